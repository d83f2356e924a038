"""The file being written: a temporary one beside the target, preallocated, fsynced, renamed at the end."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from qconvert.convert.journal import Journal
from qconvert.convert.writeback import Writer
from qconvert.formats.digest import Checksums
from qconvert.formats.errors import QConvertError, TransferError, UsageError

#: Room beyond the payload that must be free, for the file system's own needs.
_SLACK_BYTES = 1 << 20


#: Whether a file can be renamed and removed while it is open: not on Windows.
RENAMES_OPEN_FILES = sys.platform != "win32"
#: Said where a part of the output is kept.
RESUME = "the same command with --resume continues"


#: Bytes that file systems take in a name.
_LONGEST_NAME = 255


def unfinished(path: Path) -> tuple[Path, Path]:
    """The partial file and the journal of an output, beside it; of a name that leaves no room, under its digest."""
    name = path.name
    if len(os.fsencode(name)) + len(".") + len(".partial") > _LONGEST_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return path.with_name(f".{name}.partial"), path.with_name(f".{name}.journal")


def refuse_same_file(sources: list[Path], target: Path) -> None:
    """Raise UsageError when the target is one of the sources: same path, hard link, or symbolic link to it."""
    for source in sources:
        same = source.resolve() == target.resolve()
        if not same and target.exists():
            same = source.samefile(target)
        if same:
            raise UsageError(
                "source and target are the same file", file=str(target), hint="name another file with -o"
            )


class LockedError(QConvertError):
    """Another run holds the target."""


if sys.platform == "win32":
    import msvcrt

    def lock(descriptor: int, path: Path) -> None:
        """Hold the partial file for this process. Raises LockedError when another one does."""
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            raise LockedError("another qconvert is writing this file", file=str(path)) from None

else:
    import fcntl

    def lock(descriptor: int, path: Path) -> None:
        """Hold the partial file for this process. Raises LockedError when another one does."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError("another qconvert is writing this file", file=str(path)) from None


