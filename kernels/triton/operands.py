"""Device functions: tiles of stored operands, decoded to what a matrix unit multiplies.

DOT says what that is: int8; fp8 (e4m3, natively); f16, bf16 or f32. Decoded values fit f16 and bf16 without rounding
(fp8: 4 significant bits; nvfp4: 2 bits times 4; int8: 8 bits), so that the products are exact. The interpreter
multiplies bf16 wrongly: there, and there alone, f32 stands in for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from qconvert.kernels.triton.bits import (
    as_f32,
    as_i32,
    decode_e2m1,
    decode_e4m3,
    decode_e5m2,
    round_clamped,
    swizzled,
    widen,
)


@triton.jit
def to_dot(value: tl.tensor, DOT: tl.constexpr) -> tl.tensor:
    """float32 that DOT holds exactly -> DOT."""
    if DOT == "f16":
        operand = value.to(tl.float16)
    elif DOT == "bf16":
        operand = (as_i32(value) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif DOT == "int8":
        operand = value.to(tl.int8)
    else:
        operand = value
    return operand


@triton.jit
def fp8_to_f16(code: tl.tensor) -> tl.tensor:
    """e4m3 -> float16: the exponent moved up by 8 after the bits are in place."""
    c = code.to(tl.int16)
    magnitude = ((c & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
    bits = magnitude.to(tl.float16).to(tl.int16, bitcast=True)
    bits = tl.where((c & 0x7F) == 0x7F, 0x7E00, bits)
    return (bits | ((c & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def from_fp8(code: tl.tensor, KIND: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """fp8 bits -> DOT. KIND: F8_E4M3 or F8_E5M2."""
    if DOT == "fp8":
        operand = code.to(tl.float8e4nv, bitcast=True)
    elif DOT == "f16" and KIND == "F8_E4M3":
        operand = fp8_to_f16(code)
    elif KIND == "F8_E4M3":
        operand = to_dot(decode_e4m3(code), DOT)
    else:
        operand = to_dot(decode_e5m2(code), DOT)
    return operand


@triton.jit
def spread(scale: tl.tensor, R: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """[R, S] -> [R, S * WIDTH]: every scale for the WIDTH columns it belongs to."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (R, S, WIDTH)), (R, S * WIDTH))


