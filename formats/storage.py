"""Where a checkpoint's bytes come from: a local file or a remote one, behind the same few calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from qconvert.formats.errors import QConvertError
from qconvert.formats.remote import Place, RemoteBytes


class Storage(Protocol):
    """An open file."""

    @property
    def fd(self) -> int | None:
        """The descriptor, where the system has one."""
        ...

    def read_into(self, view: memoryview, start: int) -> int:
        """Some bytes from `start` on, at least one unless the file ends there. Raises OSError, QConvertError."""
        ...

    def state(self) -> str:
        """Names this version of the file: size and time, or size and etag."""
        ...

    def check_unchanged(self) -> None:
        """Raises QConvertError when the file is no longer what was opened."""
        ...

    def close(self) -> None: ...


def open_storage(file: Place) -> Storage:
    """Open for reading. Raises OSError."""
    return LocalStorage(file) if isinstance(file, Path) else RemoteStorage(file.bytes())


class LocalStorage:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._identity = self._now()

    def _now(self) -> tuple[int, int]:
        stat = os.fstat(self._fd)
        return stat.st_size, stat.st_mtime_ns

    @property
    def fd(self) -> int | None:
        return self._fd

    def read_into(self, view: memoryview, start: int) -> int:
        return _pread_into(self._fd, view, start)

    def state(self) -> str:
        size, time = self._identity
        return f"{size}:{time}"

    def check_unchanged(self) -> None:
        if self._now() != self._identity:
            raise QConvertError("the source changed while it was being read", file=str(self._file))

    def close(self) -> None:
        os.close(self._fd)


class RemoteStorage:
    def __init__(self, source: RemoteBytes) -> None:
        self._source = source

    @property
    def fd(self) -> int | None:
        return None

    def read_into(self, view: memoryview, start: int) -> int:
        return self._source.read_into(view, start)

    def state(self) -> str:
        return f"{self._source.first.st_size}:{self._source.first.version}"

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()


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
