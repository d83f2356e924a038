"""safetensors headers: reading them as untrusted input, and laying out new ones.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the payload. The JSON maps a tensor
name to dtype, shape and data_offsets (relative to the payload), and `__metadata__` to a map of strings.
Source: the safetensors format description (huggingface/safetensors README).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from math import isinf, prod
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

from qconvert.formats.dtypes import BITS, nbytes
from qconvert.formats.errors import HeaderError
from qconvert.formats.remote import Place
from qconvert.formats.tensors import Spec, TensorSpec

#: The reference implementation's own cap.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 64
#: Bytes of a page: what file systems share between files.
PAGE = 4096
#: Tensors of one file: what takes seconds and 200 MB to read. Files of trillions of weights have a third of it.
MAX_TENSORS = 200_000
#: Levels of JSON beside headers. Real configurations have six.
MAX_DEPTH = 64
_MAX_COUNT = 2**63
#: First bytes (in lower case) of files that are taken for safetensors, what they are, and what to do.
_OTHER_KINDS = (
    (b"version ", "a Git LFS pointer, the file itself was not fetched", "fetch it with git lfs pull"),
    (b"<!doctyp", "a web page, not what was to be downloaded", "get the file again"),
    (b"<html", "a web page, not what was to be downloaded", "get the file again"),
    (b"pk\x03\x04", "a zip archive or a PyTorch file", "name it by its own ending"),
    (b"gguf", "a GGUF file", "name it by its own ending, .gguf"),
)


class Header(NamedTuple):
    """A parsed header. `tensors` are in payload order with absolute offsets; `data_start` is where payload begins."""

    tensors: tuple[TensorSpec, ...]
    metadata: dict[str, str]
    data_start: int
    file_size: int
    raw: bytes


def _fail(path: str, problem: str, **facts: str | None) -> NoReturn:
    raise HeaderError(problem, file=path, **facts)


def _name_other_kind(name: str, start: bytes) -> None:
    """Raise for what commonly lies under a wrong name, told by its first bytes."""
    for magic, kind, hint in _OTHER_KINDS:
        if start.lower().startswith(magic):
            _fail(name, f"not a safetensors file: it is {kind}", hint=hint)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} occurs twice")
            seen.add(key)
    return out


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text[:20]} is beyond any number")
    return value


def _integer(text: str) -> int | float:
    # JSON knows one zero; readers that keep the sign take "-0" for a float, which is no size and no offset.
    return -0.0 if text == "-0" else int(text)


def _ints(text: str) -> Callable[[str], int | float] | None:
    """How integers are read: by a Python call for each of some 40,000 only where that can matter."""
    return _integer if "-0" in text else None


def strict_json(text: str, depth: int | None = MAX_DEPTH) -> Any:
    """JSON with duplicate keys, NaN, Infinity and half surrogate pairs refused.

    Raises ValueError, also for more than `depth` levels; None: where the caller's checks allow no nesting anyway.
    """
    try:
        document = json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_ints(text),
        )
        if "\\ud" in text.lower():
            _refuse_surrogates(document)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if depth is not None and text.count("[") + text.count("{") > depth and _deeper(document, depth):
        raise ValueError(f"nested deeper than {depth} levels")
    return document


def _deeper(document: Any, depth: int) -> bool:
    level = [document]
    for _ in range(depth):
        inner = (
            value.values() if isinstance(value, dict) else value
            for value in level
            if isinstance(value, dict | list)
        )
        level = [item for values in inner for item in values if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _refuse_bombs(raw: bytes, name: str) -> None:
    """Raise for a header whose values would take many times its own size; counting is cheap."""
    tensors = raw.count(b'"data_offsets"')
    if tensors > MAX_TENSORS:
        _fail(name, "header names too many tensors", found=str(tensors), expected=f"at most {MAX_TENSORS}")
    values = max(raw.count(b"{") + raw.count(b"["), raw.count(b","))
    if values > len(raw) // 6 + 1000:
        _fail(name, "not a header of tensors", found=f"{values} values in {len(raw)} bytes")


def half_surrogate(text: str) -> bool:
    """Whether it holds half a surrogate pair, which is no character: no reader takes it, no file can be written so."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def _refuse_surrogates(value: Any) -> None:
    if isinstance(value, str):
        if half_surrogate(value):
            raise ValueError(f"{value[:40]!r} holds half a surrogate pair")
    elif isinstance(value, list):
        for item in value:
            _refuse_surrogates(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key)
            _refuse_surrogates(item)