class OutputFile:
    """Context manager. `commit` puts the file under its final name; leaving by an error removes every trace.

    A kill, an interruption by the user, or a TransferError leaves `.NAME.partial` and its journal for `--resume`.
    `digest` names what is being made (see `Journal`). Of a `draft` nothing is left for `--resume` before `settle_on`:
    another output may be wanted in the end. Two runs on one target exclude each other by a lock on the
    partial file.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        *,
        digest: str,
        force: bool,
        resume: bool,
        mode_of: Path | None = None,
        draft: bool = False,
    ) -> None:
        self.path = path
        self.size = size
        self.temporary, notes = unfinished(path)
        self.journal = Journal(notes, digest, self.flush)
        self._mode_of = mode_of
        self._force = force
        self._resume = resume
        self._draft = draft
        self._fd = -1
        self._writer: Writer
        #: Told of everything that is written, where all of it goes through here.
        self.checksums: Checksums | None = None
        self._done = False

    def __enter__(self) -> OutputFile:
        folder = self.path.parent
        self._refuse_existing()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            began = self._open()
            self._writer = Writer(self._fd)
        except OSError as error:
            self._discard(keep=True)
            raise self._failed(error) from None
        except LockedError:
            self._discard(keep=True)
            raise
        try:
            # A run that held the lock until now may have finished the file.
            self._refuse_existing()
            self.journal.begin(self._resume, intact=began, draft=self._draft)
            self._require_space(folder)
            self._preallocate()
        except OSError as error:
            self._discard(keep=self._resume)
            raise self._failed(error) from None
        except BaseException:
            self._discard(keep=self._resume)
            raise
        return self

    def _refuse_existing(self) -> None:
        if self.path.is_dir():
            raise UsageError("is a folder", file=str(self.path))
        if self.path.exists() and not self.path.is_file():
            raise UsageError("is a device or a pipe, no file", file=str(self.path))
        if self.path.exists() and not self._force:
            raise UsageError("already exists", file=str(self.path), hint="--force overwrites it")

    def _open(self) -> bool:
        """Open and lock the partial file; whether it is one that an earlier run had laid out.

        The lock is on what was opened, which a run that ends at this moment may have renamed or removed: such a
        file is let go and the name opened again.
        """
        # In a shared folder somebody may have put a link there that leads to a file of ours.
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
        while True:
            self._fd = os.open(self.temporary, flags, 0o666)
            lock(self._fd, self.path)
            mine = os.fstat(self._fd)
            if mine.st_nlink > 1:
                # Killed between linking the final name and removing this one: the bytes are the finished file's.
                self.temporary.unlink()
            elif self._is_at(mine):
                if self._resume or not mine.st_size:
                    return mine.st_size == self.size
                # Begun anew in a new file: a lost worker of the run before may still write to the old one.
                self.temporary.unlink()
            os.close(self._fd)
            self._fd = -1

    def _is_at(self, mine: os.stat_result) -> bool:
        try:
            return os.path.samestat(mine, self.temporary.stat())
        except FileNotFoundError:
            return False

    def _require_space(self, folder: Path) -> None:
        have = os.fstat(self._fd)
        free = shutil.disk_usage(folder).free + getattr(have, "st_blocks", 0) * 512
        if free < self.size + _SLACK_BYTES:
            raise QConvertError(
                "not enough space for the output",
                file=str(folder),
                found=f"{free / 1e9:.2f} GB free",
                expected=f"{(self.size + _SLACK_BYTES) / 1e9:.2f} GB",
            )

    def _preallocate(self) -> None:
        if hasattr(os, "posix_fallocate") and self.size:
            try:
                os.posix_fallocate(self._fd, 0, self.size)
                os.ftruncate(self._fd, self.size)
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
        try:
            size = self._writer.write(data, offset)
        except OSError as error:
            raise self._failed(error) from None
        if self.checksums is not None:
            self.checksums.wrote(offset, size)

    def wrote(self, offset: int, size: int) -> None:
        """Somebody else, the kernel it may be, wrote these bytes through `fd`."""
        self._writer.wrote(offset, size)
        if self.checksums is not None:
            self.checksums.wrote(offset, size)

    def read(self, offset: int, size: int) -> bytes:
        """What was written there. Raises QConvertError (I/O error, no such bytes)."""
        data = b""
        while len(data) < size:
            try:
                more = os.pread(self._fd, size - len(data), offset + len(data))
            except OSError as error:
                raise self._failed(error) from None
            if not more:
                raise QConvertError(
                    "the unfinished output became shorter while it was written",
                    file=str(self.path),
                    found=f"end at {offset + len(data)}",
                    expected=f"byte {offset + size}",
                )
            data = data + more if data else more
        return data

    def flushing(self) -> AbstractContextManager[None]:
        """While bytes are written: the device is kept busy (see `Writer.flushing`)."""
        return self._writer.flushing(self.path.parent)

    def flush(self) -> None:
        """Everything written so far is on the device."""
        try:
            getattr(os, "fdatasync", os.fsync)(self._fd)
        except OSError as error:
            raise self._failed(error) from None

    def settle_on(self) -> None:
        """This is the output that is made: no draft any more. Raises QConvertError."""
        try:
            self.journal.settle_on()
        except OSError as error:
            raise self._failed(error) from None

    def commit(self) -> None:
        """Flush to the device and rename; the folder is flushed too, so that the name survives a power cut."""
        # A device reports an error of writing once: to the flush that ran beside the work, it may be.
        self.journal.settle()
        try:
            if self._mode_of is not None:
                # File systems without permissions refuse it; the bytes are as right without.
                with contextlib.suppress(OSError):
                    self.temporary.chmod(stat.S_IMODE(self._mode_of.stat().st_mode))
            os.fsync(self._fd)
            if not RENAMES_OPEN_FILES:
                self._close()
            if self._force:
                self.temporary.replace(self.path)
            else:
                # A hard link refuses an existing name, so another run cannot be overwritten in between.
                self._publish_new()
        except OSError as error:
            raise self._failed(error) from None
        self._done = True
        with contextlib.suppress(OSError):
            self.journal.remove()
        # The lock goes last: who waits for it must find the file finished and the journal gone.
        self._close()
        with contextlib.suppress(OSError):
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def withdraw(self) -> None:
        """Take back what `commit` put under a name that was free: another file of the same output failed."""
        if self._done and not self._force:
            with contextlib.suppress(OSError):
                self.path.unlink()

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
        # The file is there; another name of it does no harm, and the next run removes it.
        with contextlib.suppress(OSError):
            self.temporary.unlink()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _discard(self, keep: bool = False) -> None:
        if keep:
            # What cannot be noted any more is done again by --resume.
            with contextlib.suppress(OSError, QConvertError):
                self.journal.note_all()
        self.journal.close()
        if not RENAMES_OPEN_FILES:
            self._close()
        if not keep:
            # Journal first: a journal alone would be believed by nobody, but should not lie about either.
            with contextlib.suppress(OSError):
                self.journal.remove()
            with contextlib.suppress(OSError):
                self.temporary.unlink()
        self._close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._done:
            passing = (
                kind is not None
                and not self.journal.draft
                and (not issubclass(kind, Exception) or issubclass(kind, TransferError))
            )
            self._discard(keep=passing)
            if passing and isinstance(value, TransferError):
                value.hint = value.hint or RESUME
            elif passing and value is not None:
                value.add_note(RESUME)
