"""What runs on a cluster's workers: some units of a plan, into the byte ranges that are theirs.

Imports no ray: a worker is handed a plan and numbers of units, and hands back what a journal would note.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qconvert.convert.actions import Plan
from qconvert.convert.backends import required_backend
from qconvert.convert.calibration import Calibrator, opened_calibration
from qconvert.convert.execute import Executor
from qconvert.convert.identity import job_digest
from qconvert.convert.journal import Record
from qconvert.convert.units import Unit, make_units
from qconvert.convert.writeback import Writer
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError, TransferError
from qconvert.formats.header import Layout
from qconvert.formats.remote import Place

import qconvert


@dataclass(frozen=True)
class Work:
    """One output file of one job, as a worker needs to know it. `digest`: see `job_digest`."""

    version: str
    digest: str
    source: Place
    files: tuple[Place, ...]
    partial: Path
    plan: Plan
    laid: Layout
    backend: str
    threads: int
    memory: int
    calibration: Path | None


class Notebook:
    """A journal in memory. Thread-safe."""

    def __init__(self, known: Sequence[Record] = ()) -> None:
        self._known = {record["key"]: record for record in known}
        self.added: list[Record] = []
        self._lock = threading.Lock()

    def done(self, key: str) -> Record | None:
        return self._known.get(key)

    def add(self, key: str, **facts: Any) -> None:
        with self._lock:
            self.added.append({"key": key, **facts})


class SharedOutput:
    """The partial file that the driver made. Not locked: the driver holds the lock for all."""

    def __init__(self, path: Path, prefix: bytes) -> None:
        self.path = path
        try:
            # Never created here: without the driver's file there is nothing to work for.
            self._fd = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise QConvertError(
                f"the output cannot be opened by a worker: {error.strerror or error}",
                file=str(path),
                hint="all nodes must see source and output under the same paths",
            ) from None
        if os.pread(self._fd, len(prefix), 0) != prefix:
            os.close(self._fd)
            raise QConvertError("the output is another one than this worker was told of", file=str(path))
        self._writer = Writer(self._fd)

    @property
    def fd(self) -> int:
        return self._fd

    def write(self, data: memoryview | bytes, offset: int) -> None:
        try:
            self._writer.write(data, offset)
        except OSError as error:
            raise TransferError(
                f"cannot be written: {error.strerror or error}", file=str(self.path)
            ) from None

    def wrote(self, offset: int, size: int) -> None:
        self._writer.wrote(offset, size)

    def close(self) -> None:
        """Flushed first: who hears that a piece is done reads it on another machine."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise TransferError(
                f"cannot be written: {error.strerror or error}", file=str(self.path)
            ) from None
        finally:
            os.close(self._fd)


class _Opened:
    """What the last task of this process left open; tasks of one job follow each other."""

    def __init__(self, work: Work) -> None:
        self.work = work
        if work.version != qconvert.__version__:
            raise QConvertError(
                "a worker runs another version of qconvert", found=qconvert.__version__, expected=work.version
            )
        self.stack = ExitStack()
        self.checkpoint = self.stack.enter_context(Checkpoint(work.source, work.files))
        if job_digest(work.laid, self.checkpoint) != work.digest:
            self.stack.close()
            raise QConvertError(
                "a worker sees another source than the driver, or another version of it",
                file=str(work.source),
            )
        self.backend = required_backend(work.backend, f"a worker's --backend {work.backend}")
        calibration = self.stack.enter_context(opened_calibration(work.calibration))
        self.calibrator = Calibrator(calibration, work.plan, self.backend) if calibration else None
        self.units: list[Unit] = make_units(work.plan, work.laid)


_opened: _Opened | None = None


def run_units(work: Work, numbers: Sequence[int], known: Sequence[Record]) -> list[Record]:
    """Write the units of these numbers; records of the finished pieces. `known`: pieces that were done before."""
    global _opened
    if _opened is None or (_opened.work.digest, _opened.work.partial) != (work.digest, work.partial):
        if _opened is not None:
            _opened.stack.close()
            _opened = None
        _opened = _Opened(work)
    state, notes = _opened, Notebook(known)
    out = SharedOutput(work.partial, work.laid.prefix)
    try:
        Executor(
            state.checkpoint,
            work.laid,
            out,
            state.backend,
            quality=work.plan.quality,
            jobs=work.threads,
            progress=lambda done: None,
            memory=work.memory,
            journal=notes,
            calibrator=state.calibrator,
        ).run([state.units[number] for number in numbers])
        state.checkpoint.check_unchanged()
    finally:
        out.close()
    return notes.added
