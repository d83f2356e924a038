"""Kernels: block scales along K (nvfp4: 16, mxfp8: 32), scales stored in rows or in swizzled tiles.

A program takes ROWS rows times BLOCKS blocks. KIND names the source's stored type, see `bits.widen`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from qconvert.kernels.triton.bits import (
    as_f32,
    as_i32,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    halving_sum,
    magnitude,
    narrow,
    swizzled,
    widen,
)


@triton.jit
def _place(
    rows: tl.tensor,
    blocks: tl.tensor,
    tiles: tl.tensor,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SWIZZLE: tl.constexpr,
) -> tl.tuple:
    """Row (int64, for what it is multiplied with), block, offset of the scale, and whether it exists.

    [ROWS * BLOCKS] each.
    """
    i = tl.arange(0, ROWS * BLOCKS)
    row = tl.program_id(0).to(tl.int64) * ROWS + i // BLOCKS
    block = tl.program_id(1) * BLOCKS + i % BLOCKS
    at = swizzled(row, block, tiles) if SWIZZLE else row * blocks + block
    return row, block, at, (row < rows) & (block < blocks)


@triton.jit
def _round_e2m1(y: tl.tensor) -> tl.tensor:
    """Magnitudes to the nearest of 0 .5 1 1.5 2 3 4 6 as float32; `reference.round_e2m1`."""
    y = tl.minimum(y, 6.0)
    magic = tl.where(y < 2.0, 6291456.0, tl.where(y < 4.0, 12582912.0, 25165824.0))
    return (y + magic) - magic


@triton.jit
def _search_nvfp4(
    y: tl.tensor,
    start: tl.tensor,
    offsets: tl.tensor,
    COUNT: tl.constexpr,
    P: tl.constexpr,
) -> tl.tensor:
    """`reference._nvfp4_search`: y [P, 16] magnitudes in tensor scales, start [P] int32 codes."""
    best_code = start
    best_error = tl.full((P,), float("inf"), tl.float32)
    for i in range(COUNT):
        candidate = start + tl.load(offsets + i)
        candidate = tl.minimum(tl.maximum(candidate, 0), 126)
        b = decode_e4m3(candidate)
        inverse = tl.where(candidate == 0, 0.0, tl.div_rn(1.0, tl.where(candidate == 0, 1.0, b)))
        d = y - _round_e2m1(y * inverse[:, None]) * b[:, None]
        error = halving_sum(d * d, P, 16)
        wins = error < best_error
        best_error = tl.where(wins, error, best_error)
        best_code = tl.where(wins, candidate, best_code)
    return best_code


@triton.jit
def quantise_nvfp4(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    tensor_scale: tl.tensor,
    offsets: tl.tensor,
    rows: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    tiles: tl.tensor,
    KIND: tl.constexpr,
    SWIZZLE: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """x [rows, k], k a multiple of 16 -> codes [rows, k/2] (even column high), scales e4m3.

    SWIZZLE: scales in 128 x 4 tiles (`tiles` a row, zeroed before), else [rows, k/16]. offsets [COUNT] int32: steps
    of the scale's code to try (COUNT 0: none).
    """
    P: tl.constexpr = ROWS * BLOCKS
    row, block, at, inside = _place(rows, k // 16, tiles, ROWS, BLOCKS, SWIZZLE)
    col = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    v = widen(tl.load(x + row[:, None] * x_stride + col, mask=inside[:, None], other=0), KIND)
    t = tl.load(tensor_scale)
    amax = tl.max(magnitude(v), axis=1)
    code = encode_e4m3(tl.div_rn(tl.div_rn(amax, 6.0), t)).to(tl.int32)
    if COUNT > 0:
        code = _search_nvfp4(magnitude(v) * tl.div_rn(1.0, t), code, offsets, COUNT, P)
    total = t * decode_e4m3(code)
    # A block whose scale rounds to zero has only zero codes (0/1 instead of 0/0).
    dead = total == 0.0
    v = tl.where(dead[:, None], 0.0, v)
    q = encode_e2m1(tl.div_rn(v, tl.where(dead, 1.0, total)[:, None]))
    high, low = tl.split(tl.reshape(q, (P, 8, 2)))
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    out = codes + row[:, None] * (k // 2) + byte
    tl.store(out, ((high << 4) | low).to(tl.uint8), mask=inside[:, None])
    tl.store(scales + at, code.to(tl.uint8), mask=inside)


@triton.jit
def dequantise_nvfp4(
    codes: tl.tensor,
    scales: tl.tensor,
    tensor_scale: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    k: tl.tensor,
    tiles: tl.tensor,
    OUT: tl.constexpr,
    SWIZZLE: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """codes [rows, k/2] and scales -> [rows, k] in the stored type OUT: value * (tensor scale * block scale)."""
    P: tl.constexpr = ROWS * BLOCKS
    row, block, at, inside = _place(rows, k // 16, tiles, ROWS, BLOCKS, SWIZZLE)
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    packed = tl.load(codes + row[:, None] * (k // 2) + byte, mask=inside[:, None], other=0)
    packed = packed.to(tl.int32)
    q = tl.join(packed >> 4 & 15, packed & 15) if HIGH_FIRST else tl.join(packed & 15, packed >> 4 & 15)
    total = tl.load(tensor_scale) * decode_e4m3(tl.load(scales + at, mask=inside, other=0))
    value = decode_e2m1(tl.reshape(q, (P, 16))) * total[:, None]
    col = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + row[:, None] * k + col, narrow(value, OUT), mask=inside[:, None])


@triton.jit
def quantise_mxfp8(
    x: tl.tensor,
    q: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    tiles: tl.tensor,
    KIND: tl.constexpr,
    SWIZZLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """x [rows, k], k a multiple of 32 -> q e4m3 [rows, k], scales e8m0 (as in `quantise_nvfp4`)."""
    row, block, at, inside = _place(rows, k // 32, tiles, ROWS, BLOCKS, SWIZZLE)
    col = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    v = widen(tl.load(x + row[:, None] * x_stride + col, mask=inside[:, None], other=0), KIND)
    bits = as_i32(tl.div_rn(tl.max(magnitude(v), axis=1), 448.0))
    e = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    inverse = as_f32((254 - e) << 23)
    out = q + row[:, None] * k + col
    tl.store(out, encode_e4m3(v * inverse[:, None]), mask=inside[:, None])
    tl.store(scales + at, e.to(tl.uint8), mask=inside)


@triton.jit
def dequantise_mxfp8(
    q: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    k: tl.tensor,
    tiles: tl.tensor,
    OUT: tl.constexpr,
    SWIZZLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """q e4m3 [rows, k] and scales -> [rows, k] in the stored type OUT. Scale byte 0 is 0.0, as kitchen decodes it."""
    row, block, at, inside = _place(rows, k // 32, tiles, ROWS, BLOCKS, SWIZZLE)
    col = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    code = tl.load(q + row[:, None] * k + col, mask=inside[:, None], other=0)
    power = as_f32(tl.load(scales + at, mask=inside, other=0).to(tl.int32) << 23)
    value = decode_e4m3(code) * power[:, None]
    tl.store(out + row[:, None] * k + col, narrow(value, OUT), mask=inside[:, None])
