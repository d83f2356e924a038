"""What rounding to a format's values costs: the error that a quantised weight may be expected to carry already.

A value v stands for everything that is nearer to it than to its neighbours. If what was rounded lay evenly over that
cell, from l below v to r above it, its mean squared error is (l^3 + r^3) / (3 (l + r)): step^2 / 12 on an even grid.
That holds where a cell is small against the spread of the weights and where scales span many of them. With 4 bits
and a scale for every 16 weights it is off by up to 3 dB (each group's largest weight is exact, and scales are picked
for small errors), so such formats say nothing.
"""

from __future__ import annotations

from functools import cache

from qconvert.formats import minifloat
from qconvert.kernels.arrays import F32, np


def cell_errors(values: F32) -> F32:
    """Mean squared error of each value's cell, for values [n] in any order; the outermost cells are symmetric."""
    distinct, place = np.unique(values.astype(np.float64), return_inverse=True)
    gaps = np.diff(distinct) / 2
    below, above = np.append(gaps[:1], gaps), np.append(gaps, gaps[-1:])
    errors: F32 = ((below**3 + above**3) / (3 * (below + above)))[place].astype(np.float32)
    return errors


#: Stored type -> bits of exponent and mantissa, and the first magnitude that is no number.
_FLOATS = {"F8_E4M3": (4, 3, 0x7F), "F8_E5M2": (5, 2, 0x7C)}


@cache
def code_errors(kind: str) -> F32:
    """Mean squared error of each code's cell at scale 1, for a stored type; 0 for what is no number."""
    exponent_bits, mantissa_bits, finite = _FLOATS[kind]
    half = 1 << (exponent_bits + mantissa_bits)
    codes = np.concatenate([np.arange(finite), half + np.arange(finite)])
    out = np.zeros(2 * half, np.float32)
    out[codes] = cell_errors(minifloat.table(exponent_bits, mantissa_bits)[codes])
    return out
