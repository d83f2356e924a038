"""Is a weight stored rotated (ConvRot), and by which group? Told from values.

Weights as trained have columns of unequal strength and heavy tails. A rotation mixes each run of columns, after
which both are nearly gone: columns are alike and values nearly normal. So codes are taken into the plain basis
under each assumption, and the one that gives natural weights is the right one. On random weights all look alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.layers import Layer
from qconvert.formats.sample import bands, reader, spread
from qconvert.kernels.arrays import F32, F64, np

#: Bytes of codes that are read for one pool of layers.
BUDGET = 6 << 20
MAX_LAYERS = 24
MAX_ROWS = 256
GROUPS = (4, 16, 64, 256, 1024)
#: What the best assumption must have over every other: gain in excess kurtosis, ratio of unevenness, standard
#: errors of both, and the share of layers in which each measure agrees.
MIN_KURTOSIS, MIN_RATIO, MIN_Z, MIN_SHARE = 0.02, 1.25, 6.0, 0.7


class RotationScore(NamedTuple):
    """Mean excess kurtosis and unevenness of columns in the plain basis, by the group assumed (0 for none)."""

    claimed: int
    kurtosis: dict[int, float]
    columns: dict[int, float]
    best: int
    #: The least standard errors between `best` and any other; 0 where the gain is too small to mean anything.
    z: float
    #: The least share of layers in which `best` is ahead.
    share: float
    layers: int

    @property
    def verdict(self) -> int | None:
        """The group that values speak for (0: not rotated), None where they do not tell."""
        if self.layers < 2 or self.z < MIN_Z or self.share < MIN_SHARE:
            return None
        return self.best

    def words(self) -> str:
        other = self._other()
        return (
            f"excess kurtosis {self.kurtosis[self.best]:.2f} and unevenness of columns "
            f"{self.columns[self.best]:.3f} {_assumed(self.best)}, {self.kurtosis[other]:.2f} and "
            f"{self.columns[other]:.3f} {_assumed(other)} (z {self.z:.0f}, {self.layers} layers)"
        )

    def _other(self) -> int:
        if self.best != self.claimed:
            return self.claimed
        return max((g for g in self.kurtosis if g != self.best), key=lambda g: self.kurtosis[g])


def _assumed(group: int) -> str:
    return f"as rotated by {group}" if group else "as not rotated"


def rotation(checkpoint: Checkpoint, layers: Sequence[Layer]) -> RotationScore | None:
    """The score of int8 layers that have one K and claim one rotation; None where K allows no rotation."""
    first = layers[0]
    claimed = int(first.options["rotation"])
    groups = [0, *(group for group in GROUPS if first.k % group == 0)]
    if len(groups) == 1:
        return None
    chosen = spread(layers, MAX_LAYERS)
    rows = min(MAX_ROWS, BUDGET // len(chosen) // max(first.k, 1))
    kurtosis = np.zeros((len(chosen), len(groups)))
    columns = np.zeros_like(kurtosis)
    sizes = np.zeros((len(chosen), 2))
    for i, layer in enumerate(chosen):
        x = _sample(checkpoint, layer, rows)
        sizes[i] = x.shape
        # Groups are powers of 4: each assumption is one more stage than the one before.
        for j, group in enumerate(groups):
            x = _stage(x, group // 4) if group else x
            kurtosis[i, j], columns[i, j] = _measures(x)
    best = int(kurtosis.mean(axis=0).argmax())
    rivals = [j for j in range(len(groups)) if j != best]
    # Standard errors for normal values: kurtosis 24/n, the columns' mean log energy 2/(R^2 K); two of each.
    error_k = float(np.sqrt((48 / sizes.prod(axis=1)).sum())) / len(chosen)
    error_c = float(np.sqrt((4 / (sizes[:, 0] ** 2 * sizes[:, 1])).sum())) / len(chosen)
    return RotationScore(
        claimed,
        {group: float(value) for group, value in zip(groups, kurtosis.mean(axis=0), strict=True)},
        {group: float(value) for group, value in zip(groups, columns.mean(axis=0), strict=True)},
        groups[best],
        min(_lead(kurtosis, columns, best, rival, error_k, error_c) for rival in rivals),
        min(float((m[:, best] > m[:, rival]).mean()) for rival in rivals for m in (kurtosis, columns)),
        len(chosen),
    )


def _lead(kurtosis: F64, columns: F64, best: int, rival: int, error_k: float, error_c: float) -> float:
    """Standard errors by which one assumption leads another in both measures, 0 where it hardly does."""
    gain_k = float((kurtosis[:, best] - kurtosis[:, rival]).mean())
    mean_c, other_c = float(columns[:, best].mean()), float(columns[:, rival].mean())
    if gain_k < MIN_KURTOSIS or mean_c < MIN_RATIO * other_c:
        return 0.0
    return min(gain_k / error_k, (mean_c - other_c) / error_c)


def _sample(checkpoint: Checkpoint, layer: Layer, rows: int) -> F32:
    """Rows of codes brought to unit energy: a row's scale, whatever it is, then does not matter."""
    stored = reader(checkpoint, layer)
    parts = [
        stored.rows("weight", a, b).reshape(b - a, layer.k).astype(np.float32)
        for a, b in bands(layer.n, rows)
    ]
    x = np.concatenate(parts)
    energy = np.sqrt((x * x).mean(axis=1, keepdims=True))
    keep = energy[:, 0] > 0
    return np.ascontiguousarray(x[keep] / energy[keep]) if keep.any() else np.ones((1, layer.k), np.float32)


def _measures(x: F32) -> tuple[float, float]:
    """Excess kurtosis, and how uneven columns are (-mean log of their energy: 0 when all are equal)."""
    square = x * x
    energy = square.mean(axis=0, dtype=np.float64)
    fourth = float((square * square).mean(dtype=np.float64))
    mean = float(energy.mean())
    unevenness = float(-np.log(np.maximum(energy / mean, 1e-12)).mean())
    return fourth / mean**2 - 3, unevenness


def _stage(x: F32, stride: int) -> F32:
    """One stage of ConvRot: H4 / 2 over columns that lie `stride` apart. Stages 1, 4, 16 make a group of 64."""
    y = x.reshape(x.shape[0], -1, 4, stride)
    # Row i of H4 has its one -1 in column 3 - i.
    turned = y.sum(axis=2, keepdims=True) * np.float32(0.5) - y[:, :, ::-1]
    return np.asarray(turned.reshape(x.shape), np.float32)
