"""QQQ: 4-bit weights for int8 activations, laid out for Marlin's tensor-core tiles.

Layout (FORMATS_OTHER section 14; the channel-wise form checked against a file packed by QQQ's own code):

* `B` int32 [K/16, 2N]: tiles of 16 columns by 64 rows of W, each the 1024 codes of 32 threads; thread t = 4c + q holds,
  of each of the four 16-row strips of the tile, rows c and c + 8 at columns 4q to 4q + 3, eight codes to a word;
* `s_channel` f32 [1, N]; `s_group` fp16 [K/128, N], or empty where scales are per channel; both permuted, because a
  thread needs the scales of the rows it holds next to each other;
* per channel: q in -7..7 (two's complement), W = q * 16 * s_channel: the kernel works on q * 16, the file holds s/16;
* per group: u unsigned, i8 = round((u - 8) * s_group), W = i8 * s_channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from qconvert.formats.base import Codec, Codes, Group, Options, Recognition, Stored
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, Array, NDArray, np

TILE = 64
GROUP = 128


class Qqq(Codec):
    """options: group (0 for scales per channel)."""

    name = "qqq"
    anchors = ("B",)
    family = "qqq"
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, channel = group.tensors.get("B"), group.tensors.get("s_channel")
        if weight is None or weight.dtype != "I32" or len(weight.shape) != 2:
            return "no int32 B [K/16, 2N]"
        k, n = weight.shape[0] * 16, weight.shape[1] // 2
        if channel is None or channel.dtype != "F32" or channel.shape not in ((1, n), (n,)):
            return f"no float32 s_channel [1, {n}]"
        if weight.shape[1] % (2 * TILE):
            return f"B {weight} is not of whole tiles of {TILE} rows"
        scales, size = group.tensors.get("s_group"), 0
        if scales is not None and 0 not in scales.shape:
            if scales.dtype != "F16" or len(scales.shape) != 2 or scales.shape[1] != n or k % scales.shape[0]:
                return f"s_group {scales} is not fp16 [K/{GROUP}, {n}]"
            size = k // scales.shape[0]
        owned = {"B", "s_channel"} | ({"s_group"} if scales is not None else set())
        return Recognition(self.name, n, k, {"group": size}, frozenset(owned))

    def row_step(self, options: Options) -> int:
        return TILE

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        last = -(-b // TILE) * TILE
        grouped = bool(stored.options["group"])
        q = unpack(stored.columns("B", 2 * a, 2 * last), grouped)
        channel = stored.whole("s_channel").reshape(-1)[a:last].astype(np.float32)
        codes: Codes = {"q": q[: b - a], "s_channel": _unpermute(channel[None], _SINGLE)[0, : b - a]}
        if grouped:
            scales = backend.to_f32(stored.columns("s_group", a, last), "F16")
            codes["s_group"] = np.ascontiguousarray(_unpermute(scales, _GROUPED).T[: b - a])
        return codes

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        q = codes["q"].astype(np.float32)
        if options["group"]:
            q = np.rint(q * np.repeat(codes["s_group"], options["group"], axis=1))
        else:
            q *= np.float32(16)
        return np.ascontiguousarray(q * codes["s_channel"][:, None], np.float32)


@cache
def _tile(grouped: bool) -> NDArray[np.int64]:
    """Place of each packed code in its tile [16 columns, 64 rows], as column * 64 + row, in the order of the words."""
    strip, half, column = np.arange(4), np.arange(2), np.arange(4)
    thread = np.arange(32)
    # Axes: thread, strip, half, column.
    row = 16 * strip[None, :, None, None] + 8 * half[None, None, :, None] + (thread // 4)[:, None, None, None]
    col = (4 * (thread % 4))[:, None, None, None] + column[None, None, None, :]
    place = np.broadcast_to(col * TILE + row, (32, 4, 2, 4)).reshape(-1, 8)
    order = (0, 2, 4, 6, 1, 3, 5, 7) if grouped else (4, 0, 5, 1, 6, 2, 7, 3)
    return np.ascontiguousarray(place[:, order].reshape(-1))


#: Which logical scale each stored one is, within runs of 32 and 64.
_SINGLE = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
_GROUPED = [i + 8 * j for i in range(8) for j in range(8)]


def unpack(words: Array, grouped: bool) -> Array:
    """int32 [K/16, 2R] -> signed codes int8 [R, K]."""
    strips, width = words.shape
    tiles = width // (2 * TILE)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    flat = ((words.view(np.uint32)[..., None] >> shifts) & np.uint32(15)).astype(np.uint8)
    out = np.empty((strips * tiles, 16 * TILE), np.uint8)
    out[:, _tile(grouped)] = flat.reshape(strips * tiles, 16 * TILE)
    # [strip, tile, column, row] -> [tile, row, strip, column]
    codes = out.reshape(strips, tiles, 16, TILE).transpose(1, 3, 0, 2).reshape(tiles * TILE, strips * 16)
    signed = codes.astype(np.int8) - np.int8(8)
    return signed if grouped else (codes ^ np.uint8(8)).astype(np.int8) - np.int8(8)


def _unpermute(scales: Array, order: list[int]) -> Array:
    """Stored scales [M, N] -> logical ones."""
    runs = scales.reshape(scales.shape[0], -1, len(order))
    out = np.empty_like(runs)
    out[..., order] = runs
    return out.reshape(scales.shape)
