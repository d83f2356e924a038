"""Reading back what was written: the proof that the file holds what was computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from qconvert.convert.actions import Action, CopyOut, Plan
from qconvert.convert.execute import PROBE_ROWS, Probe, Result
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import Layer, take_inventory
from qconvert.formats.values import seen_as
from qconvert.kernels.api import Backend
from qconvert.runtime.verify import Side, compare_rows, decibels

#: Bytes at either end of a copied tensor that are compared.
_ENDS = 1 << 16
#: No scale: with codes of up to 448 it is beyond float32.
_TOO_LARGE = 7e35
#: Options that say how a layer computes, not what its codes stand for.
_NO_VALUES = frozenset({"full_precision"})


def read_back(
    checkpoint: Checkpoint,
    written: Checkpoint,
    plan: Plan,
    results: dict[str, Result],
    path: Path,
    backend: Backend,
) -> None:
    """Look at every quantised layer of the written file. Raises QConvertError where it is not as planned.

    Of layers that were computed, rows are decoded from the file and compared with the source's own values in the plain
    basis: same rows, same error. Tensors that were copied are compared byte by byte at both ends; where the written
    layer is also read in the source's way, that settles it, and nothing is decoded.
    """
    there = take_inventory(written).layers
    for action in plan.actions:
        if (not action.transforms and not action.layer.quantised) or action.layer.bare:
            continue
        layer = there.get(action.prefix)
        layer = seen_as(layer, action.layer) if layer else None
        if layer is None or (layer.n, layer.k) != (action.layer.n, action.layer.k):
            raise QConvertError(
                "the written file does not hold this layer as planned", file=str(path), layer=action.prefix
            )
        _same_ends(checkpoint, written, action, path)
        if not action.transforms:
            _finite_scales(checkpoint, action.layer)
        if not action.transforms and _read_alike(action.layer, layer):
            continue
        source, target = Side(checkpoint, action.layer), Side(written, layer)
        result = results.get(action.layer.prefix)
        for probe in result.probes if result and result.probes else [_first_rows(action.layer)]:
            signal, noise = compare_rows(source, target, probe.expert, probe.a, probe.b, backend)
            # Rotating back and forth in float32 leaves about 1e-13 of the signal's energy.
            floor = 1e-12 * signal
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
            raise QConvertError(
                f"{suffix} holds NaN or Inf, or overflows with its codes",
                file=str(checkpoint.files[tensor.file]),
                layer=layer.prefix,
                found=f"{bad} of {values.size} values",
                hint="get the file again",
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
