"""GGUF headers: laid out before any payload exists, as `header.layout` does for safetensors.

Same description as `gguf_container`, version 3. Tensors of more than four axes are stored as two, their own shape
under `comfy.gguf.orig_shape.<tensor>`; every tensor begins at a multiple of the alignment.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod

from qconvert.formats.dtypes import BLOCKS
from qconvert.formats.errors import QConvertError
from qconvert.formats.gguf_blocks import TYPES
from qconvert.formats.gguf_container import DEFAULT_ALIGNMENT, MAGIC, ORIGINAL_SHAPE
from qconvert.formats.header import Layout
from qconvert.formats.tensors import Spec

VERSION = 3
MAX_AXES = 4
#: Readers keep names in a buffer of this size less its end (FORMATS_OTHER section 10).
MAX_NAME = 127
_NUMBERS = {name: number for number, name in TYPES.items()}
_U32, _I32, _STRING, _ARRAY = 4, 5, 8, 9
#: general.file_type: what most of a file is, for display.
_FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K": 14}
#: Version of ggml's block layouts.
_QUANTIZATION_VERSION = 2


def lay_out(tensors: Iterable[tuple[str, Spec]], metadata: Mapping[str, str]) -> Layout:
    """Place tensors in the order given and render the header; string entries become keys.

    Raises QConvertError for what GGUF cannot hold: names that are too long, types it does not know.
    """
    items = list(tensors)
    keys = [_string(name) + _typed_string(value) for name, value in metadata.items()]
    kinds = Counter(spec.dtype for _, spec in items if spec.dtype in BLOCKS)
    if kinds:
        keys.append(_string("general.quantization_version") + struct.pack("<II", _U32, _QUANTIZATION_VERSION))
        kind = _FILE_TYPES.get(kinds.most_common(1)[0][0])
        if kind is not None:
            keys.append(_string("general.file_type") + struct.pack("<II", _U32, kind))
    infos, offsets, specs, cursor = [], {}, {}, 0
    for name, spec in items:
        _check(name, spec)
        shape = spec.shape
        if len(shape) > MAX_AXES:
            shape = (shape[0], prod(shape[1:]))
            own = struct.pack(f"<IIQ{len(spec.shape)}i", _ARRAY, _I32, len(spec.shape), *spec.shape)
            keys.append(_string(ORIGINAL_SHAPE + name) + own)
        # A tensor without axes is one of one element.
        axes = shape[::-1] or (1,)
        info = _string(name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes)
        infos.append(info + struct.pack("<IQ", _NUMBERS[spec.dtype], cursor))
        offsets[name], specs[name] = cursor, spec
        cursor = _aligned(cursor + spec.nbytes)
    head = MAGIC + struct.pack("<IQQ", VERSION, len(items), len(keys)) + b"".join(keys) + b"".join(infos)
    prefix = head.ljust(_aligned(len(head)), b"\0")
    absolute = {name: len(prefix) + offset for name, offset in offsets.items()}
    return Layout(prefix, absolute, specs, len(prefix) + cursor)


def _check(name: str, spec: Spec) -> None:
    if spec.dtype not in _NUMBERS:
        raise QConvertError(
            f"GGUF has no type for {spec.dtype}", layer=name, hint="convert to safetensors instead"
        )
    if len(name.encode()) > MAX_NAME:
        raise QConvertError(
            "the name is too long for GGUF's readers",
            layer=name,
            found=f"{len(name.encode())} bytes",
            expected=f"at most {MAX_NAME}",
            hint="shorten it with --rename",
        )
    if any(dim >= 1 << 31 for dim in spec.shape):
        raise QConvertError("an axis is too long for GGUF", layer=name, found=str(spec))


def _aligned(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed_string(text: str) -> bytes:
    return struct.pack("<I", _STRING) + _string(text)
