"""asym_w4a8_int8, 4 bit: group scales searched through the runtime's int8 grid, by tables of that grid.

Grid values are integers, so halfway points between them are multiples of 1/2: within a cell (t/2, (t+1)/2] every y has
the same nearest grid value and the same code. One table per level table holds them for every cell and every e4m3
scale. Neighbouring scales lie side by side, so that one octet holds what eight candidate scales make of a value.
A negative scale mirrors the grid, and with it the cells.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from qconvert.kernels.arrays import F32 as Floats
from qconvert.kernels.arrays import U8
from qconvert.kernels.cpu import bits
from qconvert.kernels.cpu.jit import (
    F32,
    F32_1,
    F32_2,
    OUT_F32_1,
    OUT_F32_2,
    OUT_U8_1,
    OUT_U8_2,
    U8_1,
    U8_2,
    helper,
    kernel,
)
from qconvert.kernels.cpu.lanes import halving_tree
from qconvert.kernels.cpu.octets import OCTET, add, first_least, squares, tree
from qconvert.kernels.search import BLOCK_LANES, ROW_LANES, W4A8_OFFSETS

F, I, U = np.float32, np.int32, np.uint64  # noqa: E741

#: Half-integer cells of y from -128 to 128. What lies beyond is nearest to what the outermost cells are.
CELLS = 512
#: The first of the eight candidate codes, from the absmax code: a column of the table.
FIRST = W4A8_OFFSETS[0]
assert tuple(range(FIRST, FIRST + OCTET)) == W4A8_OFFSETS
#: Columns of the table: codes FIRST .. 126 + the last offset, clamped to 0..126.
COLUMNS = 127 + OCTET - 1
LAST_CELL = (CELLS - 1) * COLUMNS


class Tables(NamedTuple):
    """What each e4m3 scale makes of each cell. [CELLS * COLUMNS] each: nearest grid values, and their codes."""

    values: Floats
    codes: U8
    largest: np.float32

    @classmethod
    def of(cls, levels: Floats) -> Tables:
        """For levels [16], ascending."""
        values, codes = np.empty(CELLS * COLUMNS, np.float32), np.empty(CELLS * COLUMNS, np.uint8)
        fill_tables(np.ascontiguousarray(levels), values, codes)
        return cls(values, codes, np.abs(levels).max())


@kernel(F32_1, OUT_F32_1, OUT_U8_1)
def fill_tables(levels: Any, values: Any, codes: Any) -> None:
    """levels [16] -> values, codes [CELLS * COLUMNS]."""
    grid = np.empty(16, np.float32)
    for column in range(COLUMNS):
        scale = bits.scale_of_code(min(max(I(column + FIRST), I(0)), I(126)))
        for j in range(16):
            grid[j] = bits.round_clamped(levels[j] * scale, F(127.0))
        j = 0
        for cell in range(CELLS):
            inside = F(cell - CELLS // 2) * F(0.5) + F(0.25)
            while j < 15 and inside > (grid[j] + grid[j + 1]) * F(0.5):
                j += 1
            values[cell * COLUMNS + column] = grid[j]
            codes[cell * COLUMNS + column] = np.uint8(j)


@kernel(F32_2, OUT_F32_1)
def find_peaks(x: Any, out: Any) -> None:
    """x [n, G] -> out [n]: the element of largest magnitude, the positive one of equals."""
    for i in range(x.shape[0]):
        group = x[i]
        magnitude, highest = I(0), I(0)
        for c in range(group.size):
            # Negative floats are negative integers.
            u = bits.bits_of(group[c])
            highest = I(max(highest, u))
            magnitude = I(max(magnitude, I(u & I(0x7FFFFFFF))))
        largest = bits.float_of(magnitude)
        out[i] = -largest if magnitude > highest else largest


@helper
def _cells(row: Any, channel: Any, y: Any, at: Any) -> Any:
    """y [2, K]: the row in channel scales, and its negative; at [2, K]: where the rows of their cells begin."""
    plain, mirrored, here, there = y[0], y[1], at[0], at[1]
    for c in range(row.size):
        v = row[c] / channel
        cell = np.floor(v * F(2.0)) + F(CELLS // 2)
        cell = F(CELLS - 1) if cell > F(CELLS - 1) else cell
        cell = F(0.0) if cell < F(0.0) else cell
        begin = I(I(cell) * I(COLUMNS))
        plain[c], mirrored[c] = v, -v
        here[c], there[c] = begin, I(I(LAST_CELL) - begin)


@kernel(F32_2, F32_2, F32_1, F32_1, F32, OUT_U8_2, OUT_F32_2)
def search(x: Any, peaks: Any, s_channel: Any, values: Any, largest: Any, s_rel: Any, error: Any) -> None:
    """x [R, K], peaks [R, n] -> s_rel [R, n] and the squared error in channel scales [R, n].

    `values`, `largest`: of `Tables`. Scales with the peak's sign are tried first, then those with the other.
    """
    groups, width = peaks.shape[1], x.shape[1]
    group = width // max(groups, 1)
    lanes = min(group, BLOCK_LANES)
    y, at = np.empty((2, width), np.float32), np.empty((2, width), np.int32)
    # Flat: which half a group reads is arithmetic, as the branch would be mispredicted half of the time.
    flat_y, flat_at = y.reshape(2 * width), at.reshape(2 * width)
    column, negative = np.empty(groups, np.int32), np.empty(groups, np.int32)
    # Sixteen running sums of an octet (`reference.lane_sum`) and one octet of scratch.
    sums = np.zeros((BLOCK_LANES + 1) * OCTET, np.float32)
    spare = U(BLOCK_LANES * OCTET)
    for r in range(x.shape[0]):
        channel, peak, code, least = s_channel[r], peaks[r], s_rel[r], error[r]
        for g in range(groups):
            # The column of the first candidate, start + FIRST, is `start`: the table begins at code FIRST.
            column[g] = I(bits.encode_e4m3(bits.magnitude_of(peak[g]) / channel / largest))
            negative[g] = (bits.bits_of(peak[g]) >> I(31)) & I(1)
            least[g] = F(np.inf)
        _cells(x[r], channel, y, at)
        for other in range(2):
            for g in range(groups):
                side, start = negative[g] ^ I(other), column[g]
                first = U(side) * U(width) + U(g * group)
                for c in range(lanes):
                    i = first + U(c)
                    squares(values, U(flat_at[i] + start), flat_y[i], sums, U(c * OCTET))
                for c in range(lanes, group):
                    i = first + U(c)
                    squares(values, U(flat_at[i] + start), flat_y[i], sums, spare)
                    add(sums, U(c % BLOCK_LANES * OCTET), spare)
                tree(sums, spare)
                k = first_least(sums, spare)
                found = sums[spare + U(k)]
                wins = found < least[g]
                candidate = min(max(start + k + I(FIRST), I(0)), I(126)) | (side << I(7))
                code[g] = np.uint8(candidate) if wins else code[g]
                least[g] = found if wins else least[g]


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


@helper
def _lower_cells(row: Any, channel: Any, at: Any) -> Any:
    """at [2, K]: as `_cells`, but a y on the border of two cells belongs to the lower one."""
    here, there = at[0], at[1]
    for c in range(row.size):
        twice = row[c] / channel * F(2.0)
        cell, mirrored = np.ceil(twice) + F(CELLS // 2 - 1), F(CELLS // 2 - 1) - np.floor(twice)
        cell = F(CELLS - 1) if cell > F(CELLS - 1) else cell
        mirrored = F(CELLS - 1) if mirrored > F(CELLS - 1) else mirrored
        here[c] = I(I(F(0.0) if cell < F(0.0) else cell) * I(COLUMNS))
        there[c] = I(I(F(0.0) if mirrored < F(0.0) else mirrored) * I(COLUMNS))


@kernel(F32_2, F32_1, U8_2, U8_1, OUT_U8_2)
def assign(x: Any, s_channel: Any, s_rel: Any, table: Any, out: Any) -> None:
    """out [R, K/2]: codes of the nearest grid values, the lower code on a tie, even column in the low nibble.

    `table`: the codes of `Tables`. Under a negative scale x and grid are mirrored.
    """
    groups, width = s_rel.shape[1], x.shape[1]
    group = width // max(groups, 1)
    at, codes = np.empty((2, width), np.int32), np.empty(width, np.uint8)
    flat_at, pairs = at.reshape(2 * width), codes.view(np.uint16)
    for r in range(x.shape[0]):
        packed = out[r]
        _lower_cells(x[r], s_channel[r], at)
        for g in range(groups):
            scale = I(s_rel[r, g])
            column = I(I(scale & I(0x7F)) - I(FIRST))
            first, target = U(I(scale >> I(7))) * U(width) + U(g * group), codes[g * group : (g + 1) * group]
            for c in range(group):
                target[c] = table[U(flat_at[first + U(c)] + column)]
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
