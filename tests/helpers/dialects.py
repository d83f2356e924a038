"""Layers as other writers store them, and what they stand for: independent definitions, numpy float64 only.

Not a test module: `conftest.py` loads it. Everything here is written from the description of the formats, with no
help from the package under test. A value is computed in float64 and rounded to float32 where the format's definition
rounds; products of two short significands are exact in float64, so this gives the float32 result bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
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


# ---- files


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


# ---- numbers


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


# ---- decoders: from stored tensors to values in the stored basis, rounded to float32 where the format rounds

Tensors = Mapping[str, T]


def decode_scaled(t: Tensors, scale: str = "weight_scale") -> F64:
    """fp8 and int8: one scale, or one a row (trailing axes of 1), of the last or the last two axes."""
    w = widen(t["weight"])
    s = widen(t[scale]) if scale in t else np.ones(())
    if s.size == 1:
        return f32(w * s.reshape(()))
    return f32(w * s.reshape(*s.shape, *[1] * (w.ndim - s.ndim)))


def decode_block_fp8(t: Tensors, scale: str = "weight_scale_inv") -> F64:
    w, s = widen(t["weight"]), widen(t[scale])
    return f32(w * s.repeat(128, 0)[: w.shape[0]].repeat(128, 1)[:, : w.shape[1]])


def decode_nvfp4(t: Tensors, low_first: bool = False, linear: bool = False) -> F64:
    codes = unpack4(t["weight"].bits, not low_first)
    n, k = codes.shape
    scale = t["weight_scale"].bits
    b = widen(T("F8_E4M3", scale if linear else unswizzle(scale, n, k // 16)))
    total = f32(widen(t["weight_scale_2"]).reshape(()) * b)
    return f32(np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7] * total.repeat(16, 1))


def decode_mxfp8(t: Tensors, scale: str = "weight_scale", linear: bool = False) -> F64:
    w = widen(t["weight"])
    n, k = w.shape
    bits = t[scale].bits.view(np.uint8)
    s = widen(T("F8_E8M0", bits if linear else unswizzle(bits, n, k // 32)))
    return f32(w * s.repeat(32, 1))


def decode_w4a4(t: Tensors) -> F64:
    return f32(signed(unpack4(t["weight"].bits, False)) * widen(t["weight_scale"]).reshape(-1, 1))


def decode_awq(t: Tensors) -> F64:
    q = unpack4(t["weight"].bits, False)
    s, z = (widen(t[name]).T for name in ("weight_scale", "weight_zeros"))
    g = q.shape[1] // s.shape[1]
    return f32(f32((q - 8) * s.repeat(g, 1)) + z.repeat(g, 1))


def decode_w4a8(t: Tensors, *, sym: bool = False, rel: str = "weight_s_rel", bits: int = 4) -> F64:
    """i8 = clamp(round(v * s_rel), +-127), w = i8 * s_channel (+ correction); without s_channel w = q * scale."""
    weight, s_rel = t["weight"].bits, t[rel]
    if s_rel.dtype == "U8":
        s_rel = T("F8_E4M3", s_rel.bits)
    scale = widen(s_rel)
    codes, centre = (unpack4(weight, False), 8) if bits == 4 else (unpack6(weight), 32)
    v = signed(codes) if sym else codes - centre
    if "weight_codebook" in t:
        v = widen(t["weight_codebook"]).reshape(-1)[codes]
    scale = scale.repeat(codes.shape[1] // scale.shape[1], 1)
    if "weight_s_channel" not in t:
        return f32(v * scale)
    i8 = np.clip(np.rint(f32(v * scale)), -127, 127)
    out = f32(i8 * widen(t["weight_s_channel"]).reshape(-1, 1))
    if "weight_correction" in t:
        c = widen(t["weight_correction"]).T
        out = f32(out + c.repeat(codes.shape[1] // c.shape[1], 1))
    return out


def decode_svdquant(t: Tensors) -> F64:
    w, scale = t["weight"].bits, widen(t["weight_scale"])
    lift, down, smooth = (widen(t[f"weight_{s}"]) for s in ("proj_up", "proj_down", "smooth_factor"))
    if w.ndim == 4:
        rows, tiles = w.shape[0] * 128, w.shape[1]
        q = np.zeros((rows, tiles * 64))
        for i in range(w.shape[0]):
            for j in range(tiles):
                for line in range(32):
                    block = signed(unpack4(w[i, j, line].reshape(4, 32), False))
                    q[i * 128 + line * 4 : i * 128 + line * 4 + 4, j * 64 : j * 64 + 64] = block
        scale = scale.transpose(0, 2, 1).reshape(rows, tiles)
        lift = lift.transpose(0, 2, 1).reshape(rows, -1)
    else:
        q, scale = signed(unpack4(w, False)), scale.T
    return q * scale.repeat(64, 1) / smooth + lift @ down.T


# ---- writers: a weight [N, K] into somebody's tensors. Plain absmax; not the best codes, but honest ones.


@dataclass(frozen=True)
class Sample:
    """A layer: its tensors by suffix, its marker, and what recognition must make of it.

    `stored`: values in the stored basis, as float32 numbers. `exact`: whether they follow bit for bit.
    """

    codec: str
    tensors: dict[str, T]
    marker: dict[str, Any] | bytes | None
    stored: F64
    options: dict[str, Any] = field(default_factory=dict)
    rotation: int = 0
    guess: bool = False
    exact: bool = True
    #: tensors that stand beside the layers in the file (sentinels), by full name
    beside: dict[str, T] = field(default_factory=dict)

    @cached_property
    def values(self) -> F64:
        """What the weight stands for; float64 (a rotation leaves no float32 numbers)."""
        return rotate(self.stored, self.rotation)

    @property
    def tolerance(self) -> float:
        """Largest deviation allowed of a float32 decoder."""
        return 2e-6 * float(np.abs(self.values).max()) if self.rotation or not self.exact else 0.0

    def named(self, prefix: str) -> dict[str, T]:
        """Tensors as they lie in a file."""
        out = {f"{prefix}.{suffix}": tensor for suffix, tensor in self.tensors.items()}
        if self.marker is not None:
            out[f"{prefix}.comfy_quant"] = marker_tensor(self.marker)
        return out | self.beside


Writer = Callable[[Rng, F64], Sample]


def weights(rng: Rng, *shape: int, std: float = 0.03) -> F64:
    """Gaussian with a few strong columns and weak rows, as trained weights are; exact in bf16."""
    w = rng.standard_normal(shape) * std
    w[..., rng.permutation(shape[-1])[: 3 * (shape[-1] > 8)]] *= 6
    w *= rng.uniform(0.3, 1.0, (*shape[:-1], 1))
    return widen(narrow(w, "BF16"))


def plain(dtype: str) -> Writer:
    def make(rng: Rng, w: F64) -> Sample:
        tensor = narrow(w, dtype)
        return Sample("plain", {"weight": tensor}, None, f32(widen(tensor)), {"dtype": dtype})

    return make


def fp8(
    kind: str = "F8_E4M3",
    scale: str = "scalar",
    *,
    marked: bool = True,
    dtype: str = "F32",
    suffix: str = "weight_scale",
    shape: tuple[int, ...] | None = None,
    tag: str | None = None,
    sentinel: int = 0,
    extra: Mapping[str, T] | None = None,
    **keys: Any,
) -> Writer:
    """scale: scalar | row | block | none. sentinel: elements of `scaled_fp8`. tag: the type the weight is given."""

    def make(rng: Rng, w: F64) -> Sample:
        limit = FINITE[kind][0][FINITE[kind][1] - 1]
        n = w.shape[0]
        match scale:
            case "scalar":
                s = np.abs(w).max() / limit
            case "row":
                s = np.abs(w).reshape(n, -1).max(1).reshape(n, *[1] * (w.ndim - 1)) / limit
            case "block":
                tiles = np.pad(w, [(0, -size % 128) for size in w.shape])
                tiles = tiles.reshape(len(tiles) // 128, 128, -1, 128)
                s = np.abs(tiles).max((1, 3)) / limit
            case _:
                s = np.ones(())
        stored = narrow(s, dtype)
        wide = widen(stored)
        spread = wide.repeat(128, 0)[:n].repeat(128, 1)[:, : w.shape[1]] if scale == "block" else wide
        tensors = {"weight": narrow(w / spread, kind)}
        if scale != "none":
            tensors[suffix] = stored
        values = decode_block_fp8(tensors, suffix) if scale == "block" else decode_scaled(tensors, suffix)
        if shape is not None or scale == "row":
            like = shape if shape is not None else wide.shape
            tensors[suffix] = T(dtype, stored.bits.reshape([n if d == -1 else d for d in like]))
        if tag:
            tensors["weight"] = T(tag, tensors["weight"].bits.view(BITS[tag]))
        name = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}[kind]
        full = sentinel == 2 or bool(keys.get("full_precision_matrix_mult"))
        return Sample(
            "float8",
            tensors | dict(extra or {}),
            {"format": name} | keys if marked else None,
            values,
            {"kind": kind, "scale": scale, "full_precision": full},
            guess=(not marked and not sentinel) or scale == "none",
            beside={"scaled_fp8": T("F8_E4M3", np.zeros(sentinel, np.uint8))} if sentinel else {},
        )

    return make


def int8(
    scale: str = "row",
    rotation: int = 0,
    *,
    dtype: str = "F32",
    shape: tuple[int, ...] | None = None,
    marked: bool = True,
    params: bool = False,
) -> Writer:
    def make(rng: Rng, w: F64) -> Sample:
        x = rotate(w, rotation)
        n = w.shape[0]
        peaks = np.abs(x).reshape(n, -1).max(1)
        s = peaks.reshape(n, *[1] * (w.ndim - 1)) / 127 if scale == "row" else peaks.max() / 127
        stored = narrow(s, dtype)
        codes = np.clip(np.rint(x / widen(stored)), -127, 127).astype(np.int8)
        tensors = {"weight": T("I8", codes), "weight_scale": stored}
        values = decode_scaled(tensors)
        if shape is not None:
            bits = stored.bits.reshape([n if d == -1 else d for d in shape])
            tensors["weight_scale"] = T(dtype, bits)
        keys = {"convrot": True, "convrot_groupsize": rotation} if rotation else {}
        marker = {"format": "int8_tensorwise"} | ({"params": keys} if params else keys)
        return Sample(
            "int8",
            tensors,
            marker if marked else None,
            values,
            {"scale": scale, "rotation": rotation},
            rotation,
            guess=not marked,
        )

    return make


def nvfp4(
    *,
    low_first: bool = False,
    linear: bool = False,
    marked: bool = True,
    tag: str = "F8_E4M3",
    rotation: int = 0,
    pad: bool = False,
    extra: Mapping[str, T] | None = None,
    guess: bool | None = None,
    **keys: Any,
) -> Writer:
    """pad: rows and columns to multiples of 16, as comfy-kitchen does."""

    def make(rng: Rng, w: F64) -> Sample:
        x = rotate(w, rotation)
        if pad:
            x = np.pad(x, [(0, -d % 16) for d in x.shape])
        n, k = x.shape
        blocks = x.reshape(n, -1, 16)
        t = float(np.float32(np.abs(x).max() / 2688))
        b = narrow(np.minimum(np.abs(blocks).max(2) / 6 / t, 448), "F8_E4M3")
        total = f32(t * widen(b))[..., None]
        ratio = np.divide(blocks, total, out=np.zeros_like(blocks), where=total > 0)
        code = np.abs(np.minimum(np.abs(ratio), 6)[..., None] - E2M1).argmin(-1) | (ratio < 0) * 8
        tensors = {
            "weight": T("U8", pack4(code.reshape(n, k), not low_first)),
            "weight_scale": T(tag, b.bits if linear else swizzle(b.bits)),
            "weight_scale_2": f32_tensor(t),
        }
        rot = {"convrot": True, "convrot_groupsize": rotation} if rotation else {}
        guessed = not marked or (linear and b.bits.shape != (up(n, 128), up(k // 16, 4)))
        return Sample(
            "nvfp4",
            tensors | dict(extra or {}),
            {"format": "nvfp4"} | rot | keys if marked else None,
            decode_nvfp4(tensors, low_first, linear),
            {
                "nibbles": "low" if low_first else "high",
                "scales": "linear" if linear else "swizzled",
                "rotation": rotation,
                "full_precision": bool(keys.get("full_precision_matrix_mult")),
            },
            rotation,
            guess=guessed if guess is None else guess,
        )

    return make


def mxfp8(
    *,
    dtype: str = "U8",
    suffix: str = "weight_scale",
    linear: bool = False,
    marked: bool = True,
    tag: str = "F8_E4M3",
    pad: bool = False,
    **keys: Any,
) -> Writer:
    def make(rng: Rng, w: F64) -> Sample:
        x = np.pad(w, [(0, -d % 32) for d in w.shape]) if pad else w
        n = len(x)
        peaks = np.abs(x.reshape(n, -1, 32)).max(2) / 448
        e = np.clip(np.ceil(np.log2(np.maximum(peaks, 2.0**-127))) + 127, 0, 254).astype(np.uint8)
        power = np.where(e == 0, 1.0, 2.0 ** (e.astype(np.float64) - 127)).repeat(32, 1)
        tensors = {
            "weight": narrow(x / power, "F8_E4M3"),
            suffix: T(dtype, e if linear else swizzle(e)),
        }
        values = decode_mxfp8(tensors, suffix, linear)
        tensors["weight"] = T(tag, tensors["weight"].bits.view(BITS[tag]))
        return Sample(
            "mxfp8",
            tensors,
            {"format": "mxfp8"} | keys if marked else None,
            values,
            {
                "scales": "linear" if linear else "swizzled",
                "full_precision": bool(keys.get("full_precision_matrix_mult")),
            },
            guess=not marked or linear,
        )

    return make


def w4a4(
    rotation: int = 256,
    *,
    shape: tuple[int, ...] = (-1,),
    dtype: str = "F32",
    params: bool = False,
    **keys: Any,
) -> Writer:
    def make(rng: Rng, w: F64) -> Sample:
        x = rotate(w, rotation)
        s = narrow(np.abs(x).max(1) / 7, dtype)
        codes = np.clip(np.rint(x / widen(s)[:, None]), -7, 7).astype(np.int64)
        tensors = {"weight": T("I8", pack4(codes, False).view(np.int8)), "weight_scale": s}
        values = decode_w4a4(tensors)
        tensors["weight_scale"] = T(dtype, s.bits.reshape([len(x) if d == -1 else d for d in shape]))
        rot = {"convrot_groupsize": rotation, **keys}
        return Sample(
            "w4a4",
            tensors,
            {"format": "convrot_w4a4"} | ({"params": rot} if params else rot),
            values,
            {"rotation": rotation, "linear_dtype": keys.get("linear_dtype", "int4")},
            rotation,
        )

    return make


#: comfy-kitchen's frozen table
CODEBOOK = np.array([
    -0.980602, -0.794529, -0.638165, -0.500986, -0.377321, -0.263187, -0.155210, -0.050720,
    0.052541, 0.156985, 0.265284, 0.379533, 0.502636, 0.638953, 0.794876, 0.980671,
])  # fmt: skip


def w4a8(
    group: int = 16,
    rotation: int = 256,
    *,
    bits: int = 4,
    codebook: bool = False,
    correction: str | None = None,
    srel: str = "F8_E4M3",
    convrot: bool = True,
    params: bool = False,
    marked: bool = True,
    stated: bool = True,
) -> Writer:
    """correction: the type of an asymmetric layer's offsets. stated: whether the marker names the group."""

    def make(rng: Rng, w: F64) -> Sample:
        x = rotate(w, rotation)
        n, k = x.shape
        grouped = x.reshape(n, -1, group)
        tensors: dict[str, T] = {}
        if correction:
            low = grouped.min(2)
            a = np.maximum((grouped.max(2) - low) / 15, 1e-8)
            code = np.clip(np.rint((grouped - low[..., None]) / a[..., None]), 0, 15)
            level = code - 8
            tensors["weight_correction"] = narrow((8 * a + low).T, correction)
        elif codebook:
            a = np.maximum(np.abs(grouped).max(2) / 0.98, 1e-8)
            code = np.abs((grouped / a[..., None])[..., None] - CODEBOOK).argmin(-1)
            level = CODEBOOK[code]
            tensors["weight_codebook"] = f32_tensor(CODEBOOK)
        else:
            most, offset = (7, 8) if bits == 4 else (31, 32)
            a = np.maximum(np.abs(grouped).max(2) / most, 1e-8)
            level = np.clip(np.rint(grouped / a[..., None]), -offset if bits == 4 else -31, most)
            code = level + offset
        channel = f32(np.maximum(np.abs(level * a[..., None]).max((1, 2)) / 127, 1e-8))
        rel = narrow(a / channel[:, None], "F8_E4M3" if srel == "U8" else srel)
        flat = code.reshape(n, k).astype(np.int64)
        packed = pack4(flat, False) if bits == 4 else pack6(flat)
        tensors |= {
            "weight": T("I8", packed.view(np.int8)),
            "weight_s_rel": T(srel, rel.bits),
            "weight_s_channel": f32_tensor(channel),
        }
        keys: dict[str, Any] = {"convrot_groupsize": rotation}
        if stated:
            keys["group_size"] = group
        if convrot:
            keys["convrot"] = True
        return Sample(
            "w4a8",
            tensors,
            ({"format": "asym_w4a8_int8"} | ({"params": keys} if params else keys)) if marked else None,
            decode_w4a8(tensors, bits=bits),
            {
                "group": group,
                "rotation": rotation,
                "bits": bits,
                "codebook": codebook,
                "correction": bool(correction),
                "signed": False,
                "grid": True,
            },
            rotation,
            guess=not marked,
        )

    return make


