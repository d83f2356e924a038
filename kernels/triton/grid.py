"""Kernels: asym_w4a8_int8, 4 and 6 bit. One program a row, the rotation inside, two passes (channel scale, codes)."""

from __future__ import annotations

import triton
import triton.language as tl
from qconvert.kernels.triton.bits import (
    decode_e4m3,
    encode_e4m3,
    halving_sum,
    magnitude,
    narrow,
    round_clamped,
    widen,
)
from qconvert.kernels.triton.rotate import rotate_flat


@triton.jit
def _tile(
    row: tl.tensor,
    tile: tl.tensor,
    k: tl.tensor,
    KIND: tl.constexpr,
    ROT: tl.constexpr,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    col = tile * SIZE + tl.arange(0, SIZE)
    return rotate_flat(widen(tl.load(row + col, mask=col < k, other=0), KIND), ROT, FACTOR, SIZE)


@triton.jit
def _level(codebook: tl.tensor, j: tl.constexpr, TABLE: tl.constexpr) -> tl.tensor:
    level = tl.load(codebook + j) if TABLE else j - 8.0
    return level


@triton.jit
def _group_sum(x: tl.tensor, NG: tl.constexpr, G: tl.constexpr) -> tl.tensor:
    """[NG, G] -> [NG] in the order of `reference.lane_sum` with 16 lanes."""
    if G <= 16:
        total = halving_sum(x, NG, G)
    else:
        CHUNKS: tl.constexpr = G // 16
        chunk = tl.arange(0, CHUNKS)[None, :, None]
        y = tl.reshape(x, (NG, CHUNKS, 16))
        lanes = tl.zeros((NG, 16), dtype=tl.float32)
        for i in tl.static_range(CHUNKS):
            # One term of each sum is not zero: the chunk is picked, not added up.
            lanes = lanes + tl.sum(tl.where(chunk == i, y, 0.0), axis=1)
        total = halving_sum(lanes, NG, 16)
    return total


@triton.jit
def _nearest_level(y: tl.tensor, s_rel: tl.tensor, codebook: tl.tensor, TABLE: tl.constexpr) -> tl.tensor:
    """Distance of y [NG, G] to the grid of its group, 4 bit."""
    least = magnitude(y - round_clamped(_level(codebook, 0, TABLE) * s_rel, 127.0)[:, None])
    for j in tl.static_range(1, 16):
        grid = round_clamped(_level(codebook, j, TABLE) * s_rel, 127.0)
        least = tl.minimum(least, magnitude(y - grid[:, None]))
    return least


@triton.jit
def _six_bit(y: tl.tensor, s_rel: tl.tensor) -> tl.tuple:
    """Level -31..31 whose grid value is nearest to y, and the distance; `reference_w4a8._six_bit_nearest`."""
    s = tl.where(s_rel == 0.0, 1.0, s_rel)[:, None]
    u = tl.div_rn(y, s)
    # Far out the middle only has to stay far out: the levels are clamped to 31.
    middle = round_clamped(u, 1048576.0)
    best_level = tl.minimum(tl.maximum(middle - 1.0, -31.0), 31.0)
    best = magnitude(y - round_clamped(best_level * s_rel[:, None], 127.0))
    for step in tl.static_range(2):
        level = tl.minimum(tl.maximum(middle + step, -31.0), 31.0)
        d = magnitude(y - round_clamped(level * s_rel[:, None], 127.0))
        wins = d < best
        best = tl.where(wins, d, best)
        best_level = tl.where(wins, level, best_level)
    return best_level, best


@triton.jit
def search_grid(
    x: tl.tensor,
    s_channel: tl.tensor,
    s_rel: tl.tensor,
    errors: tl.tensor,
    codebook: tl.tensor,
    offsets: tl.tensor,
    groups: tl.tensor,
    k: tl.tensor,
    largest_level: tl.tensor,
    TABLE: tl.constexpr,
    BITS: tl.constexpr,
    COUNT: tl.constexpr,
    G: tl.constexpr,
    NG: tl.constexpr,
) -> None:
    """For given s_channel [R]: the e4m3 code of each group's scale with the least error among `offsets` [COUNT].

    4 bit: under the sign of the group's largest element, then under the other; see `reference_w4a8`.

    x float32 [R, k], rotated, contiguous: groups are taken as they lie, `groups` of them, NG a program. s_rel uint8
    and errors float32 [R, k/G].
    """
    group = tl.program_id(0).to(tl.int64) * NG + tl.arange(0, NG)
    inside = group < groups
    channel = tl.load(s_channel + group // (k // G), mask=inside, other=1.0)
    at = group[:, None] * G + tl.arange(0, G)[None, :]
    v = tl.load(x + at, mask=inside[:, None], other=0.0)
    y = tl.div_rn(v, channel[:, None])
    start = encode_e4m3(tl.div_rn(tl.max(magnitude(y), axis=1), largest_level)).to(tl.int32)
    best_code = start
    best_error = tl.full((NG,), float("inf"), tl.float32)
    if BITS == 4:
        side = tl.where(tl.max(-v, axis=1) > tl.max(v, axis=1), -1.0, 1.0)
        for _ in tl.static_range(2):
            mirrored = y * side[:, None]
            for i in range(COUNT):
                candidate = tl.minimum(tl.maximum(start + tl.load(offsets + i), 0), 126)
                d = _nearest_level(mirrored, decode_e4m3(candidate), codebook, TABLE)
                error = _group_sum(d * d, NG, G)
                wins = error < best_error
                best_error = tl.where(wins, error, best_error)
                best_code = tl.where(wins, tl.where(side < 0.0, candidate | 128, candidate), best_code)
            side = -side
    else:
        for i in range(COUNT):
            candidate = tl.minimum(tl.maximum(start + tl.load(offsets + i), 0), 126)
            _, d = _six_bit(y, decode_e4m3(candidate))
            error = _group_sum(d * d, NG, G)
            wins = error < best_error
            best_error = tl.where(wins, error, best_error)
            best_code = tl.where(wins, candidate, best_code)
    tl.store(s_rel + group, best_code.to(tl.uint8), mask=inside)
    tl.store(errors + group, best_error, mask=inside)


@triton.jit
def quantise_grid(
    x: tl.tensor,
    codes: tl.tensor,
    s_rel: tl.tensor,
    s_channel: tl.tensor,
    codebook: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    largest_level: tl.tensor,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    BITS: tl.constexpr,
    GIVEN: tl.constexpr,
    ROT: tl.constexpr,
    FACTOR: tl.constexpr,
    G: tl.constexpr,
    NG: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """x [R, k] -> codes [R, k/2] or (BITS 6) [R, 3k/4], s_rel e4m3 [R, k/G], s_channel [R].

    TABLE: levels are codebook [16], else c - 8; largest_level: their largest magnitude. GIVEN: both scales are read,
    not made. A tile is NG groups of G, a power of two.
    """
    SIZE: tl.constexpr = NG * G
    r = tl.program_id(0).to(tl.int64)
    row = x + r * x_stride
    if GIVEN:
        channel = tl.load(s_channel + r)
    else:
        largest = tl.zeros((SIZE,), dtype=tl.float32)
        for tile in range(TILES):
            largest = tl.maximum(largest, magnitude(_tile(row, tile, k, KIND, ROT, FACTOR, SIZE)))
        channel = tl.maximum(tl.div_rn(tl.max(largest, axis=0), 127.0), 1e-30)
        tl.store(s_channel + r, channel)
    for tile in range(TILES):
        y = tl.reshape(tl.div_rn(_tile(row, tile, k, KIND, ROT, FACTOR, SIZE), channel), (NG, G))
        group = tile * NG + tl.arange(0, NG)
        at = s_rel + r * (k // G) + group
        if GIVEN:
            code = tl.load(at, mask=group < k // G, other=0).to(tl.int32)
        else:
            code = encode_e4m3(tl.div_rn(tl.max(magnitude(y), axis=1), largest_level)).to(tl.int32)
            tl.store(at, code.to(tl.uint8), mask=group < k // G)
        scale = decode_e4m3(code & 127)
        if BITS == 4:
            # A negative scale mirrors the grid.
            y = y * tl.where(code > 127, -1.0, 1.0)[:, None]
            q = tl.zeros((NG, G), dtype=tl.int32)
            below = round_clamped(_level(codebook, 0, TABLE) * scale, 127.0)
            for j in tl.static_range(1, 16):
                above = round_clamped(_level(codebook, j, TABLE) * scale, 127.0)
                q += (y > ((below + above) * 0.5)[:, None]).to(tl.int32)
                below = above
            _store_nibbles(codes + r * (k // 2), tl.reshape(q, (SIZE,)), tile, k, SIZE)
        else:
            level, _ = _six_bit(y, scale)
            q = tl.reshape(level + 32.0, (SIZE,)).to(tl.int32)
            _store_nibbles(codes + r * (k // 4 * 3), q & 15, tile, k, SIZE)
            _store_tops(codes + r * (k // 4 * 3) + k // 2, q >> 4, tile, k, SIZE)


@triton.jit
def _store_nibbles(out: tl.tensor, q: tl.tensor, tile: tl.tensor, k: tl.tensor, SIZE: tl.constexpr) -> None:
    low, high = tl.split(tl.reshape(q, (SIZE // 2, 2)))
    at = tile * (SIZE // 2) + tl.arange(0, SIZE // 2)
    tl.store(out + at, (low | (high << 4)).to(tl.uint8), mask=at < k // 2)


@triton.jit
def _store_tops(out: tl.tensor, top: tl.tensor, tile: tl.tensor, k: tl.tensor, SIZE: tl.constexpr) -> None:
    even, odd = tl.split(tl.reshape(top, (SIZE // 4, 2, 2)))
    t0, t2 = tl.split(even)
    t1, t3 = tl.split(odd)
    at = tile * (SIZE // 4) + tl.arange(0, SIZE // 4)
    byte = t0 | (t1 << 2) | (t2 << 4) | (t3 << 6)
    tl.store(out + at, byte.to(tl.uint8), mask=at < k // 4)


@triton.jit
def grid_value(
    row: tl.tensor,
    col: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    codebook: tl.tensor,
    TABLE: tl.constexpr,
    BITS: tl.constexpr,
    FLIP: tl.constexpr,
) -> tl.tensor:
    """The levels (float32) that the codes at columns `col` of a stored row name. FLIP: nibbles are signed."""
    byte = tl.load(row + col // 2, mask=inside, other=0).to(tl.int32)
    code = (byte >> ((col & 1) * 4)) & 15
    if FLIP:
        code = code ^ 8
    if BITS == 6:
        top = tl.load(row + k // 2 + col // 4, mask=inside, other=0).to(tl.int32)
        code = code | (((top >> ((col & 3) * 2)) & 3) << 4)
        value = (code - 32).to(tl.float32)
    elif TABLE:
        value = tl.load(codebook + code)
    else:
        value = (code - 8).to(tl.float32)
    return value


@triton.jit
def dequantise_grid(
    codes: tl.tensor,
    s_rel: tl.tensor,
    s_channel: tl.tensor,
    codebook: tl.tensor,
    correction: tl.tensor,
    out: tl.tensor,
    k: tl.tensor,
    code_stride: tl.tensor,
    OUT: tl.constexpr,
    TABLE: tl.constexpr,
    BITS: tl.constexpr,
    FLIP: tl.constexpr,
    SREL: tl.constexpr,
    CORRECTED: tl.constexpr,
    CHANNEL: tl.constexpr,
    ROT: tl.constexpr,
    FACTOR: tl.constexpr,
    G: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Codes -> [R, k] in the stored type OUT (int8 with OUT I8: the grid itself). Grid (R, tiles a row).

    SREL: stored type of s_rel. CORRECTED: correction [R, k/G] is added. CHANNEL False: no s_channel is applied.
    """
    r = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = col < k
    value = grid_value(codes + r * code_stride, col, inside, k, codebook, TABLE, BITS, FLIP)
    group = r * (k // G) + col // G
    value = round_clamped(value * widen(tl.load(s_rel + group, mask=inside, other=0), SREL), 127.0)
    if CHANNEL:
        value = value * tl.load(s_channel + r)
    if CORRECTED:
        value = value + tl.load(correction + group, mask=inside, other=0.0)
    value = rotate_flat(value, ROT, FACTOR, SIZE)
    if OUT == "I8":
        tl.store(out + r * k + col, value.to(tl.int8), mask=inside)
    else:
        tl.store(out + r * k + col, narrow(value, OUT), mask=inside)
