"""How ComfyUI finds a layer's marker: the header before the tensors; the legacy sentinel without a header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from qconvert.formats.tensors import HeaderView, Spec
from qconvert.runtime.contracts.base import Violation
from qconvert.runtime.contracts.common import HEADER_KEY, marker_text, suffixes, tensors_by_layer

#: Stripped from every name of a diffusion model, in tensors and in the header alike.
DIFFUSION_PREFIX = "model.diffusion_model."
SENTINEL = "scaled_fp8"
_RENAMED = {"scale_weight": "weight_scale", "scale_input": "input_scale"}


@dataclass
class Found:
    """Markers, tensors, and names as written in the file, by layer name without the diffusion prefix."""

    markers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    specs: dict[str, dict[str, Spec]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    #: Layers whose marker cannot be read: refused already.
    broken: set[str] = field(default_factory=set)


def read(view: HeaderView) -> Found:
    """Layers and markers as ComfyUI sees them after its conversions."""
    found = Found()
    sentinels = []
    if HEADER_KEY not in view.metadata and SENTINEL in suffixes(view):
        sentinels = [name for name in view.tensors if _bare(name) == SENTINEL]
    for prefix, specs in tensors_by_layer(view).items():
        layer = _bare(prefix)
        if sentinels:
            specs = {
                _RENAMED.get(suffix, suffix): spec
                for suffix, spec in specs.items()
                if suffix != SENTINEL or _join(prefix, suffix) not in sentinels
            }
            if not specs:
                continue
        found.specs[layer] = found.specs[layer] | specs if layer in found.specs else specs
        found.names[layer] = prefix
    header = _header_layers(found, view.metadata)
    for prefix, payload in view.markers.items():
        layer = _bare(prefix)
        if "weight" not in found.specs.get(layer, {}):
            message = "a marker for a layer that is not in the file is not read"
            found.violations.append(Violation("note", "marker-unread", message, prefix))
        elif layer in header:
            _compare(found, prefix, payload, header[layer])
        else:
            _take(found, layer, *_parse(payload))
    for layer, marker in header.items():
        if "weight" in found.specs.get(layer, {}):
            _take(found, layer, marker, None)
    if sentinels:
        _take_legacy(found, view.tensors, two=prod(view.tensors[sentinels[0]].shape) == 2)
    return found


def _join(prefix: str, suffix: str) -> str:
    return f"{prefix}.{suffix}" if prefix else suffix


def _bare(name: str) -> str:
    return name.removeprefix(DIFFUSION_PREFIX)


def _parse(payload: bytes) -> tuple[Any, str | None]:
    """The JSON of a marker tensor, or the words of the error that reading it raises."""
    try:
        return json.loads(payload), None
    except (ValueError, RecursionError) as error:
        return None, f"{type(error).__name__} {error}"


def _take(found: Found, layer: str, marker: Any, error: str | None) -> None:
    if error is None and not isinstance(marker, dict):
        error = f"AttributeError '{type(marker).__name__}' object has no attribute 'get'"
    if error is None:
        found.markers[layer] = marker
        return
    found.broken.add(layer)
    name = found.names[layer]
    found.violations.append(Violation("refuse", "marker-payload", error, name, expected="a JSON object"))


def _compare(found: Found, prefix: str, payload: bytes, marker: Any) -> None:
    own, error = _parse(payload)
    if error is not None or own == marker or not isinstance(own, dict):
        return
    message = "the header's entry wins over the tensor's marker without a word"
    text = f"{marker_text(own)} in the tensor, {json.dumps(marker)} in the header"
    found.violations.append(Violation("trap", "marker-conflict", message, prefix, text, "one marker"))


def _header_layers(found: Found, metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get(HEADER_KEY)
    if text is None:
        return {}
    header, error = _parse(text.encode())
    layers = header.get("layers") if isinstance(header, dict) else None
    if isinstance(layers, dict):
        return {_bare(name): marker for name, marker in layers.items()}
    expected = f'{HEADER_KEY}: {{"layers": {{LAYER: MARKER}}}}'
    message = error or "KeyError 'layers'"
    found.violations.append(Violation("refuse", "header-metadata", message, expected=expected))
    return {}


def _take_legacy(found: Found, tensors: Mapping[str, Spec], *, two: bool) -> None:
    """With the scaled_fp8 sentinel every layer that has a scale_weight is a float8_e4m3fn layer."""
    for name in tensors:
        prefix, _, suffix = _bare(name).rpartition(".")
        if suffix == "scale_weight":
            marker: dict[str, Any] = {"format": "float8_e4m3fn"}
            found.markers[prefix] = marker | ({"full_precision_matrix_mult": True} if two else {})
