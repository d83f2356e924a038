"""asym_w4a8_int8, 4 bit: groups side by side in vector registers, searched through the runtime's int8 grid.

A group is one lane; its G columns are rows of scratch arrays [.., L]. Loops run over lanes and touch few arrays, so
that LLVM's overlap checks stay cheap and the loops are vectorised; sizes are run-time numbers so that it does not
unroll them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from qconvert.kernels.cpu import bits
from qconvert.kernels.cpu.jit import (
    F32_1,
    F32_2,
    I32_1,
    I64,
    OUT_F32_2,
    OUT_U8_1,
    U8_2,
    helper,
    kernel,
)
from qconvert.kernels.search import BLOCK_LANES

F, I = np.float32, np.int32  # noqa: E741


@helper
def transpose_groups(x, first, last, s_channel, per_row, y):  # type: ignore[no-untyped-def]
    """y [G, L]: groups first..last of x [n, G] in channel scales; the scale of group i is s_channel[i // per_row]."""
    for lane in range(last - first):
        group, scale = x[first + lane], s_channel[(first + lane) // per_row]
        for c in range(group.size):
            y[c, lane] = group[c] / scale


@helper
def absmax_codes(y, largest_level, start, amax):  # type: ignore[no-untyped-def]
    """start [L]: e4m3 codes of max|y| / largest_level."""
    for lane in range(amax.size):
        amax[lane] = F(0.0)
    for c in range(y.shape[0]):
        row = y[c]
        for lane in range(amax.size):
            amax[lane] = max(amax[lane], bits.magnitude_of(row[lane]))
    for lane in range(amax.size):
        start[lane] = I(bits.encode_e4m3(amax[lane] / largest_level))


@helper
def sum_squares(distance, column, sums):  # type: ignore[no-untyped-def]
    """Add distance^2 of a column to its running sum (`reference.lane_sum`)."""
    acc = sums[column % BLOCK_LANES]
    if column < BLOCK_LANES:
        for lane in range(acc.size):
            acc[lane] = distance[lane] * distance[lane]
    else:
        for lane in range(acc.size):
            acc[lane] += distance[lane] * distance[lane]


@helper
def keep_least(sums, candidate, least, best):  # type: ignore[no-untyped-def]
    """Halves of sums [P, L] added to halves, then the lanes that improve keep their candidate."""
    half = sums.shape[0] // 2
    while half > 0:
        for c in range(half):
            low, high = sums[c], sums[c + half]
            for lane in range(low.size):
                low[lane] += high[lane]
        half //= 2
    error = sums[0]
    for lane in range(least.size):
        wins = error[lane] < least[lane]
        best[lane] = candidate[lane] if wins else best[lane]
        least[lane] = error[lane] if wins else least[lane]


@helper
def _grid(levels, scale, grid):  # type: ignore[no-untyped-def]
    """grid [16, L]: round(level * scale) clamped to +-127."""
    for j in range(levels.size):
        level, row = levels[j], grid[j]
        for lane in range(scale.size):
            row[lane] = bits.round_clamped(level * scale[lane], F(127.0))


@helper
def _nearest_of_4(target, previous, y, g0, g1, g2, g3):  # type: ignore[no-untyped-def]
    """target = min(previous, |y - g0|, ...). Two arrays: updating one in place becomes slow masked stores."""
    for lane in range(target.size):
        v = y[lane]
        d = min(bits.magnitude_of(v - g0[lane]), bits.magnitude_of(v - g1[lane]))
        e = min(bits.magnitude_of(v - g2[lane]), bits.magnitude_of(v - g3[lane]))
        target[lane] = min(previous[lane], min(d, e))


@helper
def _count_above_4(count, y, m0, m1, m2, m3):  # type: ignore[no-untyped-def]
    for lane in range(count.size):
        v = y[lane]
        low = I(v > m0[lane]) + I(v > m1[lane])
        count[lane] += low + (I(v > m2[lane]) + I(v > m3[lane]))


@kernel(F32_2, F32_1, I64, F32_1, I32_1, I64, OUT_U8_1, OUT_U8_1)
def encode(
    x: Any, s_channel: Any, per_row: Any, levels: Any, offsets: Any, lanes: Any, out: Any, s_rel: Any
) -> None:
    """x [n, G] (per_row groups a row), levels [16] -> out [n*G/2], s_rel [n]; see `reference_w4a8.w4a8_encode`."""
    count, width = x.shape
    largest_level = F(0.0)
    for j in range(levels.size):
        largest_level = max(largest_level, bits.magnitude_of(levels[j]))
    y, grid = np.zeros((width, lanes), np.float32), np.empty((16, lanes), np.float32)
    sums = np.empty((min(width, BLOCK_LANES), lanes), np.float32)
    start, candidate, best = np.zeros(lanes, np.int32), np.zeros(lanes, np.int32), np.zeros(lanes, np.int32)
    scale, least, work = np.empty(lanes, np.float32), np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    other, far = np.empty(lanes, np.float32), np.full(lanes, np.inf, np.float32)
    index, codes = np.empty(lanes, np.int32), np.empty(lanes * width, np.uint8)
    pairs = codes.view(np.uint16)
    for first in range(0, count, lanes):
        last = min(first + lanes, count)
        transpose_groups(x, first, last, s_channel, per_row, y)
        absmax_codes(y, largest_level, start, work)
        for lane in range(lanes):
            least[lane] = F(np.inf)
        for k in range(offsets.size):
            offset = offsets[k]
            for lane in range(lanes):
                candidate[lane] = min(max(start[lane] + offset, I(0)), I(126))
                scale[lane] = bits.scale_of_code(candidate[lane])
            _grid(levels, scale, grid)
            for c in range(width):
                row = y[c]
                _nearest_of_4(work, far, row, grid[0], grid[1], grid[2], grid[3])
                _nearest_of_4(other, work, row, grid[4], grid[5], grid[6], grid[7])
                _nearest_of_4(work, other, row, grid[8], grid[9], grid[10], grid[11])
                _nearest_of_4(other, work, row, grid[12], grid[13], grid[14], grid[15])
                sum_squares(other, c, sums)
            keep_least(sums, candidate, least, best)
        for lane in range(lanes):
            scale[lane] = bits.scale_of_code(best[lane])
        _grid(levels, scale, grid)
        for j in range(15):
            low, high = grid[j], grid[j + 1]
            for lane in range(lanes):
                low[lane] = (low[lane] + high[lane]) * F(0.5)
        for lane in range(lanes):
            grid[15, lane] = F(np.inf)
        for c in range(width):
            for lane in range(lanes):
                index[lane] = I(0)
            for j in range(0, 16, 4):
                _count_above_4(index, y[c], grid[j], grid[j + 1], grid[j + 2], grid[j + 3])
            for lane in range(lanes):
                codes[lane * width + c] = np.uint8(index[lane])
        for lane in range(last - first):
            s_rel[first + lane] = np.uint8(best[lane])
        packed = out[first * width // 2 : last * width // 2]
        for i in range(packed.size):
            # Little endian: the even column is the low byte.
            packed[i] = np.uint8(pairs[i] | (pairs[i] >> np.uint16(4)))


@kernel(U8_2, F32_2, F32_1, F32_1, OUT_F32_2)
def decode(codes: Any, s_rel: Any, s_channel: Any, levels: Any, out: Any) -> None:
    """codes [R, K/2], s_rel [R, K/G], s_channel [R], levels [16] -> out [R, K]."""
    group = out.shape[1] // s_rel.shape[1]
    for r in range(codes.shape[0]):
        source, target, channel = codes[r], out[r], s_channel[r]
        for c in range(source.size):
            target[2 * c] = levels[source[c] & np.uint8(15)]
            target[2 * c + 1] = levels[source[c] >> np.uint8(4)]
        for g in range(s_rel.shape[1]):
            scale, run = s_rel[r, g], target[g * group : (g + 1) * group]
            for c in range(group):
                run[c] = bits.round_clamped(run[c] * scale, F(127.0)) * channel
