"""Scale searches that weight the squared error by how large the inputs of each column are. numpy only.

The output error of a rounding error d under inputs with second moments H is d H d^T; with only H's diagonal known it
is the sum of H_kk d_k^2. The searches are those of `reference`, candidates included, with that weight in the sum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from qconvert.kernels.api import F32, U8
from qconvert.kernels.search import (
    INT4_FACTORS,
    INT4_STEPS,
    INT8_FACTORS,
    INT8_STEPS,
    NVFP4_OFFSETS,
    SCALE_FLOOR,
)

_CODES = np.arange(127)
#: Values of the e4m3 codes 0..126.
E4M3: F32 = np.where(_CODES < 8, _CODES * 2.0**-9, (1 + _CODES % 8 / 8) * 2.0 ** (_CODES // 8 - 7)).astype(
    np.float32
)
_E4M3_MIDDLES = (E4M3[1:] + E4M3[:-1]) / 2
#: Magnitudes of the E2M1 codes 0..7.
E2M1: F32 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def round_e2m1(x: F32) -> F32:
    """The nearest E2M1 value, ties to the even code, saturating (as `reference.round_e2m1`, with signs)."""
    y = np.minimum(np.abs(x), np.float32(6))
    magic = np.where(y < 2, 6291456.0, np.where(y < 4, 12582912.0, 25165824.0)).astype(np.float32)
    out: F32 = np.copysign((y + magic) - magic, x)
    return out


def encode_e2m1(values: F32) -> U8:
    """Codes 0..15 of exact E2M1 values."""
    code = np.searchsorted(E2M1, np.abs(values)).astype(np.uint8)
    signed: U8 = code | (np.signbit(values).astype(np.uint8) << np.uint8(3))
    return signed


def nvfp4_scale(blocks: F32, weights: F32, tensor_scale: np.float32) -> U8:
    """e4m3 codes [R] of the scales of blocks [R, 16] with the least weighted squared error; weights [16]."""
    y = np.abs(blocks) / tensor_scale
    peak = y.max(axis=1)
    start = np.searchsorted(_E4M3_MIDDLES, peak / np.float32(6)).astype(np.int64)
    best, least = start, np.full(len(y), np.inf, np.float32)
    for offset in NVFP4_OFFSETS:
        candidate = np.clip(start + offset, 1, 126)
        b = E4M3[candidate][:, None]
        d = y - round_e2m1(y / b) * b
        error = (d * d) @ weights
        wins = error < least
        best, least = np.where(wins, candidate, best), np.where(wins, error, least)
    return np.where(peak == 0, 0, best).astype(np.uint8)


def row_scale(x: F32, weights: F32, levels: int) -> F32:
    """[R]: amax_row/levels or the tried multiple of it with the least weighted squared error; weights [K]."""
    start = np.maximum(np.abs(x).max(axis=1) / np.float32(levels), np.float32(SCALE_FLOOR))

    def error(factor: F32) -> F32:
        u = x / np.maximum(start * factor, np.float32(SCALE_FLOOR))[:, None]
        d = u - np.clip(np.rint(u), -levels, levels)
        # In units of the absmax scale, so that tiny weights do not underflow.
        out: F32 = ((d * d) @ weights) * (factor * factor)
        return out

    best = np.ones_like(start)
    least = error(best)

    def attempt(factor: F32) -> None:
        e = error(factor)
        wins = e < least
        best[wins], least[wins] = factor[wins], e[wins]

    factors, steps = (INT4_FACTORS, INT4_STEPS) if levels == 7 else (INT8_FACTORS, INT8_STEPS)
    for factor in factors:
        attempt(np.full_like(start, factor))
    for step in steps:
        middle = best.copy()
        attempt(middle - np.float32(step))
        attempt(middle + np.float32(step))
    out: F32 = np.maximum(start * best, np.float32(SCALE_FLOOR))
    return out


def unit_mean(weights: NDArray[np.floating]) -> F32:
    """Weights over their mean: errors keep their magnitude. All-zero weights become ones."""
    mean = float(weights.mean(dtype=np.float64))
    if mean <= 0:
        return np.ones(weights.shape, np.float32)
    out: F32 = (weights / mean).astype(np.float32)
    return out
