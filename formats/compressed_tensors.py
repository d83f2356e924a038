"""compressed-tensors (llm-compressor): nvfp4, mxfp4, mxfp6. FORMATS_OTHER section 3.

`weight_packed` gives all of them away; the integers under that name are in formats/compressed_ints.py. Formats that
keep the name `weight` (float-quantized, int-quantized, mxfp8-quantized) are read by the codecs of those numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from qconvert.formats.base import Group, Recognition
from qconvert.formats.mx import MxCodec
from qconvert.formats.nvfp4_dialect import Names, Nvfp4Dialect


class CompressedNvfp4(Nvfp4Dialect):
    """nvfp4-pack-quantized: weight_packed U8 [N,K/2] low first, weight_scale e4m3 [N,K/16] row-major,
    weight_global_scale F32 [1] and input_global_scale F32 [1], both reciprocals of ComfyUI's.
    """

    name = "compressed_nvfp4"
    anchors = ("weight_packed",)
    activation_scales = ("input_global_scale",)
    names: ClassVar[Names] = Names(
        weight="weight_packed",
        total="weight_global_scale",
        total_divides=True,
        one=(1,),
        activation="input_global_scale",
        activation_divides=True,
    )

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        return self.claim(group, scales="linear")


class CompressedMx(MxCodec):
    """mxfp4-pack-quantized and mxfp6-pack-quantized: weight_packed U8, weight_scale U8 e8m0 [N,K/32] row-major."""

    name = "compressed_mx"
    family = "mx"
    anchors = ("weight_packed",)

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        if "weight_global_scale" in group.tensors:
            return "there is a tensor scale"
        names = ("weight_packed", "weight_scale")
        got = self.claim(group, names, "e2m1", "linear")
        if isinstance(got, str):
            got = self.claim(group, names, "e2m3", "linear")
        return (
            got if isinstance(got, str) or got.options["scales"] == "linear" else "scales are not row-major"
        )
