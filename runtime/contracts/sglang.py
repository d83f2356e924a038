"""What sglang's diffusion runtime does with a quantised checkpoint: 0.5.23, and an older, stricter commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from qconvert.formats.errors import UsageError
from qconvert.formats.tensors import HeaderView, Spec
from qconvert.runtime.contracts.base import Kind, LayerVerdict, Verdict, Violation
from qconvert.runtime.contracts.common import (
    PLAIN_FORMATS,
    Layer,
    container_violations,
    planned_marker,
    remedy,
    suffixes,
    tensors_by_layer,
    with_remedies,
)
from qconvert.runtime.contracts.sglang_headers import orphan_violations, route_violations
from qconvert.runtime.contracts.sglang_markers import Markers, read_markers
from qconvert.runtime.contracts.sglang_rules import (
    ALIASES,
    INT8,
    NEWER,
    OLDER,
    SERVED,
    Dialect,
    is_plain_int8,
    marker_violations,
    method_name,
    resolve,
    shape_violations,
    swizzle_violations,
)
from qconvert.runtime.contracts.sglang_tensors import SIX_BIT, scale_form, size, tensor_violations
from qconvert.runtime.contracts.sglang_tp import tp_violations
from qconvert.runtime.roles import is_embedding_name

_CLASSES = {
    "comfy_nvfp4": "ComfyNvfp4Config",
    "kitchen_w4a8": "KitchenW4A8Config",
    "kitchen_w4a4": "KitchenW4A4Config",
    "comfy_fp8": "ComfyFp8Config",
    "comfy_mxfp8": "MXFP8Config",
}
#: What the runtime's layers do not take, by format, when asked for by a planner (`tensors` of layer_refusal).
_REFUSED_EXTRAS = {"nvfp4": {"input_scale"}}


class SglangContract:
    """A contract (see base.Contract) over the rules that all versions share."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.name = dialect.name
        self.configs: Mapping[str, str] = {
            **_CLASSES,
            "convrot_int8": dialect.int8_class,
            **dict.fromkeys(ALIASES, dialect.int8_class),
        }

    def check(self, view: HeaderView, *, tp: int = 1) -> Verdict:
        """What the runtime would do with this header; `tp` ranks share every linear layer."""
        markers, problems = read_markers(view)
        problems = container_violations(view) + problems
        config = self._resolve(markers, problems)
        # A layer whose marker is missing or unreadable has that fault, and not one more for each of its scales.
        faulty = {problem.layer for problem in problems if problem.layer}
        problems += orphan_violations(view, {*markers, *faulty})
        problems += route_violations(view, markers)
        if markers and len(view.files) > 1:
            message = "text encoders read markers from a single .safetensors file only, not from shards"
            problems.append(Violation("environment", "one-file", message, found=f"{len(view.files)} files"))
        specs = tensors_by_layer(view)
        verdicts = tuple(
            self._judge(config, _layer(prefix, markers[prefix], specs.get(prefix, {})), tp)
            for prefix in sorted(markers)
        )
        verdict = Verdict(self.name, self.configs[config] if config else None, verdicts, tuple(problems))
        options = () if self.dialect is NEWER else ("--runtime", self.name)
        return with_remedies(
            verdict, lambda: remedy(view, config or _nearest_target(markers, view), *options)
        )

    def layer_refusal(
        self, config: str, kind: Kind, format_name: str, n: int, k: int, options: Mapping[str, Any]
    ) -> str | None:
        """See base.Contract."""
        config = self._known(config)
        if format_name in PLAIN_FORMATS:
            return None
        for violation in self._planned(config, kind, format_name, n, k, options):
            if violation.severity in ("refuse", "trap"):
                return violation.line()
        return None

    def marker_violations(
        self, config: str, kind: Kind, layer: str, marker: Mapping[str, Any], scale: str | None = None
    ) -> list[Violation]:
        """See base.Contract."""
        return marker_violations(self.dialect, self._known(config), kind, layer, marker, scale)

    def format_set_violations(self, config: str, formats: Collection[str]) -> list[Violation]:
        """See base.Contract."""
        asked = self._known(config)
        if not formats:
            return []
        taken = resolve(formats)
        if taken is None:
            return [_unsupported(sorted(formats))]
        if taken == asked:
            return []
        message = f"a file with these formats is taken by {self.configs[taken]}"
        return [Violation("refuse", "config-other", message, None, ", ".join(sorted(formats)), asked)]

    def _known(self, config: str) -> str:
        if config not in self.configs:
            raise UsageError(
                f"{self.name} has no config {config!r}", expected=", ".join(sorted(self.configs))
            )
        return ALIASES.get(config, config)

    def _resolve(self, markers: Markers, problems: list[Violation]) -> str | None:
        formats = sorted({str(marker.get("format")) for marker in markers.values()})
        if not formats:
            if not problems:
                message = "no comfy quantization markers: loaded as an unquantised checkpoint"
                problems.append(Violation("note", "unquantised", message))
            return None
        config = resolve(formats)
        if config is None:
            problems.append(_unsupported(formats))
        return config

    def _judge(self, config: str | None, layer: Layer, tp: int) -> LayerVerdict:
        method = method_name(config, layer.kind, layer.marker) if config else "none"
        return LayerVerdict(
            layer.prefix, layer.kind, layer.format, method, tuple(self._violations(config, layer, method, tp))
        )

    def _violations(self, config: str | None, layer: Layer, method: str, tp: int) -> Iterator[Violation]:
        shape = size(layer)
        if shape is None:
            found = layer.specs.get("weight")
            message = "a marker, and no 2-D weight that a layer could load"
            yield Violation("refuse", "weight-2d", message, layer.prefix, str(found), "a weight [N,K]")
        if config is None:
            return
        yield from marker_violations(
            self.dialect, config, layer.kind, layer.prefix, layer.marker, scale_form(layer)
        )
        if shape is None or method == "unquantised":
            return
        n, k = shape
        misfits = list(tensor_violations(layer, n, k))
        yield from misfits
        yield from shape_violations(layer.prefix, layer.kind, layer.marker, k)
        if not any(violation.rule == "swizzle-padded" for violation in misfits):
            yield from swizzle_violations(layer.prefix, layer.marker, n, k)
        yield from tp_violations(layer, n, k, tp)
        if layer.format == "mxfp8":
            message = "the parameter is called weight_scale_inv: only models that map the name load it"
            if "weight_scale_inv" not in layer.specs:
                yield Violation("note", "mxfp8-name", message, layer.prefix, "weight_scale", "MiniMax-H3")
        if layer.format == "float8_e4m3fn" and "input_scale" in layer.specs:
            message = "input_scale switches the layer to static activation scaling"
            yield Violation("note", "fp8-static", message, layer.prefix)

    def _planned(
        self, config: str, kind: Kind, format_name: str, n: int, k: int, options: Mapping[str, Any]
    ) -> Iterator[Violation]:
        marker = planned_marker(format_name, options)
        scale = options.get("scale")
        yield from marker_violations(self.dialect, config, kind, "", marker, scale)
        yield from shape_violations("", kind, marker, k)
        if kind == "linear":
            yield from swizzle_violations("", marker, n, k)
        full = bool(marker.get("full_precision_matrix_mult", False))
        if options.get("partitions", 1) > 1 and full and format_name in ("nvfp4", "float8_e4m3fn"):
            message = "layers that the model fuses cannot use full-precision matmul"
            yield Violation(
                "refuse", "full-precision-fused", message, None, f"{options['partitions']} parts", "1"
            )
        if options.get("bits", 4) == 6:
            yield Violation("refuse", "w4a8-six-bit", SIX_BIT)
        if kind == "linear" and scale == "scalar" and format_name == INT8 and not is_plain_int8(marker):
            message = "an int8 linear layer has one scale a row"
            yield Violation("refuse", "tensor-shape", message, None, "one scale ()", "[N,1]")
        refused = set(_REFUSED_EXTRAS.get(format_name, set()))
        if full and format_name == "float8_e4m3fn":
            refused.add("input_scale")
        for suffix in sorted(refused & set(options.get("tensors", ()))):
            message = f"Parameter {suffix} not found in the model"
            yield Violation("refuse", "tensor-unknown", message, expected=f"no {suffix} in this layer")


