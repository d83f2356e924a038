"""Rows and columns that writers add to fill whole blocks: nvfp4 up to multiples of 16, mxfp8 of 32.

The file does not store the true shape (FORMATS "nvfp4", "mxfp8": ComfyUI takes it from its module). What stands
beside the weight may tell it: `orig_shape` in the marker, the length of a bias, of a pre_quant_scale. Then the
layer gets its true shape, and what was added is cut off wherever values are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.finding import Finding
from qconvert.kernels.arrays import U8, np
from qconvert.kernels.layout import unpack_nibbles, up

if TYPE_CHECKING:
    from qconvert.formats.layers import Layer

#: Codec -> what writers fill N and K up to.
PADS = {"nvfp4": 16, "modelopt_nvfp4": 16, "mxfp8": 32}
#: Rows that are looked at for columns of nothing.
_SAMPLE = 64


def unpad(checkpoint: Checkpoint, layer: Layer) -> None:
    """Give a padded layer its true shape where something tells it; report what looks like padding otherwise."""
    multiple = PADS.get(layer.codec.name)
    if multiple is None or layer.experts or layer.ndim != 2:
        return
    n, k, evidence = _told(layer, multiple)
    rotation = layer.codec.rotation(layer.options)
    if rotation and k % rotation:
        k = layer.k
    rows, columns = _empty_tail(checkpoint, layer, multiple)
    if (n, k) != (layer.n, layer.k):
        empty = rows >= layer.n - n and columns >= layer.k - k
        layer.findings.append(
            Finding(
                "repair" if empty else "guess",
                f"padded from [{n}, {k}] to [{layer.n}, {layer.k}]; cut back",
                layer.prefix,
                f"{evidence}; what is cut is {'zero' if empty else 'NOT zero'}",
            )
        )
        layer.options["padded"] = {"n": layer.n, "k": layer.k, "true_k": k}
        layer.n, layer.k = n, k
    elif rows or columns:
        what = " and ".join(
            f"{count} {word}{'s' if count > 1 else ''}"
            for count, word in ((rows, "row"), (columns, "column"))
            if count
        )
        layer.findings.append(
            Finding(
                "note",
                "the weight may have been padded, and nothing beside it tells its true shape; kept as stored",
                layer.prefix,
                f"the last {what} of [{layer.n}, {layer.k}] are zero",
            )
        )


def _told(layer: Layer, multiple: int) -> tuple[int, int, str]:
    """The true (N, K) that can be told, and by what. What does not fit is a finding."""
    shape = [layer.n, layer.k]
    told: list[str] = []
    stated = layer.marker.get("orig_shape") if layer.marker else None
    if stated is not None:
        if _is_shape(stated) and [up(size, multiple) for size in stated] == shape:
            shape = list(stated)
            told.append(f"orig_shape {stated}")
        elif stated != shape:
            message = f"orig_shape {stated!r} does not fit the stored [{layer.n}, {layer.k}]; ignored"
            layer.findings.append(Finding("guess", message, layer.prefix, "marker"))
    for axis, suffix in ((0, "bias"), (1, "pre_quant_scale")):
        tensor = layer.tensors.get(suffix)
        if tensor is None or len(tensor.shape) != 1 or tensor.shape[0] == shape[axis]:
            continue
        stored = (layer.n, layer.k)[axis]
        if up(tensor.shape[0], multiple) == stored and shape[axis] == stored:
            shape[axis] = tensor.shape[0]
            told.append(f"{suffix} {tensor.spec}")
        elif tensor.shape[0] != stored:
            message = f"{suffix} {tensor.spec} does not fit a weight of [{shape[0]}, {shape[1]}]"
            layer.findings.append(Finding("guess", message, layer.prefix, "shapes"))
    return shape[0], shape[1], ", ".join(told)


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    )


def _empty_tail(checkpoint: Checkpoint, layer: Layer, multiple: int) -> tuple[int, int]:
    """How many of the last rows and columns hold nothing but zeros; fewer than `multiple`, else it is no padding."""
    tail = np.asarray(_codes(checkpoint, layer, max(0, layer.n - multiple), layer.n).any(axis=1))
    rows = int(np.argmax(tail[::-1])) if tail.any() else 0
    head = np.asarray(_codes(checkpoint, layer, 0, min(_SAMPLE, layer.n - rows), multiple).any(axis=0))
    columns = int(np.argmax(head[::-1])) if head.any() else 0
    return rows, columns


def _codes(checkpoint: Checkpoint, layer: Layer, a: int, b: int, columns: int | None = None) -> U8:
    """Codes of rows [a, b), one a column, or of the last columns only. Zero is code 0: padding has no sign."""
    weight = layer.tensors["weight"]
    row = weight.nbytes // weight.shape[0]
    raw = checkpoint.pread(weight.file, weight.start + a * row, (b - a) * row).reshape(b - a, row)
    if layer.codec.family == "nvfp4":
        if columns is not None:
            raw = raw[:, -(columns // 2) :]
        return unpack_nibbles(raw, high_first=layer.options["nibbles"] == "high")
    return raw if columns is None else raw[:, -columns:]
