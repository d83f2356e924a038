"""GGUF as a container: its header as untrusted input, every tensor at its offset.

The format (FORMATS_OTHER section 10): "GGUF", u32 version, u64 number of tensors, u64 number of keys; keys (name,
type, value); tensor infos (name, dimensions innermost first, type, offset from the data's start); data, aligned to
`general.alignment`. Block types keep their names as dtypes ("Q4_K", shape [N, K] in elements).

ComfyUI-GGUF stores some tensors reshaped and their own shape under `comfy.gguf.orig_shape.<tensor>`: the shape given
here is the original one. String keys become metadata; arrays and numbers (vocabularies above all) do not.
"""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from math import prod
from typing import Any, BinaryIO, NoReturn

from qconvert.formats.dtypes import nbytes
from qconvert.formats.errors import HeaderError
from qconvert.formats.gguf_blocks import TYPES
from qconvert.formats.header import MAX_HEADER_BYTES, Header
from qconvert.formats.remote import Place
from qconvert.formats.tensors import TensorSpec

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 8
_MAX_TENSORS = 1_000_000
_MAX_COUNT = 2**63

#: Value types of keys: struct codes of the plain ones; 8 is a string, 9 an array.
_PLAIN = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads the header piece by piece; never past the file, never more than a header may be."""

    def __init__(self, handle: BinaryIO, path: str, size: int) -> None:
        self.handle, self.path, self.size = handle, path, size
        self.raw = bytearray()

    def fail(self, problem: str, **facts: str | None) -> NoReturn:
        raise HeaderError(problem, file=self.path, **facts)

    def take(self, count: int) -> bytes:
        if count > self.size - len(self.raw):
            self.fail(
                "truncated inside the GGUF header",
                found=f"{self.size} bytes",
                expected=f"at least {len(self.raw) + count}",
            )
        if len(self.raw) + count > MAX_HEADER_BYTES:
            self.fail("GGUF header is impossibly long", expected=f"at most {MAX_HEADER_BYTES} bytes")
        data = self.handle.read(count)
        if len(data) != count:
            self.fail("truncated inside the GGUF header")
        self.raw += data
        return data

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.number("<Q")).decode("utf-8")
        except UnicodeDecodeError:
            self.fail("a name in the GGUF header is not UTF-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A key's value; long arrays of numbers are skipped over and read as None."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _PLAIN:
                self.fail("GGUF key of an unknown type", found=str(kind))
            return self.number(_PLAIN[kind])
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _PLAIN:
            size = struct.calcsize(_PLAIN[inner])
            data = self.take(size * count)
            return None if count > MAX_DIMS else [v for (v,) in struct.iter_unpack(_PLAIN[inner], data)]
        if inner not in (_STRING, _ARRAY) or depth > 2 or count > MAX_HEADER_BYTES:
            self.fail("GGUF array of an unknown type", found=f"type {inner}, {count} elements")
        for _ in range(count):
            self.value(inner, depth + 1)
        return None


def read_gguf(path: Place, index: int = 0) -> Header:
    """Parse and validate the header of a GGUF file; reads no payload. Raises HeaderError."""
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(0)
            return _read(_Cursor(handle, str(path), size), index)
    except OSError as error:
        raise HeaderError(f"cannot be read: {error.strerror or error}", file=str(path)) from None


def _read(cursor: _Cursor, index: int) -> Header:
    if cursor.take(4) != MAGIC:
        cursor.fail("not a GGUF file")
    version = cursor.number("<I")
    if version not in VERSIONS:
        cursor.fail(
            "GGUF version that is not read",
            found=str(version),
            expected=f"one of {', '.join(map(str, VERSIONS))}",
        )
    tensors, keys = cursor.number("<Q"), cursor.number("<Q")
    if tensors > _MAX_TENSORS or keys > _MAX_TENSORS:
        cursor.fail("GGUF header counts are impossible", found=f"{tensors} tensors, {keys} keys")
    values: dict[str, Any] = {}
    for _ in range(keys):
        name = cursor.string()
        if name in values:
            cursor.fail(f"GGUF key {name!r} occurs twice")
        values[name] = cursor.value(cursor.number("<I"))
    infos = [_info(cursor) for _ in range(tensors)]
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        cursor.fail("GGUF alignment makes no sense", found=str(alignment))
    start = -(-len(cursor.raw) // alignment) * alignment
    specs = _place(cursor, infos, values, start, alignment, index)
    metadata = {name: value for name, value in values.items() if isinstance(value, str)}
    return Header(specs, metadata, start, cursor.size, bytes(cursor.raw))


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, count = cursor.string(), cursor.number("<I")
    if count > MAX_DIMS:
        cursor.fail(f"tensor {name!r} has too many dimensions", found=str(count))
    shape = tuple(cursor.number("<Q") for _ in range(count))[::-1]
    if any(dim >= _MAX_COUNT for dim in shape) or prod(shape) >= _MAX_COUNT:
        cursor.fail(f"tensor {name!r} is impossibly large", found=str(list(shape)))
    return name, shape, cursor.number("<I"), cursor.number("<Q")


def _place(
    cursor: _Cursor,
    infos: list[tuple[str, tuple[int, ...], int, int]],
    values: dict[str, Any],
    start: int,
    alignment: int,
    index: int,
) -> tuple[TensorSpec, ...]:
    """Tensors in payload order; offsets, sizes and shapes checked against each other and the file."""
    specs, seen = [], set()
    for name, shape, kind, offset in infos:
        if name in seen:
            cursor.fail(f"tensor {name!r} occurs twice")
        seen.add(name)
        dtype = TYPES.get(kind)
        if dtype is None:
            cursor.fail(f"tensor {name!r} is of an unknown GGUF type", found=str(kind))
        size = nbytes(dtype, shape)
        if size is None or (shape and nbytes(dtype, shape[-1:]) is None):
            cursor.fail(f"tensor {name!r} is not of whole {dtype} blocks", found=str(list(shape)))
        original = values.get(ORIGINAL_SHAPE + name)
        if original is not None:
            if (
                not isinstance(original, list)
                or prod(original) != prod(shape)
                or min(original, default=1) < 0
            ):
                cursor.fail(
                    f"{ORIGINAL_SHAPE}{name} does not fit the tensor", found=f"{original}, {list(shape)}"
                )
            shape = tuple(original)
        if offset % alignment or offset + size > cursor.size - start:
            cursor.fail(
                f"tensor {name!r} lies outside the file or is not aligned",
                found=f"offset {offset}, {size} bytes",
                expected=f"at most {cursor.size - start}",
            )
        specs.append(TensorSpec(name, dtype, shape, start + offset, size, index))
    specs.sort(key=lambda spec: (spec.start, spec.nbytes))
    for before, after in pairwise(specs):
        if before.start + before.nbytes > after.start:
            cursor.fail(f"tensor {after.name!r} overlaps {before.name!r}")
    return tuple(specs)