def _unsupported(formats: list[str]) -> Violation:
    message = "Unsupported Comfy quantization format(s): " + ", ".join(formats)
    served = (main + (f" (+ {INT8})" if companion else "") for main, companion in SERVED.values())
    return Violation("refuse", "format-set", message, expected="; ".join(served))


def _layer(prefix: str, marker: Mapping[str, Any], specs: Mapping[str, Spec]) -> Layer:
    return Layer(prefix, "embedding" if is_embedding_name(prefix) else "linear", marker, specs)


def _nearest_target(markers: Markers, view: HeaderView) -> str:
    """Which config a file that resolves to none is closest to: what most of its bytes and markers say."""
    formats = Counter(str(marker.get("format")) for marker in markers.values())
    for config, (main, _) in SERVED.items():
        if formats.get(main):
            return config
    dtypes = {spec.dtype for name, spec in view.tensors.items() if name.endswith(".weight")}
    scales = {spec.dtype for name, spec in view.tensors.items() if name.endswith(".weight_scale")}
    if "weight_s_rel" in suffixes(view):
        return "kitchen_w4a8"
    if "weight_scale_2" in suffixes(view) or "U8" in dtypes:
        return "comfy_nvfp4"
    if "F8_E4M3" in dtypes and "U8" in scales:
        return "comfy_mxfp8"
    return "convrot_int8" if "I8" in dtypes else "comfy_fp8"


SGLANG_0_5_23 = SglangContract(NEWER)
SGLANG_0132848 = SglangContract(OLDER)