def sym_w4a8(
    name: str = "sym_w4a8_int8",
    group: int = 16,
    rotation: int = 256,
    *,
    channel: bool = True,
    suffix: str = "weight_s_rel",
    srel: str = "F8_E4M3",
) -> Writer:
    """Signed nibbles; group scales alone or with a channel scale."""

    def make(rng: Rng, w: F64) -> Sample:
        x = rotate(w, rotation)
        n, k = x.shape
        grouped = x.reshape(n, -1, group)
        a = np.maximum(np.abs(grouped).max(2) / 7, 1e-8)
        q = np.clip(np.rint(grouped / a[..., None]), -8, 7)
        tensors = {"weight": T("I8", pack4(q.reshape(n, k).astype(np.int64), False).view(np.int8))}
        if channel:
            ch = f32(np.maximum(np.abs(q * a[..., None]).max((1, 2)) / 127, 1e-8))
            tensors |= {suffix: narrow(a / ch[:, None], srel), "weight_s_channel": f32_tensor(ch)}
        else:
            tensors[suffix] = narrow(a, srel)
        keys = {"convrot": True, "convrot_groupsize": rotation} if rotation else {}
        return Sample(
            "w4a8",
            tensors,
            {"format": name, "group_size": group} | keys,
            decode_w4a8(tensors, sym=True, rel=suffix),
            {"group": group, "rotation": rotation, "signed": True, "grid": channel, "bits": 4},
            rotation,
            guess=True,
        )

    return make


