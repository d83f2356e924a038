"""Many conversions, one after the other: planned first, each on its own fate, told in one table at the end.

Jobs do not run at the same time: one conversion keeps all cores busy, and memory stays what one was given.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
from qconvert.convert.actions import LOSSLESS
from qconvert.convert.identity import is_finished
from qconvert.convert.job import Outcome, Request, final_output, output_path, plan_job, run_job
from qconvert.convert.jobsfile import read_jobs
from qconvert.convert.journal import StaleError
from qconvert.convert.output import unfinished
from qconvert.convert.progress import progress_bar
from qconvert.convert.screen import Volume, quiet, say, say_rows, speaking
from qconvert.convert.shards import ShardWriter
from qconvert.convert.text import db, size
from qconvert.convert.upload import staging_folder
from qconvert.formats.checkpoint import dumps, opened
from qconvert.formats.errors import QConvertError
from qconvert.formats.remote import Remote
from qconvert.runtime.verify import decibels

Status = Literal["new", "half done", "finished", "converted", "failed"]


@dataclass
class Job:
    """A conversion and what became of it. `sqnr`: over all layers that lost anything, None where not measured."""

    request: Request
    output: str
    #: The file as it is written here; of an output for another machine, where it waits for its upload.
    made_at: Path = Path()
    status: Status = "new"
    source_bytes: int = 0
    output_bytes: int = 0
    work_bytes: int = 0
    sqnr: float | None = None
    seconds: float = 0.0
    error: str | None = None


def run_batch(
    path: Path, as_json: bool, dry_run: bool, overrides: dict[str, Any], volume: Volume = "normal"
) -> None:
    """`qconvert batch JOBS.toml`. Exits with 1 when any job failed."""
    with speaking(volume):
        _run_batch(path, as_json, dry_run, overrides)


def _run_batch(path: Path, as_json: bool, dry_run: bool, overrides: dict[str, Any]) -> None:
    requests = read_jobs(path, overrides)
    jobs = [_planned(request) for request in requests]
    if not as_json:
        _print_plan(jobs)
    _require_space(jobs)
    begun = time.monotonic()
    try:
        if not dry_run:
            for job in jobs:
                if job.status in ("new", "half done"):
                    _run(job, as_json)
                    if not as_json:
                        say(job.status, _line(job))
    finally:
        # After Ctrl-C too: what is done is told.
        _report(jobs, time.monotonic() - begun, as_json, dry_run)
    if any(job.status == "failed" for job in jobs):
        sys.exit(1)


def _planned(request: Request) -> Job:
    """What a job will do. A source that is missing or broken fails its own job, here already."""
    job = Job(request, str(request.output))
    try:
        with opened(request.source) as checkpoint:
            plan, laid = plan_job(request, checkpoint)
            path, output = final_output(request, checkpoint, plan), output_path(request, plan.target)
            job.output, job.source_bytes = str(path), checkpoint.nbytes
            if isinstance(output, Remote):
                # Folder outputs keep their folder there.
                job.made_at = staging_folder(request, output) / str(path).removeprefix(f"{output.parent}/")
            else:
                job.made_at = Path(str(path))
            writer = ShardWriter(plan, laid, job.made_at, request.shard_size)
            job.output_bytes = writer.nbytes
            job.work_bytes = sum(action.layer.nbytes for action in plan.actions)
            parts = [(name, part) for name, _, part in writer.parts]
            if all(is_finished(path.parent / name, part, checkpoint) for name, part in parts):
                job.status = "finished"
            elif any(unfinished(job.made_at.parent / name)[1].exists() for name, _ in parts):
                job.status = "half done"
    except Exception as error:
        _fail(job, error)
    return job


def _run(job: Job, silent: bool) -> None:
    begun = time.monotonic()
    try:
        outcome = _convert(job, silent)
    except Exception as error:
        # One job's end, whatever it is, is not the batch's.
        _fail(job, error)
    else:
        job.status, job.sqnr = "converted", total_sqnr(outcome)
        job.output_bytes = outcome.output_bytes
    job.seconds = time.monotonic() - begun


def _convert(job: Job, silent: bool) -> Outcome:
    with opened(job.request.source) as checkpoint:
        with progress_bar(job.work_bytes, silent) as advance:
            try:
                return run_job(job.request, checkpoint, advance)
            except StaleError:
                pass
        # Half done from another source or plan: worth nothing now.
        with progress_bar(job.work_bytes, silent) as advance:
            return run_job(replace(job.request, resume=False), checkpoint, advance)


def total_sqnr(outcome: Outcome) -> float | None:
    """Over every layer that was changed; infinite when none lost anything, None when none was changed."""
    changed = [action for action in outcome.plan.actions if action.kind != "keep"]
    if not changed:
        return None
    lossy = [outcome.results.get(a.layer.prefix) for a in changed if a.kind not in LOSSLESS]
    measured = [result for result in lossy if result is not None]
    if lossy and not measured:
        return None
    return (
        decibels(sum(r.signal for r in measured), sum(r.noise for r in measured))
        if measured
        else float("inf")
    )


def _fail(job: Job, error: Exception) -> None:
    job.status = "failed"
    job.error = error.line() if isinstance(error, QConvertError) else f"{type(error).__name__}: {error}"


def _volumes(jobs: list[Job]) -> Iterator[tuple[Path, int, int]]:
    """(folder, bytes to come, bytes free) of every file system that outputs go to; what is half done is there."""
    needs: dict[int, tuple[Path, int]] = {}
    for job in jobs:
        if job.status not in ("new", "half done"):
            continue
        path = job.made_at
        folder = path.parent
        while not folder.exists():
            folder = folder.parent
        device = folder.stat().st_dev
        first, need = needs.get(device, (folder, 0))
        partial, _ = unfinished(path)
        there = getattr(partial.stat(), "st_blocks", 0) * 512 if partial.exists() else 0
        needs[device] = first, need + max(0, job.output_bytes - there)
    for folder, need in needs.values():
        yield folder, need, shutil.disk_usage(folder).free


def _require_space(jobs: list[Job]) -> None:
    for folder, need, free in _volumes(jobs):
        if need > free:
            raise QConvertError(
                "not enough space for all outputs",
                file=str(folder),
                found=f"{size(free)} free",
                expected=size(need),
            )


def _print_plan(jobs: list[Job]) -> None:
    rows = [("source", "target", "size", "output", "size", "state")]
    for job in jobs:
        rows.append(
            (
                _short(job.request.source),
                job.request.target,
                size(job.source_bytes) if job.source_bytes else "-",
                _short(job.output),
                size(job.output_bytes) if job.output_bytes else "-",
                job.status,
            )
        )
    say_rows(rows, head=True)
    for folder, need, free in _volumes(jobs):
        say("space", f"{size(need)} to write, {size(free)} free at {folder}")
    for job in jobs:
        if job.error:
            say("failed", job.error)


def _short(place: object) -> str:
    return str(place).rpartition("/")[2] or str(place).rpartition(os.sep)[2] or str(place)


def _line(job: Job) -> str:
    return job.error if job.error else f"{job.output}  {size(job.output_bytes)} in {job.seconds:.1f} s"


def _report(jobs: list[Job], seconds: float, as_json: bool, dry_run: bool) -> None:
    failed = sum(job.status == "failed" for job in jobs)
    if as_json:
        click.echo(dumps({"ok": not failed, "dry_run": dry_run, "jobs": [_json(job) for job in jobs]}))
        return
    if dry_run or quiet():
        return
    rows = [("status", "source", "target", "read", "written", "SQNR", "time")]
    for job in jobs:
        ran = job.status == "converted"
        rows.append(
            (
                job.status,
                _short(job.request.source),
                job.request.target,
                size(job.source_bytes) if ran else "-",
                size(job.output_bytes) if job.status in ("converted", "finished") else "-",
                db(job.sqnr) if job.sqnr is not None else "-",
                f"{job.seconds:.1f} s" if job.seconds else "-",
            )
        )
    click.echo()
    say_rows(rows, head=True)
    done = [job for job in jobs if job.status == "converted"]
    finished = sum(job.status == "finished" for job in jobs)
    click.echo(
        f"{len(jobs)} jobs: {len(done)} converted, {finished} finished before, {failed} failed; "
        f"{size(sum(job.source_bytes for job in done))} read in {seconds:.1f} s"
    )


def _json(job: Job) -> dict[str, Any]:
    sqnr = job.sqnr
    return {
        "source": str(job.request.source),
        "target": job.request.target,
        "output": job.output,
        "status": job.status,
        "error": job.error,
        "source_bytes": job.source_bytes,
        "output_bytes": job.output_bytes,
        "sqnr_db": "exact" if sqnr == float("inf") else sqnr,
        "seconds": round(job.seconds, 3),
    }
