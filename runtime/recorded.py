"""Recorded inputs of layers, from a safetensors file: `<layer>.inputs` or `<layer>`, [S, K]."""

from __future__ import annotations

from collections.abc import Callable

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import Layer
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, np


def recorded_inputs(checkpoint: Checkpoint, backend: Backend) -> Callable[[Layer], F32 | None]:
    """A function from a layer to its recorded inputs [S, K] in float32, None where there are none.

    It raises QConvertError when what is recorded does not fit the layer.
    """

    def find(layer: Layer) -> F32 | None:
        for name in (f"{layer.prefix}.inputs", layer.prefix):
            tensor = checkpoint.tensors.get(name)
            if tensor is None:
                continue
            if len(tensor.shape) != 2 or tensor.shape[1] != layer.k or tensor.dtype not in FLOATS:
                raise QConvertError(
                    "recorded inputs do not fit the layer",
                    file=str(checkpoint.path),
                    layer=layer.prefix,
                    found=str(tensor.spec),
                    expected=f"float [S, {layer.k}]",
                )
            return np.ascontiguousarray(backend.to_f32(checkpoint.read(name), tensor.dtype))
        return None

    return find
