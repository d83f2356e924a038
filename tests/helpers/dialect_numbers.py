"""Numbers of few bits and how they are laid out, in float64; part of `dialects`."""

from __future__ import annotations

from typing import Any

import numpy as np
from dialect_files import BITS, F64, Array, T


def _table(exponent_bits: int, mantissa_bits: int, bias: int) -> F64:
    """Magnitudes of a small float by code, infinities and NaNs included as what their bits would be."""
    codes = np.arange(2 ** (exponent_bits + mantissa_bits))
    e, m = codes >> mantissa_bits, (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    return np.where(e == 0, m * 2.0 ** (1 - bias), (1 + m) * 2.0 ** (e - bias))


E4M3 = _table(4, 3, 7)
E5M2 = _table(5, 2, 15)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
#: finite codes: 0x7F is NaN in e4m3fn, 0x7C and above are inf and NaN in e5m2
FINITE = {"F8_E4M3": (E4M3, 0x7F), "F8_E5M2": (E5M2, 0x7C)}


def widen(tensor: T) -> F64:
    """Values of a stored tensor."""
    bits = tensor.bits
    match tensor.dtype:
        case "BF16":
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        case "F8_E4M3" | "F8_E5M2":
            table, _ = FINITE[tensor.dtype]
            return np.where(bits & 0x80, -1.0, 1.0) * table[bits & 0x7F]
        case "F8_E8M0":
            return np.where(bits == 0, 0.0, 2.0 ** (bits.astype(np.float64) - 127))
    return bits.astype(np.float64)


def narrow(x: F64, dtype: str) -> T:
    """Values rounded to a stored type, ties to even; 8-bit floats saturate."""
    x = np.asarray(x, np.float64)
    if dtype == "BF16":
        bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
        return T(dtype, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))
    if dtype in FINITE:
        table, count = FINITE[dtype]
        magnitude = np.minimum(np.abs(x), table[count - 1])
        high = np.clip(np.searchsorted(table[:count], magnitude), 1, count - 1)
        low = high - 1
        gap_low, gap_high = magnitude - table[low], table[high] - magnitude
        up = (gap_high < gap_low) | ((gap_high == gap_low) & (high % 2 == 0))
        return T(dtype, (np.where(up, high, low) | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8))
    return T(dtype, x.astype(BITS[dtype]))


def f32(x: Array) -> F64:
    """Rounded to float32, kept in float64."""
    return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def f32_tensor(x: Any) -> T:
    return T("F32", np.asarray(x, np.float32))


def hadamard(group: int) -> F64:
    h4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float64)
    h = np.ones((1, 1))
    while h.shape[0] < group:
        h = np.kron(h, h4)
    assert h.shape[0] == group
    return h / np.sqrt(group)


def rotate(x: F64, group: int) -> F64:
    """Every run of `group` columns times the regular Hadamard matrix; 0 leaves x as it is."""
    if not group:
        return x
    return (x.reshape(*x.shape[:-1], -1, group) @ hadamard(group)).reshape(x.shape)


def sqnr(reference: Array, x: Array) -> float:
    a, b = np.asarray(reference, np.float64), np.asarray(x, np.float64)
    noise = np.square(a - b).sum()
    return float("inf") if noise == 0 else float(10 * np.log10(np.square(a).sum() / noise))


# ---- layouts


def up(x: int, m: int) -> int:
    return -(-x // m) * m


def swizzle(scales: Array) -> Array:
    """By the formula of the flat offset, element by element."""
    rows, cols = scales.shape
    out = np.zeros(up(rows, 128) * up(cols, 4), scales.dtype)
    tiles = up(cols, 4) // 4
    r, c = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    out[((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scales
    return out.reshape(up(rows, 128), up(cols, 4))


def unswizzle(stored: Array, rows: int, cols: int) -> Array:
    tiles = up(cols, 4) // 4
    r, c = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    at = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    return stored.reshape(-1)[at]


def pack4(codes: Array, high_first: bool) -> Array:
    first, second = codes[..., 0::2].astype(np.uint8) & 15, codes[..., 1::2].astype(np.uint8) & 15
    return first << 4 | second if high_first else second << 4 | first


def unpack4(packed: Array, high_first: bool) -> Array:
    packed = packed.view(np.uint8)
    pair = [packed >> 4, packed & 15]
    return np.stack(pair if high_first else pair[::-1], -1).reshape(*packed.shape[:-1], -1).astype(np.int64)


def pack6(codes: Array) -> Array:
    top = (codes >> 4).astype(np.uint8).reshape(*codes.shape[:-1], -1, 4)
    tops = top[..., 0] | top[..., 1] << 2 | top[..., 2] << 4 | top[..., 3] << 6
    return np.concatenate([pack4(codes, False), tops], -1)


def unpack6(packed: Array) -> Array:
    packed = packed.view(np.uint8)
    k = packed.shape[-1] * 4 // 3
    low = unpack4(packed[..., : k // 2], False)
    columns = np.arange(k)
    return low | ((packed[..., k // 2 :].astype(np.int64)[..., columns // 4] >> 2 * (columns % 4)) & 3) << 4


def signed(nibbles: Array) -> Array:
    return np.where(nibbles > 7, nibbles - 16, nibbles)
