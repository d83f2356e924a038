"""FastVideo's nvfp4 text encoders (MiniMax-H3). FORMATS_OTHER section 6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from qconvert.formats.base import Group, Options, Recognition
from qconvert.formats.nvfp4_dialect import Names, Nvfp4Dialect


class FastVideoNvfp4(Nvfp4Dialect):
    """weight_packed U8 [N,K/2] low first; weight_scale **U8**: e4m3 bytes in 128 x 4 tiles under the logical shape
    [N,K/16], so N % 128 == 0 and K % 64 == 0; weight_global_scale F32 [1], the reciprocal of ComfyUI's.
    """

    name = "fastvideo_nvfp4"
    anchors = ("weight_packed",)
    activation_scales = ()
    names: ClassVar[Names] = Names(
        weight="weight_packed",
        total="weight_global_scale",
        total_divides=True,
        one=(1,),
        activation="",
        scale_dtype="U8",
    )
    layouts: ClassVar[tuple[str, ...]] = ("swizzled",)

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        return self.claim(group, scales="swizzled")

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        if n % 128 or k % 64:
            return f"FastVideo's nvfp4 needs N % 128 == 0 and K % 64 == 0, this weight is [{n}, {k}]"
        return None
