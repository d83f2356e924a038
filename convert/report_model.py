"""What a report says, gathered from a plan and its outcome: numbers only, no rendering."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qconvert.convert.actions import LOSSLESS, Action, Plan, out_spec
from qconvert.convert.classes import layer_class
from qconvert.convert.execute import Result
from qconvert.convert.job import Outcome
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.remote import Place
from qconvert.runtime.contracts.base import Verdict
from qconvert.runtime.verify import decibels


@dataclass(frozen=True)
class LayerRow:
    """One layer. `error`: relative RMS error (0 for what is exact), None before a conversion; bytes as stored."""

    name: str
    cls: str
    role: str
    action: str
    before: str
    after: str
    shape: tuple[int, int]
    params: int
    bytes_before: int
    bytes_after: int
    error: float | None
    reason: str

    @property
    def sqnr(self) -> float | None:
        """Decibels; inf for what is exact."""
        if self.error is None:
            return None
        return math.inf if self.error == 0 else -20 * math.log10(self.error)

    @property
    def changed(self) -> bool:
        return self.action not in LOSSLESS


@dataclass(frozen=True)
class ClassRow:
    """Layers of one class together."""

    cls: str
    layers: int
    changed: int
    params: int
    bytes_before: int
    bytes_after: int
    sqnr: float | None

    @property
    def bits(self) -> float:
        """Bits a weight takes in the output, scales included."""
        return 8 * self.bytes_after / self.params if self.params else 0.0


@dataclass(frozen=True)
class PlanRow:
    """Layers to which the same happens for the same reason."""

    action: str
    role: str
    after: str
    layers: int
    bytes_before: int
    reason: str


@dataclass(frozen=True)
class Histogram:
    """Weights of one layer before and after: counts in bins of equal width between the first and the last edge.

    Values beyond the edges are counted in the outermost bins. `values`: how many were looked at.
    """

    layer: str
    error: float
    low: float
    high: float
    before: tuple[int, ...]
    after: tuple[int, ...]
    values: int


@dataclass(frozen=True)
class Report:
    """Everything a report shows. `outcome` numbers are None for a plan that was not carried out."""

    source: str
    output: str
    target: str
    summary: str
    contracts: tuple[str, ...]
    families: tuple[str, ...]
    source_bytes: int
    output_bytes: int
    seconds: float | None
    sqnr: float | None
    verdicts: tuple[Verdict, ...]
    classes: tuple[ClassRow, ...]
    plan: tuple[PlanRow, ...]
    layers: tuple[LayerRow, ...]
    histograms: tuple[Histogram, ...]
    findings: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    drops: tuple[tuple[str, str, int], ...]
    serving: tuple[str, ...]
    provenance: Mapping[str, Any]

    @property
    def done(self) -> bool:
        return self.seconds is not None


def build_report(
    checkpoint: Checkpoint,
    plan: Plan,
    path: Place,
    output_bytes: int,
    outcome: Outcome | None,
    histograms: Iterable[Histogram],
    findings: Iterable[tuple[str, str]],
    serving: Iterable[str],
) -> Report:
    """A report on a plan, and on what came of it where it was carried out."""
    results = outcome.results if outcome else None
    changed = [results[a.layer.prefix] for a in plan.actions if results and _measured(a, results)]
    total = (
        decibels(sum(r.signal for r in changed), sum(r.noise for r in changed))
        if results is not None
        else None
    )
    drops: dict[tuple[str, str], int] = {}
    for drop in plan.drops:
        key = (drop.tensor.rpartition(".")[2], drop.reason)
        drops[key] = drops.get(key, 0) + 1
    return Report(
        source=str(checkpoint.path),
        output=str(path),
        target=plan.target.name,
        summary=plan.target.summary,
        contracts=tuple(contract.name for contract in plan.contracts),
        families=plan.families,
        source_bytes=checkpoint.nbytes,
        output_bytes=output_bytes,
        seconds=outcome.seconds if outcome else None,
        sqnr=total,
        verdicts=outcome.verdicts if outcome else (),
        classes=tuple(_classes(plan, results)),
        plan=tuple(_groups(plan)),
        layers=tuple(_row(action, results) for action in plan.actions),
        histograms=tuple(histograms),
        findings=tuple(findings),
        notes=plan.notes,
        drops=tuple((suffix, reason, count) for (suffix, reason), count in drops.items()),
        serving=tuple(serving),
        provenance=json.loads(plan.metadata.get("qconvert", "{}")),
    )


def relative_error(result: Result) -> float:
    """Root of noise over signal; 0 where there is no noise, 1 where all is lost of a layer of zeros."""
    if result.noise == 0:
        return 0.0
    return math.sqrt(result.noise / result.signal) if result.signal > 0 else 1.0


def _measured(action: Action, results: Mapping[str, Result]) -> bool:
    return action.kind not in LOSSLESS and action.layer.prefix in results


def _written(action: Action) -> int:
    return sum(out_spec(out).nbytes for out in action.outputs)


def _row(action: Action, results: Mapping[str, Result] | None) -> LayerRow:
    layer = action.layer
    error = None
    if results is not None:
        error = relative_error(results[layer.prefix]) if _measured(action, results) else 0.0
    return LayerRow(
        action.prefix, layer_class(action.prefix, action.role), action.role, action.kind, layer.word,
        action.method, (layer.n, layer.k), layer.params, layer.nbytes, _written(action), error, action.reason,
    )  # fmt: skip


def _classes(plan: Plan, results: Mapping[str, Result] | None) -> list[ClassRow]:
    groups: dict[str, list[Action]] = {}
    for action in plan.actions:
        groups.setdefault(layer_class(action.prefix, action.role), []).append(action)
    rows = []
    for cls, actions in sorted(groups.items()):
        sqnr = None
        if results is not None:
            measured = [results[a.layer.prefix] for a in actions if _measured(a, results)]
            sqnr = decibels(sum(r.signal for r in measured), sum(r.noise for r in measured))
        rows.append(
            ClassRow(
                cls,
                len(actions),
                sum(action.kind not in LOSSLESS for action in actions),
                sum(action.layer.params for action in actions),
                sum(action.layer.nbytes for action in actions),
                sum(_written(action) for action in actions),
                sqnr,
            )
        )
    return rows


def _groups(plan: Plan) -> list[PlanRow]:
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for action in plan.actions:
        key = (action.kind, action.role, action.method, action.reason)
        groups.setdefault(key, []).append(action.layer.nbytes)
    return [
        PlanRow(kind, role, method, len(sizes), sum(sizes), reason)
        for (kind, role, method, reason), sizes in groups.items()
    ]
