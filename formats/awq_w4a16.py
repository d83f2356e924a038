"""awq_w4a16 as comfy-kitchen stores it: unsigned nibbles, float scale and offset for groups along K.

Layout and arithmetic: FORMATS "awq_w4a16": w = (q - 8) * scale + zeros, even column low, scales [K/G, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.formats.base import Codec, Codes, Group, Options, Part, Recognition, Stored
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.finding import Finding
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array, np
from qconvert.kernels.layout import pack_nibbles, unpack_nibbles

DEFAULT_G = 64


class AwqW4A16(Codec):
    """options: group, dtype (of scales)."""

    name = "awq_w4a16"
    marker_formats = ("awq_w4a16",)
    family = "awq_w4a16"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scale = group.tensors.get("weight"), group.tensors.get("weight_scale")
        zeros = group.tensors.get("weight_zeros")
        if weight is None or weight.dtype not in ("I8", "U8") or len(weight.shape) != 2:
            return "weight is not packed 4-bit"
        floating = scale is not None and zeros is not None and {scale.dtype, zeros.dtype} <= FLOATS
        if scale is None or zeros is None or not floating or scale.shape != zeros.shape:
            return "no float weight_scale and weight_zeros of one shape"
        n, k = weight.shape[0], weight.shape[1] * 2
        if len(scale.shape) != 2 or scale.shape[1] != n or not scale.shape[0] or k % scale.shape[0]:
            return f"weight_scale {scale} is not [K/G, {n}] with K = {k}"
        g = k // scale.shape[0]
        findings: list[Finding] = []
        stated = marker.get("group_size", DEFAULT_G) if marker else g
        if stated != g:
            findings.append(
                Finding(
                    "guess",
                    f"group_size {stated} does not fit the tensors; {g} does",
                    group.prefix,
                    f"{scale}",
                )
            )
        if marker is None:
            findings.append(
                Finding(
                    "guess",
                    f"no marker; taken as awq_w4a16 with group {g}",
                    group.prefix,
                    f"weight {weight}, weight_scale {scale}, weight_zeros",
                )
            )
        owned = frozenset({"weight", "weight_scale", "weight_zeros"})
        return Recognition(self.name, n, k, {"group": g, "dtype": scale.dtype}, owned, tuple(findings))

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        g = options["group"]
        return None if k % g == 0 and k % 2 == 0 else f"awq_w4a16 needs K to be a multiple of {g}, K = {k}"

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        scale = Spec(options["dtype"], (k // options["group"], n))
        return (
            Part("weight", Spec("I8", (n, k // 2))),
            Part("weight_scale", scale, "columns"),
            Part("weight_zeros", scale, "columns"),
        )

    def marker(self, options: Options) -> dict[str, Any]:
        return {"format": "awq_w4a16", "group_size": options["group"]}

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        codes: Codes = {"q": stored.rows("weight", a, b).view(np.uint8)}
        for suffix, key, bits in (("weight_scale", "scale", "raw_s"), ("weight_zeros", "zeros", "raw_z")):
            raw = stored.columns(suffix, a, b)
            codes[key] = np.ascontiguousarray(backend.to_f32(raw, stored.dtype(suffix)).T)
            codes[bits] = np.ascontiguousarray(raw.T)
        return codes

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        rows = codes["q"].shape[0]
        q = unpack_nibbles(codes["q"], high_first=False).astype(np.float32) - np.float32(8)
        spread = q.reshape(rows, -1, options["group"])
        out = spread * codes["scale"][..., None] + codes["zeros"][..., None]
        return np.ascontiguousarray(out.reshape(rows, -1), np.float32)

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        # Asymmetric absmax per group; scale and offset are rounded to their stored type before codes are chosen.
        rows, k = x.shape
        g, dtype = options["group"], options["dtype"]
        grouped = x.reshape(rows, k // g, g)
        low, high = grouped.min(axis=2), grouped.max(axis=2)
        # A constant group has no spread: its value is the offset alone.
        step = np.maximum((high - low) / np.float32(15), np.float32(1e-30))
        scale_raw = backend.from_f32(np.ascontiguousarray(step), dtype)
        scale = backend.to_f32(scale_raw, dtype)
        zeros_raw = backend.from_f32(np.ascontiguousarray(low + np.float32(8) * scale), dtype)
        zeros = backend.to_f32(zeros_raw, dtype)
        safe = np.where(scale > 0, scale, np.float32(1))
        q = np.clip(np.rint((grouped - zeros[..., None]) / safe[..., None]) + 8, 0, 15).astype(np.uint8)
        return {
            "q": pack_nibbles(q.reshape(rows, k), high_first=False),
            "scale": scale,
            "zeros": zeros,
            "raw_s": scale_raw,
            "raw_z": zeros_raw,
        }

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        return {
            "weight": codes["q"],
            "weight_scale": np.ascontiguousarray(codes["raw_s"].T),
            "weight_zeros": np.ascontiguousarray(codes["raw_z"].T),
        }

    def carries(self, source: Options, target: Options) -> bool:
        return (source["group"], source["dtype"]) == (target["group"], target["dtype"])
