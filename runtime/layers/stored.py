"""A layer's tensors as they lie in the file, in torch: all of them, or only those of a run of rows."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from qconvert.formats.dtypes import numpy_dtype
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import Layer
from qconvert.formats.reader import LayerReader
from qconvert.formats.tensors import Spec
from torch import Tensor

_TORCH: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    # Two codes a byte; the stored shape counts codes.
    "F4": torch.uint8,
}

#: Where rows [a, b) of a layer lie in one of its tensors. tiles: 128 rows of swizzled scales at a time.
Place = Literal["rows", "tiles", "blocks", "columns", "whole"]

#: Tensors that a layer's forward pass reads besides those of its codec.
COMPANIONS = ("bias", "input_scale", "scale_input", "pre_quant_scale")


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch type of a stored one. Raises QConvertError where torch has none."""
    try:
        return _TORCH[dtype]
    except KeyError:
        raise QConvertError(f"no layer is built from {dtype} tensors") from None


def storage_shape(spec: Spec) -> tuple[int, ...]:
    """The shape of the torch tensor that holds a stored one."""
    return (*spec.shape[:-1], spec.shape[-1] // 2) if spec.dtype == "F4" else spec.shape


def to_torch(array: NDArray[Any], spec: Spec) -> Tensor:
    """A stored tensor's bits (as `Checkpoint.read` and `LayerReader` give them) under its torch type."""
    dtype = torch_dtype(spec.dtype)
    # bf16 comes as uint16, 8-bit floats as uint8: carried over as integers of that size, then renamed.
    carrier = {1: np.uint8, 2: np.int16}.get(numpy_dtype(spec.dtype).itemsize, array.dtype)
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(carrier))
    return flat.view(dtype).reshape(storage_shape(spec))


def used_suffixes(layer: Layer) -> tuple[str, ...]:
    """The tensors of a layer that its forward pass reads, in payload order."""
    return tuple(s for s in layer.tensors if s in layer.owned or s in COMPANIONS)


def place(layer: Layer, suffix: str) -> Place:
    """How rows of the layer are found in this tensor."""
    name, options = layer.codec.name, layer.options
    if suffix == "weight":
        return "rows"
    if suffix == "bias":
        return "rows"
    if suffix in COMPANIONS or suffix in ("weight_scale_2", "weight_codebook"):
        return "whole"
    if name == "awq_w4a16" or suffix == "weight_correction":
        return "columns"
    if name in ("nvfp4", "mxfp8"):
        return "tiles" if options["scales"] == "swizzled" else "rows"
    scale = options.get("scale")
    if scale in ("scalar", "none"):
        return "whole"
    return "blocks" if scale == "block" else "rows"


def read(reader: LayerReader, layer: Layer, suffix: str, a: int, b: int) -> Tensor:
    """Rows [a, b) of one tensor, `a` a multiple of 128 unless the layer stores row by row."""
    spec = layer.tensors[suffix].spec
    shape = storage_shape(spec)
    where = place(layer, suffix)
    if where == "whole":
        return to_torch(reader.whole(suffix), spec)
    if where == "columns":
        return to_torch(reader.columns(suffix, a, b), Spec(spec.dtype, (shape[0], b - a)))
    if where == "tiles":
        a, b = a, min(-(-b // 128) * 128, shape[0])
    elif where == "blocks":
        a, b = a // 128, -(-b // 128)
    rows = reader.rows(suffix, a, b)
    if spec.dtype == "F4":
        return torch.from_numpy(rows.view(np.uint8)).reshape(b - a, *shape[1:])
    return to_torch(rows, Spec(spec.dtype, (b - a, *spec.shape[1:])))


def row_step(layer: Layer) -> int:
    """A run of rows has to begin at a multiple of this."""
    return 128 if any(place(layer, s) in ("tiles", "blocks") for s in used_suffixes(layer)) else 1


def empty(layer: Layer, suffix: str, device: torch.device | str) -> Tensor:
    """An uninitialised tensor of the stored type and shape."""
    spec = layer.tensors[suffix].spec
    return torch.empty(storage_shape(spec), dtype=torch_dtype(spec.dtype), device=device)
