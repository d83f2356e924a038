"""`QuantLinear` and `QuantEmbedding`: modules that hold a layer's stored tensors and nothing else.

Buffers have the names, types and shapes of the file, so `state_dict()` gives back what was loaded. Built from a
header (on the meta device, without reading anything), filled by `load`.
"""

from __future__ import annotations

from functools import cache
from typing import Self

import torch
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import Layer
from qconvert.formats.reader import LayerReader
from qconvert.kernels.dispatch import Dispatch
from qconvert.kernels.linear import LinearOps
from qconvert.kernels.weights import Weight
from qconvert.runtime.layers.method import INPUT_SCALES, Method, check_buildable, linear_method
from qconvert.runtime.layers.operand import operand
from qconvert.runtime.layers.stored import empty, read, row_step, used_suffixes
from torch import Tensor, nn


@cache
def _default_ops() -> LinearOps:
    """Kernels on a GPU, the definition in torch elsewhere; one for all layers, so that triton is asked once."""
    return Dispatch()


class StoredLayer(nn.Module):
    """Rows [first, last) of a layer of a checkpoint, as stored. `last` None: all of them.

    `ops`: what computes; None for kernels where there are any (`kernels.dispatch`).
    """

    def __init__(
        self, layer: Layer, ops: LinearOps | None = None, first: int = 0, last: int | None = None
    ) -> None:
        super().__init__()
        check_buildable(layer)
        self.layer = layer
        self.ops: LinearOps = _default_ops() if ops is None else ops
        self.first, self.last = first, layer.n if last is None else last
        if first % row_step(layer):
            raise QConvertError(
                f"rows of this layer are cut at multiples of {row_step(layer)}, not at {first}"
            )
        self.suffixes = tuple(s for s in used_suffixes(layer) if self.wants(s))
        for suffix in self.suffixes:
            self.register_buffer(suffix, empty(layer, suffix, "meta"))

    def wants(self, suffix: str) -> bool:
        """Whether the forward pass reads this tensor."""
        return True

    @classmethod
    def from_file(
        cls,
        checkpoint: Checkpoint,
        layer: Layer,
        *,
        device: torch.device | str = "cpu",
        ops: LinearOps | None = None,
        first: int = 0,
        last: int | None = None,
    ) -> Self:
        """Built and filled."""
        return cls(layer, ops, first, last).load(checkpoint, device)

    def load(self, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> Self:
        """Fill the buffers from the file that the layer's header came from."""
        reader = LayerReader(checkpoint, self.layer)
        for suffix in self.suffixes:
            stored = read(reader, self.layer, suffix, self.first, self.last)
            self.register_buffer(suffix, stored.to(device))
        return self

    def stored(self) -> dict[str, Tensor]:
        """The buffers by suffix."""
        return {suffix: self.get_buffer(suffix) for suffix in self.suffixes}

    def operand(self) -> Weight:
        """The weight that is multiplied: views of the buffers wherever their bits allow it."""
        tensors = self.stored()
        if tensors["weight"].is_meta:
            raise QConvertError("the layer was built but not loaded", layer=self.layer.prefix)
        return operand(self.layer.codec.name, self.layer.options, tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def extra_repr(self) -> str:
        layer = self.layer
        rows = "" if (self.first, self.last) == (0, layer.n) else f", rows {self.first}:{self.last}"
        return f"{layer.prefix}: [{layer.n}, {layer.k}] {layer.codec.name}{rows}"


class QuantLinear(StoredLayer):
    """A linear layer that computes as the serving runtime would; `method` says how.

    forward: x [..., K] float32, float16 or bfloat16 -> [..., N] of the same type.
    """

    def __init__(
        self, layer: Layer, ops: LinearOps | None = None, first: int = 0, last: int | None = None
    ) -> None:
        super().__init__(layer, ops, first, last)
        self.method: Method = linear_method(layer)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        tensors = self.stored()
        if "pre_quant_scale" in tensors:
            # Rounded to the input's type before anything else happens to it, as runtimes do.
            factor = tensors["pre_quant_scale"].to(torch.float32).reshape(-1)
            rows = (rows.to(torch.float32) * factor).to(x.dtype)
        out = self.ops.linear(
            rows.contiguous(),
            self.operand(),
            self.method.activation,
            bias=tensors.get("bias"),
            rotation=self.method.rotation,
            input_scale=next((tensors[s] for s in INPUT_SCALES if s in tensors), None),
        )
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.method}"


class QuantEmbedding(StoredLayer):
    """A table; forward: row numbers (int32 or int64, any shape) -> [..., K] in `dtype`.

    Only the rows asked for are decoded.
    """

    def __init__(
        self,
        layer: Layer,
        ops: LinearOps | None = None,
        first: int = 0,
        last: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(layer, ops, first, last)
        self.dtype = dtype

    def wants(self, suffix: str) -> bool:
        # A lookup multiplies nothing: what scales inputs has no meaning for it.
        return suffix not in (*INPUT_SCALES, "pre_quant_scale", "bias")

    def forward(self, index: Tensor) -> Tensor:
        rows = self.last - self.first
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= rows):
            raise IndexError(
                f"rows 0 to {rows - 1} exist, asked for {int(index.min())} to {int(index.max())}"
            )
        return self.ops.lookup(
            index.to(torch.int64),
            self.operand(),
            rotation=self.layer.codec.rotation(self.layer.options),
            dtype=self.dtype,
        )
