"""Names, types, shapes: what a header says of one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qconvert.formats.dtypes import nbytes


class Spec(NamedTuple):
    """Type and shape of a tensor that may not exist yet."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = nbytes(self.dtype, self.shape)
        if size is None:
            raise ValueError(f"{self.dtype}{list(self.shape)} does not fill whole bytes")
        return size

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class TensorSpec(NamedTuple):
    """A stored tensor: `start` is the absolute byte offset in `file` (an index into the checkpoint's files)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    file: int = 0

    @property
    def spec(self) -> Spec:
        return Spec(self.dtype, self.shape)


@dataclass(frozen=True)
class HeaderView:
    """All that a contract may look at: no payload but the markers'.

    `tensors`: name -> type and shape, over all shards. `metadata`: the header's string entries (all shards merged).
    `markers`: raw bytes of every `<layer>.comfy_quant` tensor, by layer prefix. `files`: file names, in order.
    `source`: what a command that mends the file must name, where that is another one than `files`.
    """

    tensors: Mapping[str, Spec]
    metadata: Mapping[str, str]
    markers: Mapping[str, bytes]
    files: tuple[str, ...] = ("model.safetensors",)
    #: config.json beside the files.
    config: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None
