"""A plan cut into units of work, the same for every run: what a journal names and a cluster hands out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from qconvert.convert.actions import Action, ConstOut, CopyOut, Plan
from qconvert.formats.header import PAGE, Layout

COPY_BYTES = 16 << 20


class ConstUnit(NamedTuple):
    """Bytes known at planning time."""

    key: str
    data: bytes
    offset: int

    @property
    def nbytes(self) -> int:
        return len(self.data)


class CopyUnit(NamedTuple):
    """`nbytes` from `start` of source file `file` to `offset` of the output."""

    key: str
    file: int
    start: int
    offset: int
    nbytes: int


class LayerUnit(NamedTuple):
    """One layer's transformation, of one expert where the layer is a bank."""

    key: str
    action: Action
    expert: int | None

    @property
    def nbytes(self) -> int:
        return self.action.layer.nbytes // max(self.action.layer.experts, 1)


Unit = ConstUnit | CopyUnit | LayerUnit


def make_units(plan: Plan, laid: Layout) -> list[Unit]:
    """Every byte of the output after the header, in a fixed order."""
    units: list[Unit] = [ConstUnit("header", laid.prefix, 0)]
    units += _constants(plan, laid)
    units += _copies(plan, laid)
    for action in plan.actions:
        if action.transforms:
            experts: list[int | None] = list(range(action.layer.experts)) if action.layer.experts else [None]
            for expert in experts:
                suffix = "" if expert is None else f":{expert}"
                units.append(LayerUnit(f"layer:{action.layer.prefix}{suffix}", action, expert))
    return units


def _constants(plan: Plan, laid: Layout) -> Iterator[ConstUnit]:
    for out in plan.outputs():
        if isinstance(out, ConstOut):
            yield ConstUnit(f"const:{out.name}", out.data, laid.offsets[out.name])


def _copies(plan: Plan, laid: Layout) -> Iterator[CopyUnit]:
    """Copies, neighbours in both files joined into long runs, runs cut into pieces."""
    runs: list[list[int]] = []
    for out in plan.outputs():
        if not isinstance(out, CopyOut):
            continue
        tensor, offset = out.source, laid.offsets[out.name]
        last = runs[-1] if runs else None
        if last and (tensor.file, tensor.start, offset) == (last[0], last[1] + last[3], last[2] + last[3]):
            last[3] += tensor.nbytes
        else:
            runs.append([tensor.file, tensor.start, offset, tensor.nbytes])
    for file, start, offset, size in runs:
        done = 0
        while done < size:
            at = offset + done
            # Whole pages, which some file systems share, apart from what lies before the first.
            step = PAGE if at % PAGE and size > COPY_BYTES // 16 else COPY_BYTES
            piece = min(step - at % step, size - done)
            yield CopyUnit(f"copy:{at}", file, start + done, at, piece)
            done += piece
