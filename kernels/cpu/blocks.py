"""Formats with one scale for a block of columns: nvfp4 (16) and mxfp8 (32). Arrays are lists of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from qconvert.kernels.cpu import bits
from qconvert.kernels.cpu.jit import (
    F32,
    F32_2,
    I32_1,
    OUT_F32_2,
    OUT_U8_1,
    OUT_U8_2,
    U8_1,
    U8_2,
    helper,
    kernel,
)
from qconvert.kernels.cpu.lanes import LANES, keep_least

F, I = np.float32, np.int32  # noqa: E741


@helper
def _amax_bits(block: Any) -> Any:
    largest = I(0)
    for c in range(block.size):
        largest = I(max(largest, I(bits.bits_of(block[c]) & I(0x7FFFFFFF))))
    return largest


@kernel(F32_2, OUT_U8_2, OUT_U8_1)
def encode_mxfp8(x: Any, out: Any, scales: Any) -> None:
    """x, out [n, 32], scales [n]; see `reference.mxfp8_encode`."""
    for i in range(x.shape[0]):
        block, target = x[i], out[i]
        ratio = bits.bits_of(bits.float_of(_amax_bits(block)) / F(448.0))
        e = I(ratio >> I(23))
        if ratio & I(0x7FFFFF):
            e = I(e + I(1))
        scales[i] = np.uint8(e)
        inverse = bits.float_of(I(I(I(254) - e) << I(23)))
        for c in range(32):
            target[c] = bits.encode_e4m3(block[c] * inverse)


@kernel(U8_2, U8_1, OUT_F32_2)
def decode_mxfp8(q: Any, scales: Any, out: Any) -> None:
    """q, out [n, 32], scales [n]; byte 0 decodes to 0.0."""
    for i in range(q.shape[0]):
        block, target = q[i], out[i]
        power = bits.float_of(I(scales[i]) << I(23))
        for c in range(32):
            target[c] = bits.decode_e4m3(block[c]) * power


@helper
def _e2m1_error(y: Any, inverse: Any, b: Any) -> Any:
    d = y - bits.round_e2m1(y * inverse) * b
    return d * d


@helper
def _search(
    y: Any, start: Any, offsets: Any, best: Any, candidate: Any, least: Any, scale: Any, sums: Any
) -> Any:
    """best [L]: the e4m3 code of each lane's block with the least squared error (see `reference`).

    y [16, L]: magnitudes in tensor scales, one block a lane; start [L]: absmax codes; the rest is scratch:
    candidate, least [L], scale [2, L], sums [8, L].
    """
    b, inverse = scale[0], scale[1]
    for lane in range(LANES):
        least[lane] = F(np.inf)
    for k in range(offsets.size):
        offset = offsets[k]
        for lane in range(LANES):
            candidate[lane] = I(min(max(I(start[lane] + offset), I(0)), I(126)))
            b[lane] = bits.scale_of_code(candidate[lane])
            inverse[lane] = F(1.0) / b[lane] if candidate[lane] > I(0) else F(0.0)
        for c in range(sums.shape[0]):
            low, high, pair = y[c], y[c + sums.shape[0]], sums[c]
            for lane in range(LANES):
                over, step = inverse[lane], b[lane]
                pair[lane] = _e2m1_error(low[lane], over, step) + _e2m1_error(high[lane], over, step)
        keep_least(sums, candidate, least, best)


@helper
def _absmax_codes(blocks: Any, tensor_scale: Any, code: Any) -> Any:
    for lane in range(blocks.shape[0]):
        code[lane] = _amax_bits(blocks[lane])
    for lane in range(blocks.shape[0]):
        code[lane] = I(bits.encode_e4m3((bits.float_of(code[lane]) / F(6.0)) / tensor_scale))


@helper
def _transpose(blocks: Any, factor: Any, y: Any) -> Any:
    """y [16, L] = |blocks [L, 16]| * factor."""
    for lane in range(blocks.shape[0]):
        block = blocks[lane]
        for c in range(block.size):
            y[c, lane] = bits.magnitude_of(block[c]) * factor


@helper
def _pack_e2m1(blocks: Any, divisors: Any, codes: Any, pairs: Any, packed: Any) -> Any:
    """packed [8n] from blocks [n, 16] over divisors [n]. A divisor of zero gives codes 0.

    codes [L, 16]: scratch, and pairs [8L] the same memory.
    """
    for lane in range(blocks.shape[0]):
        block, row, divisor = blocks[lane], codes[lane], divisors[lane]
        for c in range(block.size):
            row[c] = bits.encode_e2m1(block[c] / divisor)
    # Apart from the above: views that live across a branch are counted references, an atomic operation each.
    for lane in range(blocks.shape[0]):
        if divisors[lane] == F(0.0):
            for c in range(blocks.shape[1]):
                codes[lane, c] = np.uint8(0)
    for i in range(packed.size):
        # Little endian: the even column is the low byte, and goes to the high nibble.
        pair = np.uint16(pairs[i])
        packed[i] = np.uint8(np.uint16(pair << np.uint16(4)) | np.uint16(pair >> np.uint16(8)))


@kernel(F32_2, F32, I32_1, OUT_U8_1, OUT_U8_1)
def encode_nvfp4(x: Any, tensor_scale: Any, offsets: Any, out: Any, scales: Any) -> None:
    """x [n, 16], out [8n], scales [n]; see `reference.nvfp4_encode`.

    Without offsets: absmax scales. The block size is read from x on purpose: loops over a known small number would
    be unrolled instead of vectorised.
    """
    count, width = x.shape
    y, sums = np.zeros((width, LANES), np.float32), np.empty((width // 2, LANES), np.float32)
    start, code, candidate = np.zeros(LANES, np.int32), np.zeros(LANES, np.int32), np.zeros(LANES, np.int32)
    scale, least, total = (
        np.empty((2, LANES), np.float32),
        np.empty(LANES, np.float32),
        np.empty(LANES, np.float32),
    )
    pairs = np.empty(LANES * width // 2, np.uint16)
    codes = pairs.view(np.uint8).reshape(LANES, width)
    for first in range(0, count, LANES):
        last = min(first + LANES, count)
        blocks = x[first:last]
        _absmax_codes(blocks, tensor_scale, start)
        if offsets.size > 0:
            _transpose(blocks, F(1.0) / tensor_scale, y)
            _search(y, start, offsets, code, candidate, least, scale, sums)
        else:
            for lane in range(LANES):
                code[lane] = start[lane]
        for lane in range(last - first):
            scales[first + lane] = np.uint8(code[lane])
            total[lane] = tensor_scale * bits.scale_of_code(code[lane])
        _pack_e2m1(blocks, total, codes, pairs, out[first * 8 : last * 8])


@kernel(U8_1, U8_1, F32, OUT_F32_2)
def decode_nvfp4(codes: Any, scales: Any, tensor_scale: Any, out: Any) -> None:
    """codes [8n], scales [n], out [n, 16]. Nibbles are spread to bytes first, which LLVM vectorises apart."""
    count, width = out.shape
    total, pairs = np.empty(LANES, np.float32), np.empty(LANES * width // 2, np.uint16)
    spread = pairs.view(np.uint8).reshape(LANES, width)
    for first in range(0, count, LANES):
        last = min(first + LANES, count)
        packed, target = codes[first * 8 : last * 8], out[first:last]
        for lane in range(last - first):
            total[lane] = tensor_scale * bits.decode_e4m3(scales[first + lane])
        for i in range(packed.size):
            byte = np.uint16(packed[i])
            low = np.uint16(np.uint16(byte & np.uint16(15)) << np.uint16(8))
            pairs[i] = np.uint16(np.uint16(byte >> np.uint16(4)) | low)
        for lane in range(last - first):
            row, values, factor = spread[lane], target[lane], total[lane]
            for c in range(width):
                values[c] = bits.decode_e2m1(row[c]) * factor
