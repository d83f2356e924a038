"""Small floats and rounding, branch-free on 32-bit lanes: scalars in, scalars out, vectorised by LLVM in loops.

Narrowing is the same for every kind: in the normal range the float32 bits are rounded half to even at the last kept
mantissa bit and the exponent is rebased; below it, adding the power of two whose last place is the kind's least
step leaves the code in the low bits.
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
def encode_e4m3(x: Any) -> Any:
    """Saturating; NaN becomes 0x7F with its sign."""
    u = bits_of(x)
    magnitude = u & I32(0x7FFFFFFF)
    a = min(magnitude, I32(0x43E00000))  # 448
    normal = ((a + I32(0x7FFFF) + ((a >> I32(20)) & I32(1))) >> I32(20)) - I32(960)
    small = bits_of(float_of(a) + F32(16384.0)) - I32(0x46800000)
    code = small if a < I32(0x3C800000) else normal  # 2^-6
    code = I32(0x7F) if magnitude > I32(0x7F800000) else code
    return U8(code | ((u >> I32(24)) & I32(0x80)))


@helper
def encode_e5m2(x: Any) -> Any:
    """Saturating; NaN becomes 0x7F with its sign."""
    u = bits_of(x)
    magnitude = u & I32(0x7FFFFFFF)
    a = min(magnitude, I32(0x47600000))  # 57344
    normal = ((a + I32(0xFFFFF) + ((a >> I32(21)) & I32(1))) >> I32(21)) - I32(448)
    small = bits_of(float_of(a) + F32(128.0)) - I32(0x43000000)
    code = small if a < I32(0x38800000) else normal  # 2^-14
    code = I32(0x7F) if magnitude > I32(0x7F800000) else code
    return U8(code | ((u >> I32(24)) & I32(0x80)))


@helper
def encode_f16(x: Any) -> Any:
    """Overflow becomes infinity, NaN the quiet NaN with its sign."""
    u = bits_of(x)
    magnitude = u & I32(0x7FFFFFFF)
    a = min(magnitude, I32(0x47800000))  # 2^16, whose code is infinity's
    normal = ((a + I32(0xFFF) + ((a >> I32(13)) & I32(1))) >> I32(13)) - I32(0x1C000)
    small = bits_of(float_of(a) + F32(0.5)) - I32(0x3F000000)
    code = small if a < I32(0x38800000) else normal  # 2^-14
    code = I32(0x7E00) if magnitude > I32(0x7F800000) else code
    return np.uint16(code | ((u >> I32(16)) & I32(0x8000)))


@helper
def encode_bf16(x: Any) -> Any:
    """Overflow becomes infinity, NaN the quiet NaN with its sign."""
    u = bits_of(x)
    magnitude = u & I32(0x7FFFFFFF)
    code = (magnitude + I32(0x7FFF) + ((magnitude >> I32(16)) & I32(1))) >> I32(16)
    code = I32(0x7FC0) if magnitude > I32(0x7F800000) else code
    return np.uint16(code | ((u >> I32(16)) & I32(0x8000)))


@helper
def decode_e4m3(code: Any) -> Any:
    c = I32(code)
    value = float_of((c & I32(0x7F)) << I32(20)) * F32(2.0**120)
    bits = bits_of(value)
    bits = I32(0x7FC00000) if (c & I32(0x7F)) == I32(0x7F) else bits
    return float_of(bits | ((c & I32(0x80)) << I32(24)))


@helper
def decode_e5m2(code: Any) -> Any:
    c = I32(code)
    value = float_of((c & I32(0x7F)) << I32(21)) * F32(2.0**112)
    bits = bits_of(value)
    special = I32(0x7F800000) | ((c & I32(3)) << I32(21))
    bits = special if (c & I32(0x7F)) >= I32(0x7C) else bits
    return float_of(bits | ((c & I32(0x80)) << I32(24)))


@helper
def decode_f16(code: Any) -> Any:
    c = I32(code)
    value = float_of((c & I32(0x7FFF)) << I32(13)) * F32(2.0**112)
    bits = bits_of(value)
    special = I32(0x7F800000) | ((c & I32(0x3FF)) << I32(13))
    bits = special if (c & I32(0x7FFF)) >= I32(0x7C00) else bits
    return float_of(bits | ((c & I32(0x8000)) << I32(16)))


@helper
def decode_e8m0(code: Any) -> Any:
    """2^(code - 127); 255 is NaN. Code 0 is the subnormal 2^-127."""
    c = I32(code)
    bits = c << I32(23)
    bits = I32(0x00400000) if c == I32(0) else bits
    return float_of(I32(0x7FC00000) if c == I32(255) else bits)


@helper
def scale_of_code(code: Any) -> Any:
    """The value of an e4m3 code 0..126, an int32, without the sign and NaN of `decode_e4m3`."""
    return float_of(I32(code) << I32(20)) * F32(2.0**120)


@helper
def encode_e2m1(x: Any) -> Any:
    """Code 0..15 as uint8, saturating at 6, the sign kept for zeros."""
    u = bits_of(x)
    a = min(u & I32(0x7FFFFFFF), I32(0x40C00000))  # 6
    normal = ((a + I32(0x1FFFFF) + ((a >> I32(22)) & I32(1))) >> I32(22)) - I32(252)
    small = bits_of(float_of(a) + F32(4194304.0)) - I32(0x4A800000)
    code = small if a < I32(0x3F800000) else normal  # 1
    return U8(code | ((u >> I32(28)) & I32(8)))


@helper
def decode_e2m1(code: Any) -> Any:
    """Value of a code 0..15."""
    c = I32(code)
    m = c & I32(7)
    bits = (m + I32(252)) << I32(22)
    bits = bits_of(F32(m) * F32(0.5)) if m < I32(2) else bits
    return float_of(bits | ((c & I32(8)) << I32(28)))


@helper
def round_e2m1(y: Any) -> Any:
    """A magnitude to the nearest of 0 .5 1 1.5 2 3 4 6 (see `reference.round_e2m1`)."""
    v = F32(6.0) if y > F32(6.0) else y
    magic = F32(12582912.0) if v < F32(4.0) else F32(25165824.0)
    magic = F32(6291456.0) if v < F32(2.0) else magic
    return (v + magic) - magic
