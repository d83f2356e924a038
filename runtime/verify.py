"""Comparing two files by what their layers stand for: decoded values, and outputs on seeded activations."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.layers import Inventory, Layer
from qconvert.formats.reader import LayerReader
from qconvert.formats.registry import CODECS, codec_for_marker
from qconvert.formats.tensors import TensorSpec
from qconvert.formats.values import aligned, decode_rows, input_factor, seen_as
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, np

#: Elements decoded at a time.
CHUNK_ELEMENTS = 1 << 20
#: Rows of the seeded activations that outputs are compared on.
PROBES = 8


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal/noise); inf when there is no error, also for 0/0; -inf where it is all error, or no number."""
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf


class LayerMatch(NamedTuple):
    """Energies (float64) of one layer: of the weights, and of its outputs on random inputs (0 where not run)."""

    layer: str
    source_format: str
    format: str
    params: int
    rows: int
    signal: float
    noise: float
    out_signal: float = 0.0
    out_noise: float = 0.0

    @property
    def sqnr(self) -> float:
        return decibels(self.signal, self.noise)

    @property
    def out_sqnr(self) -> float:
        return decibels(self.out_signal, self.out_noise)


class Side(NamedTuple):
    """One of the two files."""

    checkpoint: Checkpoint
    layer: Layer

    def values(self, expert: int | None, a: int, b: int, backend: Backend, fold: bool) -> F32:
        """Rows [a, b) in the plain basis; `fold` multiplies a pre_quant_scale in."""
        reader = LayerReader(self.checkpoint, self.layer, expert)
        start = aligned(self.layer.codec, self.layer.options, a)
        x = decode_rows(self.layer, reader, start, b, backend)[a - start :]
        factor = input_factor(self.layer, reader, backend) if fold else None
        return np.ascontiguousarray(x if factor is None else x * factor)

    def chunks(self, starts: Iterable[tuple[int, int]], backend: Backend, fold: bool) -> Iterable[F32]:
        for expert in range(self.layer.experts) if self.layer.experts else (None,):
            reader = LayerReader(self.checkpoint, self.layer, expert)
            factor = input_factor(self.layer, reader, backend) if fold else None
            for a, b in starts:
                x = decode_rows(self.layer, reader, a, b, backend)
                yield x if factor is None else x * factor


def compare_rows(
    source: Side, target: Side, expert: int | None, a: int, b: int, backend: Backend
) -> tuple[float, float]:
    """(signal, noise) energies of rows [a, b) of both sides, as `compare_layer` compares them."""
    return backend.error(*paired_rows(source, target, expert, a, b, backend))


def paired_rows(
    source: Side, target: Side, expert: int | None, a: int, b: int, backend: Backend
) -> tuple[F32, F32]:
    """Rows [a, b) of both sides in the plain basis, [b-a, k] each, as `compare_layer` compares them."""
    fold = _fold(source.layer, target.layer)
    return source.values(expert, a, b, backend, fold), target.values(expert, a, b, backend, fold)


def _fold(source: Layer, target: Layer) -> bool:
    """Stored weights are compared when both sides carry a pre_quant_scale or neither does."""
    return ("pre_quant_scale" in source.tensors) != ("pre_quant_scale" in target.tensors)


def compare_layer(
    source: Side,
    target: Side,
    backend: Backend,
    *,
    max_rows: int | None = None,
    activations: F32 | None = None,
    elements: int = CHUNK_ELEMENTS,
) -> LayerMatch:
    """Decode both sides and compare. `max_rows`: only that many rows, in evenly spaced blocks of 128.

    `activations` [S, K]: inputs that outputs are compared on; seeded random ones when None.
    pre_quant_scale is applied on both sides unless both carry one: then stored weights are compared, on inputs that
    the source's was applied to. `elements`: how many are decoded at a time, but never fewer than 128 rows.
    """
    layer = source.layer
    n, k = min(source.layer.n, target.layer.n), layer.k
    fold = _fold(layer, target.layer)
    spans = _spans(n, k, max_rows, elements)
    if activations is None and layer.ndim == 2 and k:
        activations = _activations(layer.prefix, k, PROBES)
    elif activations is not None and not fold and not layer.experts:
        factor = input_factor(layer, LayerReader(source.checkpoint, layer), backend)
        activations = activations if factor is None else activations * factor
    signal = noise = out_signal = out_noise = 0.0
    for x, y in zip(source.chunks(spans, backend, fold), target.chunks(spans, backend, fold), strict=True):
        s, e = backend.error(x, y)
        signal, noise = signal + s, noise + e
        if activations is not None:
            s, e = backend.error(
                np.ascontiguousarray(activations @ x.T), np.ascontiguousarray(activations @ y.T)
            )
            out_signal, out_noise = out_signal + s, out_noise + e
    rows = sum(b - a for a, b in spans)
    return LayerMatch(
        layer.prefix,
        layer.word,
        target.layer.word,
        layer.params,
        rows,
        signal,
        noise,
        out_signal,
        out_noise,
    )


