"""What is already written: pieces of an output, noted beside it so that a killed run can be continued.

A journal is a text file of JSON lines. The first names what is being made (a digest over source headers, plan and
version); each further line is a finished piece. A piece is noted only after its bytes were flushed to the device,
so that neither a kill nor a power cut can make a hole that the journal calls written.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from qconvert.formats.checkpoint import dumps
from qconvert.formats.errors import QConvertError

#: Seconds between flushes: what a killed run loses at most, beside a flush's own time. Each costs: writers wait for it.
FLUSH_SECONDS = 3.0

Record = dict[str, Any]


class StaleError(QConvertError):
    """What there is to resume was made from something else."""


class Notes(Protocol):
    """What an executor needs of a journal."""

    def done(self, key: str) -> Record | None: ...

    def add(self, key: str, **facts: Any) -> None: ...


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Journal:
    """Finished pieces by key. Thread-safe. `flush` makes the output's bytes durable."""

    def __init__(self, path: Path, digest: str, flush: Callable[[], None]) -> None:
        self.path = path
        self.digest = digest
        self._flush = flush
        self._done: dict[str, Record] = {}
        self._waiting: list[Record] = []
        self._lock = threading.Lock()
        self._last = time.monotonic()
        #: Whether all is written: what waits is noted without waiting for its time.
        self._ending = False
        self._noting: threading.Thread | None = None
        self._error: BaseException | None = None
        self._fd = -1
        #: Whether another output may be wanted in the end: nothing is noted, and there is nothing to resume.
        self.draft = False

    def begin(self, resume: bool, intact: bool = True, draft: bool = False) -> None:
        """Start anew, or (`resume`) take over what an earlier run noted. `intact`: the bytes it speaks of are there.

        `draft`: pieces wait until `settle_on` says that it is this output that is made.

        Raises StaleError when there is something to resume that belongs to another source, plan or version.
        """
        keep = 0
        if resume and self.path.exists():
            keep = self._load()
            if not intact:
                keep, self._done = 0, {}
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        # A line cut off by the kill goes; what follows starts on a line of its own.
        os.ftruncate(self._fd, keep)
        os.lseek(self._fd, keep, os.SEEK_SET)
        self.draft = draft
        if not keep and not draft:
            self._write_head()

    def _write_head(self) -> None:
        # Not flushed: a journal without its first line is not believed, and the run then starts anew.
        os.write(self._fd, (dumps({"qconvert": self.digest}) + "\n").encode())

    def settle_on(self) -> None:
        """What was begun as a draft is what is made: from now on it can be resumed. Raises OSError."""
        with self._lock:
            self._write_head()
            self.draft = False

    def _load(self) -> int:
        data = self.path.read_bytes()
        keep, records = 0, []
        for line in data.splitlines(keepends=True):
            record = _parsed(line)
            # Cut off by a kill, or (after a power cut) blocks that were never written: what follows is not trusted.
            if record is None or (keep and not isinstance(record.get("key"), str)):
                break
            records.append(record)
            keep += len(line)
        if not records:
            return 0
        if records[0].get("qconvert") != self.digest:
            raise StaleError(
                "--resume: the unfinished output was made from another source, plan or version",
                file=str(self.path),
                hint="run without --resume to start anew",
            )
        self._done = {record["key"]: record for record in records[1:]}
        return keep

    def done(self, key: str) -> Record | None:
        """The record of a finished piece, None when it is still to do."""
        return self._done.get(key)

    def known(self) -> list[Record]:
        """The records of all pieces that an earlier run finished."""
        return list(self._done.values())

    def add(self, key: str, **facts: Any) -> None:
        """Note a piece whose bytes were handed to the system. Raises what an earlier flush raised."""
        with self._lock:
            self._raise()
            self._waiting.append({"key": key, **facts})
            if not self.draft and time.monotonic() - self._last >= FLUSH_SECONDS:
                self._begin()

    def begin_flush(self) -> None:
        """All is written: let the device take it while the caller does something else."""
        with self._lock:
            self._ending = True
            self._begin()

    def _begin(self) -> None:
        if self._noting is None:
            self._noting = threading.Thread(target=self._note, daemon=True)
            self._noting.start()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _note(self) -> None:
        """Flush beside the work, and note what was finished before."""
        while True:
            with self._lock:
                ready, self._waiting = self._waiting, []
                due = self._ending or time.monotonic() - self._last >= FLUSH_SECONDS
                if not (ready and due) or self._error is not None:
                    self._waiting = ready
                    self._noting = None
                    return
            try:
                self._write(ready)
            except BaseException as error:
                self._error = error
            self._last = time.monotonic()

    def _write(self, ready: list[Record]) -> None:
        self._flush()
        try:
            os.write(self._fd, "".join(dumps(record) + "\n" for record in ready).encode())
        except OSError as error:
            problem = f"cannot be written: {error.strerror or error}"
            raise QConvertError(problem, file=str(self.path)) from None

    def settle(self) -> None:
        """Wait for the flush that is under way. Raises what it, or one before it, raised."""
        noting = self._noting
        if noting is not None:
            noting.join()
        self._raise()

    def note_all(self) -> None:
        """Note everything added so far: a run that is given up for now loses nothing."""
        self.settle()
        ready, self._waiting = self._waiting, []
        if ready and self._fd >= 0:
            self._write(ready)

    def close(self) -> None:
        """Give up the file's handle; pieces not yet noted are forgotten."""
        noting = self._noting
        if noting is not None:
            noting.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """The output is complete, or given up."""
        self.close()
        self.path.unlink(missing_ok=True)
