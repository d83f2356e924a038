"""Markers as sglang reads them: tensors and header merged, nothing forgiven.

qconvert's own parser (formats) is lenient, for it repairs. This one must fail where the runtime fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qconvert.formats.tensors import HeaderView, Spec
from qconvert.runtime.contracts.base import Violation
from qconvert.runtime.contracts.common import HEADER_KEY, MARKER, dtypes
from qconvert.runtime.contracts.once import once_a_view

Markers = dict[str, dict[str, Any]]

#: Weights of these types must be marked; others (F8_E5M2 among them) pass as plain tensors.
_MUST_BE_MARKED = frozenset({"F8_E4M3", "I8", "U8"})
#: Types that numpy does not have: a marker stored so cannot be turned into bytes.
_NOT_BYTES = frozenset({"BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2"})


def read_markers(view: HeaderView) -> tuple[Markers, list[Violation]]:
    """The merged markers by layer, and every reason why the runtime would not read the file at all."""
    markers, found = _read(view)
    return markers, list(found)


@once_a_view
def _read(view: HeaderView) -> tuple[Markers, list[Violation]]:
    markers: Markers = {}
    found: list[Violation] = []
    for prefix, marker in _header_markers(view.metadata, found).items():
        _merge(markers, prefix, marker, found)
    for prefix, payload in view.markers.items():
        parsed = _tensor_marker(prefix, payload, view.tensors.get(f"{prefix}.{MARKER}"), found)
        if parsed is not None:
            _merge(markers, prefix, parsed, found)
    weights = {}
    if not _MUST_BE_MARKED.isdisjoint(dtypes(view)):
        weights = {
            name.removesuffix(".weight"): spec
            for name, spec in view.tensors.items()
            if name.endswith(".weight") and spec.dtype in _MUST_BE_MARKED
        }
    if view.metadata.get("quant_format", "").lower() == "mxfp8":
        _global_mxfp8(view, weights, markers, found)
    # An unreadable marker is one fault, not also a missing one.
    for prefix in sorted(weights.keys() - markers.keys() - view.markers.keys()):
        found.append(
            Violation(
                "refuse",
                "marker-missing",
                "Quantized weights are missing comfy_quant metadata",
                layer=prefix,
                found=str(weights[prefix]),
                expected="a comfy_quant marker",
            )
        )
    return markers, found


def _merge(markers: Markers, prefix: str, marker: Mapping[str, Any], found: list[Violation]) -> None:
    known = markers.setdefault(prefix, {})
    clashes = [key for key, value in marker.items() if key in known and known[key] != value]
    if clashes:
        key = clashes[0]
        found.append(
            Violation(
                "refuse",
                "marker-conflict",
                f"Conflicting Comfy quantization markers for {prefix!r}",
                layer=prefix,
                found=f"{key}: {json.dumps(known[key])} (header), {json.dumps(marker[key])} (tensor)",
                expected="one value for each key",
            )
        )
    known.update({key: value for key, value in marker.items() if key not in known})


def _header_markers(metadata: Mapping[str, str], found: list[Violation]) -> dict[str, dict[str, Any]]:
    text = metadata.get(HEADER_KEY)
    if text is None:
        return {}

    def broken(what: str) -> dict[str, dict[str, Any]]:
        message = f"the header's {HEADER_KEY} {what}"
        found.append(Violation("refuse", "header-metadata", message, expected='{"layers": {LAYER: MARKER}}'))
        return {}

    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return broken("is not JSON")
    if not isinstance(header, dict):
        return broken("is not a JSON object")
    layers = header.get("layers")
    if not isinstance(layers, dict):
        return broken("has no object `layers`")
    strays = [prefix for prefix, marker in layers.items() if not isinstance(marker, dict)]
    if strays:
        broken(f"holds something other than an object for {strays[0]!r}")
    return {prefix: marker for prefix, marker in layers.items() if isinstance(marker, dict)}


def _tensor_marker(
    prefix: str, payload: bytes, spec: Spec | None, found: list[Violation]
) -> dict[str, Any] | None:
    def broken(what: str, expected: str) -> None:
        message = f"the tensor {prefix}.{MARKER} {what}"
        found.append(Violation("refuse", "marker-payload", message, layer=prefix, expected=expected))

    if spec is not None and spec.dtype in _NOT_BYTES:
        broken(f"has dtype {spec.dtype}, which is not read as bytes", "U8")
        return None
    try:
        marker = json.loads(payload)
    except (ValueError, RecursionError):
        what = "holds NUL bytes only" if payload and not payload.strip(b"\0") else "is not JSON"
        broken(what, "a JSON object")
        return None
    if not isinstance(marker, dict):
        broken(f"holds a JSON {type(marker).__name__}", "a JSON object")
        return None
    return marker


def _global_mxfp8(
    view: HeaderView, weights: Mapping[str, Spec], markers: Markers, found: list[Violation]
) -> None:
    """`quant_format: mxfp8` in the header marks every quantised weight, and each must look like mxfp8."""
    for prefix, weight in sorted(weights.items()):
        scale = view.tensors.get(f"{prefix}.weight_scale")
        fits = weight.dtype == "F8_E4M3" and len(weight.shape) == 2 and weight.shape[1] % 32 == 0
        wanted = Spec("U8", (weight.shape[0], weight.shape[1] // 32)) if fits else None
        if wanted is None or scale != wanted:
            found.append(
                Violation(
                    "refuse",
                    "header-mxfp8",
                    "the header says quant_format mxfp8, and this weight and its scale do not fit it",
                    layer=prefix,
                    found=f"weight {weight}, weight_scale {scale}",
                    expected=f"F8_E4M3 [N,K], K a multiple of 32, weight_scale {wanted or 'U8 [N,K/32]'}",
                )
            )
        markers.setdefault(prefix, {"format": "mxfp8"})
