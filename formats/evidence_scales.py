"""Are block scales swizzled? Told from values: under the right reading they vary by row and by column.

A block's scale follows the size of its weights, and that is mostly a matter of the row (an output channel) and of
the column (input channels that are strong everywhere). Read in the wrong layout, rows and columns are torn apart.
Both readings put the same bytes of a band of 128 rows into the same [128, C] table in another order, so what an
additive model of rows and columns explains is compared at equal degrees of freedom. On scales without such
structure both explain what chance gives, and their difference, in its standard deviations, is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.layers import Layer
from qconvert.formats.sample import BAND, bands, e4m3, each, form, looked_up, reader, spread
from qconvert.kernels.arrays import F32, F64, U8, np

#: Bytes of scales that are read of one file.
BUDGET = 4 << 20
MAX_LAYERS = 96
#: The difference must be this many standard deviations of chance, and one reading must explain this much more.
MIN_Z, MIN_RATIO = 8.0, 1.3

_BLOCK = {"nvfp4": 16, "mxfp8": 32}


@cache
def _logarithms() -> F32:
    """Of the e4m3 codes; zero as the least that there is."""
    return np.log2(np.maximum(np.abs(e4m3()), np.float32(2.0**-9)))


class LayoutScore(NamedTuple):
    """Shares of the scales' spread that rows and columns explain above chance; z > 0 speaks for swizzled."""

    swizzled: float
    linear: float
    z: float
    layers: int

    @property
    def verdict(self) -> str | None:
        """swizzled, linear, or None where values do not tell."""
        best, other = max(self.swizzled, self.linear), min(self.swizzled, self.linear)
        if abs(self.z) < MIN_Z or best < MIN_RATIO * other:
            return None
        return "swizzled" if self.z > 0 else "linear"

    def words(self) -> str:
        return (
            f"rows and columns explain {self.swizzled:.0%} of the block scales' spread as swizzled, "
            f"{self.linear:.0%} as linear (z {self.z:+.0f}, {self.layers} layers)"
        )


def ambiguous(layer: Layer) -> bool:
    """Whether the shape of the scales fits both layouts, and reading them can tell the two apart."""
    block = _BLOCK.get(form(layer))
    if block is None or layer.n % BAND or layer.k % (4 * block):
        return False
    # With one tile across, the wrong reading only permutes rows: nothing to see.
    return layer.k // block > 4


def scale_layout(checkpoint: Checkpoint, layers: Sequence[Layer]) -> LayoutScore | None:
    """The score over all layers for which `ambiguous` holds; None when there are none."""
    chosen = spread([layer for layer in layers if ambiguous(layer)], MAX_LAYERS)
    if not chosen:
        return None
    total = np.zeros(5)
    for part in each(lambda layer: _layer(checkpoint, layer, BUDGET // len(chosen)), chosen):
        total += part
    as_swizzled, as_linear, by_chance, freedom, elements = total
    if not elements:
        # All scales are alike: nothing varies, by row or otherwise.
        return LayoutScore(0.0, 0.0, 0.0, len(chosen))
    rest = elements - freedom
    return LayoutScore(
        max(0.0, float((as_swizzled - by_chance) / rest)),
        max(0.0, float((as_linear - by_chance) / rest)),
        # Each sum of squares is chi-squared with `freedom` degrees under chance, so it varies by 2 * freedom.
        float((as_swizzled - as_linear) / np.sqrt(4 * freedom)),
        len(chosen),
    )


def _layer(checkpoint: Checkpoint, layer: Layer, budget: int) -> F64:
    """Explained squares in units of the variance (swizzled, linear), chance, degrees of freedom, elements."""
    blocks = layer.k // _BLOCK[form(layer)]
    stored = reader(checkpoint, layer)
    source = str(layer.options.get("source", "weight_scale"))
    out = np.zeros(5)
    for a, b in bands(layer.n, budget // blocks):
        levels = _levels(stored.rows(source, a, b).view(np.uint8).reshape(BAND, blocks), form(layer))
        if levels.min() == levels.max():
            continue
        levels -= levels.mean()
        variance = float(np.einsum("ij,ij->", levels, levels)) / levels.size
        freedom = BAND + blocks - 2
        out += (
            _explained(*_swizzled_means(levels)) / variance,
            _explained(levels.mean(axis=1), levels.mean(axis=0)) / variance,
            freedom,
            freedom,
            levels.size,
        )
    return out


def _levels(raw: U8, codec: str) -> F32:
    """Scales on a logarithmic axis; zero blocks as the smallest scale there is."""
    return raw.astype(np.float32) if codec == "mxfp8" else looked_up(_logarithms(), raw)


def _swizzled_means(stored: F32) -> tuple[F32, F32]:
    """Means of the rows and of the columns of a band [128, C] that lies as swizzled, C a multiple of 4.

    A tile lists (row % 32, row // 32, column): sums are taken where the elements lie, moving them would take longer.
    """
    blocks = stored.shape[1]
    tiles = stored.reshape(blocks // 4, 4 * BAND)
    rows = tiles.sum(axis=0).reshape(32, 4, 4).sum(axis=2).T.reshape(BAND)
    # One half onto the other until a row's four columns are left: numpy sums short rows slowly.
    columns = tiles
    while columns.shape[1] > 4:
        half = columns.shape[1] // 2
        columns = columns[:, :half] + columns[:, half:]
    return rows / np.float32(blocks), columns.reshape(blocks) / np.float32(BAND)


def _explained(rows: F32, columns: F32) -> float:
    """Sum of squares over a table of its row means and its column means, of which each have a mean of zero."""
    return float((rows**2).sum() * len(columns) + (columns**2).sum() * len(rows))
