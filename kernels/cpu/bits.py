"""Small floats and rounding, branch-free on 32-bit lanes: scalars in, scalars out, vectorised by LLVM in loops.

Narrowing is the same for every kind: in the normal range the float32 bits are rounded half to even at the last kept
mantissa bit and the exponent is rebased; below it, adding the power of two whose last place is the kind's least
step leaves the code in the low bits.

numba computes with int32 in int64, which halves the lanes: every intermediate result is cast back, and LLVM then
computes in 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from qconvert.kernels.cpu.jit import helper

#: 1.5 * 2^23: adding and subtracting it rounds |x| < 2^22 to an integer, half to even.
MAGIC = np.float32(12582912.0)

F32, I32, U8 = np.float32, np.int32, np.uint8


@helper
def bits_of(x: Any) -> Any:
    return F32(x).view(I32)


@helper
def float_of(bits: Any) -> Any:
    return I32(bits).view(F32)


@helper
def magnitude_of(x: Any) -> Any:
    """|x| by clearing the sign bit."""
    return float_of(bits_of(x) & I32(0x7FFFFFFF))


@helper
def round_clamped(x: Any, limit: Any) -> Any:
    """round_half_even(clamp(x, +-limit)) for an integer limit; never -0.0."""
    y = limit if x > limit else x
    y = -limit if y < -limit else y
    return (y + MAGIC) - MAGIC


@helper
def _narrow(u: Any, largest: Any, drop: Any, half: Any, rebase: Any, magic: Any, least: Any, nan: Any) -> Any:
    """The code, without its sign, of the float32 with bits `u`.

    largest: bits that magnitudes saturate at; drop: mantissa bits that go, half: 2^(drop-1) - 1; rebase: what the
    exponent loses; magic: the power of two that rounds what is below the bits `least`; nan: the code of NaN.
    """
    magnitude = I32(u & I32(0x7FFFFFFF))
    a = I32(min(magnitude, largest))
    odd = I32(I32(a >> drop) & I32(1))
    normal = I32(I32(I32(I32(a + half) + odd) >> drop) - rebase)
    small = I32(bits_of(float_of(a) + magic) - bits_of(magic))
    code = small if a < least else normal
    return nan if magnitude > I32(0x7F800000) else code


@helper
def encode_e4m3(x: Any) -> Any:
    """Saturating at 448; NaN becomes 0x7F with its sign."""
    u = bits_of(x)
    code = _narrow(
        u, I32(0x43E00000), I32(20), I32(0x7FFFF), I32(960), F32(16384.0), I32(0x3C800000), I32(0x7F)
    )
    return U8(code | I32(I32(u >> I32(24)) & I32(0x80)))


@helper
def encode_e5m2(x: Any) -> Any:
    """Saturating at 57344; NaN becomes 0x7F with its sign."""
    u = bits_of(x)
    code = _narrow(
        u, I32(0x47600000), I32(21), I32(0xFFFFF), I32(448), F32(128.0), I32(0x38800000), I32(0x7F)
    )
    return U8(code | I32(I32(u >> I32(24)) & I32(0x80)))


@helper
def encode_f16(x: Any) -> Any:
    """Overflow (2^16, whose code is infinity's) becomes infinity, NaN the quiet NaN with its sign."""
    u = bits_of(x)
    code = _narrow(
        u, I32(0x47800000), I32(13), I32(0xFFF), I32(0x1C000), F32(0.5), I32(0x38800000), I32(0x7E00)
    )
    return np.uint16(code | I32(I32(u >> I32(16)) & I32(0x8000)))


@helper
def encode_bf16(x: Any) -> Any:
    """Overflow becomes infinity, NaN the quiet NaN with its sign."""
    u = bits_of(x)
    magnitude = I32(u & I32(0x7FFFFFFF))
    odd = I32(I32(magnitude >> I32(16)) & I32(1))
    code = I32(I32(I32(magnitude + I32(0x7FFF)) + odd) >> I32(16))
    code = I32(0x7FC0) if magnitude > I32(0x7F800000) else code
    return np.uint16(code | I32(I32(u >> I32(16)) & I32(0x8000)))


@helper
def decode_e4m3(code: Any) -> Any:
    c = I32(code)
    magnitude = I32(c & I32(0x7F))
    bits = bits_of(float_of(I32(magnitude << I32(20))) * F32(2.0**120))
    bits = I32(0x7FC00000) if magnitude == I32(0x7F) else bits
    return float_of(I32(bits | I32(I32(c & I32(0x80)) << I32(24))))


@helper
def decode_e5m2(code: Any) -> Any:
    c = I32(code)
    magnitude = I32(c & I32(0x7F))
    bits = bits_of(float_of(I32(magnitude << I32(21))) * F32(2.0**112))
    special = I32(I32(0x7F800000) | I32(I32(c & I32(3)) << I32(21)))
    bits = special if magnitude >= I32(0x7C) else bits
    return float_of(I32(bits | I32(I32(c & I32(0x80)) << I32(24))))


@helper
def decode_f16(code: Any) -> Any:
    c = I32(code)
    magnitude = I32(c & I32(0x7FFF))
    bits = bits_of(float_of(I32(magnitude << I32(13))) * F32(2.0**112))
    special = I32(I32(0x7F800000) | I32(I32(c & I32(0x3FF)) << I32(13)))
    bits = special if magnitude >= I32(0x7C00) else bits
    return float_of(I32(bits | I32(I32(c & I32(0x8000)) << I32(16))))


@helper
def decode_e8m0(code: Any) -> Any:
    """2^(code - 127); 255 is NaN. Code 0 is the subnormal 2^-127."""
    c = I32(code)
    bits = I32(c << I32(23))
    bits = I32(0x00400000) if c == I32(0) else bits
    return float_of(I32(0x7FC00000) if c == I32(255) else bits)


@helper
def scale_of_code(code: Any) -> Any:
    """The value of an e4m3 code 0..126, an int32, without the sign and NaN of `decode_e4m3`."""
    return float_of(I32(I32(code) << I32(20))) * F32(2.0**120)


@helper
def encode_e2m1(x: Any) -> Any:
    """Code 0..15 as uint8, saturating at 6, the sign kept for zeros; NaN becomes 7."""
    u = bits_of(x)
    code = _narrow(
        u, I32(0x40C00000), I32(22), I32(0x1FFFFF), I32(252), F32(4194304.0), I32(0x3F800000), I32(7)
    )
    return U8(code | I32(I32(u >> I32(28)) & I32(8)))


@helper
def decode_e2m1(code: Any) -> Any:
    """Value of a code 0..15."""
    c = I32(code)
    m = I32(c & I32(7))
    bits = I32(I32(m + I32(252)) << I32(22))
    bits = bits_of(F32(m) * F32(0.5)) if m < I32(2) else bits
    return float_of(I32(bits | I32(I32(c & I32(8)) << I32(28))))


@helper
def round_e2m1(y: Any) -> Any:
    """A magnitude to the nearest of 0 .5 1 1.5 2 3 4 6 (see `reference.round_e2m1`)."""
    v = F32(6.0) if y > F32(6.0) else y
    magic = F32(12582912.0) if v < F32(4.0) else F32(25165824.0)
    magic = F32(6291456.0) if v < F32(2.0) else magic
    return (v + magic) - magic
