"""Unquantised weights: F64, F32, F16, BF16."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

from qconvert.formats.base import Codec, Codes, Group, Options, Part, Recognition, Stored
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.tensors import Spec, TensorSpec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array


def plain_form(spec: Spec | TensorSpec) -> tuple[int, int, dict[str, Any]]:
    """(n, k, options) of a weight of floats."""
    shape = spec.shape
    n, k = _extent(shape)
    return n, k, {"dtype": spec.dtype, "shape": shape}


@lru_cache(4096)
def _extent(shape: tuple[int, ...]) -> tuple[int, int]:
    """(n, k). Of a file's thousands of weights most have one of few shapes."""
    return shape[0] if shape else 1, prod(shape[1:])


class Plain(Codec):
    """options: dtype ("BF16", ...), shape (the stored shape; k is the product of all axes but the first)."""

    name = "plain"
    family = "plain"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        spec = group.tensors.get("weight")
        if spec is None or spec.dtype not in FLOATS:
            return "no unquantised weight"
        n, k, options = plain_form(spec)
        return Recognition(self.name, n, k, options, frozenset({"weight"}))

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        return (Part("weight", Spec(options["dtype"], tuple(options.get("shape", (n, k))))),)

    def word(self, options: Options) -> str:
        return str(options["dtype"])

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        return {
            "weight": backend.to_f32(
                stored.rows("weight", a, b).reshape(b - a, stored.k), stored.dtype("weight")
            )
        }

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return codes["weight"]

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        # The rounded value is the code, so that decode gives back what the file will hold.
        raw = backend.from_f32(x, options["dtype"])
        return {"weight": backend.to_f32(raw, options["dtype"]), "raw": raw}

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        return {"weight": codes["raw"]}
