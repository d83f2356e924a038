"""A source as it lies on disk: one file, or a folder of shards with an index. Headers now, payload by pread."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from qconvert.formats.containers import SUFFIXES, read_container
from qconvert.formats.dtypes import SUB_BYTE, numpy_dtype
from qconvert.formats.errors import HeaderError, QConvertError, UsageError, close_to
from qconvert.formats.header import Header, strict_json
from qconvert.formats.tensors import HeaderView, Spec, TensorSpec

MARKER_SUFFIX = ".comfy_quant"
#: A marker is a few hundred bytes of JSON; anything longer is not one.
MAX_MARKER_BYTES = 65536
MAX_JSON_BYTES = 64_000_000


class Checkpoint:
    """Opened read-only. `tensors` maps name to TensorSpec over all shards; `config` is config.json beside them.

    Use as a context manager, or call `close`. Raises QConvertError for files that cannot be trusted.
    """

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path = path
        self.files = files
        self.headers: list[Header] = []
        self.tensors: dict[str, TensorSpec] = {}
        self.metadata: dict[str, str] = {}
        self._fds: list[int] = []
        self._identity: list[tuple[int, int]] = []
        for index, file in enumerate(files):
            header = read_container(file, index)
            self.headers.append(header)
            for tensor in header.tensors:
                if tensor.name in self.tensors:
                    raise HeaderError(
                        f"tensor {tensor.name!r} is in two shards",
                        file=f"{files[self.tensors[tensor.name].file]} and {file}",
                    )
                self.tensors[tensor.name] = tensor
            for key, value in header.metadata.items():
                self.metadata.setdefault(key, value)
        self.config: dict[str, Any] = _read_config(path if path.is_dir() else path.parent)
        for file in files:
            descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            stat = os.fstat(descriptor)
            self._fds.append(descriptor)
            self._identity.append((stat.st_size, stat.st_mtime_ns))

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """A file (safetensors, GGUF, a pickle of tensors), or a folder with one, or with shards and their index."""
        if not path.exists():
            beside = path.parent.iterdir() if path.parent.is_dir() else ()
            # Endings are alike anyway: only what differs by a letter or two is meant.
            hint = close_to(path.name, (other.name for other in beside), "", 0.9)
            raise UsageError("no such file or folder", file=str(path), hint=hint or None)
        if path.is_file():
            return cls(path, [path])
        indexes = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.bin.index.json"))
        if len(indexes) > 1:
            raise UsageError("several index files; name one checkpoint", file=str(path))
        if indexes:
            return cls(path, _indexed_files(indexes[0]))
        for suffix in SUFFIXES:
            files = sorted(p for p in path.glob(f"*{suffix}") if p.is_file())
            if files:
                break
        else:
            raise UsageError("no .safetensors file in this folder", file=str(path))
        if len(files) > 1:
            raise UsageError(
                f"{len(files)} {files[0].suffix} files and no index",
                file=str(path),
                found=", ".join(file.name for file in files[:4]) + (", ..." if len(files) > 4 else ""),
                hint="name one of the files",
            )
        return cls(path, files)

    def close(self) -> None:
        for descriptor in self._fds:
            os.close(descriptor)
        self._fds = []

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        return sum(header.file_size for header in self.headers)

    def fd(self, index: int) -> int:
        return self._fds[index]

    def digest(self) -> str:
        """sha256 over the headers of all shards: names what the plan was made from."""
        state = hashlib.sha256()
        for header in self.headers:
            state.update(len(header.raw).to_bytes(8, "little") + header.raw)
        return state.hexdigest()

    def pread(self, index: int, start: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """`size` bytes from absolute offset `start` of shard `index`, in a fresh buffer. Short reads are an error."""
        buffer = np.empty(size, np.uint8)
        view = memoryview(buffer)
        done = 0
        while done < size:
            try:
                got = _pread_into(self._fds[index], view[done:], start + done)
            except OSError as error:
                raise QConvertError(
                    f"read error at byte {start + done}: {error.strerror or error}",
                    file=str(self.files[index]),
                ) from None
            if got == 0:
                raise QConvertError(
                    "the file ended early: it was truncated while being read",
                    file=str(self.files[index]),
                    found=f"end at {start + done}",
                    expected=f"byte {start + size}",
                )
            done += got
        return buffer

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """A whole tensor in its stored type (bf16 as uint16, 8-bit floats as uint8), shaped as the header says."""
        tensor = self.tensors[name]
        data = self.pread(tensor.file, tensor.start, tensor.nbytes)
        return data.view(numpy_dtype(tensor.dtype)).reshape(_storage_shape(tensor))

    def check_unchanged(self) -> None:
        """Raise when a source file was written to since it was opened (size or modification time)."""
        for descriptor, file, identity in zip(self._fds, self.files, self._identity, strict=True):
            stat = os.fstat(descriptor)
            if (stat.st_size, stat.st_mtime_ns) != identity:
                raise QConvertError("the source changed while it was being read", file=str(file))

    def marker_bytes(self) -> dict[str, bytes]:
        """Raw bytes of every `<layer>.comfy_quant` tensor, by layer prefix. Read once."""
        return self._markers

    @cached_property
    def _markers(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name, tensor in self.tensors.items():
            if name.endswith(MARKER_SUFFIX):
                if tensor.nbytes > MAX_MARKER_BYTES:
                    raise QConvertError(
                        "marker tensor is too large to be a marker",
                        file=str(self.files[tensor.file]),
                        layer=name,
                        found=f"{tensor.nbytes} bytes",
                        expected=f"at most {MAX_MARKER_BYTES}",
                    )
                found[name.removesuffix(MARKER_SUFFIX)] = self.pread(
                    tensor.file, tensor.start, tensor.nbytes
                ).tobytes()
        return found

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Type and shape of every tensor. One object for all who ask, so that answers about it can be kept."""
        return {name: tensor.spec for name, tensor in self.tensors.items()}

    def view(self) -> HeaderView:
        """What a contract may look at."""
        return HeaderView(
            tensors=self.specs,
            metadata=self.metadata,
            markers=self.marker_bytes(),
            files=tuple(file.name for file in self.files),
            config=self.config,
        )


