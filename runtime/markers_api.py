"""Questions that exporters and loaders ask about markers, as plain dicts, before any file is written or read.

Nothing here imports torch. A marker is what a `<layer>.comfy_quant` tensor holds: `{"format": "nvfp4", ...}`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qconvert.formats.errors import UsageError
from qconvert.formats.tensors import HeaderView
from qconvert.runtime.contracts.base import Contract, Kind, Violation
from qconvert.runtime.contracts.registry import DEFAULT_CONTRACT, get_contract
from qconvert.runtime.contracts.sglang_headers import QUANT_SUFFIXES
from qconvert.runtime.contracts.sglang_markers import read_markers
from qconvert.runtime.contracts.sglang_rules import CONVROT_GROUPS, as_int, is_plain_int8
from qconvert.runtime.roles import is_embedding_name

Marker = Mapping[str, Any]


def validate_markers(
    markers: Mapping[str, Mapping[str, Any]], config: str, runtime: str = DEFAULT_CONTRACT
) -> list[Violation]:
    """What `runtime` would refuse or misread in these markers (layer -> marker) if `config` is to take them.

    Judged from markers and names alone, so that it can run before anything is quantised: a layer is taken for an
    embedding by its name (`runtime.roles`), and scales are not known. An empty list means that nothing is wrong;
    violations of severity "note" and "environment" are no refusals. Unknown names of a runtime or a config raise
    UsageError.
    """
    contract = get_contract(runtime)
    name = _config_name(contract, config)
    objects = {layer: marker for layer, marker in markers.items() if isinstance(marker, Mapping)}
    found = contract.format_set_violations(name, {str(marker.get("format")) for marker in objects.values()})
    if not markers:
        found.append(Violation("refuse", "no-markers", "no markers: such a file is loaded as unquantised"))
    for layer, marker in sorted(markers.items()):
        if layer not in objects:
            message = "a marker must be an object"
            found.append(
                Violation("refuse", "marker-payload", message, layer, type(marker).__name__, "a dict")
            )
            continue
        role: Kind = "embedding" if is_embedding_name(layer) else "linear"
        found += contract.marker_violations(name, role, layer, marker, _scale(marker))
    return found


def check_names(view: HeaderView, parameter_names: Collection[str]) -> list[Violation]:
    """Nothing missing, nothing unknown: the file's tensors against a model's list of parameters.

    The list is the unquantised model's. Of a layer that carries a marker, scales and other companions of its
    weight are known too; markers themselves are no parameters.
    """
    known = set(parameter_names)
    markers, _ = read_markers(view)
    marked = markers.keys() | view.markers.keys()
    found = []
    for name, spec in sorted(view.tensors.items()):
        layer, _, suffix = name.rpartition(".")
        companion = layer in marked and f"{layer}.weight" in known and suffix in QUANT_SUFFIXES
        if name not in known and suffix != "comfy_quant" and not companion:
            message = f"Parameter {name} not found in the model"
            found.append(Violation("refuse", "name-unknown", message, layer or None, str(spec)))
    for name in sorted(known - view.tensors.keys()):
        owner = name.rpartition(".")[0] or None
        found.append(Violation("refuse", "name-missing", f"the file has no tensor {name}", owner))
    return found


def is_comfy_rowwise_int8_marker(marker: Marker | None, scale_shape: Sequence[int] | None = None) -> bool:
    """int8 without rotation, one scale a row: what serves as an embedding beside nvfp4 everywhere.

    The marker itself does not tell one scale a row from one for all: pass the shape of `weight_scale` for that.
    """
    if marker is None or not is_plain_int8(marker) or marker.get("_is_tensorwise_scalar"):
        return False
    return scale_shape is None or (len(scale_shape) == 2 and scale_shape[1] == 1)


def is_comfy_scalar_int8_marker(marker: Marker | None, scale_shape: Sequence[int] | None = None) -> bool:
    """int8 without rotation, one scale for all: what serves as an embedding beside w4a8 everywhere."""
    if marker is None or not is_plain_int8(marker) or marker.get("_is_rowwise"):
        return False
    return scale_shape is None or len(scale_shape) == 0


def is_convrot_int8_marker(marker: Marker | None) -> bool:
    """A rotated int8 linear layer, with a group that is served."""
    return (
        _format(marker) == "int8_tensorwise"
        and _get(marker, "convrot") is True
        and any(_get(marker, "convrot_groupsize") == group for group in CONVROT_GROUPS)
    )


def is_asym_w4a8_marker(marker: Marker | None) -> bool:
    """4-bit codes on an int8 grid, said to be rotated, as sglang wants it."""
    return _format(marker) == "asym_w4a8_int8" and _get(marker, "convrot") is True


def is_convrot_w4a4_marker(marker: Marker | None) -> bool:
    """4-bit weights for 4-bit activations, with a group and a dtype that are served."""
    return (
        _format(marker) == "convrot_w4a4"
        and as_int(_get(marker, "convrot_groupsize", 256)) in CONVROT_GROUPS
        and str(_get(marker, "linear_dtype", "int4")) in ("int4", "int8")
    )


def is_comfy_nvfp4_marker(marker: Marker | None) -> bool:
    """nvfp4, not rotated."""
    return _format(marker) == "nvfp4" and not _get(marker, "convrot", False)


def is_comfy_fp8_marker(marker: Marker | None) -> bool:
    """fp8 e4m3 with a scale."""
    return _format(marker) == "float8_e4m3fn"


def is_comfy_mxfp8_marker(marker: Marker | None) -> bool:
    """e4m3 with e8m0 scales for blocks of 32."""
    return _format(marker) == "mxfp8"


def _config_name(contract: Contract, config: str) -> str:
    """A config by its user's name or by the runtime's class."""
    if config in contract.configs:
        return config
    for name, class_name in contract.configs.items():
        if config == class_name:
            return name
    known = ", ".join(contract.configs)
    raise UsageError(f"{contract.name} has no config {config!r}", expected=f"one of {known}")


def _get(marker: Marker | None, key: str, default: Any = None) -> Any:
    return default if marker is None else marker.get(key, default)


def _format(marker: Marker | None) -> str | None:
    name = _get(marker, "format")
    return name if isinstance(name, str) else None


def _scale(marker: Marker) -> str | None:
    """The form of an int8 scale, where a loader's own annotations give it away."""
    if marker.get("_is_rowwise"):
        return "row"
    return "scalar" if marker.get("_is_tensorwise_scalar") else None


__all__ = [
    "check_names",
    "is_asym_w4a8_marker",
    "is_comfy_fp8_marker",
    "is_comfy_mxfp8_marker",
    "is_comfy_nvfp4_marker",
    "is_comfy_rowwise_int8_marker",
    "is_comfy_scalar_int8_marker",
    "is_convrot_int8_marker",
    "is_convrot_w4a4_marker",
    "validate_markers",
]