@triton.jit
def block_scales(
    scales: tl.tensor,
    first: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    tiles: tl.tensor,
    WIDTH: tl.constexpr,
    SWIZZLE: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """Scale bytes of rows first + row, columns start .. start + BK, `count` a row: [R, BK / WIDTH]."""
    block = start // WIDTH + tl.arange(0, BK // WIDTH)
    if SWIZZLE:
        at = swizzled((first + row).to(tl.int64)[:, None], block[None, :], tiles)
    else:
        at = (first + row).to(tl.int64)[:, None] * count + block[None, :]
    return tl.load(scales + at, mask=inside[:, None] & (block < count)[None, :], other=0)


@triton.jit
def nibbles(
    base: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
    start: tl.tensor,
    k: tl.tensor,
    HIGH_FIRST: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """int32 codes 0..15 of columns start .. start + BK, [R, BK]; `base` points to the tile's first row."""
    byte = start // 2 + tl.arange(0, BK // 2)
    ok = inside[:, None] & (byte < k // 2)[None, :]
    packed = tl.load(base + row[:, None] * stride + byte[None, :], mask=ok, other=0).to(tl.int32)
    both = tl.join(packed >> 4 & 15, packed & 15) if HIGH_FIRST else tl.join(packed & 15, packed >> 4 & 15)
    return tl.reshape(both, (R, BK))


@triton.jit
def grid_tile(
    base: tl.tensor,
    codebook: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
    start: tl.tensor,
    k: tl.tensor,
    TABLE: tl.constexpr,
    BITS: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """Levels (float32) of asym_w4a8_int8 codes, [R, BK]."""
    code = nibbles(base, row, inside, stride, start, k, False, R, BK)
    if BITS == 6:
        byte = start // 4 + tl.arange(0, BK // 4)
        ok = inside[:, None] & (byte < k // 4)[None, :]
        top = tl.load(base + row[:, None] * stride + k // 2 + byte[None, :], mask=ok, other=0).to(tl.int32)
        low = tl.join(top & 3, (top >> 4) & 3)
        high = tl.join((top >> 2) & 3, (top >> 6) & 3)
        code = code | (tl.reshape(tl.join(low, high), (R, BK)) << 4)
        level = (code - 32).to(tl.float32)
    elif TABLE:
        # Gathered from registers: a load by code would be staged through shared memory, value by value, and what
        # that takes does not fit sm_89 and sm_120.
        table = tl.load(codebook + tl.arange(0, 16))
        level = tl.reshape(tl.gather(table, tl.reshape(code, (R * BK,)), 0), (R, BK))
    else:
        level = (code - 8).to(tl.float32)
    return level


@triton.jit
def load_operand(
    q: tl.tensor,
    scales: tl.tensor,
    codebook: tl.tensor,
    first: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    start: tl.tensor,
    k: tl.tensor,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
    SWIZZLE: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    G: tl.constexpr,
    SREL: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """Rows first + row (0..R-1, those below `rows` exist), columns start .. start + BK, as DOT [R, BK].

    KIND: I8, int4, grid4, table4, grid6, F8_E4M3, F8_E5M2, nvfp4, mxfp8, F32, F16, BF16 (int16 bits).
    """
    inside = first + row < rows
    base = q + first.to(tl.int64) * stride
    if KIND == "int4":
        code = nibbles(base, row, inside, stride, start, k, False, R, BK)
        operand = ((code ^ 8) - 8).to(tl.int8)
    elif KIND == "grid4" or KIND == "table4" or KIND == "grid6":
        WIDTH: tl.constexpr = G if G < BK else BK
        level = grid_tile(
            base,
            codebook,
            row,
            inside,
            stride,
            start,
            k,
            KIND == "table4",
            6 if KIND == "grid6" else 4,
            R,
            BK,
        )
        group = (start + tl.arange(0, BK // WIDTH) * WIDTH) // G
        at = (first + row).to(tl.int64)[:, None] * (k // G) + group[None, :]
        s = tl.load(scales + at, mask=inside[:, None] & (group < k // G)[None, :], other=0)
        level = level * spread(widen(s, SREL), R, BK // WIDTH, WIDTH)
        operand = to_dot(round_clamped(level, 127.0), DOT)
    elif KIND == "nvfp4":
        code = nibbles(base, row, inside, stride, start, k, HIGH_FIRST, R, BK)
        s = block_scales(scales, first, row, inside, start, k // 16, _tiles(k, 16), 16, SWIZZLE, R, BK)
        operand = to_dot(decode_e2m1(code) * spread(decode_e4m3(s), R, BK // 16, 16), DOT)
    else:
        col = start + tl.arange(0, BK)
        ok = inside[:, None] & (col < k)[None, :]
        raw = tl.load(base + row[:, None] * stride + col[None, :], mask=ok, other=0)
        if KIND == "mxfp8":
            s = block_scales(scales, first, row, inside, start, k // 32, _tiles(k, 32), 32, SWIZZLE, R, BK)
            power = as_f32(s.to(tl.int32) << 23)
            operand = to_dot(decode_e4m3(raw) * spread(power, R, BK // 32, 32), DOT)
        elif KIND == "F8_E4M3" or KIND == "F8_E5M2":
            operand = from_fp8(raw, KIND, DOT)
        elif KIND == "BF16" and DOT == "bf16":
            operand = raw.to(tl.bfloat16, bitcast=True)
        elif (KIND == "F16" and DOT == "f16") or (KIND == "I8" and DOT == "int8"):
            operand = raw
        else:
            operand = to_dot(widen(raw, KIND), DOT)
    return operand


@triton.jit
def _tiles(k: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Swizzled scale tiles a row."""
    return (k // WIDTH + 3) // 4
