"""A weight [N, K] into somebody's tensors: integers, codebooks, low ranks; and banks of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np
from dialect_decoders import decode_awq, decode_scaled, decode_svdquant, decode_w4a4, decode_w4a8
from dialect_files import F64, Rng, T
from dialect_numbers import f32, f32_tensor, narrow, pack4, pack6, rotate, widen
from dialect_writers import Sample, Writer


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
