"""torch.save files (.pt, .pth, .ckpt, .bin): names and offsets through torch.load(weights_only=True), no code run.

torch writes a zip archive whose entries are stored as they are, so every tensor has an offset in the file. It is
loaded under a fake mode, in which torch reads the pickle and notes where each storage lies, but no payload.
Anything that `weights_only` refuses (classes, functions), the older format without a zip archive, and compressed
entries are refused here; nothing is ever unpickled by other means.

What `weights_only` lets pass may still take all memory (`bytearray(10**10)`, entries that claim to be larger than the
file), or lead round in circles (mappings inside themselves). Before torch sees a pickle, its operations are listed,
not run: their number is limited, and so is what they may name.
"""

from __future__ import annotations

import contextlib
import logging
import pickletools
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from qconvert.formats.dtypes import nbytes
from qconvert.formats.errors import HeaderError, QConvertError
from qconvert.formats.header import Header, half_surrogate
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
#: Bytes of the pickle inside the archive, and its operations: some 30 a tensor.
MAX_PICKLE_BYTES, MAX_OPERATIONS = 32_000_000, 3_000_000
#: Mappings inside one another, and the length of all names: the same mapping may stand in many places.
MAX_DEPTH, MAX_NAMES = 64, 50_000_000
#: The archive's note of byte order is a word.
_MAX_ORDER_BYTES = 64
#: What the pickle of a model names. torch allows more, of which some make objects of any size.
_NAMED = re.compile(
    r"torch\.(cuda\.)?\w+Storage|torch\.storage\.(Typed|Untyped)Storage|torch\.Size|torch\.device"
    r"|torch\.(bfloat|float|complex|u?int|q?u?int|bits)[0-9]\w*|torch\.bool"
    r"|torch\._utils\._rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state|sparse_tensor|qtensor)"
    r"|torch\._tensor\._rebuild_from_type_v2|torch\.(nn\.parameter\.Parameter|Tensor|serialization\._get_layout)"
    r"|torch\.per_\w+|collections\.(OrderedDict|Counter)|_codecs\.encode|(builtins|__builtin__)\.(set|complex)"
)


def read_pickle(path: Place, index: int = 0) -> Header:
    """The tensors of a torch.save file. Raises HeaderError for what is refused, QConvertError without torch."""
    name = str(path)
    stored = _directory(path)
    _look_through(path)
    document = _load(path)
    root = document
    if isinstance(document, Mapping):
        root = next((document[key] for key in _ROOTS if isinstance(document.get(key), Mapping)), document)
    size = path.stat().st_size
    specs = []
    found: dict[str, Any] = {}
    for key, tensor in _tensors(root, name):
        if key in found:
            raise HeaderError(f"tensor {key!r} occurs twice", file=name, hint=_RESAVE)
        if half_surrogate(key):
            # No other container can hold such a name.
            raise HeaderError(f"tensor {key!r} is named with half a surrogate pair", file=name, hint=_RESAVE)
        found[key] = tensor
    for key, tensor in found.items():
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
    size = path.stat().st_size
    with _archive(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise HeaderError("the archive's entries are compressed", file=str(path), hint=_RESAVE)
        for entry in entries:
            # Whoever reads it takes memory for what it says.
            if entry.header_offset + max(entry.file_size, entry.compress_size) > size:
                raise HeaderError(
                    f"the archive's entry {entry.filename!r} reaches beyond the file",
                    file=str(path),
                    found=f"{entry.file_size} bytes from {entry.header_offset}",
                    expected=f"at most {size}",
                )
        orders = [entry for entry in entries if entry.filename.endswith("/byteorder")]
        if any(o.file_size > _MAX_ORDER_BYTES or archive.read(o).strip() != b"little" for o in orders[:1]):
            raise HeaderError("was written on a big-endian machine", file=str(path), hint=_RESAVE)
    # The data follows the entry's own header, whose length only the loader reads; its end bounds it.
    return [
        (entry.header_offset, min(size, entry.header_offset + entry.file_size + (1 << 17)))
        for entry in entries
    ]


@contextlib.contextmanager
def _archive(path: Place) -> Iterator[zipfile.ZipFile]:
    try:
        with path.open("rb") as handle, zipfile.ZipFile(handle) as archive:
            yield archive
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError, EOFError, RuntimeError, zlib.error):
        raise HeaderError(
            "is a pickle without a zip archive (torch before 1.6), or no torch file at all",
            file=str(path),
            hint=_RESAVE,
        ) from None


def _look_through(path: Place) -> None:
    """List the pickle's operations, running none. Raises HeaderError for too many, and for what it may not name."""
    name = str(path)
    with _archive(path) as archive:
        pickles = [entry for entry in archive.infolist() if entry.filename.endswith("data.pkl")]
        if any(entry.file_size > MAX_PICKLE_BYTES for entry in pickles):
            raise HeaderError(
                "its pickle is too large", file=name, expected=f"at most {MAX_PICKLE_BYTES} bytes"
            )
        data = [archive.read(entry) for entry in pickles]
    for pickle in data:
        try:
            for count, (operation, argument, _) in enumerate(pickletools.genops(pickle)):
                if count >= MAX_OPERATIONS:
                    raise HeaderError(
                        "its pickle has too many operations", file=name, expected=f"at most {MAX_OPERATIONS}"
                    )
                if operation.name not in ("GLOBAL", "INST"):
                    continue
                named = str(argument).replace(" ", ".", 1)
                if not _NAMED.fullmatch(named):
                    raise HeaderError(f"it names {named}, which is no tensor", file=name, hint=_RESAVE)
        except ValueError as error:
            raise HeaderError(f"its pickle cannot be read: {error}"[:200], file=name, hint=_RESAVE) from None


@contextlib.contextmanager
def _silenced(name: str) -> Iterator[None]:
    """What is wrong with a file is said once: by the exception, not by a library's log with a traceback."""
    log = logging.getLogger(name)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _load(path: Place) -> Any:
    try:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        raise QConvertError(
            "torch files are read with torch", file=str(path), hint="pip install torch"
        ) from None
    try:
        with path.open("rb") as handle, _silenced("torch._subclasses.fake_tensor"), FakeTensorMode():
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


def _tensors(root: Any, file: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, tensor) of every tensor in nested mappings; lists and numbers are no part of a model.

    Raises HeaderError for mappings that are nested too deeply, as one inside itself is, or that hold too much.
    """
    import torch

    todo: list[tuple[str, Any, int]] = [("", root, 0)]
    taken = 0
    while todo:
        prefix, value, depth = todo.pop()
        if isinstance(value, torch.Tensor):
            yield prefix, value
        elif isinstance(value, Mapping):
            if depth >= MAX_DEPTH:
                raise HeaderError(
                    "its mappings are nested too deeply", file=file, expected=f"at most {MAX_DEPTH} levels"
                )
            for key, inner in value.items():
                if isinstance(key, str):
                    taken += len(prefix) + len(key) + 50
                    if taken > MAX_NAMES:
                        raise HeaderError("its mappings hold too much", file=file, hint=_RESAVE)
                    todo.append((f"{prefix}.{key}" if prefix else key, inner, depth + 1))
