"""Reading one layer's tensors by rows: the `Stored` that codecs load from."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import prod

from qconvert.formats.base import Options
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.dtypes import BITS, BLOCKS, SUB_BYTE, nbytes, numpy_dtype
from qconvert.formats.layers import Layer
from qconvert.formats.tensors import TensorSpec
from qconvert.kernels.arrays import Array, np

#: Tensors read by columns are kept whole up to this size; no more than a few layers are open at a time.
KEPT_BYTES = 4 << 20
#: Runs of columns of larger ones that are kept at a time, of the same size.
KEPT_BANDS = 3


class LayerReader:
    """A layer of an open checkpoint. Safe to use from several threads; small whole tensors are read once and kept.

    `expert` selects one 2-D weight out of a bank: every tensor that has the experts' axis loses it.
    """

    def __init__(self, checkpoint: Checkpoint, layer: Layer, expert: int | None = None) -> None:
        self._checkpoint = checkpoint
        self._tensors: Mapping[str, TensorSpec] = layer.tensors
        self._expert = expert
        self._experts = layer.experts
        self._kept: dict[str, Array] = {}
        self._bands: dict[tuple[str, int, int], Array] = {}
        self._lock = threading.Lock()
        self.n = layer.n
        self.k = layer.k
        self.options: Options = layer.options

    def has(self, suffix: str) -> bool:
        return suffix in self._tensors

    def dtype(self, suffix: str) -> str:
        return self._tensors[suffix].dtype

    def _span(self, suffix: str) -> tuple[TensorSpec, tuple[int, ...], int]:
        """The tensor, its shape without the experts' axis, and where that part begins."""
        tensor = self._tensors[suffix]
        shape, start = tensor.shape, tensor.start
        shared = suffix in self.options.get("shared", ())
        if self._expert is not None and not shared and len(shape) > 0 and shape[0] == self._experts:
            start += tensor.nbytes // self._experts * self._expert
            shape = shape[1:]
        return tensor, shape, start

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self._span(suffix)[1]

    def rows(self, suffix: str, a: int, b: int) -> Array:
        tensor, shape, start = self._span(suffix)
        if not shape:
            return self.whole(suffix)
        row = _size(tensor.dtype, shape[1:])
        data = self._checkpoint.pread(tensor.file, start + a * row, (b - a) * row)
        if tensor.dtype in SUB_BYTE:
            return data.reshape(b - a, row)
        return data.view(numpy_dtype(tensor.dtype)).reshape(b - a, *shape[1:])

    def columns(self, suffix: str, a: int, b: int) -> Array:
        # Small ones ([K/G, N] scales) are kept whole and cut per chunk; of large ones only the columns are read.
        tensor, shape, start = self._span(suffix)
        kind = numpy_dtype(tensor.dtype)
        if shape[0] * shape[1] * kind.itemsize <= KEPT_BYTES:
            return np.ascontiguousarray(self.whole(suffix)[:, a:b])
        # A band of columns serves several chunks: short reads cost more than the bytes they bring.
        width = max(b - a, KEPT_BYTES // (shape[0] * kind.itemsize))
        first = a // width * width
        if b > first + width:
            return self._band(tensor, shape, start, a, b)
        with self._lock:
            key = (suffix, first, width)
            band = self._bands.get(key)
            if band is None:
                band = self._band(tensor, shape, start, first, min(first + width, shape[1]))
                while len(self._bands) >= KEPT_BANDS:
                    del self._bands[next(iter(self._bands))]
                self._bands[key] = band
        return np.ascontiguousarray(band[:, a - first : b - first])

    def _band(self, tensor: TensorSpec, shape: tuple[int, ...], start: int, a: int, b: int) -> Array:
        """Columns [a, b) of a 2-D tensor, row by row."""
        kind = numpy_dtype(tensor.dtype)
        out = np.empty((shape[0], b - a), kind)
        for row in range(shape[0]):
            at = start + (row * shape[1] + a) * kind.itemsize
            out[row] = self._checkpoint.pread(tensor.file, at, (b - a) * kind.itemsize).view(kind)
        return out

    def whole(self, suffix: str) -> Array:
        with self._lock:
            kept = self._kept.get(suffix)
            if kept is None:
                tensor, shape, start = self._span(suffix)
                data = self._checkpoint.pread(tensor.file, start, _size(tensor.dtype, shape))
                kept = data if tensor.dtype in BLOCKS else data.view(numpy_dtype(tensor.dtype)).reshape(shape)
                self._kept[suffix] = kept
            return kept

    def release(self) -> None:
        """Forget what `whole` kept: the layer is done."""
        with self._lock:
            self._kept.clear()
            self._bands.clear()

    def row_bytes(self, suffix: str) -> int:
        """Bytes of one row of a tensor."""
        tensor, shape, _ = self._span(suffix)
        return _size(tensor.dtype, shape[1:])


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of whole rows; of sub-byte types what fills bytes."""
    exact = nbytes(dtype, shape)
    return exact if exact is not None else BITS[dtype] * prod(shape) // 8