def read_header(path: Place, index: int = 0) -> Header:
    """Parse and validate the header of a safetensors file; reads no payload.

    Raises HeaderError for anything the format does not allow: length, UTF-8, duplicate keys, unknown dtypes, sizes
    that do not follow from shape x dtype, gaps, overlaps, or a file that ends too early or too late.
    """
    name = str(path)
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(0)
            prefix = handle.read(8)
            if len(prefix) < 8:
                _fail(name, "not a safetensors file: shorter than 8 bytes", found=f"{size} bytes")
            length = int.from_bytes(prefix, "little")
            if length > size - 8:
                _name_other_kind(name, prefix)
            if length > MAX_HEADER_BYTES:
                _fail(
                    name,
                    "not a safetensors file: its header length is impossible",
                    found=f"{length} bytes",
                    expected=f"at most {MAX_HEADER_BYTES}",
                )
            if length > size - 8:
                _fail(
                    name,
                    "truncated inside the header, or not a safetensors file",
                    found=f"{size} bytes",
                    expected=f"at least {8 + length}",
                    hint="get the file again",
                )
            raw = handle.read(length)
    except OSError as error:
        _fail(name, f"cannot be read: {error.strerror or error}")
    return parse_header(raw, size, name, index)


def parse_header(raw: bytes, file_size: int, name: str, index: int = 0) -> Header:
    """Validate header JSON against the size of its file (bytes). `name` is for messages. Raises HeaderError."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        _fail(name, "header is not UTF-8")
    if not text.startswith("{"):
        _fail(name, "not a safetensors file: the header does not start with '{'")
    _refuse_bombs(raw, name)
    try:
        document = _header_json(text)
    except ValueError as error:
        _fail(name, f"header is not valid JSON: {error}")
    if not isinstance(document, dict):
        _fail(name, "header is not a JSON object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _fail(name, "__metadata__ is not a map of strings")
    data_start = 8 + len(raw)
    payload = file_size - data_start
    tensors = _tensors(name, document, data_start, payload, index)
    tensors.sort(key=_START_AND_SIZE)
    cursor = data_start
    for tensor in tensors:
        if tensor.start != cursor:
            problem = "overlaps the one before it" if tensor.start < cursor else "leaves a gap before it"
            _fail(
                name,
                f"tensor {tensor.name!r} {problem}",
                found=f"offset {tensor.start - data_start}",
                expected=f"{cursor - data_start}",
            )
        cursor += tensor.nbytes
    if cursor != file_size:
        _fail(
            name,
            "truncated payload" if cursor > file_size else "bytes follow the last tensor",
            found=f"{file_size} bytes",
            expected=f"{cursor}",
        )
    return Header(tuple(tensors), metadata, data_start, file_size, raw)


def _header_json(text: str) -> Any:
    """As `strict_json`, without a call for each object where no key can occur twice.

    Each key that was written has a colon: where as many keys are left as there are colons, none was written twice.
    """
    if "\\" not in text:
        try:
            document = json.loads(
                text, parse_constant=_no_constant, parse_float=_finite, parse_int=_ints(text)
            )
        except (ValueError, RecursionError):
            # What is wrong with it is said below.
            document = None
        if isinstance(document, dict):
            entries = [entry for entry in document.values() if isinstance(entry, dict)]
            if len(document) + sum(map(len, entries)) == text.count(":"):
                return document
    return strict_json(text, None)


_FIELDS = ("dtype", "shape", "data_offsets")
_KEYS = set(_FIELDS)
_fields = itemgetter(*_FIELDS)
_START_AND_SIZE = itemgetter(TensorSpec._fields.index("start"), TensorSpec._fields.index("nbytes"))


def _counts(values: Any) -> bool:
    """Whether all are plain integers that a size or an offset can be."""
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < _MAX_COUNT)


def _tensors(
    name: str, document: dict[str, Any], data_start: int, payload: int, index: int
) -> list[TensorSpec]:
    """All entries. Of thousands most have one of few shapes, known by their text, which tells 1, 1.0 and true apart."""
    known: dict[tuple[str, str], tuple[tuple[int, ...], int]] = {}
    tensors = []
    for key, entry in document.items():
        try:
            dtype, axes, offsets = _fields(entry)
            shape, size = known[dtype, repr(axes)]
            begin, end = offsets
            plain = len(entry) == 3 and type(offsets) is list and type(begin) is int and type(end) is int
            if not (plain and begin >= 0 and end <= payload and end - begin == size):
                raise ValueError
        except (TypeError, KeyError, ValueError, RecursionError):
            # A shape not met before, or an entry that is wrong: looked at closely.
            tensor = _tensor(name, key, entry, data_start, payload, index)
            known[tensor.dtype, repr(entry["shape"])] = tensor.shape, tensor.nbytes
        else:
            tensor = TensorSpec(key, dtype, shape, data_start + begin, size, index)
        tensors.append(tensor)
    return tensors


def _tensor(name: str, key: str, entry: Any, data_start: int, payload: int, index: int) -> TensorSpec:
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        _fail(name, f"tensor {key!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        _fail(name, f"tensor {key!r} has an unknown dtype", found=repr(dtype)[:40])
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not _counts(shape):
        _fail(name, f"tensor {key!r} has a bad shape", found=repr(shape)[:60])
    if not isinstance(offsets, list) or len(offsets) != 2 or not _counts(offsets):
        _fail(name, f"tensor {key!r} has bad data_offsets", found=repr(offsets)[:60])
    begin, end = offsets
    size = nbytes(dtype, tuple(shape))
    # An axis of 0 hides no impossible ones: other readers multiply from the left and overflow.
    if size is None or BITS[dtype] * prod(filter(None, shape)) >= _MAX_COUNT:
        _fail(name, f"tensor {key!r} has an impossible size", found=f"{dtype}{shape}"[:80])
    if end - begin != size:
        _fail(
            name,
            f"tensor {key!r}: size does not follow from its shape and dtype",
            found=f"{end - begin} bytes",
            expected=f"{size} for {dtype}{shape}"[:80],
        )
    if end > payload:
        _fail(
            name,
            f"truncated: tensor {key!r} ends behind the file",
            found=f"{data_start + payload} bytes",
            expected=f"at least {data_start + end}",
            hint="get the file again",
        )
    return TensorSpec(key, dtype, tuple(shape), data_start + begin, size, index)


class Layout(NamedTuple):
    """A header laid out before any payload exists: `prefix` are the first bytes of the file."""

    prefix: bytes
    offsets: Mapping[str, int]
    specs: Mapping[str, Spec]
    file_size: int


def layout(
    tensors: Iterable[tuple[str, Spec]], metadata: Mapping[str, str], page_offset: int | None = None
) -> Layout:
    """Place tensors in the order given (absolute byte offsets) and render the header.

    Wider types first would align better, but order is the caller's: payload order follows the source, so that
    copies stay sequential. The header is padded with spaces to a multiple of 8 bytes, as the format asks; with
    `page_offset` (a multiple of 8) until the payload begins so far behind the beginning of a page.
    """
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    cursor = 0
    begins: dict[str, int] = {}
    specs: dict[str, Spec] = {}
    for key, spec in tensors:
        if key in specs:
            raise ValueError(f"tensor {key!r} is laid out twice")
        if key == "__metadata__":
            raise ValueError("no tensor can be called __metadata__")
        size = spec.nbytes
        document[key] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [cursor, cursor + size],
        }
        begins[key], specs[key] = cursor, spec
        cursor += size
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if page_offset is not None:
        raw += b" " * ((page_offset - 8 - len(raw)) % PAGE)
    start = 8 + len(raw)
    offsets = {key: begin + start for key, begin in begins.items()}
    return Layout(len(raw).to_bytes(8, "little") + raw, offsets, specs, start + cursor)