def _storage_shape(tensor: TensorSpec) -> tuple[int, ...]:
    if tensor.dtype in SUB_BYTE:
        return (tensor.nbytes,)
    return tensor.shape


if hasattr(os, "preadv"):

    def _pread_into(descriptor: int, view: memoryview, offset: int) -> int:
        # One call moves at most 2 GiB on Linux; the caller loops.
        return os.preadv(descriptor, [view[: 1 << 30]], offset)

else:  # Windows: no positional reads; a lock keeps seek and read together
    import threading

    _SEEK_LOCK = threading.Lock()

    def _pread_into(descriptor: int, view: memoryview, offset: int) -> int:
        with _SEEK_LOCK:
            os.lseek(descriptor, offset, os.SEEK_SET)
            data = os.read(descriptor, min(len(view), 1 << 30))
        view[: len(data)] = data
        return len(data)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise QConvertError("JSON file is too large", file=str(path))
        document = strict_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise QConvertError(f"is not valid JSON: {error}", file=str(path)) from None
    if not isinstance(document, dict):
        raise QConvertError("is not a JSON object", file=str(path))
    return document


#: Where quantisers of older versions kept what is `quantization_config` in config.json now -> the method, where the
#: file does not say it itself.
_OWN_CONFIGS = {
    "quantization_config.json": "auto-round",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json, with `quantization_config` from a file of its own where config.json has none."""
    path = folder / "config.json"
    config = _read_json(path) if path.is_file() else {}
    if "quantization_config" not in config:
        for name, method in _OWN_CONFIGS.items():
            if (folder / name).is_file():
                return config | {"quantization_config": {"quant_method": method} | _read_json(folder / name)}
    return config


def _indexed_files(index: Path) -> list[Path]:
    folder = index.parent
    document = _read_json(index)
    mapping = document.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise QConvertError("index has no weight_map", file=str(index))
    names: dict[str, None] = {}
    for name in mapping.values():
        if not isinstance(name, str):
            raise QConvertError(
                "index names a file that is not a string", file=str(index), found=repr(name)[:60]
            )
        names[name] = None
    files = []
    for name in sorted(names):
        # Shards lie beside their index; anything that leads elsewhere is an attack or an accident.
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name or ":" in name:
            raise QConvertError(
                "index names a file outside its folder", file=str(index), found=repr(name)[:80]
            )
        path = folder / name
        if not path.is_file():
            raise QConvertError(
                "index names a shard that is not there",
                file=str(index),
                found=name,
                hint="put all shards beside their index",
            )
        files.append(path)
    _compare_index(index, mapping, files)
    return files


def _compare_index(index: Path, mapping: Mapping[str, str], files: list[Path]) -> None:
    for number, file in enumerate(files):
        present = {tensor.name for tensor in read_container(file, number).tensors}
        listed = {name for name, where in mapping.items() if where == file.name}
        for name in sorted(listed - present):
            raise QConvertError(
                f"index lists tensor {name!r} in {file.name}, which does not hold it", file=str(index)
            )
        for name in sorted(present - listed):
            raise QConvertError(
                f"{file.name} holds tensor {name!r}, which the index does not list there", file=str(index)
            )


@contextmanager
def opened(path: Path) -> Iterator[Checkpoint]:
    """Open a checkpoint for the length of a block."""
    checkpoint = Checkpoint.open(path)
    try:
        yield checkpoint
    finally:
        checkpoint.close()


def spec_of(checkpoint: Checkpoint, name: str) -> Spec:
    return checkpoint.tensors[name].spec


def dumps(document: Any) -> str:
    """Compact JSON, keys in the order given: what markers and metadata are written with."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)
