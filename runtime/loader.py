"""The layers of a file as modules, read when first asked for and kept within a memory budget.

A layer that does not fit the budget is never held whole: its rows are streamed through it, once a forward pass
(linear layers), or only the rows asked for are read (tables). Both give what the whole layer would.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.layers import Inventory, Layer, take_inventory
from qconvert.kernels.linear import LinearOps
from qconvert.runtime.layers.method import check_buildable, linear_method
from qconvert.runtime.layers.modules import QuantEmbedding, QuantLinear
from qconvert.runtime.layers.stored import row_step, used_suffixes
from qconvert.runtime.roles import is_embedding_name
from torch import Tensor, nn

#: Bytes of stored tensors held at a time.
DEFAULT_MEMORY = 512 << 20


class StreamedLinear(nn.Module):
    """A linear layer whose rows are read, multiplied and dropped, run by run, within `memory` bytes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: Layer,
        memory: int,
        device: torch.device | str = "cpu",
        ops: LinearOps | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.method = layer, linear_method(layer)
        self._checkpoint, self._device, self._ops = checkpoint, device, ops
        step = row_step(layer)
        self._rows = max(step, memory * layer.n // max(stored_bytes(layer), 1) // step * step)

    def parts(self) -> Iterator[QuantLinear]:
        """The layer in runs of rows, each read when its turn comes."""
        for a in range(0, self.layer.n, self._rows):
            b = min(a + self._rows, self.layer.n)
            yield QuantLinear.from_file(
                self._checkpoint, self.layer, device=self._device, ops=self._ops, first=a, last=b
            )

    def forward(self, x: Tensor) -> Tensor:
        """As `QuantLinear.forward`."""
        out = torch.empty(*x.shape[:-1], self.layer.n, dtype=x.dtype, device=x.device)
        for part in self.parts():
            out[..., part.first : part.last] = part(x)
        return out


class StreamedEmbedding(nn.Module):
    """A table left on disk: forward reads the distinct rows asked for, in runs, and decodes them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: Layer,
        device: torch.device | str = "cpu",
        ops: LinearOps | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        check_buildable(layer)
        self.layer, self.dtype = layer, dtype
        self._checkpoint, self._device, self._ops = checkpoint, device, ops

    def forward(self, index: Tensor) -> Tensor:
        """As `QuantEmbedding.forward`."""
        rows, back = torch.unique(index, return_inverse=True)
        if rows.numel() and not 0 <= int(rows[0]) <= int(rows[-1]) < self.layer.n:
            raise IndexError(f"rows 0 to {self.layer.n - 1} exist")
        found = torch.empty(rows.numel(), self.layer.k, dtype=self.dtype, device=index.device)
        step, wanted, done = row_step(self.layer), rows.tolist(), 0
        while done < len(wanted):
            first = wanted[done] // step * step
            last, stop = min(first + step, self.layer.n), done + 1
            while stop < len(wanted) and wanted[stop] <= last:
                last = min(wanted[stop] // step * step + step, self.layer.n)
                stop += 1
            part = QuantEmbedding(self.layer, self._ops, first, last, self.dtype)
            part.load(self._checkpoint, self._device)
            found[done:stop] = part(rows[done:stop].to(self._device) - first).to(index.device)
            done = stop
        return found[back]


Module = QuantLinear | QuantEmbedding | StreamedLinear | StreamedEmbedding


class LazyLayers:
    """The quantised layers of an open checkpoint by name. Nothing is read until a layer is asked for.

    `memory`: bytes of stored tensors kept; the layers used least recently are dropped first (a caller that keeps
    a module keeps its memory). `is_table`: which layers are looked up rather than multiplied, by name.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        inventory: Inventory | None = None,
        *,
        memory: int = DEFAULT_MEMORY,
        device: torch.device | str = "cpu",
        ops: LinearOps | None = None,
        dtype: torch.dtype = torch.bfloat16,
        is_table: Callable[[str], bool] = is_embedding_name,
    ) -> None:
        if memory <= 0:
            raise UsageError(f"a memory budget of {memory} bytes holds nothing")
        self._checkpoint = checkpoint
        self._layers = (take_inventory(checkpoint) if inventory is None else inventory).layers
        self.memory, self._device, self._ops, self._dtype = memory, device, ops, dtype
        self._is_table = is_table
        self._kept: OrderedDict[str, QuantLinear | QuantEmbedding] = OrderedDict()

    def names(self) -> list[str]:
        """Every quantised layer that can be run."""
        return [
            name for name, layer in self._layers.items() if layer.quantised and self.refusal(name) is None
        ]

    def refusals(self) -> dict[str, str]:
        """Quantised layers that cannot be run, with the reason."""
        reasons = {name: self.refusal(name) for name, layer in self._layers.items() if layer.quantised}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def refusal(self, name: str) -> str | None:
        """Why a layer cannot be run; None when it can."""
        try:
            check_buildable(self._layers[name])
        except QConvertError as error:
            return error.problem
        return None

    @property
    def held(self) -> int:
        """Bytes of stored tensors held now."""
        return sum(module.nbytes for module in self._kept.values())

    def __len__(self) -> int:
        return len(self.names())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __getitem__(self, name: str) -> Module:
        """The layer `name`, unquantised ones too. KeyError: no such layer; QConvertError: it cannot be run."""
        layer = self._layers[name]
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
            return kept
        table = self._is_table(name)
        need = stored_bytes(layer)
        if need > self.memory:
            if table:
                return StreamedEmbedding(self._checkpoint, layer, self._device, self._ops, self._dtype)
            return StreamedLinear(self._checkpoint, layer, self.memory, self._device, self._ops)
        while self._kept and self.held + need > self.memory:
            self._kept.popitem(last=False)
        module = self._build(layer, table)
        self._kept[name] = module.load(self._checkpoint, self._device)
        return module

    def _build(self, layer: Layer, table: bool) -> QuantLinear | QuantEmbedding:
        if table:
            return QuantEmbedding(layer, self._ops, dtype=self._dtype)
        return QuantLinear(layer, self._ops)


def stored_bytes(layer: Layer) -> int:
    """Bytes of the tensors that the layer's module holds."""
    return sum(layer.tensors[suffix].nbytes for suffix in used_suffixes(layer))
