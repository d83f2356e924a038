"""Which nibble of a byte comes first? Told from values, one answer for a file.

Swapping nibbles exchanges each even column with its neighbour. In one matrix that is only another order of
columns; but the columns are the channels of what flows in, and other tensors that no swap touches know the same
channels: norms and biases (and pre_quant_scale) by element, layers that write those channels by row, layers in
another format by column. If a strong channel there is a strong (or a weak) column here, then

* the sums of the two columns of a byte follow the channels whatever the order: they say how both hang together,
* the differences of the two follow them with the same sign if the order is right, with the opposite sign if not.

Each pair of channels gives one vote, summed over all matrices and references; under chance a vote's sign is a coin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.layers import Inventory, Layer
from qconvert.formats.sample import (
    BAND,
    bands,
    each,
    floats,
    form,
    nibbles_squared,
    reader,
    row_strengths,
    spread,
    squared_scales,
)
from qconvert.formats.tensors import TensorSpec
from qconvert.kernels.arrays import F32, F64, U8, np

#: Bytes read for column energies, and for the references' row and column energies.
BUDGET, REFERENCE_BUDGET = 20 << 20, 16 << 20
MAX_MATRICES, MAX_VECTORS, MAX_WRITERS, MAX_READERS = 48, 256, 24, 8
MAX_ROWS = 512
#: Channels a dimension must have for its votes to mean anything.
MIN_CHANNELS = 64
#: Blocks of 16 columns of a band that are looked up at a time: larger buffers would be new to the process, and each of
#: their pages a fault.
BLOCKS = 32
#: Bytes of block scales that are looked up at a time.
RUN = 96 << 10
#: Correlation of sums, in standard errors, from which on a matrix and a reference are taken to be related.
RELATED = 4.0
#: An answer needs this many standard deviations, this share of votes, this many matrices.
MIN_Z, MIN_SHARE, MIN_RELATED = 6.0, 0.65, 2

_FLOATS = ("BF16", "F16", "F32", "F64")


class NibbleScore(NamedTuple):
    """`pairs` of channels voted in the dimension that tells most, `high` of them for high nibble first."""

    z: float
    pairs: int
    high: int
    matrices: int
    references: int
    #: Another dimension of the model says the opposite.
    torn: bool = False

    @property
    def verdict(self) -> str | None:
        """high, low, or None where values do not tell."""
        share = max(self.high, self.pairs - self.high) / max(self.pairs, 1)
        if self.torn or abs(self.z) < MIN_Z or share < MIN_SHARE or self.matrices < MIN_RELATED:
            return None
        return "high" if self.z > 0 else "low"

    def words(self) -> str:
        if not self.matrices:
            return "no other tensor of the file shares the channel order of these columns"
        first = "high" if self.z > 0 else "low"
        agree = self.high if self.z > 0 else self.pairs - self.high
        return (
            f"with {first} nibble first {agree} of {self.pairs} pairs of columns agree with norms, biases and "
            f"rows of other layers (z {abs(self.z):.1f}; {_count(self.matrices, 'matrix', 'matrices')}, "
            f"{_count(self.references, 'reference', 'references')})"
        )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def nibble_order(checkpoint: Checkpoint, inventory: Inventory, layers: Sequence[Layer]) -> NibbleScore:
    """The score of nvfp4 `layers`, whose scale layout is settled; their nibble options are not looked at."""
    chosen = spread([layer for layer in layers if layer.k >= MIN_CHANNELS], MAX_MATRICES)
    references = {
        k: found
        for k in dict.fromkeys(layer.k for layer in chosen)
        if (found := _references(checkpoint, inventory, k))
    }
    # Columns that nothing is known of to compare them with are not worth reading.
    told = [layer for layer in chosen if layer.k in references]
    subjects: dict[int, list[F64]] = {}
    columns = each(lambda layer: _columns(checkpoint, layer, BUDGET // len(chosen)), told)
    for layer, vector in zip(told, columns, strict=True):
        subjects.setdefault(layer.k, []).append(vector)
    scores = [_vote(np.stack(vectors), references[k]) for k, vectors in subjects.items()]
    if not scores:
        return NibbleScore(0.0, 0, 0, 0, 0)
    best = max(scores, key=lambda score: abs(score.z))
    torn = any(score.z * best.z < 0 and abs(score.z) > MIN_Z for score in scores)
    return NibbleScore(best.z, best.pairs, best.high, best.matrices, best.references, torn)


def _vote(subjects: F64, references: list[F64]) -> NibbleScore:
    others = np.stack(references)
    sums, differences = _split(subjects)
    other_sums, other_differences = _split(others)
    pairs = sums.shape[1]
    related = sums @ other_sums.T
    related[np.abs(related) < RELATED / np.sqrt(pairs)] = 0
    votes = (differences * (related @ other_differences)).sum(axis=0)
    # Wilcoxon's signed ranks: no single pair of channels, however extreme, can decide.
    ranks = _ranks(np.abs(votes)) + 1.0
    z = float((np.sign(votes) * ranks).sum() / np.sqrt((ranks * ranks).sum())) if votes.any() else 0.0
    return NibbleScore(
        z,
        pairs,
        int((votes > 0).sum()),
        int(related.any(axis=1).sum()),
        int(related.any(axis=0).sum()),
    )


def _split(vectors: F64) -> tuple[F64, F64]:
    """Sums of the two channels of a byte, rid of slow trends along the channels, and their differences."""
    ranks = _ranks(vectors)
    even, odd = ranks[:, 0::2], ranks[:, 1::2]
    sums = even + odd
    sums = sums - (np.roll(sums, 1, axis=1) + np.roll(sums, -1, axis=1)) / 2
    return _unit(sums), _unit(even - odd)


def _ranks(x: F64) -> F64:
    """Place of each element, from 0, along the last axis."""
    out = np.empty(x.shape)
    np.put_along_axis(out, np.argsort(x, axis=-1), np.arange(x.shape[-1], dtype=np.float64), axis=-1)
    return out


def _unit(x: F64) -> F64:
    x = x - x.mean(axis=1, keepdims=True)
    length = np.sqrt((x * x).sum(axis=1, keepdims=True))
    return np.asarray(x / np.where(length > 0, length, 1), np.float64)


def _columns(checkpoint: Checkpoint, layer: Layer, budget: int) -> F64:
    """Energy of each column as stored with high nibble first, rows brought to equal strength."""
    stored = reader(checkpoint, layer)
    energy = np.zeros(layer.k)
    for a, b in bands(layer.n, min(MAX_ROWS, budget // (layer.k // 2))):
        packed = stored.rows("weight", a, b).view(np.uint8).reshape(b - a, layer.k // 2)
        scales = squared_scales(stored, a, b, layer.options)
        row = scales.mean(axis=1, keepdims=True)
        weights = np.asarray(scales / np.where(row > 0, row, 1), np.float32)
        energy += _column_energy(packed, weights)
    return energy


def _column_energy(packed: U8, weights: F32) -> F32:
    """Weighted squares of codes [R, K/2], high nibble first, summed over rows; `weights` [R, K/16] are of blocks."""
    rows, blocks = weights.shape
    # The 8 bytes of a block as one element: a block's rows side by side, so that weighing and summing them is one
    # product of a vector and a matrix.
    whole, by_block = packed.view(np.uint64), np.ascontiguousarray(weights.T)[:, None, :]
    energy = np.empty((blocks, 1, 16), np.float32)
    squares = np.empty((min(BLOCKS, blocks), rows, 8), np.uint64)
    for a in range(0, blocks, BLOCKS):
        b = min(a + BLOCKS, blocks)
        codes = np.ascontiguousarray(whole[:, a:b].T).view(np.uint8).reshape(b - a, rows, 8)
        both = np.take(nibbles_squared(), codes, out=squares[: b - a], mode="clip").view(np.float32)
        np.matmul(by_block[a:b], both, out=energy[a:b])
    return energy.reshape(blocks * 16)


def _references(checkpoint: Checkpoint, inventory: Inventory, k: int) -> list[F64]:
    """Everything else in the file that has a number for each of k channels, in an order that no swap touches."""
    vectors = spread([t for t in checkpoint.tensors.values() if _is_vector(t, k)], MAX_VECTORS)
    found = [np.abs(_values(checkpoint, tensor)).astype(np.float64) for tensor in vectors]
    writers = [layer for layer in inventory.layers.values() if layer.n == k and layer.ndim == 2]
    budget = REFERENCE_BUDGET
    affordable = []
    for layer in spread(writers, MAX_WRITERS):
        cost = _cost(layer)
        if cost is not None and cost <= budget:
            budget -= cost
            affordable.append(layer)
    found += each(lambda layer: _rows(checkpoint, layer), affordable)
    readers = [layer for layer in inventory.layers.values() if layer.k == k and layer.ndim == 2]
    for layer in spread([layer for layer in readers if _is_direct(layer)], MAX_READERS):
        found.append(_direct(checkpoint, layer))
    return [vector for vector in found if np.isfinite(vector).all() and _distinct(vector) > k // 16]


def _distinct(vector: F64) -> int:
    """How many values there are. `np.unique` would import numpy's masked arrays, which takes longer."""
    return 1 + int(np.count_nonzero(np.diff(np.sort(vector))))


