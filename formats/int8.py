"""int8_tensorwise: int8 codes with one scale or one a row, optionally ConvRot-rotated.

Layout and arithmetic: FORMATS "int8_tensorwise" and "int8 + ConvRot": w = rotate(float32(q) * scale).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from qconvert.formats.base import (
    Codec,
    Codes,
    Group,
    Options,
    Part,
    Recognition,
    Statistic,
    Stored,
    is_row,
    is_scalar,
)
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.finding import Finding
from qconvert.formats.quant_config import quant_config
from qconvert.formats.rotation import USUAL_GROUPS, choose_group, marker_rotation
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array, np

_SCALES = ("weight_scale", "scale_weight")
#: Configurations under which int8 weights are not rotated and carry their scales as recognised here.
_WRITERS = frozenset({"compressed-tensors", "modelopt", "int8"})


class Int8(Codec):
    """options: scale (scalar | row), rotation (0 or the ConvRot group), shape, source (the scale's suffix).

    For writing also: unmarked (the target has no markers).
    """

    name = "int8"
    marker_formats: tuple[str, ...] = ("int8_tensorwise",)
    family = "int8"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight = group.tensors.get("weight")
        # LightX2V's ComfyUI mode names int8's scale as ComfyUI's legacy fp8 does.
        source = next((name for name in _SCALES if name in group.tensors), _SCALES[0])
        scale = group.tensors.get(source)
        if weight is None or weight.dtype != "I8" or len(weight.shape) < 2:
            return "weight is not int8"
        if scale is None or scale.dtype not in FLOATS:
            return "int8 without a floating weight_scale"
        experts = weight.shape[0] if len(weight.shape) == 3 else 0
        shape = weight.shape[1:] if experts else weight.shape
        n, k = shape[0], prod(shape[1:])
        scale_shape = scale.shape
        if experts and scale_shape[:1] == (experts,):
            scale_shape = scale_shape[1:]
        if is_scalar(scale_shape):
            kind = "scalar"
        elif is_row(scale_shape, n):
            kind = "row"
        else:
            return f"{source} {scale} is neither one value nor one a row of [{n}, {k}]"
        findings: list[Finding] = []
        if len(scale_shape) == 1 and kind == "row" and n > 1:
            findings.append(Finding("repair", f"row scale is {scale}, not [{n}, 1]", group.prefix))
        if scale.dtype != "F32":
            findings.append(Finding("repair", f"{source} is {scale.dtype}, not F32", group.prefix))
        rotation = marker_rotation(marker, default=0)
        if rotation and k % rotation:
            # The marker is sure of the rotation and wrong (or silent) about its group.
            usual = choose_group(k, USUAL_GROUPS)
            if not usual:
                return f"ConvRot group {rotation} does not divide K = {k}"
            findings.append(
                Finding(
                    "guess",
                    f"ConvRot group {rotation} does not divide K = {k}; taken as {usual}",
                    group.prefix,
                    "the largest usual group that divides K",
                )
            )
            rotation = usual
        options = {"scale": kind, "rotation": rotation, "shape": weight.shape, "source": source}
        said = quant_config(group)
        if marker is None and said.method in _WRITERS:
            options["stated"] = said.method
            findings.append(Finding("note", f"int8 with {kind} scale", group.prefix, said.words()))
        elif marker is None:
            findings.append(
                Finding(
                    "guess",
                    "no marker; int8 taken as not rotated (a rotation cannot be seen in shapes)",
                    group.prefix,
                    f"I8 weight {list(weight.shape)} with {kind} scale",
                )
            )
        return Recognition(self.name, n, k, options, frozenset({"weight", source}), tuple(findings), experts)

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        rotation = self.rotation(options)
        if rotation and k % rotation:
            return f"K = {k} is not a multiple of the ConvRot group {rotation}"
        return None

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        weight = Part("weight", Spec("I8", tuple(options.get("shape", (n, k)))))
        if options["scale"] == "scalar":
            return (weight, Part("weight_scale", Spec("F32", ()), "whole"))
        trailing = (1,) * (len(weight.spec.shape) - 1)
        return (weight, Part("weight_scale", Spec("F32", (n, *trailing))))

    def marker(self, options: Options) -> dict[str, Any] | None:
        if options.get("unmarked"):
            return None
        marker: dict[str, Any] = {"format": "int8_tensorwise"}
        if self.rotation(options):
            marker.update(convrot=True, convrot_groupsize=self.rotation(options))
        return marker

    def statistic(self, options: Options) -> Statistic:
        return "amax" if options["scale"] == "scalar" else "none"

    def layout(self, options: Options) -> tuple[Any, ...]:
        return (options["scale"],)

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        source = stored.options.get("source", "weight_scale")
        scale = backend.to_f32(stored.whole(source), stored.dtype(source)).reshape(-1)
        row = stored.options["scale"] == "row"
        return {
            "q": stored.rows("weight", a, b).reshape(b - a, stored.k),
            "scale": np.ascontiguousarray(scale[a:b]) if row else scale.reshape(()),
        }

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return backend.int8_decode(codes["q"], codes["scale"])

    def rounding(self, codes: Codes, options: Options, backend: Backend) -> F32:
        step = self.decode({**codes, "q": np.ones_like(codes["q"])}, options, backend)
        return np.asarray(step * step / np.float32(12), np.float32)

    def prepare(self, statistic: Any, options: Options, backend: Backend, quality: Quality) -> Codes:
        if options["scale"] == "scalar":
            return {
                "scale": np.asarray(
                    max(np.float32(statistic) / np.float32(127), np.float32(1e-30)), np.float32
                )
            }
        return {}

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        scale = common["scale"] if options["scale"] == "scalar" else backend.int8_row_scale(x, quality)
        return {"q": backend.int8_encode(x, scale), "scale": scale}

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        scale = codes["scale"]
        if options["scale"] == "row":
            scale = np.ascontiguousarray(np.broadcast_to(scale.reshape(-1, 1), (codes["q"].shape[0], 1)))
        return {"weight": codes["q"], "weight_scale": scale}

    def carries(self, source: Options, target: Options) -> bool:
        return self.rotation(source) == self.rotation(target) and (
            source["scale"] == target["scale"] or source["scale"] == "scalar"
        )
