"""torch.save files (.pt, .pth, .ckpt, .bin): names and offsets through torch.load(weights_only=True), no code run.

torch writes a zip archive whose entries are stored as they are, so every tensor has an offset in the file. It is
loaded under a fake mode, in which torch reads the pickle and notes where each storage lies, but no payload.
Anything that `weights_only` refuses (classes, functions), the older format without a zip archive, and compressed
entries are refused here; nothing is ever unpickled by other means.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from qconvert.formats.dtypes import nbytes
from qconvert.formats.errors import HeaderError, QConvertError
from qconvert.formats.header import Header
from qconvert.formats.remote import Place
from qconvert.formats.tensors import TensorSpec

#: Where trainers keep the model, the first that is there.
_ROOTS = ("state_dict", "model", "module", "params_ema", "ema")
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
}  # fmt: skip
_RESAVE = "save it again with safetensors"


def read_pickle(path: Place, index: int = 0) -> Header:
    """The tensors of a torch.save file. Raises HeaderError for what is refused, QConvertError without torch."""
    name = str(path)
    stored = _directory(path)
    document = _load(path)
    root = document
    if isinstance(document, Mapping):
        root = next((document[key] for key in _ROOTS if isinstance(document.get(key), Mapping)), document)
    size = path.stat().st_size
    specs = []
    for key, tensor in _tensors(root, ""):
        if str(tensor.layout) != "torch.strided":
            raise HeaderError(f"tensor {key!r} is {tensor.layout}", file=name, hint=_RESAVE)
        dtype = _NAMES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise HeaderError(f"tensor {key!r} is of type {tensor.dtype}", file=name, hint=_RESAVE)
        offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if offset is None:
            raise QConvertError(
                "this torch does not say where a tensor lies in its file", file=name, expected="torch >= 2.7"
            )
        shape = tuple(int(dim) for dim in tensor.shape)
        if prod(shape) and not tensor.is_contiguous():
            raise HeaderError(
                f"tensor {key!r} is a strided view",
                file=name,
                found=f"strides {tensor.stride()}",
                hint=_RESAVE,
            )
        count = nbytes(dtype, shape) or 0
        start = int(offset) + int(tensor.storage_offset()) * tensor.element_size()
        if not any(begin <= start and start + count <= end for begin, end in stored):
            raise HeaderError(f"tensor {key!r} lies outside of the archive's stored entries", file=name)
        specs.append(TensorSpec(key, dtype, shape, start, count, index))
    if not specs:
        raise HeaderError("holds no tensors", file=name)
    specs.sort(key=lambda spec: (spec.start, spec.nbytes))
    raw = repr([(spec.name, spec.dtype, spec.shape, spec.start) for spec in specs]).encode()
    return Header(tuple(specs), {}, 0, size, raw)


def _directory(path: Place) -> list[tuple[int, int]]:
    """Byte ranges of the archive's entries; refuses what is no archive, and compressed entries."""
    try:
        with path.open("rb") as handle, zipfile.ZipFile(handle) as archive:
            entries = archive.infolist()
            order = [archive.read(entry) for entry in entries if entry.filename.endswith("/byteorder")]
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError, EOFError, RuntimeError, zlib.error):
        raise HeaderError(
            "is a pickle without a zip archive (torch before 1.6), or no torch file at all",
            file=str(path),
            hint=_RESAVE,
        ) from None
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise HeaderError("the archive's entries are compressed", file=str(path), hint=_RESAVE)
    if order and order[0].strip() != b"little":
        raise HeaderError("was written on a big-endian machine", file=str(path), hint=_RESAVE)
    size = path.stat().st_size
    # The data follows the entry's own header, whose length only the loader reads; its end bounds it.
    return [
        (entry.header_offset, min(size, entry.header_offset + entry.file_size + (1 << 17)))
        for entry in entries
    ]


def _load(path: Place) -> Any:
    try:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        raise QConvertError(
            "torch files are read with torch", file=str(path), hint="pip install torch"
        ) from None
    try:
        with path.open("rb") as handle, FakeTensorMode():
            return torch.load(handle, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what the pickle made it raise
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it names {named[1]}, which is no tensor" if named else _first_sentence(error)
        raise HeaderError(
            f"torch.load(weights_only=True) refuses it: {what}", file=str(path), hint=_RESAVE
        ) from None


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.partition(". ")[0][:200]


def _tensors(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, tensor) of every tensor in nested mappings; lists and numbers are no part of a model."""
    import torch

    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _tensors(inner, f"{prefix}.{key}" if prefix else key)
