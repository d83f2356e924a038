"""An output under its temporary names while it is filled, by this thread or by one beside it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
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

    Leaving it without `commit` removes every trace, or keeps what `--resume` needs (see `OutputFile`).
    """

    def __init__(
        self,
        request: Request,
        checkpoint: Checkpoint,
        plan: Plan,
        laid: Layout,
        path: Path,
        sidecars: dict[str, bytes],
    ) -> None:
        self._request, self._checkpoint, self._plan = request, checkpoint, plan
        self._folder, self._sidecars = path.parent, sidecars
        self.writer = ShardWriter(plan, laid, path, request.shard_size)
        self.backend: Backend = deferred_backend(request.backend)
        self.jobs = request.jobs or os.cpu_count() or 1
        self._stack = ExitStack()
        self._told = _Told()
        self._thread: threading.Thread | None = None
        self._executor: Executor | None = None
        self._given_up = False
        self._results: dict[str, Result] = {}
        self._error: BaseException | None = None

    def __enter__(self) -> Writing:
        local = self._checkpoint.local_files
        for name, _, _ in self.writer.parts:
            refuse_same_file(local, self._folder / name)
        request = self._request
        with ExitStack() as stack:
            self.beside = stack.enter_context(
                Sidecars(self._folder, self._sidecars | self.writer.index, force=request.force)
            )
            self._calibrate = _calibration(stack, request, self._plan, self.backend)
            self.outs = self.writer.open(
                stack,
                lambda part: job_digest(part, self._checkpoint),
                force=request.force,
                resume=request.resume,
                mode_of=next(iter(local), None),
            )
            self._stack = stack.pop_all()
        self.taken_over = sum(len(out.journal.known()) for out in self.outs)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._given_up = True
            if self._executor is not None:
                self._executor.stop(_GivenUpError())
            self._thread.join()
        self._stack.__exit__(kind, value, trace)

    def start(self) -> None:
        """Fill the output in a thread of its own."""
        self._thread = threading.Thread(target=self._try, daemon=True)
        self._thread.start()

    def _try(self) -> None:
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

    def begin(self, plan: Plan, laid: Layout) -> None:
        """Start to write. What stands against it is no error here: it is told once the plan stands."""
        try:
            writing = self._make(plan, laid).__enter__()
        except QConvertError:
            return
        self._begun = writing, laid.prefix
        writing.start()

    def taken(self, laid: Layout) -> Writing | None:
        """The writing of exactly this output; the caller leaves it."""
        if self._begun is None or self._begun[1] != laid.prefix:
            self.__exit__(None, None, None)
            return None
        writing, self._begun = self._begun[0], None
        return writing

    def __enter__(self) -> HeadStart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun is not None:
            writing, self._begun = self._begun[0], None
            writing.__exit__(kind, value, trace)
