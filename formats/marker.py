"""ComfyUI markers: one object, whichever carrier it came from, and the two carriers rendered from it.

Carriers: a `<layer>.comfy_quant` tensor of UTF-8 JSON bytes, and the header entry `_quantization_metadata`. This
parser mends what it can and says so; what a runtime would do with the same bytes is a contract's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qconvert.formats.checkpoint import dumps
from qconvert.formats.finding import Finding
from qconvert.formats.header import strict_json
from qconvert.formats.rotation import DEFAULT_GROUP, is_group, means_true

HEADER_KEY = "_quantization_metadata"
#: Entries of a header that speak of quantisation; none survives into an output.
QUANT_METADATA_KEYS = (
    HEADER_KEY,
    "quantization_config",
    "quant_format",
    "quantization_format",
    "quantization",
)
_TORCHAO_LIST, _TORCHAO_RECORD = "tensor_names", '{"_type"'
#: Names that converters write and no runtime knows -> the format they mean (the scale's shape says the rest).
ALIASES = {
    "float8_e4m3fn_rowwise": "float8_e4m3fn",
    "float8_e4m3fn_blockwise": "float8_e4m3fn",
    "float8_e4m3fn_block3d": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "int8_rowwise": "int8_tensorwise",
    "int8_tensorwise_rowwise": "int8_tensorwise",
}


def speaks_of_quantisation(key: str, value: str) -> bool:
    """Whether a header entry describes tensors that a conversion replaces: it does not survive into an output."""
    if key in QUANT_METADATA_KEYS or key.startswith("comfy.gguf."):
        return True
    return key == _TORCHAO_LIST or value.startswith(_TORCHAO_RECORD)


@dataclass
class Markers:
    """What the file says of one layer: zero, one or (in conflict) two markers, the tensor's own first."""

    candidates: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    placeholder: bool = False