def _is_vector(tensor: TensorSpec, k: int) -> bool:
    return tensor.dtype in _FLOATS and tensor.shape in ((k,), (k, 1), (1, k))


def _values(checkpoint: Checkpoint, tensor: TensorSpec) -> F32:
    return floats(checkpoint.read(tensor.name).reshape(-1), tensor.dtype)


def _cost(layer: Layer) -> int | None:
    """Bytes that it takes to learn how strong each row is; None for formats that are not looked into."""
    if form(layer) == "nvfp4":
        # Block scales alone say it, at a ninth of the bytes.
        return layer.n * layer.k // 16
    if layer.codec.name == "int8" and layer.options["scale"] == "row":
        return layer.tensors["weight_scale"].nbytes
    return layer.first.nbytes if layer.codec.name in ("plain", "float8") else None


def _rows(checkpoint: Checkpoint, layer: Layer) -> F64:
    """Energy of each row of a layer whose outputs are the channels."""
    stored = reader(checkpoint, layer)
    if form(layer) == "nvfp4":
        rows = max(1, RUN // (BAND * layer.k // 16)) * BAND
        parts = [row_strengths(stored, a, b, layer.options) for a, b in _all(layer.n, rows)]
        return np.concatenate(parts).astype(np.float64)
    if layer.codec.name == "int8" and layer.options["scale"] == "row":
        raw = stored.whole("weight_scale").reshape(-1)
        return np.abs(floats(raw, stored.dtype("weight_scale"))).astype(np.float64)
    dtype = layer.first.dtype
    energies = []
    for a, b in _all(layer.n, 4 * BAND):
        x = floats(stored.rows("weight", a, b).reshape(b - a, layer.k), dtype).astype(np.float64)
        energies.append((x * x).mean(axis=1))
    return np.concatenate(energies)


def _all(n: int, rows: int) -> Iterator[tuple[int, int]]:
    """Rows in runs that are worth a call; a multiple of BAND lets them begin where tiles do."""
    for a in range(0, n, rows):
        yield a, min(a + rows, n)


def _is_direct(layer: Layer) -> bool:
    """Whether columns of the stored weight are the channels, one number each."""
    return layer.codec.name in ("plain", "float8") or (
        layer.codec.name == "int8" and not layer.options["rotation"]
    )


def _direct(checkpoint: Checkpoint, layer: Layer) -> F64:
    """Energy of each column of a layer that is not packed, from a few rows."""
    stored = reader(checkpoint, layer)
    energy = np.zeros(layer.k)
    for a, b in bands(layer.n, BAND):
        x = floats(stored.rows("weight", a, b).reshape(b - a, layer.k), layer.first.dtype).astype(np.float64)
        row = (x * x).mean(axis=1, keepdims=True)
        energy += (x * x / np.where(row > 0, row, 1)).sum(axis=0)
    return energy
