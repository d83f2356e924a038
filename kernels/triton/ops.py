"""Triton as the layers' operations: `linear.LinearOps` with kernels, and the word on what has none."""

from __future__ import annotations

import torch
from qconvert.kernels import linear as definition
from qconvert.kernels.linear import Activation
from qconvert.kernels.triton import launch_grid, launch_rows
from qconvert.kernels.triton.chips import device
from qconvert.kernels.triton.launch import kind_of
from qconvert.kernels.triton.launch_linear import (
    activation_operand,
    multiply,
    weight_operand,
    weight_refusal,
)
from qconvert.kernels.triton.rotate import SPLITS
from qconvert.kernels.weights import (
    Fp8Weight,
    GridWeight,
    Int4Weight,
    Int8Weight,
    PlainWeight,
    Weight,
)
from torch import Tensor

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TritonOps:
    """Raises ImportError, saying why, where no kernel can run."""

    name = "triton"

    def __init__(self) -> None:
        self.device = device()

    def refusal(self, weight: Weight, activation: Activation, rotation: int, x: Tensor) -> str | None:
        """Why no kernel computes this product; None when one does."""
        if x.device.type != self.device.type:
            return f"the input is on {x.device.type}, kernels run on {self.device.type}"
        if x.dtype not in _FLOATS:
            return f"inputs are float32, float16 or bfloat16, not {x.dtype}"
        if rotation not in SPLITS:
            return f"no fused kernel rotates groups of {rotation}"
        if self._decoded_first(weight):
            return None
        return weight_refusal(weight)

    def _decoded_first(self, weight: Weight) -> bool:
        """Corrected w4a8: the runtime decodes the weight too, and multiplies in the input's type."""
        return (
            isinstance(weight, GridWeight)
            and weight.correction is not None
            and not weight.signed
            and weight.s_channel is not None
        )

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
        """As `linear.linear`. ValueError, with the reason, for what no kernel computes."""
        reason = self.refusal(weight, activation, rotation, x)
        if reason is not None:
            raise ValueError(reason)
        if self._decoded_first(weight):
            assert isinstance(weight, GridWeight)
            return self._decode_and_multiply(x, weight, bias, rotation)
        rows = activation_operand(x.contiguous(), activation, rotation, input_scale)
        return multiply(rows, weight_operand(weight), weight.k, bias, kind_of(x))

    def _decode_and_multiply(
        self, x: Tensor, weight: GridWeight, bias: Tensor | None, rotation: int
    ) -> Tensor:
        out = torch.empty(x.shape[0], weight.n, dtype=x.dtype, device=x.device)
        for a, b in definition.row_spans(weight):
            w = weight.slice(a, b)
            assert isinstance(w, GridWeight)
            decoded = launch_grid.dequantise_grid(
                w.q,
                w.s_rel,
                w.s_channel,
                w.codebook,
                w.group,
                w.bits,
                correction=w.correction,
                rotation=rotation,
                out=kind_of(x),
            )
            out[:, a:b] = torch.nn.functional.linear(
                x, decoded, None if bias is None else bias[a:b].to(x.dtype)
            )
        return out

    def lookup_refusal(self, weight: Weight, rotation: int, index: Tensor) -> str | None:
        """Why no kernel gathers rows of this table; None when one does."""
        if index.device.type != self.device.type:
            return f"the row numbers are on {index.device.type}, kernels run on {self.device.type}"
        if rotation not in SPLITS:
            return f"no fused kernel rotates groups of {rotation}"
        if isinstance(weight, Fp8Weight) and weight.blocked:
            return "fp8 with 128 x 128 scales is gathered first"
        if isinstance(weight, Int8Weight | Int4Weight | Fp8Weight | PlainWeight):
            return None
        return f"{type(weight).__name__} has no gather kernel"

    def lookup(self, index: Tensor, weight: Weight, *, rotation: int, dtype: torch.dtype) -> Tensor:
        """As `linear.lookup`; tables without a gather kernel are gathered first and decoded by the definition."""
        if self.lookup_refusal(weight, rotation, index) is not None:
            return definition.lookup(index, weight, rotation=rotation, dtype=dtype)
        if isinstance(weight, PlainWeight):
            q, kind, scale = weight.q, kind_of(weight.q), torch.ones((), device=weight.q.device)
        elif isinstance(weight, Fp8Weight):
            q, kind, scale = weight.q, weight.kind, weight.scale
        else:
            assert isinstance(weight, Int8Weight | Int4Weight)
            q, scale = weight.q, weight.scale
            kind = "I8" if isinstance(weight, Int8Weight) else "int4"
        out = kind_of(torch.empty(0, dtype=dtype))
        rows = launch_rows.dequantise_rows(q, scale, kind, rotation, out, index.reshape(-1))
        return rows.reshape(*index.shape, weight.k)
