"""A source as it lies on disk: one file, or a folder of shards with an index. Headers now, payload by pread."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from qconvert.formats.containers import SUFFIXES, read_container
from qconvert.formats.dtypes import SUB_BYTE, numpy_dtype
from qconvert.formats.errors import HeaderError, QConvertError, TransferError, UsageError, close_to
from qconvert.formats.header import Header, strict_json
from qconvert.formats.remote import Place, Remote
from qconvert.formats.storage import Storage, open_storage
from qconvert.formats.tensors import HeaderView, Spec, TensorSpec
from qconvert.kernels.arrays import np

MARKER_SUFFIX = ".comfy_quant"
#: A marker is a few hundred bytes of JSON; anything longer is not one.
MAX_MARKER_BYTES = 65536
#: Of an index, which names every tensor; and of a configuration.
MAX_JSON_BYTES = 32_000_000
MAX_CONFIG_BYTES = 8_000_000
_COMPACT = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
#: How the name of an index ends.
INDEX_SUFFIX = ".index.json"


class Checkpoint:
    """Opened read-only. `tensors` maps name to TensorSpec over all shards; `config` is config.json beside them.

    Use as a context manager, or call `close`. Raises QConvertError for files that cannot be trusted.
    """

    def __init__(self, path: Place, files: Sequence[Place]) -> None:
        self.path = path
        self.files = list(files)
        self.headers: list[Header] = []
        self.tensors: dict[str, TensorSpec] = {}
        self.metadata: dict[str, str] = {}
        self.config: dict[str, Any] = {}
        self._storages: list[Storage] = []
        with _released_on_failure(files):
            self._read(path, files)

    def _read(self, path: Place, files: Sequence[Place]) -> None:
        for index, file in enumerate(files):
            header = read_container(file, index)
            self.headers.append(header)
            tensors = {tensor.name: tensor for tensor in header.tensors}
            twice = next((name for name in tensors if name in self.tensors), None)
            if twice is not None:
                raise HeaderError(
                    f"tensor {twice!r} is in two shards",
                    file=f"{files[self.tensors[twice].file]} and {file}",
                )
            self.tensors.update(tensors)
            for key, value in header.metadata.items():
                self.metadata.setdefault(key, value)
        self.config = _read_config(path if path.is_dir() else path.parent)
        for file in files:
            self._storages.append(open_storage(file))

    @classmethod
    def open(cls, path: Place) -> Checkpoint:
        """A file (safetensors, GGUF, a pickle of tensors), an index, or a folder with one of these."""
        if not path.exists():
            beside = path.parent.iterdir() if path.parent.is_dir() else ()
            # Endings are alike anyway: only what differs by a letter or two is meant.
            hint = close_to(path.name, (other.name for other in beside), "", 0.9)
            raise UsageError("no such file or folder", file=str(path), hint=hint or None)
        if path.is_file():
            return cls(path, _indexed_files(path) if path.name.endswith(INDEX_SUFFIX) else [path])
        indexes = _found(path, "*.safetensors.index.json") or _found(path, "*.bin.index.json")
        if len(indexes) > 1:
            raise UsageError("several index files; name one checkpoint", file=str(path))
        if indexes:
            return cls(path, _indexed_files(indexes[0]))
        for suffix in SUFFIXES:
            files = [file for file in _found(path, f"*{suffix}") if file.is_file()]
            if files:
                break
        else:
            raise UsageError(
                "no .safetensors file in this folder", file=str(path), hint=_components(path) or None
            )
        if len(files) > 1:
            raise UsageError(
                f"{len(files)} {files[0].suffix} files and no index",
                file=str(path),
                found=", ".join(file.name for file in files[:4]) + (", ..." if len(files) > 4 else ""),
                hint="name one of the files",
            )
        return cls(path, files)

    def close(self) -> None:
        for storage in self._storages:
            storage.close()
        self._storages = []

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        return sum(header.file_size for header in self.headers)

    @property
    def local_files(self) -> list[Path]:
        """Those of `files` that this machine's system knows."""
        return [file for file in self.files if isinstance(file, Path)]

    def fd(self, index: int) -> int | None:
        """Shard `index`'s descriptor; None for a remote one."""
        return self._storages[index].fd

    def state(self) -> list[str]:
        """Which version of each shard this is: size and modification time, or size and etag."""
        return [storage.state() for storage in self._storages]

    def digest(self) -> str:
        """sha256 over the headers of all shards: names what the plan was made from."""
        # Here, for whoever only looks: it loads OpenSSL.
        import hashlib

        state = hashlib.sha256()
        for header in self.headers:
            state.update(len(header.raw).to_bytes(8, "little") + header.raw)
        return state.hexdigest()

    def pread(self, index: int, start: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """`size` bytes from absolute offset `start` of shard `index`, in a fresh buffer. Short reads are an error."""
        buffer = np.empty(size, np.uint8)
        self.pread_into(index, start, buffer.data)
        return buffer

    def pread_into(self, index: int, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes from absolute offset `start` of shard `index`. Short reads are an error."""
        done, size = 0, len(view)
        while done < size:
            try:
                got = self._storages[index].read_into(view[done:], start + done)
            except OSError as error:
                raise TransferError(
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

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """A whole tensor in its stored type (bf16 as uint16, 8-bit floats as uint8), shaped as the header says."""
        tensor = self.tensors[name]
        data = self.pread(tensor.file, tensor.start, tensor.nbytes)
        return data.view(numpy_dtype(tensor.dtype)).reshape(_storage_shape(tensor))

    def check_unchanged(self) -> None:
        """Raise when a source file was written to since it was opened (size, modification time, etag)."""
        for storage in self._storages:
            storage.check_unchanged()

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
                raw = bytearray(tensor.nbytes)
                self.pread_into(tensor.file, tensor.start, memoryview(raw))
                found[name.removesuffix(MARKER_SUFFIX)] = bytes(raw)
        return found

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Type and shape of every tensor. One object for all who ask, so that answers about it can be kept."""
        known: dict[tuple[str, tuple[int, ...]], Spec] = {}
        specs: dict[str, Spec] = {}
        for name, tensor in self.tensors.items():
            # Of thousands most are alike.
            spec = known.get((tensor.dtype, tensor.shape))
            if spec is None:
                spec = known[tensor.dtype, tensor.shape] = tensor.spec
            specs[name] = spec
        return specs

    def view(self) -> HeaderView:
        """What a contract may look at."""
        return HeaderView(
            tensors=self.specs,
            metadata=self.metadata,
            markers=self.marker_bytes(),
            files=tuple(file.name for file in self.files),
            config=self.config,
        )


def _components(folder: Place) -> str:
    """What to name instead of a whole pipeline, "" where the folder is none."""
    if not isinstance(folder, Path):
        return ""
    inner = sorted(config.parent.name for config in folder.glob("*/config.json"))
    return f"name one component: {', '.join(dict.fromkeys(inner))}" if inner else ""


def _found(folder: Place, pattern: str) -> list[Place]:
    return sorted(folder.glob(pattern), key=str)


def _storage_shape(tensor: TensorSpec) -> tuple[int, ...]:
    if tensor.dtype in SUB_BYTE:
        return (tensor.nbytes,)
    return tensor.shape


def _read_json(path: Place, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > limit:
            raise QConvertError(
                "JSON file is too large", file=str(path), found=f"{size} bytes", expected=f"at most {limit}"
            )
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
    "hf_quant_config.json": "modelopt",
}


def _read_config(folder: Place) -> dict[str, Any]:
    """config.json, with `quantization_config` from a file of its own where config.json has none."""
    path = folder / "config.json"
    config = _read_json(path) if path.is_file() else {}
    if "quantization_config" not in config:
        for name, method in _OWN_CONFIGS.items():
            if (folder / name).is_file():
                return config | {"quantization_config": {"quant_method": method} | _read_json(folder / name)}
    return config


def _indexed_files(index: Place) -> list[Place]:
    folder = index.parent
    document = _read_json(index, MAX_JSON_BYTES)
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
    files: list[Place] = []
    for name in sorted(names):
        # Shards lie beside their index; anything that leads elsewhere is an attack or an accident.
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name or ":" in name:
            raise QConvertError(
                "index names a file outside its folder", file=str(index), found=repr(name)[:80]
            )
        path = folder / name
        if not _is_there(path):
            raise QConvertError(
                "index names a shard that is not there",
                file=str(index),
                found=name[:80],
                hint="put all shards beside their index",
            )
        if not _leads_here(path):
            raise QConvertError(
                "index names a link that leaves its folder",
                file=str(index),
                found=name[:80],
                hint="put the file itself beside the index",
            )
        files.append(path)
    with _released_on_failure(files):
        _compare_index(index, mapping, files)
    return files


@contextmanager
def _released_on_failure(files: Sequence[Place]) -> Iterator[None]:
    """Remote files are read by threads, which nobody would end where there is no checkpoint to close."""
    try:
        yield
    except BaseException:
        for file in files:
            if isinstance(file, Remote):
                file.close()
        raise


def _leads_here(path: Place) -> bool:
    """Whether a shard lies in its index's folder, links followed; or in the Hub's cache, which links to its blobs."""
    if not isinstance(path, Path) or not path.is_symlink():
        return True
    folder, real = path.parent.resolve(), path.resolve()
    blobs = folder.parent.parent / "blobs"
    return real.parent == folder or (folder.parent.name == "snapshots" and real.parent == blobs)


def _is_there(path: Place) -> bool:
    """False also for names that the system cannot have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _compare_index(index: Place, mapping: Mapping[str, str], files: list[Place]) -> None:
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
def opened(path: Place) -> Iterator[Checkpoint]:
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
    return _COMPACT.encode(document)
