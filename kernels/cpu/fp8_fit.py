"""The scale of fp8 rows by least squared error; see `reference.fp8_fitted_scale`."""

from __future__ import annotations

from typing import Any

import numpy as np
from qconvert.kernels.cpu import bits
from qconvert.kernels.cpu.jit import F32, F32_1, F32_2, I32, OUT_F32_1, helper, kernel
from qconvert.kernels.cpu.lanes import halving_tree
from qconvert.kernels.search import ROW_LANES

F, I = np.float32, np.int32  # noqa: E741

#: Kind -> mantissa bits that go, bits of its least normal, of its largest, the float that rounds to its least step.
GRIDS = {
    "F8_E4M3": (I(20), I(0x3C800000), I(0x43E00000), F(1.5 * 2.0**14)),
    "F8_E5M2": (I(21), I(0x38800000), I(0x47600000), F(1.5 * 2.0**7)),
}


@helper
def _off_grid(u: Any, drop: Any, normal: Any, largest: Any, magic: Any) -> Any:
    """|u| less the magnitude it is rounded to, half to even, saturating."""
    magnitude = I(bits.bits_of(u) & I(0x7FFFFFFF))
    a = I(min(magnitude, largest))
    last = I(I(1) << drop)
    odd = I(I(a >> drop) & I(1))
    half = I(I(I(last >> I(1)) - I(1)) + odd)
    rounded = bits.float_of(I(I(a + half) & I(-last)))
    small = (bits.float_of(a) + magic) - magic
    return bits.float_of(magnitude) - (small if a < normal else rounded)


@helper
def _error(
    padded: Any, acc: Any, scale: Any, factor: Any, drop: Any, normal: Any, largest: Any, magic: Any
) -> Any:
    """Squared error of a row [n, ROW_LANES] under scale*factor, in units of scale."""
    inverse = F(1.0) / (scale * factor)
    for lane in range(ROW_LANES):
        acc[lane] = F(0.0)
    for i in range(padded.shape[0]):
        part = padded[i]
        for lane in range(ROW_LANES):
            d = _off_grid(part[lane] * inverse, drop, normal, largest, magic)
            acc[lane] += d * d
    return halving_tree(acc) * (factor * factor)


@kernel(F32_2, F32_1, I32, I32, I32, F32, F32_1, F32, OUT_F32_1)
def fitted_scale(
    x: Any, scale: Any, drop: Any, normal: Any, largest: Any, magic: Any, factors: Any, margin: Any, out: Any
) -> None:
    """x [R, K], scale [R] -> out [R]; drop to magic: of `GRIDS`. `factors` are tried after 1."""
    rows, cols = x.shape
    padded = np.zeros(((cols + ROW_LANES - 1) // ROW_LANES, ROW_LANES), np.float32)
    flat, acc = padded.reshape(padded.size), np.empty(ROW_LANES, np.float32)
    for r in range(rows):
        row, s = x[r], scale[r]
        for c in range(cols):
            flat[c] = row[c]
        best = F(1.0)
        least = _error(padded, acc, s, best, drop, normal, largest, magic) * margin
        for i in range(factors.size):
            e = _error(padded, acc, s, factors[i], drop, normal, largest, magic)
            if e < least:
                least, best = e, factors[i]
        out[r] = s * best
