"""Decoders of the formats that `bench_fidelity` compares, in float64 numpy, written from the formats' definitions.

They share no code with qconvert, so that an error in its own decoders cannot hide one of its encoders. Every
function takes the tensors of one layer by suffix, as they lie in a safetensors file (8-bit floats as uint8).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Tensors = Mapping[str, NDArray[Any]]


def _minifloat(bits: int, exponent: int, bias: int) -> F64:
    """The values of all codes of a small float without infinities; NaN codes come out as numbers and are not used."""
    code = np.arange(1 << bits)
    mantissa = bits - 1 - exponent
    e = (code >> mantissa) & ((1 << exponent) - 1)
    f = (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    magnitude = np.where(e == 0, f * 2.0 ** (1 - bias), (1 + f) * 2.0 ** (e - bias))
    return np.where(code >> (bits - 1), -magnitude, magnitude)


E4M3, E2M1 = _minifloat(8, 4, 7), _minifloat(4, 2, 1)


def _unswizzle(stored: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    """Scales out of 128x4 tiles, by the offset formula."""
    r, c = np.arange(rows)[:, None], np.arange(columns)[None, :]
    tiles = stored.shape[1] // 4
    offset = (r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    return stored.reshape(-1)[offset]


def _nibbles(packed: NDArray[Any], high_first: bool) -> NDArray[np.uint8]:
    byte = packed.view(np.uint8)
    pair = (byte >> 4, byte & 15) if high_first else (byte & 15, byte >> 4)
    return np.stack(pair, axis=-1).reshape(byte.shape[0], -1)


def hadamard(group: int) -> F64:
    """The regular Hadamard matrix of ConvRot, as a Kronecker power."""
    h4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float64) / 2
    h = np.ones((1, 1))
    while h.shape[0] < group:
        h = np.kron(h, h4)
    return h


def rotate(x: F64, group: int) -> F64:
    return (x.reshape(-1, group) @ hadamard(group)).reshape(x.shape) if group else x


def decode(form: str, t: Tensors, group: int = 0) -> F64:
    """[N, K] in the source's basis. `form`: a codec's name; `group`: ConvRot group, 0 when not rotated."""
    return rotate(_DECODERS[form](t), group)


def _float8(t: Tensors) -> F64:
    return E4M3[t["weight"].view(np.uint8)] * _column(t["weight_scale"])


def _int8(t: Tensors) -> F64:
    return t["weight"].astype(np.float64) * _column(t["weight_scale"])


def _column(scale: NDArray[Any]) -> F64:
    return scale.astype(np.float64).reshape(-1, 1)


def _nvfp4(t: Tensors) -> F64:
    values = E2M1[_nibbles(t["weight"], high_first=True)]
    n, k = values.shape
    scale = E4M3[_unswizzle(t["weight_scale"].view(np.uint8), n, k // 16)] * float(
        t["weight_scale_2"].reshape(())
    )
    return (values.reshape(n, -1, 16) * scale[..., None]).reshape(n, k)


def _mxfp8(t: Tensors) -> F64:
    values = E4M3[t["weight"].view(np.uint8)]
    n, k = values.shape
    exponent = _unswizzle(t["weight_scale"].view(np.uint8), n, k // 32).astype(np.float64)
    scale = np.where(exponent == 0, 0.0, 2.0 ** (exponent - 127))
    return (values.reshape(n, -1, 32) * scale[..., None]).reshape(n, k)


def _w4a4(t: Tensors) -> F64:
    codes = _nibbles(t["weight"], high_first=False).astype(np.int64)
    return np.where(codes > 7, codes - 16, codes) * _column(t["weight_scale"])


def _w4a8(t: Tensors) -> F64:
    levels = t["weight_codebook"][_nibbles(t["weight"], high_first=False)]
    n, k = levels.shape
    rel = t["weight_s_rel"]
    # The runtime multiplies in float32; exact products of the same float32 numbers can only differ at a tie.
    rel32 = E4M3[rel.view(np.uint8)].astype(np.float32)
    grid = levels.reshape(n, rel.shape[1], -1).astype(np.float32) * rel32[..., None]
    grid = np.clip(np.rint(grid), -127, 127).astype(np.float64)
    return grid.reshape(n, k) * _column(t["weight_s_channel"])


_DECODERS = {
    "float8": _float8,
    "int8": _int8,
    "nvfp4": _nvfp4,
    "mxfp8": _mxfp8,
    "w4a4": _w4a4,
    "w4a8": _w4a8,
}
