"""Sequential rounding of a run of columns, row by row: the inner loops of `qconvert.kernels.gptq`, one a format.

Every format's kernel takes w [R, B], the columns as those before left them, and u [B, B], their part of the factor.
Column j of a row is rounded to the nearest value of the format; its error over u[j, j] replaces it in w, and is
carried into the columns behind it. Rows do not depend on each other. Then the two scale searches that weigh columns
by how large their inputs are, which the same formats use.
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
    OUT_I8_2,
    OUT_U8_2,
    U8_2,
    helper,
    kernel,
)

F, I = np.float32, np.int32  # noqa: E741


@helper
def _carry(row: Any, u: Any, j: Any, value: Any) -> Any:
    """Column j was rounded to `value`."""
    e = (row[j] - value) / u[j, j]
    row[j] = e
    rest, weights = row[j + 1 :], u[j, j + 1 :]
    for i in range(rest.size):
        rest[i] -= e * weights[i]


#: Columns that are carried into at once: their part of the factor stays in the second-level cache.
TILE = 256


@kernel(F32_2, F32_2, I64, OUT_F32_2)
def carry_far(errors: Any, u: Any, first: Any, rest: Any) -> None:
    """rest [R, K] columns from `first` on, less errors [R, B] times u [B, K]: one product after the other, in order."""
    width, last = errors.shape[1], rest.shape[1]
    for a in range(first, last, TILE):
        b = min(a + TILE, last)
        for r in range(rest.shape[0]):
            row, e = rest[r, a:b], errors[r]
            for j in range(0, width - 3, 4):
                e0, e1, e2, e3 = e[j], e[j + 1], e[j + 2], e[j + 3]
                u0, u1, u2, u3 = u[j, a:b], u[j + 1, a:b], u[j + 2, a:b], u[j + 3, a:b]
                for c in range(row.size):
                    v = row[c] - e0 * u0[c]
                    v = v - e1 * u1[c]
                    v = v - e2 * u2[c]
                    row[c] = v - e3 * u3[c]
            for j in range(width - width % 4, width):
                e0, u0 = e[j], u[j, a:b]
                for c in range(row.size):
                    row[c] -= e0 * u0[c]


@kernel(OUT_F32_2, F32_2, F32_1, F32, OUT_I8_2)
def uniform(w: Any, u: Any, scale: Any, levels: Any, codes: Any) -> None:
    """Integers -levels..levels times scale [R]; codes [R, B]."""
    for r in range(w.shape[0]):
        row, s = w[r], scale[r]
        for j in range(row.size):
            q = bits.round_clamped(row[j] / s, levels)
            codes[r, j] = np.int8(I(q))
            _carry(row, u, j, q * s)


@kernel(OUT_F32_2, F32_2, F32_1, OUT_U8_2)
def float8_e4m3(w: Any, u: Any, scale: Any, codes: Any) -> None:
    """e4m3 times scale [R]; codes [R, B]."""
    for r in range(w.shape[0]):
        row, s = w[r], scale[r]
        for j in range(row.size):
            code = bits.encode_e4m3(row[j] / s)
            codes[r, j] = code
            _carry(row, u, j, bits.decode_e4m3(code) * s)


@kernel(OUT_F32_2, F32_2, F32_1, OUT_U8_2)
def float8_e5m2(w: Any, u: Any, scale: Any, codes: Any) -> None:
    """e5m2 times scale [R]; codes [R, B]."""
    for r in range(w.shape[0]):
        row, s = w[r], scale[r]
        for j in range(row.size):
            code = bits.encode_e5m2(row[j] / s)
            codes[r, j] = code
            _carry(row, u, j, bits.decode_e5m2(code) * s)


@kernel(OUT_F32_2, F32_2, OUT_U8_2, OUT_U8_2)
def mxfp8(w: Any, u: Any, scales: Any, codes: Any) -> None:
    """e4m3 under powers of two chosen when a block of 32 is reached; codes [R, B], scales [R, B/32]."""
    for r in range(w.shape[0]):
        row = w[r]
        power = F(0.0)
        for j in range(row.size):
            if j % 32 == 0:
                largest = I(0)
                for c in range(j, j + 32):
                    largest = I(max(largest, I(bits.bits_of(row[c]) & I(0x7FFFFFFF))))
                ratio = bits.bits_of(bits.float_of(largest) / F(448.0))
                e = I(ratio >> I(23)) + (I(1) if ratio & I(0x7FFFFF) else I(0))
                scales[r, j // 32] = np.uint8(e)
                power = bits.float_of(I(I(e) << I(23)))
            code = bits.encode_e4m3(row[j] / power) if power > F(0.0) else np.uint8(0)
            codes[r, j] = code
            _carry(row, u, j, bits.decode_e4m3(code) * power)


@helper
def _best_nvfp4(block: Any, weights: Any, tensor_scale: Any, offsets: Any) -> Any:
    """e4m3 code of the scale of a block [16] with the least squared error under weights [16]."""
    largest = F(0.0)
    for c in range(16):
        largest = max(largest, bits.magnitude_of(block[c]))
    start = I(bits.encode_e4m3(largest / tensor_scale / F(6.0)))
    best, least = start, F(np.inf)
    for k in range(offsets.size):
        candidate = I(min(max(I(start + offsets[k]), I(1)), I(126)))
        b = bits.scale_of_code(candidate)
        total = F(0.0)
        for c in range(16):
            y = bits.magnitude_of(block[c]) / tensor_scale
            d = y - bits.round_e2m1(y / b) * b
            total += d * d * weights[c]
        if total < least:
            least, best = total, candidate
    return best if largest > F(0.0) else I(0)


@kernel(OUT_F32_2, F32_2, F32_1, F32, I32_1, OUT_U8_2, OUT_U8_2)
def nvfp4(w: Any, u: Any, weights: Any, tensor_scale: Any, offsets: Any, scales: Any, codes: Any) -> None:
    """E2M1 under block scales searched when a block of 16 is reached, by weights [B]; codes [R, B], scales [R, B/16].

    offsets: of e4m3 codes, from the absmax one.
    """
    for r in range(w.shape[0]):
        row = w[r]
        total = F(0.0)
        for j in range(row.size):
            if j % 16 == 0:
                code = _best_nvfp4(row[j : j + 16], weights[j : j + 16], tensor_scale, offsets)
                scales[r, j // 16] = np.uint8(code)
                total = tensor_scale * bits.scale_of_code(code)
            q = bits.encode_e2m1(row[j] / total) if total > F(0.0) else np.uint8(0)
            codes[r, j] = q
            _carry(row, u, j, bits.decode_e2m1(q) * total)


@kernel(OUT_F32_2, F32_2, F32_1, U8_2, F32_1, I64, I64, OUT_U8_2)
def grid(w: Any, u: Any, levels: Any, s_rel: Any, s_channel: Any, group: Any, first: Any, codes: Any) -> None:
    """The int8 grid of w4a8 and w6a8: levels [L] ascending, s_rel e4m3 bits [R, K/group], s_channel [R].

    `first`: the column of the layer that w begins at. codes [R, B]: level numbers.
    """
    count = levels.size
    values = np.empty(count, np.float32)
    for r in range(w.shape[0]):
        row, channel = w[r], s_channel[r]
        sign = F(1.0)
        for j in range(row.size):
            column = first + j
            if j == 0 or column % group == 0:
                code = I(s_rel[r, column // group])
                sign = F(-1.0) if code > I(127) else F(1.0)
                scale = bits.scale_of_code(I(code & I(127)))
                for i in range(count):
                    values[i] = bits.round_clamped(levels[i] * scale, F(127.0))
            y = row[j] * sign / channel
            q = 0
            for i in range(count - 1):
                q += 1 if y > (values[i] + values[i + 1]) * F(0.5) else 0
            codes[r, j] = np.uint8(q)
            _carry(row, u, j, values[q] * channel * sign)


@kernel(F32_2, F32_1, F32, I32_1, OUT_U8_2)
def nvfp4_scales(x: Any, weights: Any, tensor_scale: Any, offsets: Any, out: Any) -> None:
    """x [R, K], weights [K] -> e4m3 codes [R, K/16] of the scales with the least weighted squared error."""
    for r in range(x.shape[0]):
        row = x[r]
        for b in range(out.shape[1]):
            run = row[b * 16 : (b + 1) * 16]
            out[r, b] = np.uint8(_best_nvfp4(run, weights[b * 16 : (b + 1) * 16], tensor_scale, offsets))


@helper
def _weighted_error(row: Any, weights: Any, scale: Any, levels: Any) -> Any:
    total = 0.0
    for c in range(row.size):
        v = row[c] / scale
        d = v - bits.round_clamped(v, levels)
        total += np.float64(d * d * weights[c])
    return total


@kernel(F32_2, F32_1, F32, F32, F32_1, F32_1, OUT_F32_1)
def row_scales(x: Any, weights: Any, levels: Any, floor: Any, factors: Any, steps: Any, out: Any) -> None:
    """x [R, K], weights [K] -> [R]: amax/levels or the tried multiple of it with the least weighted squared error.

    Candidates as in `reference`. Errors are in units of the absmax scale, so that tiny weights do not underflow.
    """
    for r in range(x.shape[0]):
        row = x[r]
        largest = F(0.0)
        for c in range(row.size):
            largest = max(largest, bits.magnitude_of(row[c]))
        start = max(largest / levels, floor)
        best = F(1.0)
        least = _weighted_error(row, weights, start, levels)
        for i in range(factors.size):
            factor = factors[i]
            e = _weighted_error(row, weights, max(start * factor, floor), levels) * (factor * factor)
            if e < least:
                least, best = e, factor
        for i in range(steps.size):
            middle = best
            for factor in (middle - steps[i], middle + steps[i]):
                e = _weighted_error(row, weights, max(start * factor, floor), levels) * (factor * factor)
                if e < least:
                    least, best = e, factor
        out[r] = max(start * best, floor)
