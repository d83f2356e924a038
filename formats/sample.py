"""Reading a bounded sample of a checkpoint's values with numpy alone.

What is read depends on the file's headers only, never on chance, so that equal files give equal evidence. Exact
arithmetic is not needed here: the backends, which have it, are too heavy for a command that only looks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

from qconvert.formats.base import Options
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.layers import Layer
from qconvert.formats.reader import LayerReader
from qconvert.kernels.arrays import F32, F64, U8, Array, NDArray, np
from qconvert.kernels.layout import unswizzle

Item = TypeVar("Item")
Answer = TypeVar("Answer")

#: Rows read at a stretch: the height of a tile of swizzled scales.
BAND = 128


def _minifloat(exponent_bits: int, bias: int) -> F32:
    """Values of the 256 codes of an 8-bit float; codes that are no finite number become 0."""
    code = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    magnitude = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


@cache
def e4m3() -> F32:
    table = _minifloat(4, 7)
    table[[0x7F, 0xFF]] = 0
    return table


@cache
def e5m2() -> F32:
    table = _minifloat(5, 15)
    table[[*range(0x7C, 0x80), *range(0xFC, 0x100)]] = 0
    return table


@cache
def e8m0() -> F32:
    out = np.ldexp(np.float64(1), np.arange(256) - 127)
    out[255] = np.nan
    return out.astype(np.float32)


@cache
def _e4m3_squared() -> F32:
    return np.asarray(e4m3() ** 2)


@cache
def nibbles_squared() -> NDArray[np.uint64]:
    """Squares of the two 4-bit floats in a byte, high one first: both float32 as the eight bytes of one element."""
    codes, e2m1 = np.arange(256), np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    squares = np.stack([e2m1[(codes >> 4) & 7], e2m1[codes & 7]], axis=1) ** 2
    return squares.astype(np.float32).view(np.uint64).reshape(256)


@cache
def _pairs_squared() -> F32:
    """Sum of the squares of two e4m3 that lie side by side, by the 16 bits of both."""
    squared = _e4m3_squared()
    return (squared[:, None] + squared).reshape(1 << 16)


def floats(raw: Array, dtype: str) -> F32:
    """Stored bits as float32; dtypes that hold no numbers of ours raise KeyError."""
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return looked_up(e4m3() if dtype == "F8_E4M3" else e5m2(), raw.view(np.uint8))
    if dtype in ("F16", "F32", "F64", "I8"):
        with np.errstate(over="ignore"):
            return raw.astype(np.float32)
    if dtype == "F8_E8M0":
        return looked_up(e8m0(), raw.view(np.uint8))
    raise KeyError(dtype)


def looked_up(table: F32, codes: U8 | NDArray[np.uint16]) -> F32:
    """table[codes] for a table of every code, in half the time: none is out of range, and `clip` buffers nothing."""
    return np.take(table, codes, mode="clip")


def each(work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """work(item) of all items, in order, on a few threads: numpy lets them run side by side."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, items))


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """At most `limit` of the items, evenly spaced, in order."""
    if len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def bands(n: int, rows: int) -> list[tuple[int, int]]:
    """Runs of BAND rows, evenly spaced over [0, n), of about `rows` rows altogether and one at the least."""
    starts = spread(range(0, n, BAND), max(1, rows // BAND))
    return [(a, min(a + BAND, n)) for a in starts]


def reader(checkpoint: Checkpoint, layer: Layer) -> LayerReader:
    """A layer's tensors by rows; of a bank of experts, the first."""
    return LayerReader(checkpoint, layer, 0 if layer.experts else None)


def squared_scales(stored: LayerReader, a: int, b: int, options: Options) -> F32:
    """Squares of nvfp4's block scales [b-a, K/16] of rows [a, b); `a` is a multiple of BAND."""
    if options["scales"] == "swizzled":
        tiles = stored.rows("weight_scale", a, -(-b // BAND) * BAND).view(np.uint8)
        return looked_up(_e4m3_squared(), unswizzle(tiles, b - a, stored.k // 16))
    return looked_up(_e4m3_squared(), stored.rows("weight_scale", a, b).view(np.uint8))


def row_strengths(stored: LayerReader, a: int, b: int, options: Options) -> F32:
    """Mean square of nvfp4's block scales in each of the rows [a, b); `a` is a multiple of BAND."""
    blocks = stored.k // 16
    if options["scales"] != "swizzled" or blocks % 4 or (b - a) % BAND:
        return np.asarray(squared_scales(stored, a, b, options).mean(axis=1), np.float32)
    # A tile lists, for each of 32 rows, 4 scales of it and of the rows 32, 64 and 96 below: moving bytes into rows
    # would take longer than the sums. Two scales of a row at a time: the look-ups take the most.
    pairs = stored.rows("weight_scale", a, b).view(np.uint16).reshape((b - a) // BAND, blocks // 4, 2 * BAND)
    sums = looked_up(_pairs_squared(), pairs).sum(axis=1).reshape(-1, 32, 4, 2).sum(axis=3)
    return np.asarray(sums.transpose(0, 2, 1).reshape(b - a) / np.float32(blocks), np.float32)


def form(layer: Layer) -> str:
    """The codec whose tensors these are, under ComfyUI's names: what another tool's configuration declares counts."""
    name = layer.codec.name
    if name == "modelopt_nvfp4" and layer.tensors["weight_scale"].shape == (layer.n, layer.k // 16):
        return "nvfp4"
    return "mxfp8" if name == "mxfp8_row_major" else name


def standard(x: Array) -> F64:
    """Zero mean and unit length along the last axis; constants become zero."""
    x = x - x.mean(axis=-1, keepdims=True)
    length = np.sqrt((x * x).sum(axis=-1, keepdims=True))
    return np.asarray(x / np.where(length > 0, length, 1), np.float64)
