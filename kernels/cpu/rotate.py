"""ConvRot rotation: butterflies of H4 that stay in cache, in the order of `reference.rotate`."""

from __future__ import annotations

from typing import Any

import numpy as np
from qconvert.kernels.cpu.jit import F32, F32_2, OUT_F32_2, helper, kernel


@helper
def _h4(a: Any, b: Any, c: Any, d: Any) -> Any:
    ab, a_b, cd, c_d = a + b, a - b, c + d, c - d
    return ab + c_d, ab - c_d, a_b + cd, cd - a_b


@helper
def _strides_1_4(x: Any, out: Any) -> Any:
    """The first two stages of 16 columns, in registers."""
    a0, a1, a2, a3 = _h4(x[0], x[1], x[2], x[3])
    b0, b1, b2, b3 = _h4(x[4], x[5], x[6], x[7])
    c0, c1, c2, c3 = _h4(x[8], x[9], x[10], x[11])
    d0, d1, d2, d3 = _h4(x[12], x[13], x[14], x[15])
    a0, b0, c0, d0 = _h4(a0, b0, c0, d0)
    a1, b1, c1, d1 = _h4(a1, b1, c1, d1)
    a2, b2, c2, d2 = _h4(a2, b2, c2, d2)
    a3, b3, c3, d3 = _h4(a3, b3, c3, d3)
    out[0], out[1], out[2], out[3] = a0, a1, a2, a3
    out[4], out[5], out[6], out[7] = b0, b1, b2, b3
    out[8], out[9], out[10], out[11] = c0, c1, c2, c3
    out[12], out[13], out[14], out[15] = d0, d1, d2, d3


@helper
def _stride_16(x: Any, out: Any) -> Any:
    """The third stage of 64 columns."""
    for j in range(16):
        out[j], out[16 + j], out[32 + j], out[48 + j] = _h4(x[j], x[16 + j], x[32 + j], x[48 + j])


@helper
def _stride_64(x: Any, out: Any) -> Any:
    """The fourth stage of 256 columns."""
    for j in range(64):
        out[j], out[64 + j], out[128 + j], out[192 + j] = _h4(x[j], x[64 + j], x[128 + j], x[192 + j])


@helper
def _stride(a: Any, b: Any, c: Any, d: Any) -> Any:
    """A later stage in place, on four runs of its stride."""
    for j in range(a.size):
        a[j], b[j], c[j], d[j] = _h4(a[j], b[j], c[j], d[j])


@kernel(F32_2, OUT_F32_2, F32)
def rotate_4(x: Any, out: Any, factor: Any) -> None:
    """x, out [n, 4]."""
    for i in range(x.shape[0]):
        a, b, c, d = _h4(x[i, 0], x[i, 1], x[i, 2], x[i, 3])
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = a * factor, b * factor, c * factor, d * factor


@kernel(F32_2, OUT_F32_2, F32)
def rotate(x: Any, out: Any, factor: Any) -> None:
    """x, out [n, group], group 16 or a larger power of 4; factor 1/sqrt(group)."""
    rows, group = x.shape
    tiles = x.reshape(rows, group // 16, 16)
    first, second = np.empty(group, np.float32), np.empty(group, np.float32)
    # Rows of fixed length: slices with computed bounds would cost more than the arithmetic.
    first_16, first_64 = first.reshape(group // 16, 16), first[: group // 64 * 64].reshape(group // 64, 64)
    second_64, second_256 = second[: group // 64 * 64].reshape(group // 64, 64), second[: group // 256 * 256]
    second_256 = second_256.reshape(group // 256, 256)
    first_256 = first[: group // 256 * 256].reshape(group // 256, 256)
    for i in range(rows):
        tile = tiles[i]
        for k in range(group // 16):
            _strides_1_4(tile[k], first_16[k])
        for k in range(group // 64):
            _stride_16(first_64[k], second_64[k])
        for k in range(group // 256):
            _stride_64(second_256[k], first_256[k])
        work = second if group == 64 else first
        stride = 256
        while stride < group:
            for k in range(0, group, 4 * stride):
                _stride(
                    work[k : k + stride],
                    work[k + stride : k + 2 * stride],
                    work[k + 2 * stride : k + 3 * stride],
                    work[k + 3 * stride : k + 4 * stride],
                )
            stride *= 4
        target = out[i]
        for j in range(group):
            target[j] = work[j] * factor
