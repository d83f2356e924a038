"""The vocabulary of a plan: what happens to each layer, and what each output tensor is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from qconvert.formats.base import Codec, Part
from qconvert.formats.finding import Finding
from qconvert.formats.layers import Layer
from qconvert.formats.tensors import Spec, TensorSpec
from qconvert.runtime.contracts.base import Contract
from qconvert.runtime.targets import Target

#: Cheapest lossless first. keep: an unquantised layer stays. copy: quantised, bytes unchanged. retag: bytes unchanged,
#: marker or type mended. repack: bits moved, values identical. quantise: from unquantised. requantise: decoded with
#: its own scales and encoded anew. decode: to an unquantised type. cast: from one unquantised type to another.
Kind = Literal["keep", "copy", "retag", "repack", "quantise", "requantise", "decode", "cast"]
#: Behind everything that lies in a source: (file, byte).
_END = (1 << 62, 0)
LOSSLESS: frozenset[str] = frozenset({"keep", "copy", "retag", "repack"})


class CopyOut(NamedTuple):
    """An output tensor whose payload is a source tensor's, byte for byte."""

    name: str
    spec: Spec
    source: TensorSpec


class ConstOut(NamedTuple):
    """An output tensor known at planning time (markers)."""

    name: str
    spec: Spec
    data: bytes


class PartOut(NamedTuple):
    """An output tensor that a layer's transformation writes."""

    name: str
    part: Part


@dataclass(frozen=True)
class Action:
    """What happens to one layer.

    `repack` transformations move codes; all others go through float32. `fold`: pre_quant_scale is multiplied in.
    `experts`: the transformation is repeated for each expert of a bank (decode only).
    """

    kind: Kind
    reason: str
    layer: Layer
    prefix: str
    role: str
    codec: Codec
    options: dict[str, Any]
    outputs: tuple[CopyOut | ConstOut | PartOut, ...]
    fold: bool = False

    @property
    def transforms(self) -> bool:
        return any(isinstance(out, PartOut) for out in self.outputs)

    @property
    def method(self) -> str:
        """What the layer is in the output, for people."""
        marker = self.codec.marker(self.options)
        return str(marker["format"]) if marker else self.codec.word(self.options)


class Drop(NamedTuple):
    """A source tensor that has no place in the output, and why."""

    tensor: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """All that is decided before payload is read. `order`: output tensors as they will lie in the file."""

    target: Target
    contracts: tuple[Contract, ...]
    config: str
    actions: tuple[Action, ...]
    loose: tuple[CopyOut, ...]
    drops: tuple[Drop, ...]
    findings: tuple[Finding, ...]
    metadata: dict[str, str]
    notes: tuple[str, ...] = ()
    strip: str = ""
    quality: Literal["fast", "best"] = "best"
    dtype: str = "BF16"
    families: tuple[str, ...] = field(default=())
    #: Why the runtime's loader for this model stops at the output, although it meets the format's rules.
    not_served: tuple[str, ...] = field(default=())

    @property
    def guesses(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "guess"]

    def outputs(self) -> list[CopyOut | ConstOut | PartOut]:
        """Every output tensor, in the order of the source's payload, so that what is copied stays in one piece.

        What has no counterpart there follows its layer's weight. Markers do so at the very end: a few bytes between
        two weights would move the second off its pages.
        """

        def place(tensor: TensorSpec) -> tuple[int, int]:
            return tensor.file, tensor.start

        items: list[tuple[tuple[int, int], CopyOut | ConstOut | PartOut]] = [
            (place(out.source), out) for out in self.loose
        ]
        for action in self.actions:
            for out in action.outputs:
                if isinstance(out, CopyOut):
                    items.append((place(out.source), out))
                    continue
                before = action.layer.tensors.get(out.name.removeprefix(action.prefix + "."))
                if isinstance(out, ConstOut) and (before is None or before.nbytes != out.spec.nbytes):
                    items.append((_END, out))
                else:
                    items.append((place(before or action.layer.first), out))
        return [out for _, out in sorted(items, key=lambda item: item[0])]


def out_spec(out: CopyOut | ConstOut | PartOut) -> Spec:
    return out.part.spec if isinstance(out, PartOut) else out.spec


def output_header(plan: Plan) -> list[tuple[str, Spec]]:
    """(name, spec) of every output tensor, in file order."""
    return [(out.name, out_spec(out)) for out in plan.outputs()]


def laid_anew(layer: Layer, codec: Codec, options: dict[str, Any]) -> str:
    """The reason of a repack, with what it may cost."""
    costs = dict.fromkeys((layer.codec.remark(layer.options), codec.remark(options)))
    return "; ".join([f"{layer.word} laid out anew", *filter(None, costs)])
