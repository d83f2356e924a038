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
    F32,
    F32_1,
    F32_2,
    I32_1,
    I64,
    OUT_F32_1,
    OUT_F32_2,
    OUT_U8_1,
    OUT_U8_2,
    U8_1,
    U8_2,
    helper,
    kernel,
)
from qconvert.kernels.cpu.lanes import LANES, halving_tree, keep_least, sum_squares
from qconvert.kernels.search import BLOCK_LANES, ROW_LANES

F, I = np.float32, np.int32  # noqa: E741


@helper
def transpose_groups(x: Any, first: Any, last: Any, s_channel: Any, per_row: Any, y: Any) -> Any:
    """y [G, L]: groups first..last of x [n, G] in channel scales; the scale of group i is s_channel[i // per_row]."""
    for lane in range(last - first):
        group, scale = x[first + lane], s_channel[(first + lane) // per_row]
        for c in range(group.size):
            y[c, lane] = group[c] / scale


@helper
def absmax_codes(y: Any, largest_level: Any, start: Any, amax: Any) -> Any:
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
def _fill_grid(levels: Any, scale: Any, grid: Any) -> Any:
    """grid [16*L], level by level: round(level * scale) clamped to +-127."""
    for j in range(levels.size):
        level, row = levels[j], grid[j * LANES : (j + 1) * LANES]
        for lane in range(LANES):
            row[lane] = bits.round_clamped(level * scale[lane], F(127.0))


@helper
def _nearest(distance: Any, y: Any, grid: Any) -> Any:
    """distance [L]: to the nearest of the sixteen grid values of the lane."""
    for lane in range(LANES):
        v = y[lane]
        d = bits.magnitude_of(v - grid[lane])
        for j in range(1, 16):
            d = min(d, bits.magnitude_of(v - grid[j * LANES + lane]))
        distance[lane] = d


@helper
def _count_above(index: Any, y: Any, middles: Any) -> Any:
    """index [L]: how many of the fifteen middles of the lane lie below y."""
    for lane in range(LANES):
        v = y[lane]
        n = I(0)
        for j in range(15):
            n += I(v > middles[j * LANES + lane])
        index[lane] = n


@kernel(F32_2, F32_1, I64, F32_1, F32, I32_1, OUT_U8_1, OUT_F32_1)
def search(
    x: Any,
    s_channel: Any,
    per_row: Any,
    levels: Any,
    largest_level: Any,
    offsets: Any,
    s_rel: Any,
    error: Any,
) -> None:
    """x [n, G] (per_row groups a row), levels [16] -> s_rel [n] and the squared error in channel scales [n]."""
    count, width = x.shape
    y, grid = np.zeros((width, LANES), np.float32), np.empty(16 * LANES, np.float32)
    sums = np.empty((min(width, BLOCK_LANES), LANES), np.float32)
    start, candidate, best = np.zeros(LANES, np.int32), np.zeros(LANES, np.int32), np.zeros(LANES, np.int32)
    scale, least, work = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for first in range(0, count, LANES):
        last = min(first + LANES, count)
        transpose_groups(x, first, last, s_channel, per_row, y)
        absmax_codes(y, largest_level, start, work)
        for lane in range(LANES):
            least[lane] = F(np.inf)
        for k in range(offsets.size):
            offset = offsets[k]
            for lane in range(LANES):
                candidate[lane] = min(max(start[lane] + offset, I(0)), I(126))
                scale[lane] = bits.scale_of_code(candidate[lane])
            _fill_grid(levels, scale, grid)
            for c in range(width):
                _nearest(work, y[c], grid)
                sum_squares(work, c, sums)
            keep_least(sums, candidate, least, best)
        for lane in range(last - first):
            s_rel[first + lane] = np.uint8(best[lane])
            error[first + lane] = least[lane]


@kernel(F32_2, F32, F32_1, U8_2, OUT_F32_1, OUT_F32_1, OUT_U8_2)
def keep_rows(
    error: Any, multiple: Any, channel: Any, s_rel: Any, least: Any, best_channel: Any, best_rel: Any
) -> None:
    """Rows whose group errors [R, n] add up to less than `least` [R] keep this multiple of the channel scale."""
    acc = np.empty(ROW_LANES, np.float32)
    for r in range(error.shape[0]):
        for lane in range(ROW_LANES):
            acc[lane] = F(0.0)
        row = error[r]
        for first in range(0, row.size, ROW_LANES):
            part = row[first : first + ROW_LANES]
            for lane in range(part.size):
                acc[lane] += part[lane]
        total = halving_tree(acc) * (multiple * multiple)
        if total < least[r]:
            least[r], best_channel[r] = total, channel[r]
            for g in range(row.size):
                best_rel[r, g] = s_rel[r, g]


@kernel(F32_2, F32_1, I64, F32_1, U8_1, OUT_U8_1)
def assign(x: Any, s_channel: Any, per_row: Any, levels: Any, s_rel: Any, out: Any) -> None:
    """out [n*G/2]: codes of the nearest grid values, the lower code on a tie, even column in the low nibble."""
    count, width = x.shape
    y, grid = np.zeros((width, LANES), np.float32), np.empty(16 * LANES, np.float32)
    scale, index = np.zeros(LANES, np.float32), np.empty(LANES, np.int32)
    codes = np.empty(LANES * width, np.uint8)
    pairs = codes.view(np.uint16)
    for first in range(0, count, LANES):
        last = min(first + LANES, count)
        transpose_groups(x, first, last, s_channel, per_row, y)
        for lane in range(last - first):
            scale[lane] = bits.scale_of_code(I(s_rel[first + lane]))
        _fill_grid(levels, scale, grid)
        for i in range(15 * LANES):
            grid[i] = (grid[i] + grid[i + LANES]) * F(0.5)
        for c in range(width):
            _count_above(index, y[c], grid)
            for lane in range(LANES):
                codes[lane * width + c] = np.uint8(index[lane])
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
