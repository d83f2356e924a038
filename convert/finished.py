"""An output that an earlier run had finished: what `--resume` finds after a kill in the very last moment."""

from __future__ import annotations

import contextlib
from pathlib import Path

from qconvert.convert.actions import Plan
from qconvert.convert.identity import is_finished
from qconvert.convert.job import Request, final_output, output_form
from qconvert.convert.output import unfinished
from qconvert.convert.shards import ShardWriter
from qconvert.convert.sidecars import Sidecars
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.header import Layout


def finished_before(request: Request, checkpoint: Checkpoint, plan: Plan, laid: Layout) -> Path | None:
    """The output, its file or its index, where all its tensors are there already as this conversion writes them.

    Tensors get their names before the small files beside them: those that are missing are written now. None where
    there is anything left to convert, and for outputs on other machines.
    """
    path = final_output(request, checkpoint, plan)
    if not isinstance(path, Path):
        return None
    writer = ShardWriter(plan, laid, path, request.shard_size)
    files = [path.parent / name for name, _, _ in writer.parts]
    if not all(
        is_finished(file, part, checkpoint) for file, (_, _, part) in zip(files, writer.parts, strict=True)
    ):
        return None
    beside = dict(writer.index)
    if plan.target.sidecars is not None:
        beside |= plan.target.sidecars(output_form(plan, checkpoint, path.name))
    missing = {name: data for name, data in beside.items() if not (path.parent / name).exists()}
    if any((path.parent / name).read_bytes() != beside[name] for name in beside.keys() - missing.keys()):
        return None
    with Sidecars(path.parent, missing, force=False) as written:
        written.commit()
    for file in files:
        _forget(file)
    return writer.path


def _forget(file: Path) -> None:
    """Remove what a kill between the final name and the end left of the run; another run's partial file stays."""
    partial, journal = unfinished(file)
    with contextlib.suppress(OSError):
        if partial.exists():
            if not partial.samefile(file):
                return
            partial.unlink()
        journal.unlink()
