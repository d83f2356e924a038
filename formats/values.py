"""The values a layer stands for: decoded, rotation undone, in float32."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from qconvert.formats.base import Codec, Options, Stored
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import Layer
from qconvert.formats.reader import LayerReader
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, np


def decode_rows(layer: Layer, stored: Stored, a: int, b: int, backend: Backend) -> F32:
    """Rows [a, b) of the stored weight [b-a, k], rotation undone; pre_quant_scale is not applied."""
    codes = layer.codec.load(stored, a, b, backend)
    return change_basis(
        layer.codec.decode(codes, layer.options, backend), layer.codec.rotation(layer.options), 0, backend
    )


def change_basis(x: F32, source: int, target: int, backend: Backend) -> F32:
    """From one ConvRot basis to another (group sizes, 0 for none); the same basis costs nothing."""
    if source == target:
        return x
    if source:
        x = backend.rotate(x, source)
    return backend.rotate(x, target) if target else x


def seen_as(layer: Layer, other: Layer) -> Layer:
    """A decoded bank of experts [E, N, K] as the bank it was, so that the two can be compared; else `layer` itself."""
    shape = (other.experts, other.n, other.k)
    if other.experts and not layer.experts and not layer.quantised and layer.first.shape == shape:
        return replace(layer, n=other.n, k=other.k, experts=other.experts)
    return layer


def aligned(codec: Codec, options: Options, a: int) -> int:
    """The last row at or before `a` where a chunk of this codec may begin."""
    step = codec.row_step(options)
    return a // step * step


def input_factor(layer: Layer, reader: LayerReader, backend: Backend) -> F32 | None:
    """pre_quant_scale [K] in float32, None where the layer has none."""
    if "pre_quant_scale" not in layer.tensors:
        return None
    spec = layer.tensors["pre_quant_scale"]
    if spec.dtype not in FLOATS or prod(spec.shape) != layer.k:
        raise QConvertError(
            "pre_quant_scale does not fit the layer",
            layer=layer.prefix,
            found=str(spec.spec),
            expected=f"floating [{layer.k}]",
        )
    raw: Any = reader.whole("pre_quant_scale")
    return np.ascontiguousarray(backend.to_f32(raw, reader.dtype("pre_quant_scale")).reshape(-1))
