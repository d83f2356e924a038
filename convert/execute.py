"""Doing what a plan says: payload is read once (twice where a whole-tensor statistic is needed), written once.

Units are cut into pieces of about a megaelement by rows; pieces run on a pool of threads (the kernels release the
GIL). Every piece reads its own rows, computes, and writes at its own offsets, so results do not depend on the
split. A layer whose format needs a statistic of the whole tensor queues its encoding pieces when its last
statistics piece is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qconvert.convert.actions import Action, PartOut
from qconvert.convert.copying import Target, copy_run
from qconvert.convert.heap import keep_freed_buffers
from qconvert.convert.journal import Notes, Record
from qconvert.convert.units import ConstUnit, CopyUnit, LayerUnit, Unit
from qconvert.formats.base import Codes
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError
from qconvert.formats.header import Layout
from qconvert.formats.reader import LayerReader
from qconvert.formats.values import change_basis, input_factor
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, Array, np
from qconvert.kernels.search import SCALE_FLOOR

if TYPE_CHECKING:
    from qconvert.convert.calibration import Calibrator

#: Elements of a piece: large enough to hide Python's overhead, small enough for the cache.
PIECE_ELEMENTS = 1 << 20
#: Bytes that a piece holds at its peak for each of its elements: source, float32 before and after a rotation,
#: codes, and the values decoded again to measure the error.
BYTES_PER_ELEMENT = 24
#: Elements that a table or a tensor scale is fitted on at most.
SAMPLE_ELEMENTS = 1 << 18
SAMPLE_ROWS = 16
#: `--memory`: bytes of buffers.
DEFAULT_MEMORY = 512 << 20

Progress = Callable[[int], object]


#: Rows at the start of a layer's first and last piece that are read back from the finished file.
PROBE_ROWS = 128


class Probe(NamedTuple):
    """Rows [a, b) of a layer (of one expert) and their energies as computed, to be met by the file as written."""

    expert: int | None
    a: int
    b: int
    signal: float
    noise: float


@dataclass
class Result:
    """What a transformation did to a layer: energies in float64, summed in the order of the pieces."""

    signal: float = 0.0
    noise: float = 0.0
    probes: list[Probe] = field(default_factory=list)
    #: Rows that were not zero and became zero: smaller than the format's least scale.
    lost: int = 0


@dataclass
class _Task:
    """A layer's transformation in progress."""

    unit: LayerUnit
    reader: LayerReader
    rows: int
    parts: list[PartOut]
    factor: F32 | None
    todo: list[int] = field(default_factory=list)
    pending: int = 0
    unwritten: int = 0
    statistics: dict[int, Any] = field(default_factory=dict)
    common: Codes = field(default_factory=dict)
    energies: dict[int, tuple[float, float]] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)
    lost: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def action(self) -> Action:
        return self.unit.action

    def restore(self, a: int, record: Record) -> None:
        """Take over what an earlier run measured of the piece at row `a`."""
        if "energy" in record:
            signal, noise = record["energy"]
            self.energies[a] = (signal, noise)
        self.lost += record.get("lost", 0)
        if "probe" in record:
            b, signal, noise = record["probe"]
            self.probes.append(Probe(self.unit.expert, a, b, signal, noise))