def _spans(n: int, k: int, max_rows: int | None, elements: int) -> list[tuple[int, int]]:
    step = max(128, elements // max(k, 1) // 128 * 128)
    if max_rows is None or max_rows >= n:
        return [(a, min(a + step, n)) for a in range(0, n, step)]
    blocks = -(-n // 128)
    count = max(1, max_rows // 128)
    picked = sorted({i * blocks // count for i in range(count)})
    return [(block * 128, min(block * 128 + 128, n)) for block in picked]


def _activations(prefix: str, k: int, probes: int) -> F32:
    seed = zlib.crc32(prefix.encode())
    return np.random.default_rng(seed).standard_normal((probes, k), np.float32)


def pair_layers(
    source: Inventory, target: Inventory, rename: Callable[[str], str] | None = None
) -> tuple[list[tuple[Layer, Layer]], list[str], list[str]]:
    """Layers of both files by name (and by shape); names only in the source, names only in the target.

    Without `rename`, a `model.diffusion_model.` prefix missing on one side is bridged.
    """
    strip = "model.diffusion_model."
    by_name = {}
    for name, layer in source.layers.items():
        there = rename(name) if rename else name
        if rename is None and there not in target.layers and there.removeprefix(strip) in target.layers:
            there = there.removeprefix(strip)
        by_name[there] = layer
    pairs = [(layer, target.layers[name]) for name, layer in by_name.items() if name in target.layers]
    missing = sorted(layer.prefix for name, layer in by_name.items() if name not in target.layers)
    extra = sorted(set(target.layers) - set(by_name))
    return pairs, missing, extra


class Comparison(NamedTuple):
    """The verdict on a whole file."""

    matches: list[LayerMatch]
    missing: list[str]
    extra: list[str]
    mismatched: list[str]

    def total(self) -> float:
        return decibels(sum(m.signal for m in self.matches), sum(m.noise for m in self.matches))


def compare_files(
    source: tuple[Checkpoint, Inventory],
    target: tuple[Checkpoint, Inventory],
    backend: Backend,
    *,
    rename: Callable[[str], str] | None = None,
    max_rows: int | None = None,
    activations: Callable[[Layer], F32 | None] = lambda layer: None,
    jobs: int = 1,
    elements: int = CHUNK_ELEMENTS,
    progress: Callable[[int], object] | None = None,
) -> Comparison:
    """Every layer that both files have, and the tensors that belong to no layer.

    `rename`: a layer's name in the target. `activations`: recorded inputs [S, K] of a source layer, None for random.
    """
    pairs, missing, extra = pair_layers(source[1], target[1], rename)
    mismatched: list[str] = []

    def one(pair: tuple[Layer, Layer]) -> LayerMatch | str:
        a, b = pair[0], seen_as(pair[1], pair[0])
        if (a.n, a.k, a.experts) != (b.n, b.k, b.experts):
            return f"{a.prefix}: [{a.n}, {a.k}] against [{b.n}, {b.k}]"
        match = compare_layer(
            Side(source[0], a),
            Side(target[0], b),
            backend,
            max_rows=max_rows,
            activations=activations(a),
            elements=elements,
        )
        if progress:
            progress(a.nbytes)
        return match

    # Imported here: it is a tenth of what `inspect` takes.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(jobs) as pool:
        answers = list(pool.map(one, pairs))
    matches = [answer for answer in answers if isinstance(answer, LayerMatch)]
    mismatched += [answer for answer in answers if isinstance(answer, str)]
    missing += _loose(source, target, mismatched)
    return Comparison(matches, missing, extra, mismatched)


def _loose(
    source: tuple[Checkpoint, Inventory], target: tuple[Checkpoint, Inventory], mismatched: list[str]
) -> list[str]:
    """Tensors of no layer that the target lacks; those whose bytes differ are added to `mismatched`."""
    there = {tensor.name: tensor for tensor in target[1].loose}
    missing = []
    for tensor in source[1].loose:
        other = there.get(tensor.name) or there.get(tensor.name.removeprefix("model.diffusion_model."))
        if other is None:
            missing.append(tensor.name)
        elif tensor.spec == other.spec and not _same_bytes(source[0], tensor, target[0], other):
            mismatched.append(f"{tensor.name}: other bytes under the same type and shape")
    return missing


def _same_bytes(a: Checkpoint, left: TensorSpec, b: Checkpoint, right: TensorSpec) -> bool:
    step = CHUNK_ELEMENTS * 4
    for begin in range(0, left.nbytes, step):
        size = min(step, left.nbytes - begin)
        x, y = a.pread(left.file, left.start + begin, size), b.pread(right.file, right.start + begin, size)
        if not np.array_equal(x, y):
            return False
    return True


#: SQNR (dB) under which a layer of this format is taken as wrong rather than as coarse: several dB below what the
#: format gives on any weight seen (docs/fidelity.md); noise instead of a model lies near 0 dB.
THRESHOLDS = {
    "nvfp4": 14.0,
    "asym_w4a8_int8": 14.0,
    "convrot_w4a4": 10.0,
    "awq_w4a16": 12.0,
    "float8_e4m3fn": 20.0,
    "float8_e5m2": 15.0,
    "mxfp8": 20.0,
    "int8_tensorwise": 15.0,
}
#: The same by a codec's family, for layers that carry no marker; what is not listed has 4 bits or fewer.
_FAMILY_THRESHOLDS = {"nvfp4": 14.0, "w4a8": 14.0, "float8": 15.0, "mxfp8": 20.0, "int8": 15.0}
_COARSE = 8.0


def default_threshold(format_name: str) -> float:
    """What `verify` demands of a layer when the user names no threshold; unquantised layers 40 dB."""
    given = THRESHOLDS.get(format_name)
    if given is not None:
        return given
    known = codec_for_marker(format_name) or next((c for c in CODECS if c.name == format_name), None)
    if known is None or known.name == "plain":
        return 40.0
    return _FAMILY_THRESHOLDS.get(known.family, _COARSE)
