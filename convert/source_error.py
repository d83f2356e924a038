"""The error that a quantised source carries already, apart from the one a conversion adds.

Its values are decoded exactly; what they were before they were quantised is not in the file. Where the format's codes
tell how far apart its values lie, rounding to the nearest of them has an expected error (`formats.cells`). Clipping
and whatever else was done to the weights is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qconvert.convert.actions import Action, Plan
from qconvert.convert.text import db
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.reader import LayerReader
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import np
from qconvert.runtime.verify import decibels

#: Elements of a layer that are looked at, in this many runs of rows.
ELEMENTS, RUNS = 1 << 15, 4


@dataclass(frozen=True, slots=True)
class SourceError:
    """Energies of sampled rows: of the values, and of the error they are expected to carry (None: unknown)."""

    signal: float
    noise: float | None
    layers: int = 1

    @property
    def sqnr(self) -> float | None:
        return None if self.noise is None else decibels(self.signal, self.noise)

    def __add__(self, other: SourceError) -> SourceError:
        known = self.noise is not None and other.noise is not None
        noise = (self.noise or 0.0) + (other.noise or 0.0) if known else None
        return SourceError(self.signal + other.signal, noise, self.layers + other.layers)


def decoded_layers(plan: Plan) -> list[Action]:
    """Layers whose quantised source is decoded."""
    kinds = ("requantise", "decode")
    return [action for action in plan.actions if action.layer.quantised and action.kind in kinds]


def source_errors(checkpoint: Checkpoint, plan: Plan, backend: Backend) -> dict[str, SourceError]:
    """Source layer -> what it carries already, for every layer whose quantised source is decoded."""
    return {action.layer.prefix: _measure(checkpoint, action, backend) for action in decoded_layers(plan)}


def source_lines(plan: Plan, errors: Iterable[tuple[str, SourceError]]) -> list[str]:
    """For people, one line a source format."""
    found = dict(errors)
    sums: dict[str, SourceError] = {}
    for action in decoded_layers(plan):
        own, name = found.get(action.layer.prefix), action.layer.word
        if own is not None:
            sums[name] = sums[name] + own if name in sums else own
    return [
        f"{name}: {total.layers} layers, decoded exactly; "
        + (
            "what quantising to it had cost is unknown"
            if total.sqnr is None
            else f"rounding to it is expected to have left SQNR {db(total.sqnr)}, which is not counted above"
        )
        for name, total in sums.items()
    ]


def _measure(checkpoint: Checkpoint, action: Action, backend: Backend) -> SourceError:
    layer = action.layer
    reader = LayerReader(checkpoint, layer, 0 if layer.experts else None)
    step = layer.codec.row_step(layer.options)
    blocks = -(-layer.n // step)
    length = max(1, ELEMENTS // max(layer.k, 1) // step // RUNS)
    starts = [i * blocks // RUNS for i in range(RUNS)] if blocks > RUNS * length else [0]
    if len(starts) == 1:
        length = blocks
    signal = noise = 0.0
    for start in starts:
        codes = layer.codec.load(reader, start * step, min((start + length) * step, layer.n), backend)
        x = layer.codec.decode(codes, layer.options, backend)
        signal += float(np.square(x, dtype=np.float64).sum())
        expected = layer.codec.rounding(codes, layer.options, backend)
        if expected is None:
            return SourceError(signal, None)
        noise += float(expected.sum(dtype=np.float64))
    return SourceError(signal, noise)
