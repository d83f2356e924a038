"""Reading back what was written: the proof that the file holds what was computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qconvert.convert.actions import LOSSLESS, Action, CopyOut, Plan
from qconvert.convert.execute import PROBE_ROWS, Probe, Result
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import Layer, take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.tensors import TensorSpec
from qconvert.formats.values import seen_as
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import Array, np
from qconvert.runtime.verify import Side, compare_rows, decibels

#: Bytes at either end of a copied tensor that are compared.
_ENDS = 1 << 16
#: No scale: with codes of up to 448 it is beyond float32.
_TOO_LARGE = 7e35
#: 8-bit types of block scales: bits without the sign, and the first code that is NaN or Inf.
_NO_NUMBERS = {"F8_E4M3": (0x7F, 0x7F), "F8_E5M2": (0x7F, 0x7C), "F8_E8M0": (0xFF, 0xFF)}
_PIECE, _ROWS = 1 << 18, 1 << 12
#: The smallest number of float32.
_LEAST = 2.0**-149
#: Options that say how a layer computes, not what its codes stand for.
_NO_VALUES = frozenset({"full_precision"})


def read_back(
    checkpoint: Checkpoint,
    written: Checkpoint,
    plan: Plan,
    results: dict[str, Result],
    path: Path,
    backend: Backend,
    jobs: int,
) -> None:
    """Look at every quantised layer of the written file. Raises QConvertError where it is not as planned.

    Of layers that were computed, rows are decoded from the file and compared with the source's own values in the plain
    basis: same rows, same error. Tensors that were copied are compared byte by byte at both ends; where the written
    layer is also read in the source's way, that settles it, and nothing is decoded.
    """
    there = take_inventory(written).layers

    def look(action: Action) -> None:
        _look(checkpoint, written, there, action, results.get(action.layer.prefix), path, backend)

    # Two at the most: each holds rows of a layer. In the plan's order, so that the first fault is the one that is told.
    with ThreadPoolExecutor(max(1, min(jobs, 2))) as pool:
        for _ in pool.map(look, plan.actions):
            pass


def _look(
    checkpoint: Checkpoint,
    written: Checkpoint,
    there: Mapping[str, Layer],
    action: Action,
    result: Result | None,
    path: Path,
    backend: Backend,
) -> None:
    """One layer. Raises QConvertError."""
    if (not action.transforms and not action.layer.quantised) or action.layer.bare:
        return
    layer = there.get(action.prefix)
    layer = seen_as(layer, action.layer) if layer else None
    if layer is None or (layer.n, layer.k) != (action.layer.n, action.layer.k):
        raise QConvertError(
            "the written file does not hold this layer as planned", file=str(path), layer=action.prefix
        )
    _same_ends(checkpoint, written, action, path)
    if action.kind in LOSSLESS:
        _finite_scales(checkpoint, action.layer)
        _finite_block_scales(checkpoint, action.layer, backend)
    if not action.transforms and _read_alike(action.layer, layer):
        return
    if action.kind == "repack" and _same_codes(checkpoint, written, action.layer, layer, backend):
        return
    source, target = Side(checkpoint, action.layer), Side(written, layer)
    for probe in result.probes if result and result.probes else [_first_rows(action.layer)]:
        signal, noise = compare_rows(source, target, probe.expert, probe.a, probe.b, backend)
        # Rotating back and forth in float32 leaves about 1e-13 of the signal's energy, and of the smallest numbers
        # nothing: each of at most 256 that are added up may lose half of what float32 can tell apart.
        floor = 1e-12 * signal + (probe.b - probe.a) * layer.k * (256 * _LEAST) ** 2
        if abs(noise - probe.noise) > 0.05 * probe.noise + floor:
            raise QConvertError(
                "the written layer does not read back as what was encoded",
                file=str(path),
                layer=action.prefix,
                found=f"{decibels(signal, noise):.1f} dB in rows {probe.a} to {probe.b}",
                expected=f"{decibels(signal, probe.noise):.1f} dB",
                hint="this is a fault of qconvert; please report it",
            )


def _finite_scales(checkpoint: Checkpoint, layer: Layer) -> None:
    """Raise for scales that are NaN or Inf where codes are taken over: what is computed is looked at on the way."""
    for suffix in sorted(layer.owned):
        tensor = layer.tensors.get(suffix)
        if tensor is None or suffix == "weight" or tensor.dtype not in FLOATS:
            continue
        raw = checkpoint.read(tensor.name)
        values = (raw.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "BF16" else raw
        if tensor.dtype == "F16":
            values = raw.astype(np.float32)
        bad = int(values.size - np.count_nonzero(np.abs(values) < _TOO_LARGE))
        if bad:
            raise _not_finite(checkpoint, layer, suffix, bad, values.size)


def _not_finite(checkpoint: Checkpoint, layer: Layer, suffix: str, bad: int, size: int) -> QConvertError:
    return QConvertError(
        f"{suffix} holds NaN or Inf, or overflows with its codes",
        file=str(checkpoint.files[layer.tensors[suffix].file]),
        layer=layer.prefix,
        found=f"{bad} of {size} values",
        hint="get the file again",
    )


def _finite_block_scales(checkpoint: Checkpoint, layer: Layer, backend: Backend) -> None:
    """Raise for block scales of 8 bits that are NaN or Inf, the padding of tiled ones excepted."""
    for suffix in sorted(layer.owned - {"weight"}):
        tensor = layer.tensors.get(suffix)
        if tensor is None:
            continue
        kind = tensor.dtype
        if kind in ("U8", "I8") and layer.codec.family == "mxfp8" and suffix.startswith("weight_scale"):
            kind = "F8_E8M0"
        if kind not in _NO_NUMBERS:
            continue
        # A look at the bytes is nearly free. Which of them count, the codec knows, and is asked only where one is bad.
        bad, size = _count_stored(checkpoint, tensor, kind), tensor.nbytes
        if bad:
            scales = list(_block_scales(checkpoint, layer, backend))
            if scales:
                bad, size = sum(_count(part, kind) for part in scales), sum(part.size for part in scales)
        if bad:
            raise _not_finite(checkpoint, layer, suffix, bad, size)


def _block_scales(checkpoint: Checkpoint, layer: Layer, backend: Backend) -> Iterator[Array]:
    """Those of the rows and columns that the layer has; none where its codec knows no block scales."""
    for expert in range(layer.experts) if layer.experts else (None,):
        reader = LayerReader(checkpoint, layer, expert)
        for a in range(0, layer.n, _ROWS):
            codes = layer.codec.load(reader, a, min(a + _ROWS, layer.n), backend)
            if "block_scale" in codes:
                yield codes["block_scale"]


def _count_stored(checkpoint: Checkpoint, tensor: TensorSpec, kind: str) -> int:
    """Codes of a stored tensor that are no numbers. In pieces that stay in the cache."""
    buffer = np.empty(min(_PIECE, tensor.nbytes), np.uint8)
    bad = 0
    for at in range(0, tensor.nbytes, _PIECE):
        piece = buffer[: tensor.nbytes - at]
        checkpoint.pread_into(tensor.file, tensor.start + at, piece.data)
        bad += _count(piece, kind)
    return bad


def _count(codes: Array, kind: str) -> int:
    """Codes that are no numbers."""
    mask, least = _NO_NUMBERS[kind]
    return int(np.count_nonzero((codes.view(np.uint8) & mask) >= least))


def _same_codes(
    checkpoint: Checkpoint, written: Checkpoint, source: Layer, target: Layer, backend: Backend
) -> bool:
    """Whether the first rows of both are the same numbers, bit for bit, and stand for values in the same basis."""
    probe = _first_rows(source)
    theirs, ours = (
        layer.codec.load(LayerReader(file, layer, probe.expert), probe.a, probe.b, backend)
        for file, layer in ((checkpoint, source), (written, target))
    )
    return (
        source.codec.family == target.codec.family
        and source.codec.rotation(source.options) == target.codec.rotation(target.options)
        and theirs.keys() == ours.keys()
        and all(
            theirs[key].shape == ours[key].shape and theirs[key].tobytes() == ours[key].tobytes()
            for key in theirs
        )
    )


def _read_alike(layer: Layer, other: Layer) -> bool:
    """Whether both are decoded by the same code with the same options from tensors of the same names."""
    mine, its = ({k: v for k, v in x.options.items() if k not in _NO_VALUES} for x in (layer, other))
    return layer.codec is other.codec and mine == its and layer.owned == other.owned


def _same_ends(checkpoint: Checkpoint, written: Checkpoint, action: Action, path: Path) -> None:
    for out in action.outputs:
        if not isinstance(out, CopyOut):
            continue
        source, target = out.source, written.tensors[out.name]
        for start in (0, max(0, source.nbytes - _ENDS)):
            size = min(_ENDS, source.nbytes)
            theirs = checkpoint.pread(source.file, source.start + start, size)
            if (theirs != written.pread(target.file, target.start + start, size)).any():
                raise QConvertError(
                    f"{out.name} was not copied as it is",
                    file=str(path),
                    layer=action.prefix,
                    found=f"other bytes in the {size} from byte {start}",
                    hint="this is a fault of qconvert; please report it",
                )


def _first_rows(layer: Layer) -> Probe:
    """The probe of a layer whose codes were copied or moved: no error at all."""
    return Probe(0 if layer.experts else None, 0, min(PROBE_ROWS, layer.n), 0.0, 0.0)
