"""mxfp8: e4m3 codes with a power-of-two (e8m0) scale for blocks of 32 along K, scales swizzled.

Layout and arithmetic: FORMATS "mxfp8".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.formats.base import Codec, Codes, Group, Options, Part, Recognition, Stored, cut, stored_k, up
from qconvert.formats.cells import code_errors
from qconvert.formats.finding import Finding
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array, np
from qconvert.kernels.layout import swizzle, unswizzle

_SCALES = ("weight_scale", "weight_scale_inv")


class Mxfp8(Codec):
    """options: scales (swizzled | linear), source (the scale's suffix), full_precision."""

    name = "mxfp8"
    marker_formats: tuple[str, ...] = ("mxfp8",)
    family = "mxfp8"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight = group.tensors.get("weight")
        source = next((name for name in _SCALES if name in group.tensors), None)
        if weight is None or weight.dtype not in ("F8_E4M3", "U8", "I8") or len(weight.shape) != 2:
            return "weight is not 2-D e4m3"
        if source is None:
            return "no block scales (weight_scale)"
        scale = group.tensors[source]
        n, k = weight.shape
        if scale.dtype not in ("U8", "F8_E8M0", "I8"):
            return f"{source} is {scale.dtype}, expected e8m0 bytes"
        if k % 32:
            return f"K = {k} is not a multiple of 32"
        findings: list[Finding] = []
        padded = (up(n, 128), up(k // 32, 4))
        if scale.shape == padded or (scale.shape == (n, k // 32) and n * k // 32 == padded[0] * padded[1]):
            layout = "swizzled"
        elif scale.shape == (n, k // 32):
            layout = "linear"
            findings.append(
                Finding(
                    "guess",
                    "block scales are not padded to 128 x 4 tiles, so they are taken as not swizzled",
                    group.prefix,
                    f"{source} {scale}",
                )
            )
        else:
            return f"{source} {scale} does not fit [{n}, {k}] (expected {list(padded)})"
        if weight.dtype != "F8_E4M3":
            if marker is None:
                return "weight is not tagged e4m3"
            findings.append(
                Finding("repair", f"e4m3 weight is tagged {weight.dtype}", group.prefix, "marker")
            )
        if marker is None:
            findings.append(
                Finding(
                    "guess",
                    f"no marker; taken as mxfp8 with {layout} scales",
                    group.prefix,
                    f"{source} {scale}; a marker, a config.json or --assume would tell",
                )
            )
        options = {
            "scales": layout,
            "source": source,
            "full_precision": bool(marker and marker.get("full_precision_matrix_mult")),
        }
        return Recognition(self.name, n, k, options, frozenset({"weight", source}), tuple(findings))

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        if n % 32 or k % 32:
            return f"mxfp8 needs N and K to be multiples of 32, this weight is [{n}, {k}]"
        return None

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        shape = (up(n, 128), up(k // 32, 4))
        return (
            Part("weight", Spec("F8_E4M3", (n, k))),
            Part("weight_scale", Spec(options.get("scale_dtype", "U8"), shape), "tiles"),
        )

    def marker(self, options: Options) -> dict[str, Any] | None:
        marker: dict[str, Any] = {"format": "mxfp8"}
        if options.get("full_precision"):
            marker["full_precision_matrix_mult"] = True
        return marker

    def row_step(self, options: Options) -> int:
        return 128

    def layout(self, options: Options) -> tuple[Any, ...]:
        return (options["scales"],)

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        source, blocks = stored.options["source"], stored_k(stored.options, stored.k) // 32
        if stored.options["scales"] == "swizzled":
            tiles = stored.rows(source, a, min(up(b, 128), stored.shape(source)[0])).view(np.uint8)
            scales = unswizzle(tiles, b - a, blocks)
        else:
            scales = stored.rows(source, a, b).view(np.uint8)
        return {"q": stored.rows("weight", a, b).view(np.uint8), "block_scale": np.ascontiguousarray(scales)}

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return cut(backend.mxfp8_decode(codes["q"], codes["block_scale"]), options)

    def rounding(self, codes: Codes, options: Options, backend: Backend) -> F32:
        scale = self.decode({**codes, "q": np.full_like(codes["q"], 0x38)}, options, backend)
        return np.asarray(cut(code_errors("F8_E4M3")[codes["q"]], options) * scale * scale, np.float32)

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        q, scales = backend.mxfp8_encode(x, quality)
        return {"q": q, "block_scale": scales}

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        return {"weight": codes["q"], "weight_scale": swizzle(codes["block_scale"])}

    def carries(self, source: Options, target: Options) -> bool:
        return "padded" not in source
