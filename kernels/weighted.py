"""Scale searches that weight the squared error by how large the inputs of each column are.

The output error of a rounding error d under inputs with second moments H is d H d^T; with only H's diagonal known it
is the sum of H_kk d_k^2. The searches are those of `reference`, candidates included, with that weight in the sum.
They run on the CPU whatever the backend.
"""

from __future__ import annotations

from qconvert.kernels.arrays import F32, U8, NDArray, np
from qconvert.kernels.search import (
    INT4_FACTORS,
    INT4_STEPS,
    INT8_FACTORS,
    INT8_STEPS,
    NVFP4_OFFSETS,
    SCALE_FLOOR,
)


def nvfp4_scales(x: F32, weights: F32, tensor_scale: np.float32) -> U8:
    """e4m3 codes [R, K/16] of the block scales of x [R, K]; weights [K]."""
    from qconvert.kernels.cpu import sequential

    out = np.empty((x.shape[0], x.shape[1] // 16), np.uint8)
    offsets = np.array(NVFP4_OFFSETS, np.int32)
    sequential.nvfp4_scales(
        np.ascontiguousarray(x), np.ascontiguousarray(weights), tensor_scale, offsets, out
    )
    return out


def row_scale(x: F32, weights: F32, levels: int) -> F32:
    """[R]: amax_row/levels or the tried multiple of it with the least weighted squared error; weights [K]."""
    from qconvert.kernels.cpu import sequential

    factors, steps = (INT4_FACTORS, INT4_STEPS) if levels == 7 else (INT8_FACTORS, INT8_STEPS)
    out = np.empty(x.shape[0], np.float32)
    sequential.row_scales(
        np.ascontiguousarray(x),
        np.ascontiguousarray(weights),
        np.float32(levels),
        np.float32(SCALE_FLOOR),
        np.array(factors, np.float32),
        np.array(steps, np.float32),
        out,
    )
    return out


def unit_mean(weights: NDArray[np.floating]) -> F32:
    """Weights over their mean: errors keep their magnitude. All-zero weights become ones."""
    mean = float(weights.mean(dtype=np.float64))
    if mean <= 0:
        return np.ones(weights.shape, np.float32)
    out: F32 = (weights / mean).astype(np.float32)
    return out
