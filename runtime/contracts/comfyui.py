"""What ComfyUI does with a quantised checkpoint (0.33.0 and 0271a469): tolerant, and wrong without a word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from qconvert.formats.errors import UsageError
from qconvert.formats.tensors import HeaderView, Spec
from qconvert.runtime.contracts.base import Kind, LayerVerdict, Verdict, Violation
from qconvert.runtime.contracts.comfyui_read import Found, read
from qconvert.runtime.contracts.comfyui_rules import LAYOUTS, marker_violations, shape_violations
from qconvert.runtime.contracts.comfyui_tensors import CODE_DTYPES, tensor_violations, unmarked_violations
from qconvert.runtime.contracts.common import (
    PLAIN_FORMATS,
    Layer,
    container_violations,
    dtypes,
    planned_marker,
    remedy,
    with_remedies,
)
from qconvert.runtime.roles import is_embedding_name

_CONFIG = "comfyui"
_CLASS = "MixedPrecisionOps"


class ComfyContract:
    """A contract (see base.Contract): each layer stands alone, any mix of formats is served."""

    name = "comfyui"

    def __init__(self) -> None:
        self.configs: Mapping[str, str] = {_CONFIG: _CLASS}

    def check(self, view: HeaderView, *, tp: int = 1) -> Verdict:
        """What ComfyUI would do with this header. `tp` is ignored: ComfyUI splits no layer."""
        found = read(view)
        layers = [
            self._judge(found, layer, found.specs[layer])
            for layer in sorted(found.markers)
            if "weight" in found.specs.get(layer, ())
        ]
        violations = [*container_violations(view), *found.violations, *self._unmarked(view, found)]
        if not found.markers and not violations:
            message = "no quantisation markers: loaded as an unquantised checkpoint"
            violations.append(Violation("note", "unquantised", message))
        verdict = Verdict(self.name, _CLASS if found.markers else None, tuple(layers), tuple(violations))
        return with_remedies(verdict, lambda: remedy(view, _target(found)))

    def layer_refusal(
        self, config: str, kind: Kind, format_name: str, n: int, k: int, options: Mapping[str, Any]
    ) -> str | None:
        """See base.Contract."""
        self._known(config)
        if format_name in PLAIN_FORMATS:
            return None
        for violation in _planned(kind, format_name, k, options):
            if violation.severity in ("refuse", "trap"):
                return violation.line()
        return None

    def marker_violations(
        self, config: str, kind: Kind, layer: str, marker: Mapping[str, Any], scale: str | None = None
    ) -> list[Violation]:
        """See base.Contract."""
        self._known(config)
        return marker_violations(kind, layer, marker) + list(_scale(kind, marker, layer, scale))

    def format_set_violations(self, config: str, formats: Collection[str]) -> list[Violation]:
        """See base.Contract: any mix is served."""
        self._known(config)
        return []

    def _known(self, config: str) -> None:
        if config not in self.configs:
            raise UsageError(f"{self.name} has no config {config!r}", expected=_CONFIG)

    def _judge(self, found: Found, layer: str, specs: Mapping[str, Spec]) -> LayerVerdict:
        name = found.names[layer]
        kind: Kind = "embedding" if is_embedding_name(layer) else "linear"
        judged = Layer(name, kind, found.markers[layer], specs)
        violations = marker_violations(kind, name, judged.marker)
        method = LAYOUTS.get(str(judged.format), "none")
        blocking = {"format-missing", "format-unknown", "embedding-format"}
        if not any(violation.rule in blocking for violation in violations):
            violations += tensor_violations(judged)
        return LayerVerdict(name, kind, judged.format, method, tuple(violations))

    def _unmarked(self, view: HeaderView, found: Found) -> Iterator[Violation]:
        if dtypes(view).isdisjoint(CODE_DTYPES):
            return
        for layer, specs in sorted(found.specs.items()):
            if layer not in found.markers and layer not in found.broken:
                yield from unmarked_violations(found.names[layer], specs)


def _planned(kind: Kind, format_name: str, k: int, options: Mapping[str, Any]) -> Iterator[Violation]:
    marker = planned_marker(format_name, options)
    violations = marker_violations(kind, "", marker)
    yield from violations
    if not any(violation.severity == "refuse" for violation in violations):
        yield from shape_violations(kind, "", marker, k, int(options.get("bits", 4)))
        yield from _scale(kind, marker, None, options.get("scale"))
    if "weight_correction" in options.get("tensors", ()):
        message = "weight_correction is never read: asymmetric w4a8 is silently wrong"
        yield Violation("trap", "w4a8-correction", message, expected="symmetric w4a8")


def _scale(
    kind: Kind, marker: Mapping[str, Any], layer: str | None, scale: str | None
) -> Iterator[Violation]:
    if scale == "row" and str(marker.get("format")).startswith("float8"):
        message = "RuntimeError size mismatch at the lookup"
        if kind == "linear":
            message = "scale_b must have 1 Float element (native matmul)"
        yield Violation("refuse", "fp8-row-scale", message, layer, "one scale a row", "one scale ()")


def _target(found: Found) -> str:
    """The target that most marked layers are nearest to; int8 and fp8 lose to the rarer 4-bit formats."""
    formats = Counter(str(marker.get("format")) for marker in found.markers.values())
    served = [name for name in LAYOUTS if formats[name]]
    for name in ("nvfp4", "asym_w4a8_int8", "convrot_w4a4", "awq_w4a16"):
        if formats[name]:
            return f"{_CONFIG}:{name}"
    if served:
        return f"{_CONFIG}:{max(served, key=lambda name: formats[name])}"
    suffixes = {suffix for specs in found.specs.values() for suffix in specs}
    weights = {specs["weight"].dtype for specs in found.specs.values() if "weight" in specs}
    if "weight_s_rel" in suffixes:
        return f"{_CONFIG}:asym_w4a8_int8"
    if "U8" in weights:
        return f"{_CONFIG}:nvfp4"
    return f"{_CONFIG}:{'int8_tensorwise' if 'I8' in weights else 'float8_e4m3fn'}"


COMFYUI = ComfyContract()
