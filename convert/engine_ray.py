"""`--engine ray`: one output's units spread over a Ray cluster whose nodes share a file system.

Ray schedules, retries and notices lost nodes. The driver plans, lays the file out, hands out units, notes what is
done in the same journal as a local run, and proves and commits the result. A unit that is done twice, because its
worker was lost or only believed to be, writes the same bytes to the same place twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from qconvert.convert.execute import Executor, Result
from qconvert.convert.identity import job_digest
from qconvert.convert.journal import Journal, Notes, Record
from qconvert.convert.output import OutputFile
from qconvert.convert.ray_worker import Notebook, Work, run_units
from qconvert.convert.shards import ShardWriter
from qconvert.convert.units import ConstUnit, Unit, make_units
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError, TransferError
from qconvert.formats.header import Layout
from qconvert.formats.remote import Place

import qconvert

if TYPE_CHECKING:
    from qconvert.convert.job import Request

#: Source bytes of a task: seconds of work, so that starting one costs little and losing one loses little.
TASK_BYTES = 128 << 20
#: How often a task is begun again after its worker or node was lost, or the network failed.
RETRIES = 10
#: A worker's own needs beside `--memory`: Python, numpy, the compiled kernels.
WORKER_BYTES = 300 << 20
_ON_CPU = ("cpu", "reference")

MakeExecutor = Callable[[Layout, OutputFile, Notes], Executor]


def connected() -> Any:
    """The ray module, connected to the cluster at $RAY_ADDRESS or on this machine. Raises QConvertError."""
    try:
        import ray
    except ImportError:
        raise QConvertError("--engine ray needs ray", hint="pip install 'qconvert[ray]'") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise QConvertError(
                f"no Ray cluster: {error}", hint="`ray start --head`, or set RAY_ADDRESS"
            ) from None
    return ray


def run_on_ray(
    request: Request,
    checkpoint: Checkpoint,
    writer: ShardWriter,
    outs: Sequence[OutputFile],
    executor: MakeExecutor,
    progress: Callable[[int], object],
) -> dict[str, Result]:
    """`ShardWriter.run` on a cluster."""
    ray = connected()
    results: dict[str, Result] = {}
    for out, (_, plan, laid) in zip(outs, writer.parts, strict=True):
        work = Work(
            version=qconvert.__version__,
            digest=job_digest(laid, checkpoint),
            source=_everywhere(checkpoint.path),
            files=tuple(_everywhere(file) for file in checkpoint.files),
            partial=out.temporary.resolve(),
            plan=plan,
            laid=laid,
            backend=request.backend,
            threads=request.jobs or 1,
            memory=request.memory,
            calibration=request.calibration.resolve() if request.calibration else None,
        )
        units = make_units(plan, laid)
        # The header first: workers look at it to see whether the file is the one they were told of.
        for unit in units:
            if isinstance(unit, ConstUnit):
                out.write(unit.data, unit.offset)
        out.flush()
        records = _Cluster(ray, work, units, out.journal, progress).run()
        # Everything is done: this only sums up what was measured.
        results |= executor(laid, out, Notebook(records)).run(units)
    return results


def _everywhere(place: Place) -> Place:
    return place.resolve()


def tasks_of(units: Sequence[Unit]) -> list[list[int]]:
    """Numbers of units, neighbours together, about TASK_BYTES a task."""
    tasks: list[list[int]] = []
    size = TASK_BYTES
    for number, unit in enumerate(units):
        if isinstance(unit, ConstUnit):
            continue
        if size + unit.nbytes > TASK_BYTES:
            tasks.append([])
            size = 0
        tasks[-1].append(number)
        size += unit.nbytes
    return tasks


class _Cluster:
    """One output file's tasks on their way."""

    def __init__(
        self, ray: Any, work: Work, units: Sequence[Unit], journal: Journal, progress: Callable[[int], object]
    ) -> None:
        self.ray, self.work, self.units = ray, work, units
        self.journal, self.progress = journal, progress

    def run(self) -> list[Record]:
        """All records, of this run and of the one that it continues. Raises the first task's error."""
        function = self.ray.remote(
            num_cpus=self.work.threads,
            num_gpus=0 if self.work.backend in _ON_CPU else 1,
            memory=self.work.memory + WORKER_BYTES,
            max_retries=RETRIES,
            retry_exceptions=[TransferError],
            scheduling_strategy="SPREAD",
        )(run_units)
        work = self.ray.put(self.work)
        records = self.journal.known()
        by_unit: dict[str, list[Record]] = {}
        for record in records:
            # Pieces of a layer are noted as LAYER@ROW.
            by_unit.setdefault(record["key"].rpartition("@")[0] or record["key"], []).append(record)
        waiting: dict[Any, list[int]] = {}
        for numbers in tasks_of(self.units):
            known = [record for number in numbers for record in by_unit.get(self.units[number].key, [])]
            waiting[function.remote(work, numbers, known)] = numbers
        try:
            while waiting:
                ready, _ = self.ray.wait(list(waiting), num_returns=1, timeout=None)
                numbers = waiting.pop(ready[0])
                for record in self._result(ready[0]):
                    facts = {key: value for key, value in record.items() if key != "key"}
                    self.journal.add(record["key"], **facts)
                    records.append(record)
                self.progress(sum(self.units[number].nbytes for number in numbers))
        finally:
            # After an error or Ctrl-C the rest is not wanted any more.
            for reference in waiting:
                self.ray.cancel(reference, force=True)
        return records

    def _result(self, reference: Any) -> list[Record]:
        errors = self.ray.exceptions
        try:
            records: list[Record] = self.ray.get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, QConvertError):
                raise error.cause from None
            raise
        except errors.RayError as error:
            text = str(error).strip().partition("\n")[0]
            raise TransferError(
                f"the cluster lost a task {RETRIES} times: {text}",
                file=str(self.work.partial),
                hint="--resume continues",
            ) from None
        return records
