"""The one list of formats. A new format is its module and one line here."""

from __future__ import annotations

from functools import cache

from qconvert.formats.awq import Awq
from qconvert.formats.awq_w4a16 import AwqW4A16
from qconvert.formats.base import Codec
from qconvert.formats.bitsandbytes import Bnb4, Bnb8
from qconvert.formats.compressed_ints import CompressedInt, CompressedPacked
from qconvert.formats.compressed_tensors import CompressedMx, CompressedNvfp4
from qconvert.formats.fastvideo import FastVideoNvfp4
from qconvert.formats.float8 import Float8
from qconvert.formats.gguf_codec import Gguf
from qconvert.formats.gguf_nvfp4 import GgufNvfp4
from qconvert.formats.gptq import Gptq
from qconvert.formats.int8 import Int8
from qconvert.formats.lightx2v import LightX2VMx, LightX2VMxfp8, LightX2VNvfp4
from qconvert.formats.modelopt import (
    ModelOptInt4,
    ModelOptMx,
    ModelOptNvfp4,
    ModelOptNvfp4Svd,
    ModelOptNvfp4Wide,
)
from qconvert.formats.mx import RowMajorMxfp8
from qconvert.formats.mxfp8 import Mxfp8
from qconvert.formats.nunchaku import Nunchaku, NunchakuW4A16
from qconvert.formats.nvfp4 import Nvfp4
from qconvert.formats.plain import Plain
from qconvert.formats.qqq import Qqq
from qconvert.formats.quanto import Quanto
from qconvert.formats.svdquant import SvdQuant
from qconvert.formats.torchao import (
    TorchAoFloat8,
    TorchAoInt8,
    TorchAoMx,
    TorchAoMxfp8,
    TorchAoNvfp4,
    TorchAoOther,
)
from qconvert.formats.w4a4 import ConvRotW4A4
from qconvert.formats.w4a8 import W4A8

#: In the order in which unmarked tensors are offered to them: the most telling set of tensors first.
CODECS: tuple[Codec, ...] = (
    SvdQuant(),
    W4A8(),
    TorchAoFloat8(),
    TorchAoInt8(),
    TorchAoNvfp4(),
    TorchAoMx(),
    TorchAoMxfp8(),
    TorchAoOther(),
    CompressedNvfp4(),
    FastVideoNvfp4(),
    CompressedMx(),
    CompressedPacked(),
    CompressedInt(),
    LightX2VNvfp4(),
    LightX2VMx(),
    LightX2VMxfp8(),
    ModelOptNvfp4Svd(),
    ModelOptNvfp4(),
    ModelOptNvfp4Wide(),
    ModelOptMx(),
    ModelOptInt4(),
    RowMajorMxfp8(),
    Nvfp4(),
    AwqW4A16(),
    GgufNvfp4(),
    Gguf(),
    Bnb4(),
    Bnb8(),
    Quanto(),
    Qqq(),
    Nunchaku(),
    NunchakuW4A16(),
    Gptq(),
    Awq(),
    Mxfp8(),
    Float8(),
    ConvRotW4A4(),
    Int8(),
    Plain(),
)


@cache
def _by_name() -> dict[str, Codec]:
    return {codec.name: codec for codec in CODECS}


@cache
def _by_marker() -> dict[str, Codec]:
    return {name: codec for codec in CODECS for name in codec.marker_formats}


def codec(name: str) -> Codec:
    """The codec with this registry name. KeyError when there is none."""
    return _by_name()[name]


def codec_for_marker(format_name: str) -> Codec | None:
    """The codec that a marker's "format" names, None when it is unknown."""
    return _by_marker().get(format_name)


def known_formats() -> tuple[str, ...]:
    return tuple(_by_marker())
