"""From stored tensors to values in the stored basis, rounded to float32 where the format rounds; part of `dialects`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from dialect_files import F64, T
from dialect_numbers import E2M1, f32, signed, unpack4, unpack6, unswizzle, widen

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
