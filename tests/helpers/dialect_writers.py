"""A weight [N, K] into somebody's tensors, plain or floating. Plain absmax; not the best codes, but honest ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from dialect_decoders import decode_block_fp8, decode_mxfp8, decode_nvfp4, decode_scaled
from dialect_files import BITS, F64, Rng, T, marker_tensor
from dialect_numbers import E2M1, FINITE, f32, f32_tensor, narrow, pack4, rotate, swizzle, up, widen


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
