"""The file being written: a temporary one beside the target, preallocated, fsynced, renamed at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path
from types import TracebackType

from qconvert.formats.errors import QConvertError, UsageError

#: Room beyond the payload that must be free, for the file system's own needs.
_SLACK_BYTES = 1 << 20


def refuse_same_file(sources: list[Path], target: Path) -> None:
    """Raise UsageError when the target is one of the sources: same path, hard link, or symbolic link to it."""
    for source in sources:
        same = source.resolve() == target.resolve()
        if not same and target.exists():
            same = source.samefile(target)
        if same:
            raise UsageError("source and target are the same file", file=str(target))


class OutputFile:
    """Context manager. `commit` puts the file under its final name; leaving without it removes every trace."""

    def __init__(self, path: Path, size: int, *, force: bool, mode_of: Path | None = None) -> None:
        self.path = path
        self.size = size
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._mode_of = mode_of
        self._force = force
        self._fd = -1
        self._done = False

    def __enter__(self) -> OutputFile:
        folder = self.path.parent
        if self.path.exists() and not self._force:
            raise UsageError("already exists", file=str(self.path), hint="--force overwrites it")
        if self.path.is_dir():
            raise UsageError("is a folder", file=str(self.path))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            raise QConvertError(f"cannot be written: {error.strerror}", file=str(folder)) from None
        if free < self.size + _SLACK_BYTES:
            raise QConvertError(
                "not enough space for the output",
                file=str(folder),
                found=f"{free / 1e9:.2f} GB free",
                expected=f"{(self.size + _SLACK_BYTES) / 1e9:.2f} GB",
            )
        try:
            self._fd = os.open(
                self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
            )
            self._preallocate()
        except OSError as error:
            self._discard()
            raise self._failed(error) from None
        return self

    def _preallocate(self) -> None:
        if hasattr(os, "posix_fallocate") and self.size:
            try:
                os.posix_fallocate(self._fd, 0, self.size)
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
                    raise
        os.ftruncate(self._fd, self.size)

    def _failed(self, error: OSError) -> QConvertError:
        return QConvertError(f"cannot be written: {error.strerror or error}", file=str(self.path))

    @property
    def fd(self) -> int:
        return self._fd

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """All of `data` at `offset`. Safe from several threads. Raises QConvertError (no space, I/O error)."""
        view = memoryview(data).cast("B")
        try:
            while view:
                done = os.pwrite(self._fd, view, offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            raise self._failed(error) from None

    def commit(self) -> None:
        """Flush to the device and rename; the folder is flushed too, so that the name survives a power cut."""
        try:
            if self._mode_of is not None:
                self.temporary.chmod(stat.S_IMODE(self._mode_of.stat().st_mode))
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
            if self._force:
                self.temporary.replace(self.path)
            else:
                # A hard link refuses an existing name, so another run cannot be overwritten in between.
                self._publish_new()
        except OSError as error:
            raise self._failed(error) from None
        self._done = True
        with contextlib.suppress(OSError):
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _publish_new(self) -> None:
        try:
            os.link(self.temporary, self.path)
        except FileExistsError:
            raise
        except OSError:
            # File systems without hard links: the plain rename, after a last look.
            if self.path.exists():
                raise FileExistsError(errno.EEXIST, "appeared while converting", str(self.path)) from None
            self.temporary.replace(self.path)
            return
        self.temporary.unlink()

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            self.temporary.unlink()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._done:
            self._discard()
