"""What a runtime's loader for a known model refuses beyond the format's contract, as violations.

Pure: headers, markers and the families' data. Planning obeys the same rules; here a finished file is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from qconvert.formats.tensors import HeaderView
from qconvert.runtime.contracts.base import Contract, Verdict, Violation
from qconvert.runtime.contracts.sglang_markers import read_markers
from qconvert.runtime.families import FamilyMatch, canonical_format, detect
from qconvert.runtime.families.match import RuntimeRules

Markers = Mapping[str, Mapping[str, Any]]


def config_name(contract: Contract, verdict: Verdict) -> str | None:
    """What users call the config that a verdict names; None where none resolved."""
    names = [name for name, cls in contract.configs.items() if cls == verdict.config]
    return names[0] if names else None


def model_violations(view: HeaderView, contract: Contract, verdict: Verdict) -> list[Violation]:
    """Rules of the models found in the file that it breaks under this contract; empty for unknown models."""
    config = config_name(contract, verdict)
    if config is None:
        return []
    markers, _ = read_markers(view)
    found: list[Violation] = []
    for match in detect(view.tensors):
        own = {layer: marker for layer, marker in markers.items() if match.owns(layer)}
        rules = match.runtime_rules(contract.name, _format(config, own))
        found += _whole(view, match, rules, bool(own))
        if own:
            found += _layers(match, rules, own)
            found += _fused(view, contract, config, match, own)
    return found


def _format(config: str, markers: Markers) -> str:
    """The format that a component's layers are in: the config's, or where that says nothing, what most of them say."""
    name = canonical_format(config)
    if name != config or not markers:
        return name
    formats = [str(marker.get("format")) for marker in markers.values()]
    return canonical_format(max(sorted(set(formats)), key=formats.count))


def _whole(view: HeaderView, match: FamilyMatch, rules: RuntimeRules, marked: bool) -> Iterator[Violation]:
    refused = rules.refuse_target()
    if refused and marked:
        yield Violation("refuse", "model-format", refused, found=match.title)
    stripped = rules.strip_prefix()
    if stripped:
        yield Violation("refuse", "model-prefix", stripped, found=f"names under {match.prefix!r}")
    for why in rules.missing():
        yield Violation("refuse", "model-missing", why, found=match.title)
    single = rules.single_file()
    if single and marked and len(view.files) > 1:
        yield Violation("refuse", "model-one-file", single, found=f"{len(view.files)} files")
    beyond = [layer for layer in match.layers if rules.beyond(layer)]
    if beyond:
        count = rules.max_layers()
        message = f"layers of blocks that the runtime does not read; --keep-layers {count} leaves them out"
        yield Violation("note", "model-beyond", message, beyond[0], f"{len(beyond)} layers")
    for why in rules.notes():
        yield Violation("note", "model-note", why)


def _layers(match: FamilyMatch, rules: RuntimeRules, markers: Markers) -> Iterator[Violation]:
    for layer, marker in sorted(markers.items()):
        name = str(marker.get("format"))
        why = rules.keep_unquantised(layer)
        if why:
            yield Violation("refuse", "model-layer", why, layer, name, "an unquantised layer")
            continue
        why = rules.no_full_precision(layer)
        if why and marker.get("full_precision_matrix_mult"):
            wanted = "no full_precision_matrix_mult"
            yield Violation("refuse", "model-full-precision", why, layer, name, wanted)


def _fused(
    view: HeaderView, contract: Contract, config: str, match: FamilyMatch, markers: Markers
) -> Iterator[Violation]:
    """Layers that the runtime makes one module of are judged as one."""
    layers = [layer for layer in match.layers if f"{layer}.weight" in view.tensors]
    for group in match.fused_groups(layers, contract.name):
        marked = [layer for layer in group if layer in markers]
        if not marked:
            continue
        names = ", ".join(layer.rpartition(".")[2] for layer in group)
        if len(marked) < len(group) or len({str(markers[layer].get("format")) for layer in marked}) > 1:
            message = f"the runtime makes one layer of {names}: all must be in one format"
            formats = ", ".join(
                str(markers[x].get("format")) if x in markers else "unquantised" for x in group
            )
            yield Violation("refuse", "model-fused", message, group[0], formats, "one format for all")
            continue
        marker = markers[marked[0]]
        shape = view.tensors[f"{marked[0]}.weight"].shape
        if len(shape) != 2:
            continue
        if match.component == "diffusion" and marker.get("format") == "nvfp4":
            # Transformers run these layers by other methods, whatever full_precision_matrix_mult says.
            continue
        kind: Literal["linear"] = "linear"
        options = {key: value for key, value in marker.items() if key != "format"}
        name = str(marker.get("format"))
        n, k = shape[0], shape[1] * (2 if name in ("nvfp4", "convrot_w4a4", "asym_w4a8_int8") else 1)
        alone = contract.layer_refusal(config, kind, name, n, k, options)
        fused = contract.layer_refusal(config, kind, name, n, k, {**options, "partitions": len(group)})
        if fused and not alone:
            yield Violation("refuse", "model-fused", fused, group[0], f"{names} are one layer there")
