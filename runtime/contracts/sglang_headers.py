"""What sglang finds in a header beside the markers, and before them: on the way a text encoder is loaded."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from qconvert.formats.tensors import HeaderView
from qconvert.runtime.contracts.base import Violation
from qconvert.runtime.contracts.common import FLOATS, HEADER_KEY, suffixes
from qconvert.runtime.roles import is_embedding_name

#: Suffixes that only quantised layers have. Beside an unmarked layer no model has a parameter for them.
QUANT_SUFFIXES = frozenset(
    {
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "input_scale",
        "pre_quant_scale",
        "weight_s_rel",
        "weight_s_channel",
        "weight_codebook",
        "weight_correction",
        "weight_zeros",
        "scale_weight",
        "scale_input",
        "scaled_fp8",
    }
)


def orphan_violations(view: HeaderView, marked: Collection[str]) -> list[Violation]:
    """Scales and sentinels that belong to none of the `marked` layers."""
    if suffixes(view).isdisjoint(QUANT_SUFFIXES):
        return []
    found = []
    for name, spec in sorted(view.tensors.items()):
        prefix, _, suffix = name.rpartition(".")
        if suffix in QUANT_SUFFIXES and prefix not in marked:
            message = f"Parameter {name} not found in the model"
            wanted = "no quantisation tensor beside an unmarked layer"
            found.append(Violation("refuse", "tensor-orphan", message, prefix or name, str(spec), wanted))
    return found


def route_violations(view: HeaderView, markers: Mapping[str, Mapping[str, Any]]) -> list[Violation]:
    """What a text encoder reads from the header before it looks at any marker."""
    if view.metadata.get("quantization_format") == "quanto":
        message = "text encoders take a header with quantization_format quanto before any marker"
        return [Violation("trap", "header-quanto", message, found="quantization_format: quanto")]
    config = _first_config(view.metadata)
    if not config:
        return []
    method = config.get("quant_method")
    if method:
        message = "text encoders take the header's quant_method before any marker"
        return [Violation("trap", "header-quant-method", message, found=f"quant_method: {method}")]
    layers = config.get("layers")
    if "format_version" not in config or not isinstance(layers, dict) or not _names_fp8(layers):
        return []
    lost = _lost_as_plain_fp8(view, markers)
    return [
        Violation(
            "trap" if lost else "note",
            "header-fp8",
            f"text encoders read the header's {HEADER_KEY} first, as plain fp8"
            + (f": {lost}" if lost else ""),
            found=f"{HEADER_KEY} with format_version and float8 layers",
            expected="per-layer comfy_quant tensors and no such header",
        )
    ]


def _first_config(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The header's quantisation config, in the order in which text encoders look for it; broken ones are passed."""
    for key in (HEADER_KEY, "quantization_config"):
        try:
            config = json.loads(metadata.get(key, ""))
        except (ValueError, RecursionError):
            continue
        return config if isinstance(config, dict) else {}
    return {}


def _names_fp8(layers: Mapping[str, Any]) -> bool:
    return any(
        isinstance(entry, dict) and "float8" in str(entry.get("format", "")) for entry in layers.values()
    )


def _lost_as_plain_fp8(view: HeaderView, markers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What plain fp8 (every linear layer, dynamic activations, native matmul) drops or misses."""
    if any(marker.get("full_precision_matrix_mult", False) for marker in markers.values()):
        return "full_precision_matrix_mult is dropped"
    if any(f"{prefix}.input_scale" in view.tensors for prefix in markers):
        return "input_scale has no parameter there"
    for name, spec in view.tensors.items():
        prefix, _, suffix = name.rpartition(".")
        plain = suffix == "weight" and spec.dtype in FLOATS and len(spec.shape) == 2
        if plain and prefix not in markers and not is_embedding_name(prefix):
            return f"the unquantised linear layer {prefix} would miss a weight_scale"
    return None
