"""convrot_w4a4: signed nibbles (even column low), one float32 scale a row, always rotated.

Layout and arithmetic: FORMATS "convrot_w4a4".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.formats.base import Codec, Codes, Group, Options, Part, Recognition, Stored, is_row
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.finding import Finding
from qconvert.formats.rotation import DEFAULT_GROUP, is_group
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array, np


class ConvRotW4A4(Codec):
    """options: rotation, linear_dtype (int4 | int8)."""

    name = "w4a4"
    marker_formats = ("convrot_w4a4",)
    family = "w4a4"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scale = group.tensors.get("weight"), group.tensors.get("weight_scale")
        if weight is None or weight.dtype not in ("I8", "U8") or len(weight.shape) not in (2, 3):
            return "weight is not packed 4-bit"
        experts = weight.shape[0] if len(weight.shape) == 3 else 0
        n, k = weight.shape[-2], weight.shape[-1] * 2
        if scale is None or scale.dtype not in FLOATS:
            return "no floating row scale (weight_scale)"
        scale_shape = scale.shape[1:] if experts else scale.shape
        if not is_row(scale_shape, n):
            return f"weight_scale {scale} is not one value a row of [{n}, {k}]"
        if marker is None:
            # The same shapes as int8 rows at half the K: only values could tell, and int8 is far more common.
            return "convrot_w4a4 is never assumed without a marker"
        rotation = marker.get("convrot_groupsize", DEFAULT_GROUP)
        if not is_group(rotation) or k % rotation:
            return f"ConvRot group {rotation!r} does not divide K = {k}"
        findings: list[Finding] = []
        if len(scale_shape) != 1:
            findings.append(Finding("repair", f"row scale is {scale}, not [{n}]", group.prefix))
        if scale.dtype != "F32":
            findings.append(Finding("repair", f"weight_scale is {scale.dtype}, not F32", group.prefix))
        linear = marker.get("linear_dtype", "int4")
        options = {"rotation": rotation, "linear_dtype": linear if linear in ("int4", "int8") else "int4"}
        return Recognition(
            self.name, n, k, options, frozenset({"weight", "weight_scale"}), tuple(findings), experts
        )

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        rotation = self.rotation(options)
        if not rotation or k % rotation or k % 64:
            return f"w4a4 needs K to be a multiple of 64 and of the ConvRot group {rotation}, K = {k}"
        return None

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        return (Part("weight", Spec("I8", (n, k // 2))), Part("weight_scale", Spec("F32", (n,))))

    def marker(self, options: Options) -> dict[str, Any]:
        return {
            "format": "convrot_w4a4",
            "convrot_groupsize": self.rotation(options),
            "quant_group_size": 64,
            "linear_dtype": options.get("linear_dtype", "int4"),
        }

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        scale = backend.to_f32(stored.whole("weight_scale"), stored.dtype("weight_scale")).reshape(-1)
        return {
            "q": stored.rows("weight", a, b).view(np.uint8),
            "scale": np.ascontiguousarray(scale[a:b]),
        }

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return backend.w4a4_decode(codes["q"], codes["scale"])

    def rounding(self, codes: Codes, options: Options, backend: Backend) -> F32:
        step = self.decode({**codes, "q": np.full_like(codes["q"], 0x11)}, options, backend)
        return np.asarray(step * step / np.float32(12), np.float32)

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        q, scale = backend.w4a4_encode(x, quality)
        return {"q": q, "scale": scale}

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        return {"weight": codes["q"], "weight_scale": codes["scale"]}

    def carries(self, source: Options, target: Options) -> bool:
        return self.rotation(source) == self.rotation(target)
