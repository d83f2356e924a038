"""Weights of the worst layers before and after, read from the two files once the conversion is done."""

from __future__ import annotations

from qconvert.convert.actions import LOSSLESS
from qconvert.convert.job import Outcome
from qconvert.convert.report_model import Histogram, relative_error
from qconvert.formats.checkpoint import Checkpoint, opened
from qconvert.formats.layers import take_inventory
from qconvert.formats.values import seen_as
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, np
from qconvert.runtime.verify import Side, paired_rows

#: Layers shown, the worst first.
WORST = 6
#: Weights of a layer that are looked at, at most, and the rows they begin at: whole tiles from the first.
VALUES = 1 << 18
BINS = 81
#: The share of values that the axis leaves out at each end: outliers would make the rest one bar.
_BEYOND = 0.0005


def worst_histograms(checkpoint: Checkpoint, outcome: Outcome, backend: Backend) -> list[Histogram]:
    """One for each of the layers with the largest relative errors."""
    scored = [
        (relative_error(outcome.results[action.layer.prefix]), action)
        for action in outcome.plan.actions
        if action.kind not in LOSSLESS and action.layer.prefix in outcome.results and action.layer.params
    ]
    worst = sorted((s for s in scored if s[0] > 0), key=lambda s: -s[0])[:WORST]
    if not worst:
        return []
    found = []
    with opened(outcome.output) as written:
        there = take_inventory(written).layers
        for error, action in worst:
            layer = there.get(action.prefix)
            if layer is None:
                continue
            source, target = Side(checkpoint, action.layer), Side(written, seen_as(layer, action.layer))
            rows = min(action.layer.n, max(128, VALUES // max(1, action.layer.k) // 128 * 128))
            x, y = paired_rows(source, target, 0 if action.layer.experts else None, 0, rows, backend)
            found.append(histogram(action.prefix, error, x, y))
    return found


def histogram(layer: str, error: float, before: F32, after: F32) -> Histogram:
    """Both sides [rows, k] counted in the same bins, which are symmetric around zero."""
    finite = before[np.isfinite(before)]
    reach = float(np.quantile(np.abs(finite), 1 - 2 * _BEYOND)) if finite.size else 0.0
    reach = reach or 1.0
    counts = [
        np.histogram(np.clip(np.nan_to_num(side), -reach, reach), BINS, (-reach, reach))[0]
        for side in (before, after)
    ]
    return Histogram(
        layer, error, -reach, reach, tuple(counts[0].tolist()), tuple(counts[1].tolist()), before.size
    )
