"""The definition of asym_w4a8_int8 (4 and 6 bit) in plain torch; see `reference` for the rules."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from qconvert.kernels.api import Quality
from qconvert.kernels.reference import (
    decode_e4m3,
    encode_e4m3,
    lane_sum,
    pack_nibbles,
    split,
    unpack_nibbles,
)
from qconvert.kernels.search import (
    ROW_LANES,
    SCALE_FLOOR,
    W4A8_MULTIPLES,
    W4A8_OFFSETS,
    W6A8_MULTIPLES,
    W6A8_OFFSETS,
)
from torch import Tensor

#: Levels of the 4-bit form without a codebook, by code.
UNIFORM = torch.arange(-8.0, 8.0)


def _grid(levels: Tensor, s_rel: Tensor) -> Tensor:
    """What the runtime multiplies: round(level * s_rel) clamped to +-127; s_rel [...] -> [..., levels]."""
    return (levels * s_rel[..., None]).round().clamp(-127, 127)


def _search(
    x: Tensor,
    group: int,
    largest_level: Tensor,
    multiples: tuple[float, ...],
    offsets: tuple[int, ...],
    signs: tuple[Tensor, ...],
    distance: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """s_rel e4m3 codes [R, K/G] and s_channel [R] with the least squared error among those tried.

    For each multiple of the row's absmax channel scale, each group keeps the best e4m3 code near the one its
    largest magnitude asks for, under each of `signs` (+-1, [R, K/G]); then each row keeps its best multiple.
    `distance(y, s_rel)` is that of y [R, K/G, G], in channel scales, to the nearest grid value of a positive scale.
    """
    base = torch.maximum(x.abs().amax(dim=1) / 127.0, torch.tensor(SCALE_FLOOR))
    best_channel, least_row = base, torch.full_like(base, math.inf)
    best_code = torch.zeros(x.shape[0], x.shape[1] // group, dtype=torch.int32)
    for m in multiples:
        multiple = torch.tensor(m, dtype=torch.float32)
        channel = base * multiple
        y = split(x / channel[:, None], group)
        start = encode_e4m3(y.abs().amax(dim=2) / largest_level).to(torch.int32)
        code, least = start, torch.full_like(y[..., 0], math.inf)
        for sign in signs:
            for offset in offsets:
                candidate = (start + offset).clamp(0, 126)
                d = distance(y * sign[..., None], decode_e4m3(candidate.to(torch.uint8)))
                error = lane_sum(d * d)
                wins = error < least
                signed = torch.where(sign < 0, candidate | 0x80, candidate)
                least, code = torch.where(wins, error, least), torch.where(wins, signed, code)
        row = lane_sum(least, ROW_LANES) * (multiple * multiple)
        wins = row < least_row
        least_row = torch.where(wins, row, least_row)
        best_channel = torch.where(wins, channel, best_channel)
        best_code = torch.where(wins[:, None], code, best_code)
    return best_code.to(torch.uint8), best_channel


def w4a8_encode(
    x: Tensor, group: int, codebook: Tensor | None, quality: Quality
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, s_rel and s_channel; nearest grid value, ties to the lower code.

    A table need not be symmetric, and a negative scale mirrors its grid: scales with the sign of the group's
    largest element (of equals the positive one) are tried, and then those with the other.
    """
    levels = UNIFORM if codebook is None else codebook

    def distance(y: Tensor, s_rel: Tensor) -> Tensor:
        grid = _grid(levels, s_rel)
        least = (y - grid[..., 0:1]).abs()
        for j in range(1, 16):
            least = torch.minimum(least, (y - grid[..., j : j + 1]).abs())
        return least

    groups = split(x, group)
    side = torch.where((-groups).amax(dim=2) > groups.amax(dim=2), -1.0, 1.0)
    s_rel, s_channel = _search(
        x,
        group,
        levels.abs().max(),
        W4A8_MULTIPLES if quality == "best" else (1.0,),
        W4A8_OFFSETS,
        (side, -side),
        distance,
    )
    sign = torch.where(s_rel > 0x7F, -1.0, 1.0)
    y = split(x / s_channel[:, None], group) * sign[..., None]
    grid = _grid(levels, decode_e4m3(s_rel & 0x7F))
    middle = (grid[..., :15] + grid[..., 1:]) * 0.5
    q = torch.zeros_like(y, dtype=torch.uint8)
    for j in range(15):
        q = q + (y > middle[..., j : j + 1]).to(torch.uint8)
    return pack_nibbles(q.flatten(1), high_first=False), s_rel, s_channel


def _six_bit_nearest(y: Tensor, s_rel: Tensor) -> tuple[Tensor, Tensor]:
    """Level -31..31 whose grid value is nearest to y, and the distance; the lower level wins a tie.

    The grid is the line level*s_rel rounded to integers, so only the neighbours of y/s_rel can win.
    """
    s = torch.where(s_rel == 0.0, 1.0, s_rel)[..., None]
    middle = (y / s).round()
    best_level = (middle - 1.0).clamp(-31, 31)
    best = (y - (best_level * s_rel[..., None]).round().clamp(-127, 127)).abs()
    for step in (0.0, 1.0):
        level = (middle + step).clamp(-31, 31)
        d = (y - (level * s_rel[..., None]).round().clamp(-127, 127)).abs()
        wins = d < best
        best, best_level = torch.where(wins, d, best), torch.where(wins, level, best_level)
    return best_level, best


def w6a8_encode(x: Tensor, group: int, quality: Quality) -> tuple[Tensor, Tensor, Tensor]:
    best = quality == "best"
    s_rel, s_channel = _search(
        x,
        group,
        torch.tensor(31.0),
        W6A8_MULTIPLES if best else (1.0,),
        W6A8_OFFSETS if best else (0,),
        (torch.ones(x.shape[0], x.shape[1] // group),),
        lambda y, s: _six_bit_nearest(y, s)[1],
    )
    level, _ = _six_bit_nearest(split(x / s_channel[:, None], group), decode_e4m3(s_rel))
    q = (level + 32.0).to(torch.uint8).flatten(1)
    top = q >> 4
    tops = top[:, 0::4] | (top[:, 1::4] << 2) | (top[:, 2::4] << 4) | (top[:, 3::4] << 6)
    return torch.cat((pack_nibbles(q & 15, high_first=False), tops), dim=1), s_rel, s_channel


def w4a8_decode(
    codes: Tensor,
    s_rel: Tensor,
    s_channel: Tensor,
    codebook: Tensor | None,
    group: int,
    bits: int,
    correction: Tensor | None,
) -> Tensor:
    if bits == 4:
        index = unpack_nibbles(codes, high_first=False).to(torch.int64)
        value = (UNIFORM if codebook is None else codebook)[index]
    else:
        half = codes.shape[1] // 3 * 2
        low = unpack_nibbles(codes[:, :half].contiguous(), high_first=False)
        tops = torch.stack([(codes[:, half:] >> (2 * j)) & 3 for j in range(4)], dim=-1).flatten(1)
        value = (low | (tops << 4)).to(torch.float32) - 32.0
    grid = (split(value, group) * s_rel[..., None]).round().clamp(-127, 127).to(torch.int8)
    out = grid.to(torch.float32) * s_channel[:, None, None]
    if correction is not None:
        out = out + correction[..., None]
    flat: Tensor = out.flatten(1)
    return flat
