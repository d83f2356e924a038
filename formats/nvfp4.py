"""nvfp4: E2M1 nibbles, e4m3 scales for blocks of 16 along K, one float32 tensor scale.

Layout and arithmetic: FORMATS "nvfp4" and "Block-scale swizzle". The codes: nibbles with the even column high,
block scales [N, K/16] unswizzled, tensor scale.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    cut,
    is_scalar,
    scalar,
    stored_k,
    up,
)
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.finding import Finding
from qconvert.formats.rotation import marker_rotation
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array, np
from qconvert.kernels.layout import swap_nibbles, swizzle, unswizzle


class Nvfp4(Codec):
    """options: nibbles (high | low first), scales (swizzled | linear), rotation, full_precision.

    For writing also: input (an input_scale is among the codes and written), unmarked (the target has no markers).
    """

    name = "nvfp4"
    marker_formats: tuple[str, ...] = ("nvfp4",)
    family = "nvfp4"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scale = group.tensors.get("weight"), group.tensors.get("weight_scale")
        total = group.tensors.get("weight_scale_2")
        if weight is None or weight.dtype not in ("U8", "I8", "F4") or len(weight.shape) not in (2, 3):
            return "weight is not packed 4-bit"
        if scale is None or scale.dtype not in ("F8_E4M3", "U8", "BF16", "F16", "F32"):
            return "no e4m3 block scales (weight_scale)"
        if total is None:
            return "no tensor scale (weight_scale_2)"
        experts = weight.shape[0] if len(weight.shape) == 3 else 0
        shape, scale_shape = (weight.shape[1:], scale.shape[1:]) if experts else (weight.shape, scale.shape)
        n, k = shape[0], shape[1] * (1 if weight.dtype == "F4" else 2)
        shared = is_scalar(total.shape) and not (
            experts and len(total.shape) == 1 and total.shape[0] != experts
        )
        if not shared and not (experts and total.shape[:1] == (experts,) and is_scalar(total.shape[1:])):
            return f"weight_scale_2 {total} is not one value"
        if total.dtype not in FLOATS:
            return f"weight_scale_2 {total} is not floating"
        findings: list[Finding] = []
        if k % 16:
            return f"K = {k} is not a multiple of 16"
        padded = (up(n, 128), up(k // 16, 4))
        if scale_shape == padded:
            layout = "swizzled"
        elif scale_shape == (n, k // 16):
            layout = "linear"
            findings.append(
                Finding(
                    "guess",
                    "block scales are not padded to 128 x 4 tiles, so they are taken as not swizzled",
                    group.prefix,
                    f"weight_scale {scale}",
                )
            )
        else:
            return f"weight_scale {scale} does not fit [{n}, {k}] (expected {list(padded)})"
        if scale.dtype != "F8_E4M3":
            if scale.dtype != "U8":
                return f"block scales are {scale.dtype}, expected F8_E4M3"
            findings.append(
                Finding("repair", "block scales are tagged U8; they are e4m3 bytes", group.prefix)
            )
        if total.dtype != "F32":
            findings.append(Finding("repair", f"weight_scale_2 is {total.dtype}, not F32", group.prefix))
        if weight.dtype != "U8":
            findings.append(
                Finding("repair", f"packed weight is tagged {weight.dtype}, not U8", group.prefix)
            )
        if marker is None:
            findings.append(
                Finding(
                    "guess",
                    "no marker; taken as nvfp4 with "
                    + (
                        "swizzled scales, high nibble first"
                        if layout == "swizzled"
                        else "linear scales, low nibble first"
                    ),
                    group.prefix,
                    f"weight {weight}, weight_scale {scale}, weight_scale_2 {total}; "
                    "a marker, ModelOpt's config.json or --assume would tell",
                )
            )
        rotation = marker_rotation(marker, default=0)
        if rotation and k % rotation:
            return f"ConvRot group {rotation} does not divide K = {k}"
        options = {
            "nibbles": "high" if layout == "swizzled" or marker is not None else "low",
            "scales": layout,
            "rotation": rotation,
            "full_precision": bool(marker and marker.get("full_precision_matrix_mult")),
            "shape": weight.shape,
            "dtype": weight.dtype,
        }
        owned = frozenset({"weight", "weight_scale", "weight_scale_2"})
        return Recognition(self.name, n, k, options, owned, tuple(findings), experts)

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        if k % 16 or n % 16:
            return f"nvfp4 needs N and K to be multiples of 16, this weight is [{n}, {k}]"
        rotation = self.rotation(options)
        if rotation and k % rotation:
            return f"K = {k} is not a multiple of the ConvRot group {rotation}"
        return None

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        if options["scales"] == "swizzled":
            scales = Part("weight_scale", Spec("F8_E4M3", (up(n, 128), up(k // 16, 4))), "tiles")
        else:
            scales = Part("weight_scale", Spec("F8_E4M3", (n, k // 16)))
        parts = (
            Part("weight", Spec("U8", (n, k // 2))),
            scales,
            Part("weight_scale_2", Spec("F32", ()), "whole"),
        )
        return (*parts, Part("input_scale", Spec("F32", ()), "whole")) if options.get("input") else parts

    def marker(self, options: Options) -> dict[str, Any] | None:
        if options.get("unmarked"):
            return None
        marker: dict[str, Any] = {"format": "nvfp4"}
        if options.get("full_precision"):
            marker["full_precision_matrix_mult"] = True
        if self.rotation(options):
            marker.update(convrot=True, convrot_groupsize=self.rotation(options))
        return marker

    def statistic(self, options: Options) -> Statistic:
        return "amax"

    def row_step(self, options: Options) -> int:
        return 128 if options["scales"] == "swizzled" else 1

    def layout(self, options: Options) -> tuple[Any, ...]:
        return (options["nibbles"], options["scales"])

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        k = stored_k(stored.options, stored.k)
        blocks = k // 16
        codes = stored.rows("weight", a, b).view(np.uint8).reshape(b - a, k // 2)
        if stored.options["scales"] == "swizzled":
            tiles = stored.rows("weight_scale", a, min(up(b, 128), up(stored.n, 128))).view(np.uint8)
            scales = unswizzle(tiles, b - a, blocks)
        else:
            scales = stored.rows("weight_scale", a, b).view(np.uint8)
        out = {
            "q": codes if stored.options["nibbles"] == "high" else swap_nibbles(codes),
            "block_scale": np.ascontiguousarray(scales),
        }
        for key, suffix in (("tensor_scale", "weight_scale_2"), ("input_scale", "input_scale")):
            if stored.has(suffix) and is_scalar(stored.shape(suffix)):
                value = scalar(backend.to_f32(stored.whole(suffix), stored.dtype(suffix)))
                out[key] = np.asarray(value, np.float32)
        return out

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        x = backend.nvfp4_decode(codes["q"], codes["block_scale"], np.float32(codes["tensor_scale"]))
        return cut(x, options)

    def prepare(self, statistic: Any, options: Options, backend: Backend, quality: Quality) -> Codes:
        return {"tensor_scale": np.asarray(backend.nvfp4_tensor_scale(statistic), np.float32)}

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        q, scales = backend.nvfp4_encode(x, np.float32(common["tensor_scale"]), quality)
        return {"q": q, "block_scale": scales, "tensor_scale": common["tensor_scale"]}

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        swizzled = options["scales"] == "swizzled"
        out = {
            "weight": codes["q"] if options["nibbles"] == "high" else swap_nibbles(codes["q"]),
            "weight_scale": swizzle(codes["block_scale"]) if swizzled else codes["block_scale"],
            "weight_scale_2": codes["tensor_scale"],
        }
        if options.get("input"):
            out["input_scale"] = codes["input_scale"]
        return out

    def carries(self, source: Options, target: Options) -> bool:
        return self.rotation(source) == self.rotation(target) and "padded" not in source