def awq(group: int = 64, dtype: str = "BF16", *, marked: bool = True, stated: bool = True) -> Writer:
    def make(rng: Rng, w: F64) -> Sample:
        n, k = w.shape
        grouped = w.reshape(n, -1, group)
        low = grouped.min(2)
        s = narrow(np.maximum((grouped.max(2) - low) / 15, 1e-8).T, dtype)
        z = narrow((low + 8 * widen(s).T).T, dtype)
        steps = (grouped - widen(z).T[..., None]) / widen(s).T[..., None]
        codes = np.clip(np.rint(steps) + 8, 0, 15).reshape(n, k).astype(np.int64)
        tensors = {"weight": T("I8", pack4(codes, False).view(np.int8)), "weight_scale": s, "weight_zeros": z}
        marker = {"format": "awq_w4a16"} | ({"group_size": group} if stated else {})
        return Sample(
            "awq_w4a16",
            tensors,
            marker if marked else None,
            decode_awq(tensors),
            {"group": group, "dtype": dtype},
            guess=not marked,
        )

    return make


def svdquant(tiled: bool = False, rank: int = 16, dtype: str = "BF16") -> Writer:
    def make(rng: Rng, w: F64) -> Sample:
        n, k = w.shape
        u, s, v = np.linalg.svd(w, full_matrices=False)
        lift, down = narrow(u[:, :rank] * s[:rank], dtype), narrow(v[:rank].T, dtype)
        smooth = narrow(rng.uniform(0.5, 2.0, k), dtype)
        rest = ((w - widen(lift) @ widen(down).T) * widen(smooth)).reshape(n, -1, 64)
        scale = narrow((np.abs(rest).max(2) / 7).T, dtype)
        codes = np.clip(np.rint(rest / widen(scale).T[..., None]), -7, 7).reshape(n, k).astype(np.int64)
        packed, scales, up_ = pack4(codes, False).view(np.int8), scale.bits, lift.bits
        if tiled:
            lines = packed.reshape(n // 128, 32, 4, k // 64, 32)
            packed = lines.transpose(0, 3, 1, 2, 4).reshape(n // 128, k // 64, 32, 128)
            scales = scales.T.reshape(n // 128, 128, k // 64).transpose(0, 2, 1)
            up_ = up_.reshape(n // 128, 128, rank).transpose(0, 2, 1)
        tensors = {
            "weight": T("I8", packed),
            "weight_scale": T(dtype, scales),
            "weight_proj_up": T(dtype, up_),
            "weight_proj_down": down,
            "weight_smooth_factor": smooth,
        }
        marker = {"format": "svdquant_w4a4"}
        return Sample(
            "svdquant_w4a4", tensors, marker, decode_svdquant(tensors), {"tiled": tiled}, exact=False
        )

    return make


def bank(writer: Writer, *, shared: tuple[str, ...] = (), flat: tuple[str, ...] = ()) -> Writer:
    """Experts of one format in 3-D tensors, a scalar of each becoming [E]; `shared` suffixes are stored once.

    `flat`: suffixes stored without their trailing axis of 1.
    """

    def make(rng: Rng, w: F64) -> Sample:
        parts = [writer(rng, expert) for expert in w]
        first = parts[0]
        tensors = {}
        for suffix, tensor in first.tensors.items():
            bits = np.stack([part.tensors[suffix].bits for part in parts])
            if suffix in flat:
                bits = bits[..., 0]
            tensors[suffix] = T(tensor.dtype, first.tensors[suffix].bits if suffix in shared else bits)
        marker = first.marker
        assert isinstance(marker, dict) or marker is None
        return Sample(
            first.codec,
            tensors,
            marker | {"num_experts": len(parts)} if marker is not None else None,
            np.stack([part.stored for part in parts]),
            {key: value for key, value in first.options.items() if key != "shape"},
            first.rotation,
            first.guess,
            first.exact,
        )

    return make


_PRE = {"pre_quant_scale": narrow(np.linspace(0.5, 1.5, 256), "BF16")}
_INPUT = {"input_scale": f32_tensor(0.004)}

#: name -> writer of a 2-D weight. Every state in which a layer is known to be stored.
SOURCES: dict[str, Writer] = {
    "bf16": plain("BF16"),
    "fp16": plain("F16"),
    "fp32": plain("F32"),
    "fp64": plain("F64"),
    "fp8": fp8(),
    "fp8_one": fp8(shape=(1,)),
    "fp8_bf16_scale": fp8(dtype="BF16"),
    "fp8_full": fp8(full_precision_matrix_mult=True),
    "fp8_input_scale": fp8(extra=_INPUT),
    "fp8_row": fp8(scale="row"),
    "fp8_row_1d": fp8(scale="row", shape=(-1,)),
    "fp8_block": fp8(scale="block", suffix="weight_scale_inv", marked=False),
    "fp8_cast": fp8(scale="none", marked=False),
    "fp8_cast_marked": fp8(scale="none"),
    "fp8_unmarked": fp8(marked=False),
    "fp8_tagged_u8": fp8(tag="U8"),
    "fp8_legacy": fp8(marked=False, suffix="scale_weight", sentinel=1, shape=(1,)),
    "fp8_legacy_full": fp8(
        marked=False, suffix="scale_weight", sentinel=2, extra={"scale_input": f32_tensor([1.0])}
    ),
    "e5m2": fp8("F8_E5M2"),
    "e5m2_row": fp8("F8_E5M2", "row"),
    "e5m2_cast": fp8("F8_E5M2", "none", marked=False),
    "nvfp4": nvfp4(),
    "nvfp4_full": nvfp4(full_precision_matrix_mult=True),
    "nvfp4_u8_scales": nvfp4(tag="U8"),
    "nvfp4_unmarked": nvfp4(marked=False),
    "nvfp4_convrot": nvfp4(rotation=64),
    "nvfp4_pre": nvfp4(extra=_PRE, full_precision_matrix_mult=True),
    "nvfp4_input_scale": nvfp4(extra=_INPUT),
    "mxfp8": mxfp8(),
    "mxfp8_e8m0": mxfp8(dtype="F8_E8M0"),
    "mxfp8_inv": mxfp8(suffix="weight_scale_inv"),
    "mxfp8_tagged_u8": mxfp8(tag="U8"),
    "mxfp8_unmarked": mxfp8(marked=False),
    "int8_scalar": int8("scalar"),
    "int8_row": int8(),
    "int8_row_1d": int8(shape=(-1,)),
    "int8_bf16_scale": int8(dtype="BF16"),
    "int8_convrot4": int8(rotation=4),
    "int8_convrot16": int8(rotation=16),
    "int8_convrot64": int8(rotation=64),
    "int8_convrot256": int8(rotation=256),
    "int8_convrot_1d": int8(rotation=256, shape=(-1,)),
    "int8_convrot_params": int8(rotation=64, params=True),
    "int8_unmarked": int8(marked=False),
    "w4a4": w4a4(),
    "w4a4_64": w4a4(64),
    "w4a4_16": w4a4(16),
    "w4a4_4": w4a4(4),
    "w4a4_2d": w4a4(shape=(-1, 1)),
    "w4a4_bf16_scale": w4a4(dtype="BF16"),
    "w4a4_linear_int8": w4a4(linear_dtype="int8"),
    "w4a4_params": w4a4(64, params=True),
    "w4a8": w4a8(codebook=True),
    "w4a8_uniform": w4a8(),
    "w4a8_no_convrot_key": w4a8(codebook=True, convrot=False),
    "w4a8_correction": w4a8(correction="BF16"),
    "w4a8_correction_f32": w4a8(correction="F32"),
    "w4a8_6bit": w4a8(bits=6),
    "w4a8_srel_f32": w4a8(srel="F32", codebook=True),
    "w4a8_srel_u8": w4a8(srel="U8", codebook=True),
    "w4a8_g4": w4a8(4),
    "w4a8_g8": w4a8(8, codebook=True),
    "w4a8_g32": w4a8(32, codebook=True),
    "w4a8_g64": w4a8(64),
    "w4a8_rot64": w4a8(rotation=64, codebook=True),
    "w4a8_rot4": w4a8(rotation=4),
    "w4a8_params": w4a8(32, 64, params=True),
    "w4a8_unmarked": w4a8(codebook=True, marked=False),
    "sym": sym_w4a8(),
    "sym_flat": sym_w4a8(rotation=0),
    "sym_g32": sym_w4a8("sym_w4a8", 32, 64),
    "sym_group_only": sym_w4a8(channel=False, suffix="weight_scale", srel="BF16"),
    "sym_group_only_flat": sym_w4a8(
        "w4a8_int8_sym", 64, 0, channel=False, suffix="weight_group_scale", srel="F16"
    ),
    "awq": awq(),
    "awq_g32": awq(32),
    "awq_fp16": awq(dtype="F16"),
    "awq_f32": awq(128, "F32"),
    "awq_unmarked": awq(marked=False),
    "svdquant": svdquant(),
    "svdquant_tiled": svdquant(tiled=True),
}

#: name -> writer of a 3-D weight [E, N, K]
BANKS: dict[str, Writer] = {
    "bank_bf16": bank(plain("BF16")),
    "bank_fp8": bank(fp8()),
    "bank_fp8_111": bank(fp8(shape=(1, 1))),
    "bank_e5m2": bank(fp8("F8_E5M2")),
    "bank_nvfp4": bank(nvfp4()),
    "bank_int8": bank(int8()),
    "bank_int8_convrot": bank(int8(rotation=64)),
    "bank_w4a8": bank(w4a8()),
    "bank_w4a8_codebook": bank(w4a8(codebook=True), shared=("weight_codebook",)),
    "bank_w4a8_codebooks": bank(w4a8(codebook=True)),
    "bank_w4a4": bank(w4a4(64)),
}

#: name -> writer of a convolution's weight [N, C, kh, kw]
CONVOLUTIONS: dict[str, Writer] = {
    "conv_bf16": plain("BF16"),
    "conv_fp8": fp8(),
    "conv_fp8_cast": fp8(scale="none", marked=False),
    "conv_fp8_row": fp8(scale="row"),
    "conv_int8": int8("scalar"),
    "conv_int8_row": int8(),
    "conv_int8_row_1d": int8(shape=(-1,)),
}

#: label -> (writer, N, K): sizes at the edges of what a format allows
ODD: dict[str, tuple[Writer, int, int]] = {
    "nvfp4_96x96": (nvfp4(linear=True), 96, 96),
    "nvfp4_96x96_b": (nvfp4(linear=True, marked=False, low_first=True), 96, 96),
    "nvfp4_16x16": (nvfp4(), 16, 16),
    "nvfp4_144x48": (nvfp4(rotation=16), 144, 48),
    "nvfp4_400x32": (nvfp4(), 400, 32),
    "mxfp8_96x96": (mxfp8(linear=True), 96, 96),
    "mxfp8_32x32": (mxfp8(linear=True, marked=False), 32, 32),
    "mxfp8_32x32_b": (mxfp8(), 32, 32),
    "mxfp8_416x96": (mxfp8(), 416, 96),
    "int8_1x7": (int8("scalar"), 1, 7),
    "int8_3x1": (int8("scalar"), 3, 1),
    "fp8_1x1": (fp8(), 1, 1),
    "fp8_2x5": (fp8(scale="row"), 2, 5),
    "fp8_130x200": (fp8(scale="block", suffix="weight_scale_inv", marked=False), 130, 200),
    "w4a4_5x64": (w4a4(64), 5, 64),
    "w4a8_3x16": (w4a8(rotation=16), 3, 16),
    "w4a8_3x16_b": (w4a8(4, 4), 3, 16),
    "w4a8_3x32": (w4a8(rotation=16, bits=6), 3, 32),
    "w4a8_3x48": (w4a8(48, 16), 3, 48),
    "w4a8_4x512": (w4a8(256, 256), 4, 512),
    "w4a8_4x512_b": (w4a8(32, 16, stated=False), 4, 512),
    "sym_w4a8_4x48": (sym_w4a8(group=16, rotation=0), 4, 48),
    "awq_3x4": (awq(2), 3, 4),
    "awq_3x128": (awq(stated=False), 3, 128),
    "svdquant_3x64": (svdquant(rank=1), 3, 64),
    "svdquant_256x192": (svdquant(tiled=True, rank=16), 256, 192),
}
