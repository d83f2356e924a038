"""GGUF files of diffusion models, as ComfyUI-GGUF (and stable-diffusion.cpp) read them.

FORMATS_OTHER section 10: tensors keep the names of the original checkpoint, without `model.diffusion_model.`;
`general.architecture` names the model, and where it is absent readers guess from the names.
"""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.formats.dtypes import BLOCKS
from qconvert.formats.layers import Layer
from qconvert.runtime.sidecars import OutputForm
from qconvert.runtime.target import OptionMaker, Options, Target, Wishes

#: Our families -> the names that ComfyUI-GGUF knows; others are left to its guess.
ARCHITECTURES = {
    "flux1": "flux",
    "sd3": "sd3",
    "sdxl": "sdxl",
    "hunyuan_video": "hyvid",
    "wan": "wan",
    "qwen_image": "qwen_image",
}


def _blocks(kind: str) -> OptionMaker:
    def make(layer: Layer, wishes: Wishes) -> Iterator[Options]:
        base: Options = {"flat": False}
        yield base | {"type": kind}
        # A width that does not fill the large blocks may fill the small ones.
        if BLOCKS[kind][0] > 32:
            yield base | {"type": "Q8_0"}

    return make


def _header(form: OutputForm) -> dict[str, str]:
    known = [ARCHITECTURES[family] for family in form.families if family in ARCHITECTURES]
    return {"general.architecture": known[0]} if len(known) == 1 else {}


def _target(kind: str, words: str) -> Target:
    return Target(
        f"gguf:{kind.lower()}",
        "others",
        "gguf",
        f"GGUF {kind}, {words}",
        "gguf",
        _blocks(kind),
        header=_header,
        container="gguf",
    )


GGUF_TARGETS: tuple[Target, ...] = (
    _target("Q8_0", "8 bit in blocks of 32"),
    _target("Q4_0", "4 bit in blocks of 32"),
    _target("Q4_K", "4 bit with minima, in blocks of 256"),
)
