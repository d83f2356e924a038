"""The definition of a quantised layer's forward pass, in plain torch and float32, on any device.

    out = (X @ W^T) * (f_x * f_w) + bias

X and f_x are what `quantise_activations` makes of the input, W and f_w the weight's `values` and `outer`. Integer
products are exact; all others are float32 sums whose order is free, so backends agree within a bound and not bit
for bit. Activation codes and scales are those of `reference`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

import torch
from qconvert.kernels import reference as ref
from qconvert.kernels.search import LEAST_NORMAL
from qconvert.kernels.weights import GridWeight, Int4Weight, Int8Weight, Weight
from torch import Tensor

#: What becomes of the input before it is multiplied. fp8: one scale a row; fp8_static: the stored input_scale.
Activation = Literal["none", "int8", "int4", "fp8", "fp8_static", "nvfp4", "mxfp8"]
ACTIVATIONS: tuple[Activation, ...] = ("none", "int8", "int4", "fp8", "fp8_static", "nvfp4", "mxfp8")

#: Elements of a weight decoded at a time: 16 MiB of float32.
CHUNK_ELEMENTS = 1 << 22


class Quantised(NamedTuple):
    """values [M, K] float32 as they are multiplied; factor [], [M, 1] or None for 1; largest integer value or 0."""

    values: Tensor
    factor: Tensor | None
    largest: int = 0


def quantise_activations(x: Tensor, activation: Activation, input_scale: Tensor | None = None) -> Quantised:
    """`x` [M, K] float32, already rotated."""
    if activation == "none":
        return Quantised(x, None)
    if activation in ("int8", "int4"):
        levels = 127 if activation == "int8" else 7
        scale = row_scale(x, levels)
        return Quantised((x / scale[:, None]).round().clamp(-levels, levels), scale[:, None], levels)
    if activation in ("fp8", "fp8_static"):
        if activation == "fp8":
            amax = x.abs().amax(dim=1)
            scale = torch.where(amax == 0.0, 1.0, (amax / 448.0).clamp(min=LEAST_NORMAL))
        elif input_scale is None:
            raise ValueError("static fp8 activations need an input scale")
        else:
            scale = input_scale.to(torch.float32).reshape(())
        q = ref.fp8_encode(x, scale, "F8_E4M3")
        return Quantised(ref.to_f32(q, "F8_E4M3"), scale if scale.ndim == 0 else scale[:, None])
    if activation == "mxfp8":
        return Quantised(ref.mxfp8_decode(*ref.mxfp8_encode(x)), None)
    tensor_scale = tensor_scale_of(x)
    codes, scales = ref.nvfp4_encode(x, tensor_scale, "fast")
    blocks = ref.split(ref.E2M1.to(x.device)[ref.unpack_nibbles(codes, high_first=True).to(torch.int64)], 16)
    return Quantised((blocks * ref.decode_e4m3(scales)[..., None]).flatten(1), tensor_scale)


def row_scale(x: Tensor, levels: int) -> Tensor:
    """[M]: max(amax_row/levels, 1e-30)."""
    return (x.abs().amax(dim=1) / levels).clamp(min=1e-30)


def tensor_scale_of(x: Tensor) -> Tensor:
    """nvfp4's tensor scale, computed where x lies: `reference.nvfp4_tensor_scale` of its amax."""
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    return torch.where(amax == 0.0, 1.0, (amax / 2688.0).clamp(min=LEAST_NORMAL))


def row_spans(weight: Weight, elements: int = CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Runs of rows of at most about `elements` elements, cut where the weight may be cut."""
    step = max(weight.step, elements // max(weight.k, 1) // weight.step * weight.step)
    for a in range(0, weight.n, step):
        yield a, min(a + step, weight.n)


def _product(x: Quantised, weight: Weight) -> Tensor:
    """X @ W^T; exact when both sides are integers."""
    w = weight.values()
    integral = isinstance(weight, Int8Weight | Int4Weight) or (
        isinstance(weight, GridWeight) and weight.integral
    )
    if not (x.largest and integral):
        return x.values @ w.T
    # float32 holds every partial sum below 2^24 exactly, in whatever order it is taken: K is cut so that none is
    # larger, and the sums of the cuts are added as integers (below 2^31 up to K = 133,000).
    block = (1 << 24) // (x.largest * 128)
    total = torch.zeros(x.values.shape[0], w.shape[0], dtype=torch.int32, device=w.device)
    for k in range(0, w.shape[1], block):
        total += (x.values[:, k : k + block] @ w[:, k : k + block].T).to(torch.int32)
    return total.to(torch.float32)


def linear(
    x: Tensor,
    weight: Weight,
    activation: Activation = "none",
    *,
    bias: Tensor | None = None,
    rotation: int = 0,
    input_scale: Tensor | None = None,
) -> Tensor:
    """`x` [M, K] float32, float16 or bfloat16 -> [M, N] of the same type.

    `rotation`: the ConvRot group of the weight's basis; the input is rotated into it. `bias` [N].
    """
    if x.ndim != 2 or x.shape[1] != weight.k:
        raise ValueError(f"the input is {list(x.shape)}, the weight takes [M, {weight.k}]")
    wide = x.to(torch.float32)
    if rotation:
        wide = ref.rotate(wide, rotation)
    quantised = quantise_activations(wide, activation, input_scale)
    out = torch.empty(x.shape[0], weight.n, dtype=x.dtype, device=x.device)
    for a, b in row_spans(weight):
        part = weight.slice(a, b)
        product, outer = _product(quantised, part), part.outer()
        if outer is not None and quantised.factor is not None:
            product = product * (quantised.factor * outer)
        elif outer is not None:
            product = product * outer
        elif quantised.factor is not None:
            product = product * quantised.factor
        out[:, a:b] = product if bias is None else product + bias[a:b].to(torch.float32)
    return out


def lookup(index: Tensor, weight: Weight, *, rotation: int = 0, dtype: torch.dtype) -> Tensor:
    """Rows `index` (int64, any shape) of a table -> [*index, K] in `dtype`; only those rows are decoded."""
    rows = weight.take(index.reshape(-1)).decode()
    if rotation:
        rows = ref.rotate(rows, rotation)
    return rows.to(dtype).reshape(*index.shape, weight.k)


class LinearOps(Protocol):
    """What runs `linear` and `lookup`: this module (`TorchOps`), Triton's kernels, or a choice between them."""

    name: str

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        activation: Activation,
        *,
        bias: Tensor | None,
        rotation: int,
        input_scale: Tensor | None,
    ) -> Tensor: ...

    def lookup(self, index: Tensor, weight: Weight, *, rotation: int, dtype: torch.dtype) -> Tensor: ...


class TorchOps:
    """The definition itself, on the device of its arguments."""

    name = "torch"

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        activation: Activation,
        *,
        bias: Tensor | None,
        rotation: int,
        input_scale: Tensor | None,
    ) -> Tensor:
        return linear(x, weight, activation, bias=bias, rotation=rotation, input_scale=input_scale)

    def lookup(self, index: Tensor, weight: Weight, *, rotation: int, dtype: torch.dtype) -> Tensor:
        return lookup(index, weight, rotation=rotation, dtype=dtype)
