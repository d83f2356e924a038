"""nunchaku: SVDQuant layers (int4, nvfp4, mxfp4) and 4-bit weights for 16-bit activations, both in kernel order.

Layout (FORMATS_OTHER section 11; checked against files packed by nunchaku's and AutoRound's packers). Everything is
tile-permuted; the 2-D shapes say sizes only. N and K are padded to 128: what of the padding is real, only the model
knows.

* `qweight` int8 [N, K/2]: int32 words of eight codes (k % 8), words ordered by n // 128, k // 64, n // 16, n % 8,
  k % 32 // 8, n % 16 // 8, k % 64 // 32, outermost first;
* `wscales`: int4 bf16 or fp16 [K/64, N]; nvfp4 e4m3 [K/16, N] and `wtscale` [1], `wcscales` [N]; mxfp4 e8m0 [K/32, N];
* `lora_down` [K, R], `lora_up` [N, R] (or proj_down, proj_up), in tiles of 16 x 16; `smooth` (smooth_factor) [K],
  `bias` [N], per-channel vectors;
* W = codes * scale (* wtscale * wcscales[n]) / smooth[k] + up @ down^T: the residual alone meets smoothed inputs.

Four-bit weights for 16-bit activations (the adaLN layers): `qweight` int32 [N/4, K/2], `wscales`, `wzeros` [K/64, N];
W = code * scale + zero. Rows are stored interleaved, so that those of one modulation vector lie `splits` apart; how
many there are (3 or 6) is the model's knowledge: read in stored order unless it is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.formats.base import Codec, Codes, Group, Options, Recognition, Stored
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.finding import Finding
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, U8, Array, np

TILE = 128
#: Group size, and how many scales lie together, by kind.
_KINDS = {"int4": (64, 0), "nvfp4": (16, 4), "mxfp4": (32, 2)}
_OLD = ("lora_down", "lora_up", "smooth", "smooth_orig")
_NEW = ("proj_down", "proj_up", "smooth_factor", "smooth_factor_orig")
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
_INT4 = (0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)


class Nunchaku(Codec):
    """options: kind ("int4" | "nvfp4" | "mxfp4"), rank (0 without a branch), down, up, smooth (suffixes or "")."""

    name = "nunchaku"
    anchors = ("qweight",)
    family = "nunchaku"
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scales = group.tensors.get("qweight"), group.tensors.get("wscales")
        if weight is None or weight.dtype != "I8" or len(weight.shape) != 2:
            return "no int8 qweight [N, K/2]"
        if scales is None or len(scales.shape) != 2:
            return "no wscales"
        n, k = weight.shape[0], weight.shape[1] * 2
        kind = {"F8_E4M3": "nvfp4", "U8": "mxfp4", "F8_E8M0": "mxfp4"}.get(scales.dtype, "int4")
        if kind == "int4" and scales.dtype not in FLOATS:
            return f"wscales {scales} are of no known type"
        if n % TILE or k % TILE or scales.shape != (k // _KINDS[kind][0], n):
            return f"qweight {weight} and wscales {scales} are no whole tiles of {TILE}"
        owned = {"qweight", "wscales"} | ({"wtscale", "wcscales"} & set(group.tensors))
        names = _NEW if group.has(_NEW[0]) or group.has(_NEW[2]) else _OLD
        down, up, smooth, original = (name if name in group.tensors else "" for name in names)
        rank = group.tensors[down].shape[-1] if down else 0
        if bool(down) != bool(up) or (
            down and (group.tensors[down].shape, group.tensors[up].shape) != ((k, rank), (n, rank))
        ):
            return "the low-rank branch does not fit the weight"
        if rank % 16 or (smooth and group.tensors[smooth].shape != (k,)):
            return f"rank {rank} or the smoothing vector does not fit the tiles"
        owned |= {name for name in (down, up, smooth, original) if name}
        note = Finding(
            "note",
            f"stored in tiles of {TILE}: [{n}, {k}] may include padding, which only the model can tell",
            group.prefix,
            f"qweight {weight}",
        )
        options = {"kind": kind, "rank": rank, "down": down, "up": up, "smooth": smooth}
        return Recognition(self.name, n, k, options, frozenset(owned), (note,))

    def word(self, options: Options) -> str:
        return f"nunchaku {options['kind']}"

    def row_step(self, options: Options) -> int:
        return TILE

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        options, k, last = stored.options, stored.k, -(-b // TILE) * TILE
        rows = last - a
        group, unit = _KINDS[options["kind"]]

        def floats(suffix: str, raw: Array) -> F32:
            dtype = stored.dtype(suffix)
            return backend.to_f32(np.ascontiguousarray(raw), "F8_E8M0" if dtype == "U8" else dtype)

        count = rows * (k // group)
        begin = a * (k // group)
        flat = stored.whole("wscales").reshape(-1)[begin : begin + count]
        codes: Codes = {
            "q": unpack(stored.rows("qweight", a, last))[: b - a],
            "scale": _scales(floats("wscales", flat), rows, k // group, unit)[: b - a],
        }
        total = floats("wtscale", stored.whole("wtscale")).reshape(-1)[0] if stored.has("wtscale") else 1
        codes["total"] = np.full(b - a, total, np.float32)
        if stored.has("wcscales"):
            channel = floats("wcscales", stored.whole("wcscales")).reshape(-1)[a:last]
            codes["total"] *= vector(channel)[: b - a]
        if options["smooth"]:
            codes["smooth"] = vector(floats(options["smooth"], stored.whole(options["smooth"])).reshape(-1))
        if options["rank"]:
            up = floats(options["up"], stored.rows(options["up"], a, last))
            codes["up"] = _lora(up, rank_first=False)[: b - a]
            down = floats(options["down"], stored.whole(options["down"]))
            codes["down"] = _lora(down, rank_first=True)
        return codes

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        table = np.array(_INT4 if options["kind"] == "int4" else _E2M1, np.float32)
        out: F32 = table[codes["q"]]
        spread = codes["scale"] * codes["total"][:, None]
        out *= np.repeat(spread, _KINDS[options["kind"]][0], axis=1)
        if "smooth" in codes:
            out /= codes["smooth"]
        if "up" in codes:
            # Whole tiles only: a product's rounding may depend on how many rows it has.
            for start in range(0, len(out), TILE):
                tile = np.zeros((TILE, codes["up"].shape[1]), np.float32)
                rows = codes["up"][start : start + TILE]
                tile[: len(rows)] = rows
                out[start : start + TILE] += (tile @ codes["down"].T)[: len(rows)]
        return np.ascontiguousarray(out, np.float32)


class NunchakuW4A16(Codec):
    """options: splits (1: rows as they are stored)."""

    name = "nunchaku_w4a16"
    marker_formats = ("nunchaku_w4a16",)
    anchors = ("qweight",)
    family = "nunchaku_w4a16"
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scales = group.tensors.get("qweight"), group.tensors.get("wscales")
        zeros = group.tensors.get("wzeros")
        if weight is None or weight.dtype != "I32" or len(weight.shape) != 2:
            return "no int32 qweight [N/4, K/2]"
        n, k = weight.shape[0] * 4, weight.shape[1] * 2
        if scales is None or zeros is None or scales.dtype not in FLOATS or scales != zeros:
            return "no wscales and wzeros of one shape"
        if k % 64 or scales.shape != (k // 64, n):
            return f"wscales {scales} is not [{k // 64}, {n}]"
        splits = marker.get("splits", 1) if marker else 1
        if not isinstance(splits, int) or splits < 1 or n % splits:
            return f"{splits} splits do not divide {n} rows"
        findings: tuple[Finding, ...] = ()
        if not marker:
            text = "rows may be interleaved by 3 or 6 (adaLN), which only the model can tell; taken as stored"
            text += " (--assume 'REGEX=nunchaku_w4a16,splits=3' settles it)"
            findings = (Finding("guess", text, group.prefix, f"qweight {weight}"),)
        owned = frozenset({"qweight", "wscales", "wzeros"})
        return Recognition(self.name, n, k, {"splits": splits}, owned, findings)

    def row_step(self, options: Options) -> int:
        return 4

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        n, k, splits = stored.n, stored.k, int(stored.options["splits"])
        # Where each logical row is stored.
        place = np.arange(a, b)
        place = (place % (n // splits)) * splits + place // (n // splits)
        if splits == 1:
            words = stored.rows("qweight", a // 4, -(-b // 4))
            q = unpack_w4a16(words, k)[: b - a]
        else:
            q = unpack_w4a16(stored.whole("qweight"), k)[place]
        codes: Codes = {"q": q}
        for suffix, key in (("wscales", "scale"), ("wzeros", "zero")):
            raw = np.ascontiguousarray(stored.whole(suffix)[:, place].T)
            codes[key] = backend.to_f32(raw, stored.dtype(suffix))
        return codes

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        rows, k = codes["q"].shape
        spread = codes["q"].astype(np.float32).reshape(rows, -1, 64)
        out = spread * codes["scale"][..., None] + codes["zero"][..., None]
        return np.ascontiguousarray(out.reshape(rows, k), np.float32)


def unpack(data: Array) -> U8:
    """Whole tiles of `qweight` int8 [R, K/2] -> codes 0..15 [R, K]."""
    rows, k = data.shape[0], data.shape[1] * 2
    bytes_ = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    nibbles = np.stack([bytes_ & 15, bytes_ >> 4], axis=-1)
    # Axes: n//128, k//64, n%128//16, n%8, k%32//8, n%16//8, k%64//32, k%8.
    spread = nibbles.reshape(rows // TILE, k // 64, 8, 8, 4, 2, 2, 8)
    return np.ascontiguousarray(spread.transpose(0, 2, 5, 3, 1, 6, 4, 7)).reshape(rows, k)


def vector(data: Array) -> Array:
    """A per-channel vector, whole tiles of 128, in its own order."""
    # Axes: tile, r//16, r%8//2, r%16//8, r%2.
    return np.ascontiguousarray(data.reshape(-1, 8, 4, 2, 2).transpose(0, 1, 3, 2, 4)).reshape(-1)


def _scales(data: F32, rows: int, groups: int, unit: int) -> F32:
    """Scales of whole tiles of rows -> [R, groups]."""
    tiles = rows // TILE
    if not unit:
        # A per-channel vector for each group.
        return np.ascontiguousarray(vector(data).reshape(tiles, groups, TILE).transpose(0, 2, 1)).reshape(
            rows, groups
        )
    # Axes: n//128, g//U, n%8, n%32//8, n%128//32, g%U.
    spread = data.reshape(tiles, groups // unit, 8, 4, 4, unit)
    return np.ascontiguousarray(spread.transpose(0, 4, 3, 2, 1, 5)).reshape(rows, groups)


def _lora(data: F32, *, rank_first: bool) -> F32:
    """A factor of the low-rank branch [C, R], in tiles of 16 x 16 -> the same in plain order."""
    features, rank = data.shape
    # Axes: c//16, r//16, a%8, b%8//2, a%16//8, b%16//8, b%2; of lora_down a is the rank, of lora_up the feature.
    spread = data.reshape(features // 16, rank // 16, 8, 4, 2, 2, 2)
    order = (0, 5, 3, 6, 1, 4, 2) if rank_first else (0, 4, 2, 1, 5, 3, 6)
    return np.ascontiguousarray(spread.transpose(order)).reshape(features, rank)


def unpack_w4a16(words: Array, k: int) -> U8:
    """`qweight` int32 [R/4, K/2] -> codes [R, K]."""
    halves = np.ascontiguousarray(words).view(np.uint16)
    # Axes: n//4, k//64, n%4, k%64//32, k%8; the nibble is k%32//8.
    spread = halves.reshape(words.shape[0], k // 64, 4, 2, 8)
    shifts = np.arange(0, 16, 4, dtype=np.uint16)
    nibbles = ((spread[..., None] >> shifts) & np.uint16(15)).astype(np.uint8)
    return np.ascontiguousarray(nibbles.transpose(0, 2, 1, 3, 5, 4)).reshape(words.shape[0] * 4, k)
