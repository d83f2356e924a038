"""Kernels: one scale a row (int8, int4, fp8), the rotation inside. One program a row.

Amax, scale, rounding and packing in one launch: a row that fits one tile is read once, a longer one twice (the
second time from cache). KIND names the source's stored type, see `bits.widen`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from qconvert.kernels.triton.bits import (
    encode_e4m3,
    encode_e5m2,
    magnitude,
    narrow,
    round_clamped,
)
from qconvert.kernels.triton.rotate import part_columns, rotated_parts


@triton.jit
def _largest(parts: tl.tuple, COUNT: tl.constexpr) -> tl.tensor:
    largest = magnitude(parts[0])
    for h in tl.static_range(1, COUNT):
        largest = tl.maximum(largest, magnitude(parts[h]))
    return largest


@triton.jit
def _store(
    q: tl.tensor,
    parts: tl.tuple,
    scale: tl.tensor,
    tile: tl.tensor,
    k: tl.tensor,
    CODE: tl.constexpr,
    HI: tl.constexpr,
    LO: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Codes of one tile. CODE: int8, int7 (int8 storage of -7..7), int4 (two codes a byte), e4m3 or e5m2."""
    for h in tl.static_range(HI):
        col = part_columns(tile, h, HI, LO, GROUPS, CODE == "int4")
        u = tl.div_rn(parts[h], scale)
        if CODE == "e4m3":
            tl.store(q + col, encode_e4m3(u), mask=col < k)
        elif CODE == "e5m2":
            tl.store(q + col, encode_e5m2(u), mask=col < k)
        elif CODE == "int8":
            tl.store(q + col, round_clamped(u, 127.0).to(tl.int8), mask=col < k)
        elif CODE == "int7":
            tl.store(q + col, round_clamped(u, 7.0).to(tl.int8), mask=col < k)
        else:
            low = round_clamped(u, 7.0).to(tl.int32) & 15
            high = round_clamped(tl.div_rn(parts[HI + h], scale), 7.0).to(tl.int32) & 15
            tl.store(q + col // 2, (low | (high << 4)).to(tl.uint8), mask=col < k)


@triton.jit
def quantise_rows(
    x: tl.tensor,
    q: tl.tensor,
    scales: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    q_stride: tl.tensor,
    KIND: tl.constexpr,
    CODE: tl.constexpr,
    LEVELS: tl.constexpr,
    FLOOR: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    GIVEN: tl.constexpr,
    HI: tl.constexpr,
    LO: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """x [R, k] -> codes q and scales [R] = max(amax/LEVELS, FLOOR). K a multiple of the rotation group.

    ZERO_IS_ONE: a row of zeros gets scale 1 (fp8's rule). GIVEN: scales are read, not made. TILES: tiles a row, 1
    to keep the row in registers.
    """
    PAIRS: tl.constexpr = CODE == "int4"
    COUNT: tl.constexpr = HI * 2 if PAIRS else HI
    r = tl.program_id(0).to(tl.int64)
    row = x + r * x_stride
    out = q + r * q_stride
    if GIVEN:
        scale = tl.load(scales + r)
        for tile in range(TILES):
            parts = rotated_parts(row, tile, k, 1.0, KIND, HI, LO, FACTOR, GROUPS, PAIRS)
            _store(out, parts, scale, tile, k, CODE, HI, LO, GROUPS)
    elif TILES == 1:
        parts = rotated_parts(row, 0, k, 1.0, KIND, HI, LO, FACTOR, GROUPS, PAIRS)
        amax = tl.max(_largest(parts, COUNT), axis=0)
        scale = tl.maximum(tl.div_rn(amax, LEVELS), FLOOR)
        if ZERO_IS_ONE:
            scale = tl.where(amax == 0.0, 1.0, scale)
        tl.store(scales + r, scale)
        _store(out, parts, scale, 0, k, CODE, HI, LO, GROUPS)
    else:
        largest = tl.zeros((GROUPS * LO // 2 if PAIRS else GROUPS * LO,), dtype=tl.float32)
        for tile in range(TILES):
            parts = rotated_parts(row, tile, k, 1.0, KIND, HI, LO, FACTOR, GROUPS, PAIRS)
            largest = tl.maximum(largest, _largest(parts, COUNT))
        amax = tl.max(largest, axis=0)
        scale = tl.maximum(tl.div_rn(amax, LEVELS), FLOOR)
        if ZERO_IS_ONE:
            scale = tl.where(amax == 0.0, 1.0, scale)
        tl.store(scales + r, scale)
        for tile in range(TILES):
            parts = rotated_parts(row, tile, k, 1.0, KIND, HI, LO, FACTOR, GROUPS, PAIRS)
            _store(out, parts, scale, tile, k, CODE, HI, LO, GROUPS)


@triton.jit
def dequantise_rows(
    q: tl.tensor,
    scales: tl.tensor,
    index: tl.tensor,
    out: tl.tensor,
    k: tl.tensor,
    scale_step: tl.tensor,
    q_stride: tl.tensor,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    GATHER: tl.constexpr,
    HI: tl.constexpr,
    LO: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Codes q -> [R, k] in the stored type OUT, rotated back. scale_step: 1 for a scale a row, 0 for one scale.

    KIND: I8, int4, F8_E4M3, F8_E5M2, or a plain F32, F16, BF16, which has no scale. GATHER: row r of the output is
    row index[r] of the table. Grid (R, tiles a row).
    """
    r = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    source = r
    if GATHER:
        source = tl.load(index + r).to(tl.int64)
    scale = tl.load(scales + source * scale_step)
    parts = rotated_parts(q + source * q_stride, tile, k, scale, KIND, HI, LO, FACTOR, GROUPS, False)
    target = out + r * k
    for h in tl.static_range(HI):
        col = part_columns(tile, h, HI, LO, GROUPS, False)
        tl.store(target + col, narrow(parts[h], OUT), mask=col < k)
