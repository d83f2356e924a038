"""ComfyUI's rules for one layer: from its marker, from its shape, from its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qconvert.runtime.contracts.base import Kind, Violation
from qconvert.runtime.contracts.common import is_power_of_4, marker_text

#: Format -> the class that holds such a weight.
LAYOUTS = {
    "float8_e4m3fn": "TensorCoreFP8Layout",
    "float8_e5m2": "TensorCoreFP8Layout",
    "nvfp4": "TensorCoreNVFP4Layout",
    "mxfp8": "TensorCoreMXFP8Layout",
    "int8_tensorwise": "TensorWiseINT8Layout",
    "convrot_w4a4": "TensorCoreConvRotW4A4Layout",
    "asym_w4a8_int8": "AsymW4A8Int8Layout",
    "awq_w4a16": "TensorCoreAWQW4A16Layout",
}
FP8_FORMATS = frozenset({"float8_e4m3fn", "float8_e5m2"})
_TABLE_FORMATS = FP8_FORMATS | {"int8_tensorwise"}


def option(kind: Kind, marker: Mapping[str, Any], key: str, default: Any) -> Any:
    """A key as ComfyUI finds it: at the top level, and for linear layers in "params" too."""
    nested = marker.get("params")
    if kind == "linear" and key not in marker and isinstance(nested, Mapping):
        return nested.get(key, default)
    return marker.get(key, default)


def marker_violations(kind: Kind, layer: str, marker: Mapping[str, Any]) -> list[Violation]:
    """What is wrong with a marker whatever the tensors are."""
    return list(_marker(kind, layer, marker))


def _marker(kind: Kind, layer: str, marker: Mapping[str, Any]) -> Iterator[Violation]:
    name = marker.get("format")
    if name is None:
        message = f"Unknown quantization format for layer {layer}"
        yield Violation("refuse", "format-missing", message, layer, marker_text(marker), "a format key")
        return
    if not isinstance(name, str) or name not in LAYOUTS:
        expected = ", ".join(LAYOUTS)
        yield Violation("refuse", "format-unknown", f"KeyError: {name!r}", layer, str(name), expected)
        return
    if kind == "embedding" and name not in _TABLE_FORMATS:
        message = f"size mismatch for {layer}.weight"
        yield Violation("refuse", "embedding-format", message, layer, name, "int8_tensorwise or fp8")
        return
    if name == "awq_w4a16":
        message = "KeyError 'awq_w4a16' before 0271a469"
        yield Violation("environment", "awq-version", message, layer, "ComfyUI 0.33.0", "0271a469 or newer")
    nested = marker.get("params")
    if isinstance(nested, Mapping):
        yield from _nested(kind, layer, marker, nested)
    rotation = option(kind, marker, "convrot", False)
    if name == "int8_tensorwise" and isinstance(rotation, str):
        message = "any string counts as a true convrot"
        severity = "note" if rotation.lower() == "true" else "trap"
        yield Violation(
            "trap" if severity == "trap" else "note",
            "convrot-string",
            message,
            layer,
            repr(rotation),
            "true or false",
        )
    group = _rotation(kind, marker)
    if group is not None and not is_power_of_4(group):
        message = "there is no ConvRot rotation of this size"
        yield Violation("refuse", "rotation-size", message, layer, str(group), "16, 64 or 256")


def _nested(
    kind: Kind, layer: str, marker: Mapping[str, Any], nested: Mapping[str, Any]
) -> Iterator[Violation]:
    if kind == "embedding" and nested.get("convrot") and not marker.get("convrot"):
        message = "embeddings read the top level only: convrot inside params is ignored"
        yield Violation(
            "trap", "nested-params", message, layer, marker_text(marker), "convrot at the top level"
        )
    if "full_precision_matrix_mult" in nested:
        message = "full_precision_matrix_mult inside params is ignored"
        yield Violation("note", "nested-full-precision", message, layer)


def _rotation(kind: Kind, marker: Mapping[str, Any]) -> int | None:
    """The ConvRot group that the layer is rotated back with; None when it is not."""
    name = marker.get("format")
    rotated = name in ("convrot_w4a4", "asym_w4a8_int8") or (
        name == "int8_tensorwise" and bool(option(kind, marker, "convrot", False))
    )
    return _number(option(kind, marker, "convrot_groupsize", 256)) if rotated else None


def _number(value: Any) -> int:
    """A marker's number; what is none counts as 0, which no rule accepts."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def group_size(kind: Kind, marker: Mapping[str, Any], default: int) -> int:
    """Columns that share one scale, as the marker has it."""
    return _number(option(kind, marker, "group_size", default))


def shape_violations(
    kind: Kind, layer: str, marker: Mapping[str, Any], k: int, bits: int
) -> Iterator[Violation]:
    """Multiples that K must be of."""
    name = marker.get("format")
    wanted: list[tuple[int, str]] = []
    group = _rotation(kind, marker)
    if group:
        wanted.append((group, "the ConvRot group"))
    if name == "convrot_w4a4":
        wanted.append((64, "w4a4 rows"))
    elif name == "awq_w4a16":
        wanted.append((group_size(kind, marker, 64), "group_size"))
    elif name == "asym_w4a8_int8":
        scales = group_size(kind, marker, 16)
        wanted += [(32 if bits == 6 else 16, "w4a8 rows"), (scales, "group_size")]
        if scales < 4 or (16 % scales and scales % 16) or (bits == 6 and scales % 16):
            message = f"group_size of {bits}-bit w4a8 must be {'a' if bits == 6 else '4, 8, 16 or a'} multiple of 16"
            yield Violation("refuse", "w4a8-group", message, layer, str(scales), "16, 32, 64, ...")
    for of, why in wanted:
        if of > 0 and k % of:
            message = f"K must be a multiple of {of} ({why})"
            yield Violation("refuse", "shape-multiple", message, layer, str(k), f"a multiple of {of}")
