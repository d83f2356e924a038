"""Device functions: stored bits to float32 and back, by integer arithmetic.

Nothing here relies on casts to or from bf16 and fp8: they are missing on older chips, and the interpreter's are
wrong (bf16 truncates, fp8 ties and NaN codes). Rounding is half to even by adding and subtracting 1.5 * 2^23,
which needs compilation without fused multiply-add (`launch.OPTIONS`). Divisions are `tl.div_rn`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_f32(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_i32(x: tl.tensor) -> tl.tensor:
    return x.to(tl.int32, bitcast=True)


@triton.jit
def round_even(x: tl.tensor) -> tl.tensor:
    """Nearest integer, ties to even, for |x| < 2^22; the sign of a zero is lost."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_clamped(x: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """clamp(round(x), -LIMIT, LIMIT) for any finite x: clamped first, which for an integer LIMIT is the same."""
    return round_even(tl.minimum(tl.maximum(x, -LIMIT), LIMIT))


@triton.jit
def decode_e4m3(code: tl.tensor) -> tl.tensor:
    """uint8 -> float32; the codes 0x7f and 0xff are NaN."""
    c = code.to(tl.int32)
    magnitude = c & 0x7F
    normal = as_f32((magnitude << 20) + (120 << 23))
    small = magnitude.to(tl.float32) * 0.001953125
    value = tl.where(magnitude < 8, small, normal)
    value = tl.where(magnitude == 0x7F, as_f32(magnitude * 0 + 0x7FC00000), value)
    return as_f32(as_i32(value) | ((c & 0x80) << 24))


@triton.jit
def decode_e5m2(code: tl.tensor) -> tl.tensor:
    """uint8 -> float32; 0x7c is infinity, what lies above is NaN."""
    c = code.to(tl.int32)
    magnitude = c & 0x7F
    normal = as_f32((magnitude << 21) + (112 << 23))
    small = magnitude.to(tl.float32) * 1.52587890625e-05
    value = tl.where(magnitude < 4, small, normal)
    special = ((magnitude - 0x7C) << 21) + 0x7F800000
    value = tl.where(magnitude >= 0x7C, as_f32(special), value)
    return as_f32(as_i32(value) | ((c & 0x80) << 24))


@triton.jit
def decode_e8m0(code: tl.tensor) -> tl.tensor:
    """uint8 -> 2^(code - 127); code 0 is the subnormal 2^-127, 255 NaN."""
    c = code.to(tl.int32)
    bits = tl.where(c == 0, 0x00400000, c << 23)
    return as_f32(tl.where(c == 255, 0x7FC00000, bits))


@triton.jit
def encode_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 -> uint8, half to even, saturating at 448 (infinity too); NaN keeps its sign."""
    bits = as_i32(x)
    a = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    # Normal codes: the mantissa cut to three bits; the carry of the rounding runs into the exponent by itself.
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - (120 << 3)
    small = round_even(as_f32(tl.minimum(a, 0x3C800000)) * 512.0).to(tl.int32)
    code = tl.where(a < 0x3C800000, small, normal)
    code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_e5m2(x: tl.tensor) -> tl.tensor:
    """float32 -> uint8, half to even, saturating at 57344 (infinity too); NaN keeps its sign."""
    bits = as_i32(x)
    a = tl.minimum(bits & 0x7FFFFFFF, 0x47600000)
    normal = ((a + 0xFFFFF + ((a >> 21) & 1)) >> 21) - (112 << 2)
    small = round_even(as_f32(tl.minimum(a, 0x38800000)) * 65536.0).to(tl.int32)
    code = tl.where(a < 0x38800000, small, normal)
    code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_e2m1(x: tl.tensor) -> tl.tensor:
    """float32 -> int32 codes 0..15: nearest of 0 .5 1 1.5 2 3 4 6, ties to the even code; bit 3 is the sign."""
    bits = as_i32(x)
    y = as_f32(bits & 0x7FFFFFFF)
    code = (y > 0.25).to(tl.int32) + (y >= 0.75).to(tl.int32) + (y > 1.25).to(tl.int32)
    code += (y >= 1.75).to(tl.int32) + (y > 2.5).to(tl.int32) + (y >= 3.5).to(tl.int32)
    code += (y > 5.0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def decode_e2m1(code: tl.tensor) -> tl.tensor:
    """int32 codes 0..15 -> float32; code 8 is -0.0."""
    magnitude = code & 7
    normal = as_f32((magnitude << 22) + (126 << 23))
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return as_f32(as_i32(value) | ((code & 8) << 28))


@triton.jit
def bf16_bits(x: tl.tensor) -> tl.tensor:
    """float32 -> the bits of the nearest bf16 as int16; a NaN becomes the quiet one of its sign."""
    bits = as_i32(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = ((bits >> 16) & 0x8000) | 0x7FC0
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded).to(tl.int16)


@triton.jit
def widen(raw: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Loaded values -> float32. KIND: BF16 (int16 bits), F8_E4M3, F8_E5M2, F8_E8M0 (uint8 bits), else a plain cast."""
    if KIND == "BF16":
        value = as_f32(raw.to(tl.int32) << 16)
    elif KIND == "F8_E4M3":
        value = decode_e4m3(raw)
    elif KIND == "F8_E5M2":
        value = decode_e5m2(raw)
    elif KIND == "F8_E8M0":
        value = decode_e8m0(raw)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def narrow(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """float32 -> what is stored for KIND: F32, F16, or bits of BF16 (int16), F8_E4M3, F8_E5M2 (uint8)."""
    if KIND == "BF16":
        value = bf16_bits(x)
    elif KIND == "F8_E4M3":
        value = encode_e4m3(x)
    elif KIND == "F8_E5M2":
        value = encode_e5m2(x)
    elif KIND == "F16":
        value = x.to(tl.float16)
    else:
        value = x
    return value


@triton.jit
def magnitude(x: tl.tensor) -> tl.tensor:
    """|x|, by clearing the sign bit: NaN stays what it is."""
    return as_f32(as_i32(x) & 0x7FFFFFFF)


@triton.jit
def swizzled(row: tl.tensor, col: tl.tensor, tiles: tl.tensor) -> tl.tensor:
    """Flat offset of scale (row, col) in 128 x 4 tiles, `tiles` of them a row (FORMATS section 5)."""
    tile = (row // 128) * tiles + col // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + col % 4


@triton.jit
def halving_sum(x: tl.tensor, ROWS: tl.constexpr, LANES: tl.constexpr) -> tl.tensor:
    """[ROWS, LANES] -> [ROWS]: lane l + lane l + LANES/2, and so on; `reference.lane_sum`'s last step."""
    return _halve(x, ROWS, LANES)


@triton.jit
def _halve(x: tl.tensor, ROWS: tl.constexpr, LANES: tl.constexpr) -> tl.tensor:
    if LANES == 1:
        total = tl.reshape(x, (ROWS,))
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, LANES // 2)), (0, 2, 1)))
        total = _halve(low + high, ROWS, LANES // 2)
    return total
