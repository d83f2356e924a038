"""Are the scales of fp8 layers plausible? Told from the largest codes.

A scale is chosen so that the largest weight becomes the largest code. Weights cast without a scale stay small
instead: trained weights are a few units at most. So codes that fill the range without a scale have lost one, and
weights that are huge with theirs were given its reciprocal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.layers import Layer
from qconvert.formats.sample import BAND, bands, floats, reader, spread
from qconvert.kernels.arrays import F32, Array, np

MAX_LAYERS = 32
BUDGET = 8 << 20
#: No trained matrix reaches this, let alone half of them.
LARGE_WEIGHT = 64.0
#: The code of the largest finite number.
LARGEST_CODE = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7B}


class ScaleScore(NamedTuple):
    """`amax`: the median over layers of the largest sampled weight, scale applied where there is one."""

    kind: Literal["scaled", "unscaled"]
    amax: float
    layers: int

    @property
    def plausible(self) -> bool:
        return self.layers < 2 or self.amax < LARGE_WEIGHT

    def words(self) -> str:
        return f"the largest weight of a layer is {self.amax:.3g} (median of {self.layers} layers)"


def weight_range(checkpoint: Checkpoint, layers: Sequence[Layer]) -> ScaleScore | None:
    """The score of fp8 layers that all have a scale, or all have none; block scales are not judged."""
    usable = [layer for layer in layers if layer.options["scale"] != "block" and layer.ndim == 2]
    chosen = spread(usable, MAX_LAYERS)
    if not chosen:
        return None
    peaks = []
    for layer in chosen:
        stored = reader(checkpoint, layer)
        scale = np.ones(1, np.float32)
        if layer.options["scale"] != "none":
            source = str(layer.options["source"])
            scale = np.abs(floats(stored.whole(source).reshape(-1), stored.dtype(source)))
        rows = max(BAND, BUDGET // len(chosen) // max(layer.k, 1))
        peak = 0.0
        for a, b in bands(layer.n, rows):
            largest = row_peaks(stored.rows("weight", a, b).reshape(b - a, -1), str(layer.options["kind"]))
            with np.errstate(over="ignore", invalid="ignore"):  # Scales that are none are found elsewhere.
                peak = max(peak, float((largest * (scale[a:b] if len(scale) > 1 else scale)).max()))
        peaks.append(peak)
    scaled = chosen[0].options["scale"] != "none"
    # The median; numpy's own imports its masked arrays, which takes longer than all of this.
    middle = sorted(peaks)[(len(peaks) - 1) // 2 : len(peaks) // 2 + 1]
    return ScaleScore("scaled" if scaled else "unscaled", sum(middle) / len(middle), len(chosen))


def row_peaks(codes: Array, kind: str) -> F32:
    """The largest finite magnitude in each row of fp8 codes [R, K], as float32 [R]: without its sign, a code grows
    with its value."""
    magnitude = codes.view(np.uint8) & 0x7F
    largest = LARGEST_CODE[kind]
    if magnitude.max() > largest:
        magnitude[magnitude > largest] = 0
    return floats(magnitude.max(axis=1), kind)
