"""Formats with one scale for a tensor or a row: fp8, int8, w4a4."""

from __future__ import annotations

from typing import Any

import numpy as np
from qconvert.kernels.cpu import bits
from qconvert.kernels.cpu.jit import (
    F32,
    F32_1,
    F32_2,
    I8_2,
    OUT_F32_1,
    OUT_F32_2,
    OUT_I8_2,
    OUT_U8_2,
    U8_2,
    helper,
    kernel,
)
from qconvert.kernels.cpu.lanes import halving_tree
from qconvert.kernels.search import ROW_LANES

#: Running sums of `reference.lane_sum` over a row. Many, so that LLVM keeps the loop over them and vectorises it.
LANES = ROW_LANES


@kernel(F32_2, F32_1, OUT_U8_2)
def encode_e4m3(x: Any, scale: Any, out: Any) -> None:
    """x, out [R, C], scale [R]."""
    for r in range(x.shape[0]):
        source, target, s = x[r], out[r], scale[r]
        for c in range(source.size):
            target[c] = bits.encode_e4m3(source[c] / s)


@kernel(F32_2, F32_1, OUT_U8_2)
def encode_e5m2(x: Any, scale: Any, out: Any) -> None:
    for r in range(x.shape[0]):
        source, target, s = x[r], out[r], scale[r]
        for c in range(source.size):
            target[c] = bits.encode_e5m2(source[c] / s)


@kernel(U8_2, F32_1, OUT_F32_2)
def decode_e4m3(q: Any, scale: Any, out: Any) -> None:
    for r in range(q.shape[0]):
        source, target, s = q[r], out[r], scale[r]
        for c in range(source.size):
            target[c] = bits.decode_e4m3(source[c]) * s


@kernel(U8_2, F32_1, OUT_F32_2)
def decode_e5m2(q: Any, scale: Any, out: Any) -> None:
    for r in range(q.shape[0]):
        source, target, s = q[r], out[r], scale[r]
        for c in range(source.size):
            target[c] = bits.decode_e5m2(source[c]) * s


@kernel(F32_2, F32_1, OUT_I8_2)
def encode_int8(x: Any, scale: Any, out: Any) -> None:
    limit = np.float32(127.0)
    for r in range(x.shape[0]):
        source, target, s = x[r], out[r], scale[r]
        for c in range(source.size):
            target[c] = np.int8(np.int32(bits.round_clamped(source[c] / s, limit)))


@kernel(I8_2, F32_1, OUT_F32_2)
def decode_int8(q: Any, scale: Any, out: Any) -> None:
    for r in range(q.shape[0]):
        source, target, s = q[r], out[r], scale[r]
        for c in range(source.size):
            target[c] = np.float32(source[c]) * s


@kernel(F32_2, F32_1, OUT_U8_2)
def encode_w4a4(x: Any, scale: Any, out: Any) -> None:
    """x [R, K], out [R, K/2]: two's complement nibbles, even column low."""
    limit = np.float32(7.0)
    codes = np.empty(x.shape[1], np.uint8)
    pairs = codes.view(np.uint16)
    for r in range(x.shape[0]):
        source, target, s = x[r], out[r], scale[r]
        for c in range(source.size):
            codes[c] = np.uint8(np.int32(bits.round_clamped(source[c] / s, limit)) & np.int32(15))
        for c in range(target.size):
            # Little endian: the even column is the low byte.
            target[c] = np.uint8(pairs[c] | (pairs[c] >> np.uint16(4)))


@kernel(U8_2, F32_1, OUT_F32_2)
def decode_w4a4(codes: Any, scale: Any, out: Any) -> None:
    eight = np.int32(8)
    for r in range(codes.shape[0]):
        source, target, s = codes[r], out[r], scale[r]
        for c in range(source.size):
            byte = np.int32(source[c])
            target[2 * c] = np.float32(((byte & np.int32(15)) ^ eight) - eight) * s
            target[2 * c + 1] = np.float32(((byte >> np.int32(4)) ^ eight) - eight) * s


@helper
def _clip_error(padded: Any, acc: Any, scale: Any, factor: Any, levels: Any) -> Any:
    """Squared error of a row [n, LANES] rounded in steps of scale*factor, in units of scale."""
    inverse = np.float32(1.0) / (scale * factor)
    acc[:] = np.float32(0.0)
    for i in range(padded.shape[0]):
        part = padded[i]
        for lane in range(LANES):
            u = part[lane] * inverse
            d = u - bits.round_clamped(u, levels)
            acc[lane] += d * d
    return halving_tree(acc) * (factor * factor)


@kernel(F32_2, F32, F32, F32_1, F32_1, F32, OUT_F32_1)
def row_scale(x: Any, levels: Any, floor: Any, factors: Any, steps: Any, margin: Any, out: Any) -> None:
    """out [R]: amax/levels, or the multiple of it with the least squared error (see `reference`).

    `factors` are tried after 1; then, for each of `steps`, the best so far minus and plus the step.
    """
    rows, cols = x.shape
    padded = np.zeros(((cols + LANES - 1) // LANES, LANES), np.float32)
    flat = padded.reshape(padded.size)
    acc = np.empty(LANES, np.float32)
    for r in range(rows):
        row = x[r]
        largest = np.int32(0)
        for c in range(cols):
            largest = max(largest, bits.bits_of(row[c]) & np.int32(0x7FFFFFFF))
        scale = max(bits.float_of(largest) / levels, floor)
        best = np.float32(1.0)
        if factors.size > 0:
            for c in range(cols):
                flat[c] = row[c]
            least = _clip_error(padded, acc, scale, best, levels) * margin
            for i in range(factors.size):
                error = _clip_error(padded, acc, scale, factors[i], levels)
                if error < least:
                    least, best = error, factors[i]
            for i in range(steps.size):
                middle = best
                for factor in (middle - steps[i], middle + steps[i]):
                    error = _clip_error(padded, acc, scale, factor, levels)
                    if error < least:
                        least, best = error, factor
        out[r] = max(scale * best, floor)
