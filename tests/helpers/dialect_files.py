"""Tensors as files hold them: their type and their bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

Array = NDArray[Any]
F64 = NDArray[np.float64]
Rng = np.random.Generator

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8, "U8": torch.uint8, "I64": torch.int64, "I32": torch.int32,
}  # fmt: skip
NAMES = {value: key for key, value in TORCH.items()}
#: numpy type that holds the bits of one element
BITS = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
    "I8": np.int8, "U8": np.uint8, "I64": np.int64, "I32": np.int32,
}  # fmt: skip


class T(NamedTuple):
    """A tensor: its safetensors type and its bits."""

    dtype: str
    bits: Array


def to_torch(tensor: T) -> torch.Tensor:
    bits = np.array(tensor.bits, order="C")
    if tensor.dtype == "BF16":
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits).view(TORCH[tensor.dtype])


def from_torch(tensor: torch.Tensor) -> T:
    dtype = NAMES[tensor.dtype]
    if dtype == "BF16":
        return T(dtype, tensor.view(torch.int16).numpy().view(np.uint16))
    if dtype.startswith("F8"):
        return T(dtype, tensor.view(torch.uint8).numpy())
    return T(dtype, tensor.numpy())


def write(path: Path, tensors: Mapping[str, T], metadata: Mapping[str, str] | None = None) -> Path:
    """A file as the safetensors library writes it."""
    save_file({name: to_torch(t) for name, t in tensors.items()}, path, dict(metadata) if metadata else None)
    return path


def read(path: Path) -> dict[str, T]:
    """All tensors of a file as the safetensors library reads it."""
    with safe_open(path, "pt") as file:
        return {name: from_torch(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def read_metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def marker_tensor(marker: Mapping[str, Any] | bytes) -> T:
    data = marker if isinstance(marker, bytes) else json.dumps(marker).encode()
    return T("U8", np.frombuffer(data, np.uint8).copy())