class Executor:
    """Runs units of one plan into one output file."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        laid: Layout,
        out: Target,
        backend: Backend,
        *,
        quality: Literal["fast", "best"],
        jobs: int,
        progress: Progress,
        memory: int = DEFAULT_MEMORY,
        journal: Notes | None = None,
        calibrator: Calibrator | None = None,
    ) -> None:
        self.checkpoint, self.laid, self.out = checkpoint, laid, out
        self.backend, self.quality = backend, quality
        self.jobs, self.progress, self.memory = max(1, jobs), progress, memory
        self.journal = journal
        self.calibrator = calibrator
        self._queue: deque[Callable[[], None]] = deque()
        self._ready = threading.Condition()
        self._running = 0
        self._error: BaseException | None = None
        self._tasks: list[_Task] = []

    def run(self, units: Sequence[Unit]) -> dict[str, Result]:
        """Write the units; returns energies per transformed layer. Raises the first error of any piece."""
        keep_freed_buffers()
        self._fit_memory(units)
        for unit in units:
            if isinstance(unit, ConstUnit):
                # A few hundred bytes each: written again on resume rather than noted.
                self.out.write(unit.data, unit.offset)
            elif isinstance(unit, CopyUnit):
                if not self._skip(unit.key, unit.nbytes):
                    self._queue.append(self._copy_job(unit))
            else:
                self._queue_layer(unit)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self.jobs - 1)]
        for thread in threads:
            thread.start()
        try:
            self._work()
        except BaseException as error:
            self.stop(error)
            raise
        finally:
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        return self._results()

    def _fit_memory(self, units: Sequence[Unit]) -> None:
        """Fewer threads where the largest piece (128 rows of a very wide weight) times all threads is too much."""
        largest = max(
            (
                self._piece_rows(unit.action) * unit.action.layer.k
                for unit in units
                if isinstance(unit, LayerUnit)
            ),
            default=1,
        )
        self.jobs = max(1, min(self.jobs, self.memory // (max(largest, 1) * BYTES_PER_ELEMENT)))

    def _skip(self, key: str, nbytes: int) -> Record | None:
        """The record of a piece that an earlier run finished."""
        record = self.journal.done(key) if self.journal else None
        if record is not None:
            self.progress(nbytes)
        return record

    def _note(self, key: str, **facts: Any) -> None:
        if self.journal is not None:
            self.journal.add(key, **facts)

    # ---- the pool

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._queue and self._running and self._error is None:
                    self._ready.wait()
                if self._error is not None or not self._queue:
                    return
                job = self._queue.popleft()
                self._running += 1
            try:
                job()
            except BaseException as error:
                self.stop(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                with self._ready:
                    self._running -= 1
                    self._ready.notify_all()

    def stop(self, error: BaseException) -> None:
        """Begin no more pieces: `run` ends with the first error that it was told of."""
        with self._ready:
            if self._error is None:
                self._error = error
            self._ready.notify_all()

    def _push_front(self, jobs: list[Callable[[], None]]) -> None:
        # Encoding pieces go first: their rows may still be in the page cache from the statistics pass.
        with self._ready:
            self._queue.extendleft(reversed(jobs))
            self._ready.notify_all()

    # ---- plain bytes

    def _copy_job(self, unit: CopyUnit) -> Callable[[], None]:
        def job() -> None:
            copy_run(self.checkpoint, unit.file, unit.start, self.out, unit.offset, unit.nbytes)
            self._note(unit.key)
            self.progress(unit.nbytes)

        return job

    # ---- transformations

    def _queue_layer(self, unit: LayerUnit) -> None:
        action, layer = unit.action, unit.action.layer
        reader = LayerReader(self.checkpoint, layer, unit.expert)
        factor = input_factor(layer, reader, self.backend) if action.fold else None
        parts = [out for out in action.outputs if isinstance(out, PartOut)]
        task = _Task(unit, reader, self._piece_rows(action), parts, factor)
        self._tasks.append(task)
        todo = []
        for a in range(0, layer.n, task.rows):
            record = self._skip(f"{unit.key}@{a}", self._piece_bytes(task, a))
            if record is None:
                todo.append(a)
            else:
                task.restore(a, record)
        task.todo = todo
        statistic = action.codec.statistic(action.options) if action.kind != "repack" else "none"
        if not todo:
            return
        if statistic == "amax":
            starts = range(0, layer.n, task.rows)
            task.pending = len(starts)
            self._queue.extend(self._amax_job(task, a) for a in starts)
        elif statistic == "sample":
            self._queue.append(self._sample_job(task))
        else:
            self._queue.extend(self._encode_jobs(task))

    @staticmethod
    def _piece_bytes(task: _Task, a: int) -> int:
        layer = task.action.layer
        return task.unit.nbytes * (min(a + task.rows, layer.n) - a) // max(layer.n, 1)

    def _piece_rows(self, action: Action) -> int:
        layer = action.layer
        step = lcm(layer.codec.row_step(layer.options), action.codec.row_step(action.options))
        # A repack holds no float32: its pieces may be larger, and there is less to do around them.
        elements = 2 * PIECE_ELEMENTS if action.kind == "repack" else PIECE_ELEMENTS
        return max(step, elements // max(layer.k, 1) // step * step)

    def _values(self, task: _Task, a: int, b: int) -> F32:
        """Source rows [a, b) in the basis that the output is stored in, finite."""
        action, layer = task.action, task.action.layer
        codes = layer.codec.load(task.reader, a, b, self.backend)
        x = layer.codec.decode(codes, layer.options, self.backend)
        source, target = layer.codec.rotation(layer.options), action.codec.rotation(action.options)
        if task.factor is not None:
            x = change_basis(x, source, 0, self.backend) * task.factor
            source = 0
        return change_basis(x, source, target, self.backend)

    def _finite_amax(self, task: _Task, x: F32, a: int) -> float:
        peak = self.backend.amax(x)
        if not np.isfinite(peak):
            bad = np.argwhere(~np.isfinite(x))
            where = f"row {a + int(bad[0][0])}" if bad.size else f"rows from {a}"
            raise QConvertError(
                "weight holds NaN or Inf",
                file=str(self.checkpoint.files[task.action.layer.first.file]),
                layer=task.action.layer.prefix,
                found=f"{len(bad)} such values at {where}",
                hint=f"--keep '{task.action.layer.prefix}' leaves the layer as it is",
            )
        return peak

    def _amax_job(self, task: _Task, a: int) -> Callable[[], None]:
        def job() -> None:
            x = self._values(task, a, min(a + task.rows, task.action.layer.n))
            peak = self._finite_amax(task, x, a)
            with task.lock:
                task.statistics[a] = peak
                task.pending -= 1
                last = task.pending == 0
            if last:
                self._prepare(task, max(task.statistics.values()))

        return job

    def _sample_job(self, task: _Task) -> Callable[[], None]:
        def job() -> None:
            sample = self._sample(task)
            self._finite_amax(task, sample, 0)
            self._prepare(task, sample)

        return job

    def _sample(self, task: _Task) -> F32:
        """Rows in short runs, evenly through the layer."""
        layer = task.action.layer
        step = lcm(SAMPLE_ROWS, layer.codec.row_step(layer.options))
        blocks = -(-layer.n // step)
        count = max(1, min(blocks, SAMPLE_ELEMENTS // max(layer.k, 1) // step))
        picked = [block * blocks // count for block in range(count)]
        return np.concatenate([self._values(task, i * step, min((i + 1) * step, layer.n)) for i in picked])

    def _prepare(self, task: _Task, statistic: Any) -> None:
        action = task.action
        task.common = action.codec.prepare(statistic, action.options, self.backend, self.quality)
        if self.quality == "best" and action.codec.fits(action.options):
            self._push_front([self._fit_job(task)])
        else:
            self._push_front(self._encode_jobs(task))

    def _fit_job(self, task: _Task) -> Callable[[], None]:
        def job() -> None:
            action = task.action
            sample = self._sample(task)
            task.common = action.codec.fit(task.common, sample, action.options, self.backend)
            self._push_front(self._encode_jobs(task))

        return job

    def _encode_jobs(self, task: _Task) -> list[Callable[[], None]]:
        task.unwritten = len(task.todo)
        return [self._encode_job(task, a) for a in task.todo]

    def _encode_job(self, task: _Task, a: int) -> Callable[[], None]:
        def job() -> None:
            action, layer = task.action, task.action.layer
            b = min(a + task.rows, layer.n)
            facts: dict[str, Any] = {}
            if action.kind == "repack":
                codes = layer.codec.load(task.reader, a, b, self.backend)
            else:
                x = self._values(task, a, b)
                if not task.statistics:
                    self._finite_amax(task, x, a)
                codes = self._encode(task, x)
                y = action.codec.decode(codes, action.options, self.backend)
                energy = self.backend.error(x, y)
                if not np.isfinite(energy[1]):
                    raise QConvertError(
                        f"values do not fit {action.method}",
                        file=str(self.checkpoint.files[layer.first.file]),
                        layer=layer.prefix,
                        found=f"magnitude {self.backend.amax(x):.4g}",
                        hint="choose a wider --dtype or target",
                    )
                facts["energy"] = energy
                lost = lost_rows(codes, x, y)
                if lost:
                    facts["lost"] = lost
                if a == 0 or b == layer.n:
                    head = self.backend.error(x[:PROBE_ROWS], y[:PROBE_ROWS])
                    facts["probe"] = (min(a + PROBE_ROWS, b), *head)
            self._store(task, action.codec.store(codes, action.options, layer.k), a, b)
            self._note(f"{task.unit.key}@{a}", **facts)
            with task.lock:
                task.restore(a, facts)
                task.unwritten -= 1
                if not task.unwritten:
                    task.reader.release()
                    if self.calibrator is not None:
                        self.calibrator.release(action)
            self.progress(self._piece_bytes(task, a))

        return job

    def _encode(self, task: _Task, x: F32) -> Codes:
        action = task.action
        if self.calibrator is not None and self.calibrator.knows(action):
            carried = None if action.fold else input_factor(action.layer, task.reader, self.backend)
            return self.calibrator.encode(action, x, task.common, self.quality, carried)
        return action.codec.encode(x, task.common, action.options, self.backend, self.quality)

    def _store(self, task: _Task, arrays: dict[str, Array], a: int, b: int) -> None:
        layer = task.action.layer
        for out in task.parts:
            spec, array = out.part.spec, np.ascontiguousarray(arrays[out.part.suffix])
            offset, n = self.laid.offsets[out.name], layer.n
            if task.unit.expert is not None:
                offset += spec.nbytes // layer.experts * task.unit.expert
            if out.part.place == "whole":
                if a == 0:
                    self.out.write(array.reshape(-1).view(np.uint8).data, offset)
            elif out.part.place == "columns":
                # [C, N], or [C, N/m] where m columns are packed into one element.
                size, width = array.itemsize, spec.shape[-1]
                for c, run in enumerate(array):
                    self.out.write(run.view(np.uint8).data, offset + (c * width + a * width // n) * size)
            else:
                total = spec.nbytes // (layer.experts or 1)
                padded = -(-n // 128) * 128 if out.part.place == "tiles" else n
                self.out.write(array.reshape(-1).view(np.uint8).data, offset + total // padded * a)

    def _results(self) -> dict[str, Result]:
        results: dict[str, Result] = {}
        for task in self._tasks:
            result = results.setdefault(task.action.layer.prefix, Result())
            for a in sorted(task.energies):
                result.signal += task.energies[a][0]
                result.noise += task.energies[a][1]
            result.probes += sorted(task.probes, key=lambda probe: probe.a)
            result.lost += task.lost
        return results


def lost_rows(codes: Codes, x: F32, y: F32) -> int:
    """Rows of `x` that hold something and whose decoded `y` hold nothing, among those with the least row scale."""
    scale = codes.get("scale", codes.get("s_channel"))
    if scale is None or scale.shape[:1] != x.shape[:1] or scale.dtype != np.float32:
        return 0
    least = np.flatnonzero(scale.reshape(len(x), -1).max(axis=1) <= np.float32(16 * SCALE_FLOOR))
    return int(np.count_nonzero(x[least].any(axis=1) & ~y[least].any(axis=1))) if least.size else 0
