"""Weights in GGUF's block types: rows of blocks, decoded and (Q8_0, Q4_0, Q4_K) encoded.

FORMATS_OTHER section 10. The type is the tensor's dtype, so nothing about it is guessed. Blocks run along K; a
tensor whose own shape does not divide into blocks (ComfyUI-GGUF's orig_shape) is one long run of them. Matrices of
type NVFP4 belong to `gguf_nvfp4`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from qconvert.formats import gguf_blocks, gguf_encode
from qconvert.formats.base import Codec, Codes, Group, Options, Part, Recognition, Stored
from qconvert.formats.dtypes import BLOCKS
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array, np


class Gguf(Codec):
    """options: type, shape (the tensor's own), flat (rows do not begin with a block)."""

    name = "gguf"
    family = "gguf"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight = group.tensors.get("weight")
        if weight is None or weight.dtype not in BLOCKS:
            return "not of a GGUF block type"
        n = weight.shape[0] if weight.shape else 1
        k = prod(weight.shape[1:])
        options = {
            "type": weight.dtype,
            "shape": weight.shape,
            "flat": bool(k % BLOCKS[weight.dtype][0]),
        }
        return Recognition(self.name, n, k, options, frozenset({"weight"}))

    def word(self, options: Options) -> str:
        return str(options["type"])

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        elements = BLOCKS[options["type"]][0]
        if k % elements:
            return f"{options['type']} needs K to be a multiple of {elements}, K = {k}"
        return None

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        return (Part("weight", Spec(options["type"], (n, k))),)

    def layout(self, options: Options) -> tuple[Any, ...]:
        return ("gguf", options["type"])

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        options = stored.options
        elements, size = BLOCKS[options["type"]]
        first, last = a * stored.k, b * stored.k
        begin, end = first // elements, -(-last // elements)
        if options["flat"]:
            # Reshaped tensors are small convolutions and projections of older models.
            data = stored.whole("weight").reshape(-1)[begin * size : end * size]
        else:
            data = stored.rows("weight", a, b)
        codes: Codes = {
            "blocks": data.reshape(-1, size),
            "span": np.array([first - begin * elements, b - a, stored.k]),
        }
        return codes

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        skip, rows, k = (int(value) for value in codes["span"])
        values = gguf_blocks.decode(options["type"], codes["blocks"]).reshape(-1)[skip : skip + rows * k]
        return np.ascontiguousarray(values.reshape(rows, k))

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        rows, k = x.shape
        blocks = gguf_encode.encode(options["type"], x, backend, quality == "best")
        return {"blocks": blocks, "span": np.array([0, rows, k])}

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        return {"weight": codes["blocks"]}

    def carries(self, source: Options, target: Options) -> bool:
        return bool(source["type"] == target["type"] and not source["flat"])
