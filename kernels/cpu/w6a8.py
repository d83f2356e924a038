"""asym_w4a8_int8, 6 bit: uniform levels -31..31, searched through the runtime's int8 grid. See `w4a8`."""

from __future__ import annotations

from typing import Any

import numpy as np
from qconvert.kernels.cpu import bits
from qconvert.kernels.cpu.jit import (
    F32_1,
    F32_2,
    I32_1,
    I64,
    OUT_F32_1,
    OUT_F32_2,
    OUT_U8_1,
    OUT_U8_2,
    U8_2,
    helper,
    kernel,
)
from qconvert.kernels.cpu.lanes import LANES, keep_least, sum_squares
from qconvert.kernels.search import BLOCK_LANES

F, I = np.float32, np.int32  # noqa: E741


@helper
def _transpose_groups(x: Any, first: Any, last: Any, s_channel: Any, per_row: Any, y: Any) -> Any:
    """y [G, L]: groups first..last of x [n, G] in channel scales; the scale of group i is s_channel[i // per_row]."""
    for lane in range(last - first):
        group, scale = x[first + lane], s_channel[(first + lane) // per_row]
        for c in range(group.size):
            y[c, lane] = group[c] / scale


@helper
def _absmax_codes(y: Any, largest_level: Any, start: Any, amax: Any) -> Any:
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
def _clamp_level(level: Any) -> Any:
    return min(max(level, F(-31.0)), F(31.0))


@helper
def _distance(y: Any, level: Any, scale: Any) -> Any:
    return bits.magnitude_of(y - bits.round_clamped(level * scale, F(127.0)))


@helper
def _middle(y: Any, scale: Any) -> Any:
    """The level at y, unclamped; a scale of zero has only the grid value 0, any level does."""
    ratio = y / (F(1.0) if scale == F(0.0) else scale)
    return (ratio + bits.MAGIC) - bits.MAGIC


@helper
def _least_distance(y: Any, scale: Any) -> Any:
    middle = _middle(y, scale)
    below = _distance(y, _clamp_level(middle - F(1.0)), scale)
    at = _distance(y, _clamp_level(middle), scale)
    above = _distance(y, _clamp_level(middle + F(1.0)), scale)
    return min(min(below, at), above)


@helper
def _nearest_level(y: Any, scale: Any) -> Any:
    """The lower level wins a tie."""
    middle = _middle(y, scale)
    level = _clamp_level(middle - F(1.0))
    least = _distance(y, level, scale)
    for step in (F(0.0), F(1.0)):
        other = _clamp_level(middle + step)
        d = _distance(y, other, scale)
        level = other if d < least else level
        least = d if d < least else least
    return level


@kernel(F32_2, F32_1, I64, I32_1, OUT_U8_1, OUT_F32_1)
def search(x: Any, s_channel: Any, per_row: Any, offsets: Any, s_rel: Any, error: Any) -> None:
    """x [n, G] (per_row groups a row) -> s_rel [n] and the squared error in channel scales [n]."""
    count, width = x.shape
    y, sums = np.zeros((width, LANES), np.float32), np.empty((BLOCK_LANES, LANES), np.float32)
    start, candidate, best = np.zeros(LANES, np.int32), np.zeros(LANES, np.int32), np.zeros(LANES, np.int32)
    scale, least, work = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for first in range(0, count, LANES):
        last = min(first + LANES, count)
        _transpose_groups(x, first, last, s_channel, per_row, y)
        _absmax_codes(y, F(31.0), start, work)
        for lane in range(LANES):
            least[lane] = F(np.inf)
        for k in range(offsets.size):
            offset = offsets[k]
            for lane in range(LANES):
                candidate[lane] = min(max(start[lane] + offset, I(0)), I(126))
                scale[lane] = bits.scale_of_code(candidate[lane])
            for c in range(width):
                row = y[c]
                for lane in range(LANES):
                    work[lane] = _least_distance(row[lane], scale[lane])
                sum_squares(work, c, sums)
            keep_least(sums, candidate, least, best)
        for lane in range(last - first):
            s_rel[first + lane] = np.uint8(best[lane])
            error[first + lane] = least[lane]


@kernel(F32_2, F32_2, F32_1, OUT_U8_2)
def assign(x: Any, s_rel: Any, s_channel: Any, out: Any) -> None:
    """x [R, K], s_rel values [R, K/G] -> packed codes [R, 3K/4].

    K/2 bytes of low nibbles, even column low, then K/4 bytes of the top two bits of four columns.
    """
    rows, cols = x.shape
    group = cols // s_rel.shape[1]
    codes = np.empty(cols, np.uint8)
    low, two = np.uint8(15), np.uint8(3)
    for r in range(rows):
        row, channel = x[r], s_channel[r]
        for g in range(s_rel.shape[1]):
            scale, run, target = (
                s_rel[r, g],
                row[g * group : (g + 1) * group],
                codes[g * group : (g + 1) * group],
            )
            for c in range(group):
                target[c] = np.uint8(I(_nearest_level(run[c] / channel, scale)) + I(32))
        nibbles, tops = out[r, : cols // 2], out[r, cols // 2 :]
        for c in range(nibbles.size):
            nibbles[c] = (codes[2 * c] & low) | ((codes[2 * c + 1] & low) << np.uint8(4))
        for c in range(tops.size):
            byte = (codes[4 * c] >> np.uint8(4)) & two
            byte |= ((codes[4 * c + 1] >> np.uint8(4)) & two) << np.uint8(2)
            byte |= ((codes[4 * c + 2] >> np.uint8(4)) & two) << np.uint8(4)
            tops[c] = np.uint8(byte | (((codes[4 * c + 3] >> np.uint8(4)) & two) << np.uint8(6)))


@kernel(U8_2, F32_2, F32_1, OUT_F32_2)
def decode(codes: Any, s_rel: Any, s_channel: Any, out: Any) -> None:
    """codes [R, 3K/4], s_rel [R, K/G], s_channel [R] -> out [R, K]."""
    half, group = out.shape[1] // 2, out.shape[1] // s_rel.shape[1]
    for r in range(codes.shape[0]):
        nibbles, tops, target, channel = codes[r, :half], codes[r, half:], out[r], s_channel[r]
        for c in range(half):
            top = I(tops[c // 2]) >> I(4 * (c % 2))
            byte = I(nibbles[c])
            target[2 * c] = F(((byte & I(15)) | ((top & I(3)) << I(4))) - I(32))
            target[2 * c + 1] = F(((byte >> I(4)) | (((top >> I(2)) & I(3)) << I(4))) - I(32))
        for g in range(s_rel.shape[1]):
            scale, run = s_rel[r, g], target[g * group : (g + 1) * group]
            for c in range(group):
                run[c] = bits.round_clamped(run[c] * scale, F(127.0)) * channel
