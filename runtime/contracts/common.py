"""What the contracts share: layers grouped from a header, and the ways to say what was found in one."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from qconvert.formats.dtypes import BLOCKS
from qconvert.formats.tensors import HeaderView, Spec
from qconvert.runtime.contracts.base import Kind, Verdict, Violation
from qconvert.runtime.contracts.once import once_a_view

#: Formats that are no quantisation at all: layers in them are served by every runtime.
PLAIN_FORMATS = frozenset({"bf16", "fp16", "f16", "fp32", "f32", "plain", "bfloat16", "float16", "float32"})
#: Dtypes that loaders cast into each other without loss of meaning (biases, pre_quant_scale).
FLOATS = frozenset({"F32", "F16", "BF16"})
MARKER = "comfy_quant"
#: The header entry that carries markers: {"layers": {LAYER: MARKER}}.
HEADER_KEY = "_quantization_metadata"
_NOT_IN_MARKERS = frozenset({"scale", "tensors", "partitions", "bits"})


class Layer(NamedTuple):
    """One layer of a header: its marker and its tensors by suffix (the marker's own tensor left out)."""

    prefix: str
    kind: Kind
    marker: Mapping[str, Any]
    specs: Mapping[str, Spec]

    @property
    def format(self) -> str | None:
        name = self.marker.get("format")
        return name if isinstance(name, str) else None


def container_violations(view: HeaderView) -> list[Violation]:
    """A refusal for GGUF files: other loaders than the ones judged here read them."""
    kinds = sorted(dtypes(view) & BLOCKS.keys())
    if not kinds and not any(file.endswith(".gguf") for file in view.files):
        return []
    message = "a GGUF file: read by loaders of its own (ComfyUI-GGUF, LightX2V's and sglang's GGUF paths)"
    return [Violation("refuse", "container", message, None, ", ".join(kinds) or "GGUF", "safetensors")]


@once_a_view
def dtypes(view: HeaderView) -> frozenset[str]:
    """Every type that occurs."""
    return frozenset({spec.dtype for spec in view.tensors.values()})


@once_a_view
def suffixes(view: HeaderView) -> frozenset[str]:
    """What tensors are called behind their last dot, the markers' name left out."""
    return frozenset(itertools.chain.from_iterable(tensors_by_layer(view).values()))


@once_a_view
def tensors_by_layer(view: HeaderView) -> dict[str, dict[str, Spec]]:
    """Prefix -> suffix -> type and shape; a tensor belongs to the name before its last dot."""
    layers: dict[str, dict[str, Spec]] = {}
    for name, spec in view.tensors.items():
        prefix, _, suffix = name.rpartition(".")
        if suffix == MARKER:
            continue
        if prefix in layers:
            layers[prefix][suffix] = spec
        else:
            layers[prefix] = {suffix: spec}
    return layers


def shape_text(shape: Iterable[int]) -> str:
    """A shape as it is shown in messages: [64, 512], and [] for a scalar."""
    return str(list(shape))


def marker_text(marker: Mapping[str, Any]) -> str:
    """A marker as it is shown in messages."""
    try:
        return json.dumps(dict(marker))
    except (TypeError, ValueError):
        return repr(dict(marker))


def planned_marker(format_name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The marker that a planner's options (see base.Contract.layer_refusal) would become."""
    return {"format": format_name} | {key: options[key] for key in options if key not in _NOT_IN_MARKERS}


def remedy(view: HeaderView, target: str, *options: str) -> str:
    """The command that mends a file: a single file by its name, shards by their folder; an output by its source."""
    source = view.source
    if source is None:
        source = view.files[0] if len(view.files) == 1 else str(PurePath(view.files[0]).parent)
    return shlex.join(["qconvert", source, "--to", target, *options])


def with_remedies(verdict: Verdict, find: Callable[[], str]) -> Verdict:
    """The same verdict, every fault of the file with the command that mends it; `find` is asked where there is one.

    A rank's share that does not fit (`tp-...`) is no fault of the file: fewer ranks mend it, no conversion does.
    """

    def whole(violation: Violation) -> bool:
        return violation.severity == "note" or violation.rule.startswith("tp-")

    if all(whole(violation) for violation in verdict.all_violations()):
        return verdict
    command = find()

    def mended(violations: tuple[Violation, ...]) -> tuple[Violation, ...]:
        return tuple(v if whole(v) else v._replace(remedy=command) for v in violations)

    layers = tuple(layer._replace(violations=mended(layer.violations)) for layer in verdict.layers)
    return verdict._replace(layers=layers, violations=mended(verdict.violations))


def up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def is_power_of_4(value: int) -> bool:
    """Sizes a ConvRot rotation exists for: 4, 16, 64, 256, 1024, ..."""
    return value >= 4 and value & (value - 1) == 0 and value.bit_length() % 2 == 1