def parse_marker(raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """A marker's JSON object, or None and why not. Trailing NULs and white space are allowed; all-NUL is ''."""
    text = raw.rstrip(b"\0 \t\r\n")
    if not text:
        return None, ""
    try:
        document = strict_json(text.decode("utf-8"))
    except UnicodeDecodeError:
        return None, "its bytes are not UTF-8"
    except ValueError as error:
        return None, f"its bytes are not JSON: {error}"
    if not isinstance(document, dict):
        return None, f"it is a JSON {type(document).__name__}, not an object"
    return document, None


def flatten(marker: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Keys of a nested "params" object moved to the top (the top wins); whether there was one."""
    params = marker.get("params")
    if not isinstance(params, Mapping):
        return dict(marker), False
    top = {key: value for key, value in marker.items() if key != "params"}
    return {**params, **top}, True


def header_layers(metadata: Mapping[str, str]) -> tuple[dict[str, Any], Finding | None]:
    """Markers in the header entry, and a finding when the entry is there but cannot be read."""
    text = metadata.get(HEADER_KEY)
    if text is None:
        return {}, None
    try:
        document = strict_json(text)
    except ValueError as error:
        return {}, Finding("guess", f"header entry {HEADER_KEY} is not JSON ({error}); ignored")
    layers = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(layers, dict):
        return {}, Finding("note", f"header entry {HEADER_KEY} lists no layers; ignored")
    return layers, None


def collect(
    raw: Mapping[str, bytes], metadata: Mapping[str, str], layers: Iterable[str]
) -> tuple[dict[str, Markers], list[Finding]]:
    """Markers by layer prefix, from both carriers, for the layers that exist; and findings for the rest.

    A marker whose layer does not exist is tried under the prefixes that real layers have (`model.diffusion_model.`
    and the like): one common prefix must explain all of them, otherwise the marker is dropped with a finding.
    """
    known = set(layers)
    found: dict[str, Markers] = {}
    findings: list[Finding] = []
    listed, problem = header_layers(metadata)
    if problem:
        findings.append(problem)
    for carrier, source in (("tensor", _parsed(raw)), ("header", listed)):
        rename = _prefix_fix([name for name in source if name not in known], known)
        for name, value in source.items():
            layer = rename(name) if name not in known else name
            if layer is None:
                findings.append(
                    Finding("repair", f"{carrier} marker for a layer that does not exist; dropped", name)
                )
                continue
            state = found.setdefault(layer, Markers())
            if layer != name:
                state.findings.append(
                    Finding(
                        "repair", f"{carrier} marker is named {name!r}", layer, "the only prefix that fits"
                    )
                )
            _add(state, layer, carrier, value)
    return found, findings


def _parsed(raw: Mapping[str, bytes]) -> dict[str, Any]:
    return {name: parse_marker(data) for name, data in raw.items()}


def _add(state: Markers, layer: str, carrier: str, value: Any) -> None:
    problem: str | None = None
    if carrier == "tensor":
        value, problem = value
    elif not isinstance(value, dict):
        value, problem = None, f"it is a JSON {type(value).__name__}, not an object"
    if value is None:
        if problem == "":
            state.placeholder = True
            state.findings.append(Finding("note", "marker tensor is empty (NUL bytes): a placeholder", layer))
        else:
            state.findings.append(Finding("repair", f"{carrier} marker cannot be read: {problem}", layer))
        return
    marker, nested = flatten(value)
    if nested:
        state.findings.append(
            Finding("repair", f"{carrier} marker keeps its options in a nested params", layer)
        )
    name = marker.get("format")
    if not isinstance(name, str) or not name:
        state.findings.append(Finding("repair", f"{carrier} marker names no format", layer))
        marker["format"] = ""
    elif name in ALIASES:
        state.findings.append(
            Finding("repair", f"format name {name!r} is no ComfyUI format; read as {ALIASES[name]!r}", layer)
        )
        marker["format"] = ALIASES[name]
    state.findings.extend(_mend_numbers(layer, carrier, marker))
    state.findings.extend(_rotation_findings(layer, carrier, marker))
    if all(marker != other for _, other in state.candidates):
        state.candidates.append((carrier, marker))


def _mend_numbers(layer: str, carrier: str, marker: dict[str, Any]) -> Iterator[Finding]:
    """Group sizes written as "16" or 16.0 are numbers to every reader; null is what a missing key is."""
    for key in ("group_size", "convrot_groupsize"):
        value = marker.get(key)
        if value is None:
            marker.pop(key, None)
        elif _is_number(value):
            marker[key] = int(value)
            yield Finding("repair", f"{carrier} marker's {key} is {value!r}; read as {int(value)}", layer)


def _is_number(value: Any) -> bool:
    """A number that is not written as a JSON integer."""
    return (isinstance(value, str) and value.strip().isdecimal()) or (
        isinstance(value, float) and value.is_integer()
    )


def _rotation_findings(layer: str, carrier: str, marker: Mapping[str, Any]) -> Iterator[Finding]:
    """ConvRot keys that `rotation.marker_rotation` has to make sense of."""
    flag, group = marker.get("convrot"), marker.get("convrot_groupsize")
    if isinstance(flag, str):
        said = "true" if means_true(flag) else "false"
        yield Finding(
            "repair" if said == "true" else "guess",
            f"{carrier} marker's convrot is the string {flag!r}; read as {said}",
            layer,
            "ComfyUI takes any string as true",
        )
    elif flag is not None and not isinstance(flag, bool):
        yield Finding("repair", f"{carrier} marker's convrot is {flag!r}; read as {bool(flag)}", layer)
    if group is not None and not is_group(group):
        message = (
            f"{carrier} marker's convrot_groupsize {group!r} is no power of 4; {DEFAULT_GROUP} is assumed"
        )
        yield Finding("guess", message, layer, "the default")


def _prefix_fix(names: list[str], known: set[str]) -> Any:
    """A function from a marker's name to a layer's, by one prefix added or removed for all; None where it fails."""
    if not names:
        return lambda name: None
    suffixes: dict[str, set[str]] = {}
    for layer in known:
        cut = 0
        while True:
            suffixes.setdefault(layer[cut:], set()).add(layer[:cut])
            dot = layer.find(".", cut)
            if dot < 0:
                break
            cut = dot + 1
    common: set[str] | None = None
    for name in names:
        prefixes = suffixes.get(name, set())
        if prefixes:
            common = set(prefixes) if common is None else common & prefixes
    if common and len(common) == 1:
        prefix = next(iter(common))
        return lambda name: prefix + name if prefix + name in known else None

    def shorter(name: str) -> str | None:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            tail = ".".join(parts[cut:])
            if tail in known:
                return tail
        return None

    return shorter


def render_tensor(marker: Mapping[str, Any]) -> bytes:
    """The bytes of a `comfy_quant` tensor."""
    return dumps(dict(marker)).encode()


def render_header(markers: Mapping[str, Mapping[str, Any]]) -> str:
    """The value of the header entry."""
    layers = {layer: dict(marker) for layer, marker in markers.items()}
    return dumps({"format_version": "1.0", "layers": layers})
