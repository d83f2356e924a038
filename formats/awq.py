"""AWQ files in AutoAWQ's GEMM layout (AutoRound's auto_round:auto_awq is the same): packed along N, interleaved.

Layout (FORMATS_OTHER section 2; checked against files written by AutoRound).

* `qweight` int32 [K, N/8]: eight columns a word, logical column j of the eight at nibble (0, 4, 1, 5, 2, 6, 3, 7)[j];
* `qzeros` int32 [K/G, N/8]: zero points packed in the same way, stored as they are;
* `scales` fp16 [K/G, N];
* W[n, k] = (q - zero) * scales[k // G, n].

Smoothing scales are folded into neighbouring weights; nothing else is stored. Other `version`s of AutoAWQ (gemv,
gemv_fast, marlin) lay bits out differently and are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.formats import affine
from qconvert.formats.base import Codec, Codes, Group, Options, Part, Recognition, Stored
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.quant_config import quant_config
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, U32, Array, np

#: Nibble of logical column j within a word of eight.
NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
STEP = 8


class Awq(Codec):
    """options: bits (4), group, symmetric, order ("natural"), dtype (of scales)."""

    name = "awq"
    anchors = ("qweight",)
    family = affine.FAMILY

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scales = group.tensors.get("qweight"), group.tensors.get("scales")
        zeros = group.tensors.get("qzeros")
        if weight is None or weight.dtype != "I32" or len(weight.shape) != 2:
            return "no int32 qweight [K, N/8]"
        if scales is None or scales.dtype not in FLOATS or len(scales.shape) != 2 or not scales.shape[0]:
            return "no float scales [K/G, N]"
        k, n, groups = weight.shape[0], scales.shape[1], scales.shape[0]
        if weight.shape[1] * 8 != n:
            return f"qweight {weight} does not hold {n} columns, eight a word"
        if zeros is None or zeros.dtype != "I32" or zeros.shape != (groups, n // 8):
            return f"no qzeros [{groups}, {n // 8}]"
        if k % groups:
            return f"{groups} groups do not divide K = {k}"
        config = quant_config(group)
        version = str(config.document.get("version", "gemm")).lower()
        if config.method == "awq" and version != "gemm":
            return f"AutoAWQ's {version} layout is another one"
        options = {
            "bits": 4,
            "group": k // groups,
            "symmetric": _symmetric(group),
            "order": "natural",
            "dtype": scales.dtype,
        }
        return Recognition(self.name, n, k, options, frozenset({"qweight", "qzeros", "scales"}))

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        fits = n % 8 == 0 and k % options["group"] == 0
        return None if fits else f"awq needs N % 8 = 0 and K % {options['group']} = 0, N = {n}, K = {k}"

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        groups = k // options["group"]
        return (
            Part("qweight", Spec("I32", (k, n // 8)), "columns"),
            Part("qzeros", Spec("I32", (groups, n // 8)), "columns"),
            Part("scales", Spec(options["dtype"], (groups, n)), "columns"),
        )

    def layout(self, options: Options) -> tuple[Any, ...]:
        return ("awq", options["group"])

    def row_step(self, options: Options) -> int:
        return STEP

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        first, last = a // 8, -(-b // 8)
        raw = np.ascontiguousarray(stored.columns("scales", a, b).T)
        return {
            "q": unpack(stored.columns("qweight", first, last))[: b - a],
            "zero": unpack(stored.columns("qzeros", first, last))[: b - a].astype(np.int16),
            "scale": backend.to_f32(raw, stored.dtype("scales")),
            "scale_raw": raw,
        }

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return affine.decode(codes, options)

    def rounding(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return affine.rounding(codes, options)

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        return {
            "qweight": pack(codes["q"]),
            "qzeros": pack(codes["zero"].astype(np.uint8)),
            "scales": np.ascontiguousarray(codes["scale_raw"].T),
        }

    def carries(self, source: Options, target: Options) -> bool:
        same = all(source.get(key) == target[key] for key in ("bits", "group", "dtype"))
        return same and source.get("order", "natural") == "natural"


def _shifts() -> U32:
    return np.array([4 * nibble for nibble in NIBBLE], np.uint32)


def unpack(words: Array) -> Array:
    """int32 [C, N/8] -> codes uint8 [N, C]."""
    spread = (words.view(np.uint32)[..., None] >> _shifts()) & np.uint32(15)
    return np.ascontiguousarray(spread.astype(np.uint8).reshape(words.shape[0], -1).T)


def pack(codes: Array) -> Array:
    """The inverse of `unpack`: codes uint8 [N, C] -> int32 [C, N/8]."""
    spread = np.ascontiguousarray(codes.T).reshape(codes.shape[1], -1, 8).astype(np.uint32)
    words: Array = np.bitwise_or.reduce(spread << _shifts(), axis=-1).view(np.int32)
    return words


def _symmetric(group: Group) -> bool:
    """Whether the first zero points are all 8; what would carry codes as symmetric ones checks the others."""
    head = group.head("qzeros")
    return head is not None and head.size > 0 and bool((head.view(np.uint32) == 0x88888888).all())
