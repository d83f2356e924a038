"""An output under its temporary names while it is filled, by this thread or by one beside it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from qconvert.convert.actions import Plan
from qconvert.convert.execute import Executor, Progress, Result
from qconvert.convert.identity import job_digest
from qconvert.convert.journal import Notes
from qconvert.convert.output import OutputFile, refuse_same_file
from qconvert.convert.shards import ShardWriter
from qconvert.convert.sidecars import Sidecars
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError
from qconvert.formats.header import Layout
from qconvert.kernels.api import Backend
from qconvert.kernels.select import deferred_backend

if TYPE_CHECKING:
    from qconvert.convert.calibration import Calibrator
    from qconvert.convert.job import Request


class _GivenUpError(Exception):
    """Nobody wants the output any more."""


class _Told:
    """Progress, kept until there is somebody to tell. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold = 0
        self._listener: Progress | None = None

    def __call__(self, done: int) -> None:
        with self._lock:
            if self._listener is None:
                self._untold += done
                return
            listener = self._listener
        listener(done)

    def to(self, listener: Progress) -> None:
        with self._lock:
            self._listener = listener
            untold = self._untold
        listener(untold)


class Writing:
    """Context manager: opens every file of an output at once, so that space and names are checked before any work.

    Leaving it without `commit` removes every trace, or keeps what `--resume` needs (see `OutputFile`, also for
    `draft`).
    """

    def __init__(
        self,
        request: Request,
        checkpoint: Checkpoint,
        plan: Plan,
        laid: Layout,
        path: Path,
        sidecars: dict[str, bytes],
        draft: bool = False,
    ) -> None:
        self._draft = draft
        self._request, self._checkpoint, self._plan = request, checkpoint, plan
        self.folder, self._sidecars = path.parent, sidecars
        self.writer = ShardWriter(plan, laid, path, request.shard_size)
        self.backend: Backend = deferred_backend(request.backend)
        self.jobs = request.jobs or os.cpu_count() or 1
        self._stack = ExitStack()
        self._told = _Told()
        self._thread: threading.Thread | None = None
        self._executor: Executor | None = None
        #: Of what the thread and whoever gives it up know of each other.
        self._lock = threading.Lock()
        self._given_up = self._entered = False
        self._results: dict[str, Result] = {}
        self._error: BaseException | None = None

    def __enter__(self) -> Writing:
        local = self._checkpoint.local_files
        for name, _, _ in self.writer.parts:
            refuse_same_file(local, self.folder / name)
        request = self._request
        with ExitStack() as stack:
            self.beside = stack.enter_context(
                Sidecars(self.folder, self._sidecars | self.writer.index, force=request.force)
            )
            self._calibrate = _calibration(stack, request, self._plan, self.backend)
            self.outs = self.writer.open(
                stack,
                lambda part: job_digest(part, self._checkpoint),
                force=request.force,
                resume=request.resume,
                mode_of=next(iter(local), None),
                draft=self._draft,
            )
            self._stack = stack.pop_all()
        self.taken_over = sum(len(out.journal.known()) for out in self.outs)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._given_up = True
            entered = self._entered
        # A thread whose start was interrupted cannot be waited for; should it begin yet, it ends at once.
        if self._thread is not None and entered:
            if self._executor is not None:
                self._executor.stop(_GivenUpError())
            self._thread.join()
        self._stack.__exit__(kind, value, trace)

    def start(self) -> None:
        """Fill the output in a thread of its own."""
        self._thread = threading.Thread(target=self._try, daemon=True)
        self._thread.start()

    def _try(self) -> None:
        with self._lock:
            if self._given_up:
                return
            self._entered = True
        try:
            self._results = self._run()
        except BaseException as error:
            self._error = error

    def results(self, progress: Progress) -> dict[str, Result]:
        """Fill the output, or wait until the thread of `start` has; energies per transformed layer.

        Raises the first error of any piece.
        """
        self._told.to(progress)
        if self._thread is None:
            return self._run()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results

    def _run(self) -> dict[str, Result]:
        if self._request.engine == "ray":
            from qconvert.convert.engine_ray import run_on_ray

            return run_on_ray(
                self._request, self._checkpoint, self.writer, self.outs, self._make_executor, self._told
            )
        return self.writer.run(self.outs, self._make_executor)

    def _make_executor(self, part: Layout, out: OutputFile, notes: Notes | None = None) -> Executor:
        self._executor = Executor(
            self._checkpoint,
            part,
            out,
            self.backend,
            quality=self._plan.quality,
            jobs=self.jobs,
            progress=self._told if notes is None else lambda done: None,
            memory=self._request.memory,
            journal=notes or out.journal,
            calibrator=self._calibrate(),
        )
        if self._given_up:
            # Between two files, or before the first.
            raise _GivenUpError
        return self._executor

    def commit(self) -> None:
        """Put everything under its final names, or nothing."""
        try:
            for out in self.outs:
                out.commit()
            self.beside.commit()
        except BaseException:
            for out in self.outs:
                out.withdraw()
            raise


def _calibration(
    stack: ExitStack, request: Request, plan: Plan, backend: Backend
) -> Callable[[], Calibrator | None]:
    """What makes a file's calibrator; it makes none where nothing was recorded."""
    if request.calibration is None:
        return lambda: None
    from qconvert.convert.calibration import Calibration, Calibrator

    calibration = stack.enter_context(closing(Calibration(request.calibration)))
    return lambda: Calibrator(calibration, plan, backend)


class HeadStart:
    """Context manager: writing that begins from a draft of the plan, before all is known that decides the plan.

    Where the plan comes out as drafted, which its header tells to the bit, its writing is taken over; where it does
    not, or is never asked for, nothing is left of it.
    """

    def __init__(self, make: Callable[[Plan, Layout], Writing]) -> None:
        self._make = make
        self._begun: tuple[Writing, bytes] | None = None
        #: Folders that there were not before, inner ones first.
        self._new_folders: list[Path] = []

    def begin(self, plan: Plan, laid: Layout) -> None:
        """Start to write. What stands against it is no error here: it is told once the plan stands."""
        try:
            writing = self._make(plan, laid)
            folders = (writing.folder, *writing.folder.parents)
            self._new_folders = [folder for folder in folders if not os.access(folder, os.F_OK)]
            writing.__enter__()
        except QConvertError:
            self._remove_folders()
            return
        self._begun = writing, laid.prefix
        writing.start()

    def taken(self, laid: Layout) -> Writing | None:
        """The writing of exactly this output; the caller leaves it. Raises QConvertError (no space, I/O error)."""
        if self._begun is None or self._begun[1] != laid.prefix:
            self.__exit__(None, None, None)
            return None
        writing = self._begun[0]
        for out in writing.outs:
            out.settle_on()
        self._begun, self._new_folders = None, []
        return writing

    def __enter__(self) -> HeadStart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun is not None:
            writing, self._begun = self._begun[0], None
            writing.__exit__(kind, value, trace)
        self._remove_folders()

    def _remove_folders(self) -> None:
        """Those that are empty: anything that appeared in them meanwhile stays."""
        for folder in self._new_folders:
            with suppress(OSError):
                folder.rmdir()
        self._new_folders = []
