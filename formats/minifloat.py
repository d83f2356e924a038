"""Values of the small floats by code, where no backend has a name for them.

Bit layouts: FORMATS_OTHER ("LUT4", mxfp6 of sections 3 and 5): sign in the highest bit, subnormals, no infinities.
"""

from __future__ import annotations

from functools import cache

from qconvert.kernels.arrays import F32, np


@cache
def table(exponent_bits: int, mantissa_bits: int) -> F32:
    """All values of a float with these fields and the usual bias, every code a finite number."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    magnitude = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent.astype(float) - bias)
    )
    negative = codes >> (exponent_bits + mantissa_bits)
    return np.where(negative, -magnitude, magnitude).astype(np.float32)
