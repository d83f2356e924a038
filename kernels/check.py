"""What an encoder's arguments must satisfy, said once for all backends. Every function raises ValueError."""

from __future__ import annotations

import numpy as np
from qconvert.kernels.arrays import F32
from qconvert.kernels.search import LEAST_NORMAL


def check_group(x: F32, group: int, *, power_of_4: bool = True) -> None:
    """`x` is [R, K] with K a multiple of `group`, itself a power of 4 (4, 16, 64, ...) for rotations."""
    if power_of_4 and (group < 4 or group & (group - 1) or group.bit_length() % 2 == 0):
        raise ValueError(f"rotation groups are powers of 4 from 4 up, got {group}")
    if x.ndim != 2 or x.shape[1] % group:
        raise ValueError(f"need [R, K] with K a multiple of {group}, got {list(x.shape)}")


def check_nvfp4(x: F32, tensor_scale: np.float32) -> None:
    """K in whole blocks of 16, and a tensor scale that can be divided by."""
    check_group(x, 16, power_of_4=False)
    if not LEAST_NORMAL <= float(tensor_scale) < float("inf"):
        raise ValueError(f"nvfp4 tensor scale must be a normal float32 above zero, got {tensor_scale}")


def check_w4a8(x: F32, group: int, codebook: F32 | None = None, *, six_bit: bool = False) -> None:
    """FORMATS section 4: K % 16 == 0 (6 bit: 32), K % G == 0, G divides 16 (from 4) or is a multiple."""
    small = group in (4, 8) and not six_bit
    if not small and (group < 16 or group % 16):
        raise ValueError(f"group size {group} is not served: {'' if six_bit else '4, 8 or '}multiples of 16")
    check_group(x, group, power_of_4=False)
    check_group(x, 32 if six_bit else 16, power_of_4=False)
    if codebook is not None:
        if codebook.shape != (16,):
            raise ValueError(f"a codebook has 16 levels, got {list(codebook.shape)}")
        if not (abs(codebook).max() > 0.0 and (codebook[1:] >= codebook[:-1]).all()):
            raise ValueError("a codebook is finite, ascending and not all zero")
