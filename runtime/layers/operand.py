"""From the stored tensors of a layer to the operand that the kernels multiply; views where bits allow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from qconvert.formats.errors import QConvertError
from qconvert.kernels.weights import (
    AwqWeight,
    Fp8Weight,
    GridWeight,
    Int4Weight,
    Int8Weight,
    Mxfp8Weight,
    Nvfp4Weight,
    PlainWeight,
    Weight,
)
from torch import Tensor

Options = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


def operand(codec: str, options: Options, tensors: Tensors) -> Weight:
    """The weight of a layer whose codec, options and tensors (by suffix) are given. QConvertError: no such layer."""
    try:
        build = _BUILDERS[codec]
    except KeyError:
        raise QConvertError(f"{codec} has no forward pass here") from None
    return build(options, tensors)


def buildable(codec: str) -> bool:
    """Whether `operand` knows the codec."""
    return codec in _BUILDERS


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _matrix(tensor: Tensor) -> Tensor:
    """[N, ...] as [N, K]."""
    return tensor.reshape(tensor.shape[0], -1)


def _scalar(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).reshape(-1)[0]


def _row(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).reshape(-1)


def _plain(options: Options, tensors: Tensors) -> Weight:
    weight = tensors["weight"]
    return PlainWeight(_matrix(weight.to(torch.float32) if weight.dtype == torch.float64 else weight))


def _int8(options: Options, tensors: Tensors) -> Weight:
    scale = tensors["weight_scale"]
    return Int8Weight(
        _matrix(tensors["weight"]), _scalar(scale) if options["scale"] == "scalar" else _row(scale)
    )


def _w4a4(options: Options, tensors: Tensors) -> Weight:
    return Int4Weight(_bits(tensors["weight"]), _row(tensors["weight_scale"]))


def _float8(options: Options, tensors: Tensors) -> Weight:
    q = _matrix(_bits(tensors["weight"]))
    kind = options["scale"]
    if kind == "none":
        return Fp8Weight(q, torch.ones((), device=q.device), options["kind"])
    scale = tensors[options["source"]]
    if kind == "block":
        return Fp8Weight(q, scale.to(torch.float32), options["kind"])
    return Fp8Weight(q, _scalar(scale) if kind == "scalar" else _row(scale), options["kind"])


def _nvfp4(options: Options, tensors: Tensors) -> Weight:
    return Nvfp4Weight(
        _bits(tensors["weight"]),
        _bits(tensors["weight_scale"]),
        _scalar(tensors["weight_scale_2"]),
        options["scales"] == "swizzled",
        options["nibbles"] == "high",
    )


def _mxfp8(options: Options, tensors: Tensors) -> Weight:
    q, scale = _bits(tensors["weight"]), _bits(tensors[options["source"]])
    swizzled = options["scales"] == "swizzled"
    if swizzled:
        # A writer may keep the logical shape [N, K/32] for bytes that lie in whole tiles.
        rows = -(-q.shape[0] // 128) * 128
        scale = scale.reshape(rows, -1)
    return Mxfp8Weight(q, scale, swizzled)


def _w4a8(options: Options, tensors: Tensors) -> Weight:
    rel = tensors[options["source"]]
    exact = options["srel_dtype"] == "F8_E4M3"
    channel, correction = tensors.get("weight_s_channel"), None
    if options["correction"]:
        correction = tensors["weight_correction"].to(torch.float32).T.contiguous()
    return GridWeight(
        _bits(tensors["weight"]),
        _bits(rel) if exact else rel.to(torch.float32),
        _row(channel) if channel is not None and options["grid"] else None,
        _row(tensors["weight_codebook"]) if options["codebook"] else None,
        correction,
        options["group"],
        options["bits"],
        options["signed"],
    )


def _awq(options: Options, tensors: Tensors) -> Weight:
    return AwqWeight(
        _bits(tensors["weight"]),
        tensors["weight_scale"].to(torch.float32).T.contiguous(),
        tensors["weight_zeros"].to(torch.float32).T.contiguous(),
        options["group"],
    )


_BUILDERS = {
    "plain": _plain,
    "int8": _int8,
    "w4a4": _w4a4,
    "float8": _float8,
    "nvfp4": _nvfp4,
    "mxfp8": _mxfp8,
    "w4a8": _w4a8,
    "awq_w4a16": _awq,
}
