"""Encoding a layer whose inputs are known: scales that weigh columns by them, and GPTQ-style sequential rounding.

One function a format, each with the format's own scales: the block scales of nvfp4 and mxfp8 are chosen when the
rounding reaches the block (on what the columns before it left of it); row scales of w4a4, int8 and fp8 and the group
scales of w4a8 are fixed beforehand. Formats without an entry are encoded as without calibration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qconvert.formats.base import Codec, Codes, Options
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, I8, U8, np
from qconvert.kernels.gptq import gptq_factor, gptq_round
from qconvert.kernels.layout import pack_nibbles, pack_six_bits
from qconvert.kernels.search import NVFP4_OFFSETS
from qconvert.kernels.weighted import nvfp4_scales, row_scale, unit_mean

#: Magnitudes of the E2M1 codes 0..7.
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


@dataclass(frozen=True)
class Moments:
    """What is known of a layer's inputs, in the basis the layer is stored in.

    `diagonal` [K]: mean squares, their own mean 1. `factor` [K, K]: for GPTQ, None when only the diagonal is known.
    """

    diagonal: F32
    factor: F32 | None = None

    @classmethod
    def of(cls, moments: F32, rotation: int, backend: Backend) -> Moments:
        """From E[x^2] [K] or E[x x^T] [K, K] of the plain inputs. Raises ValueError (see `gptq_factor`).

        A rotated layer multiplies rotated inputs R x, whose moments are R H R^T; of a diagonal H the diagonal of
        that is its mean over each rotation group.
        """
        if moments.ndim == 1:
            if rotation:
                means = moments.reshape(-1, rotation).mean(axis=1, dtype=np.float64)
                moments = np.repeat(means, rotation).astype(np.float32)
            return cls(unit_mean(moments))
        if rotation:
            half = backend.rotate(np.ascontiguousarray(moments, np.float32), rotation)
            moments = backend.rotate(np.ascontiguousarray(half.T), rotation)
        return cls(unit_mean(np.maximum(np.diag(moments), 0)), gptq_factor(moments))


def calibrates(codec: Codec, full: bool) -> bool:
    """Whether what is known of the inputs ([K, K] when `full`, else [K]) changes how this format is encoded."""
    return codec.name in (_ENCODERS if full else _BY_DIAGONAL)


def encode_calibrated(
    codec: Codec,
    x: F32,
    common: Codes,
    options: Options,
    backend: Backend,
    quality: Quality,
    moments: Moments,
) -> Codes:
    """`codec.encode` with the output's error in mind instead of the weight's."""
    codes: Codes = _ENCODERS[codec.name](codec, x, common, options, backend, quality, moments)
    return codes


def _nvfp4(
    codec: Codec, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality, m: Moments
) -> Codes:
    t = np.float32(common["tensor_scale"])
    offsets = np.array(NVFP4_OFFSETS, np.int32)
    scales = np.zeros((x.shape[0], x.shape[1] // 16), np.uint8)
    codes = np.zeros(x.shape, np.uint8)
    if m.factor is None:
        scales = nvfp4_scales(x, m.diagonal, t)
        values = t * np.repeat(backend.to_f32(scales, "F8_E4M3"), 16, axis=1)
        codes = _nearest_e2m1(np.divide(x, values, out=np.zeros_like(x), where=values != 0))
    else:
        kernels = _kernels()

        def block(a: int, w: F32, u: F32) -> None:
            run = slice(a // 16, (a + w.shape[1]) // 16)
            s, q = np.empty((len(w), w.shape[1] // 16), np.uint8), np.empty(w.shape, np.uint8)
            kernels.nvfp4(w, u, m.diagonal[a : a + w.shape[1]], t, offsets, s, q)
            scales[:, run], codes[:, a : a + w.shape[1]] = s, q

        gptq_round(x, m.factor, block)
    return {
        "q": pack_nibbles(codes, high_first=True),
        "block_scale": scales,
        "tensor_scale": common["tensor_scale"],
    }


def _nearest_e2m1(x: F32) -> U8:
    """Codes 0..15 of the nearest E2M1 values, ties to the even code, saturating."""
    y = np.minimum(np.abs(x), np.float32(6))
    magic = np.where(y < 2, 6291456.0, np.where(y < 4, 12582912.0, 25165824.0)).astype(np.float32)
    code = np.searchsorted(np.array(_E2M1, np.float32), (y + magic) - magic).astype(np.uint8)
    signed: U8 = code | (np.signbit(x).astype(np.uint8) << np.uint8(3))
    return signed


def _uniform_codes(x: F32, scale: F32, levels: int, m: Moments) -> I8:
    """Integers -levels..levels [R, K] under a scale a row [R]."""
    codes = np.empty(x.shape, np.int8)
    if m.factor is None:
        codes[:] = np.clip(np.rint(x / scale[:, None]), -levels, levels)
        return codes
    kernels = _kernels()

    def block(a: int, w: F32, u: F32) -> None:
        q = np.empty(w.shape, np.int8)
        kernels.uniform(w, u, scale, np.float32(levels), q)
        codes[:, a : a + w.shape[1]] = q

    gptq_round(x, m.factor, block)
    return codes


def _w4a4(
    codec: Codec, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality, m: Moments
) -> Codes:
    scale = row_scale(x, m.diagonal, 7)
    q = _uniform_codes(x, scale, 7, m).view(np.uint8) & np.uint8(15)
    return {"q": pack_nibbles(q, high_first=False), "scale": scale}


def _int8(
    codec: Codec, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality, m: Moments
) -> Codes:
    if options["scale"] == "scalar":
        scale = common["scale"]
        rows = np.full(x.shape[0], scale, np.float32)
    else:
        scale = rows = row_scale(x, m.diagonal, 127)
    return {"q": _uniform_codes(x, rows, 127, m), "scale": scale}


def _w4a8(
    codec: Codec, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality, m: Moments
) -> Codes:
    codes = codec.encode(x, common, options, backend, quality)
    if m.factor is None:
        # Within a rotation group all weights are equal: the scales' search has nothing to weigh.
        return codes
    six = options["bits"] == 6
    levels = np.arange(-31, 32) if six else common["codebook"] if options["codebook"] else np.arange(-8, 8)
    levels = levels.astype(np.float32)
    q = np.empty(x.shape, np.uint8)
    kernels = _kernels()

    def block(a: int, w: F32, u: F32) -> None:
        found = np.empty(w.shape, np.uint8)
        group, scales = int(options["group"]), np.ascontiguousarray(codes["s_rel_bits"])
        kernels.grid(w, u, levels, scales, codes["s_channel"], group, a, found)
        q[:, a : a + w.shape[1]] = found

    gptq_round(x, m.factor, block)
    # Six bits are stored as level + 32, and the least level is -31.
    return {**codes, "q": pack_six_bits(q + np.uint8(1)) if six else pack_nibbles(q, high_first=False)}


def _float8(
    codec: Codec, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality, m: Moments
) -> Codes:
    codes = codec.encode(x, common, options, backend, quality)
    if m.factor is None:
        # A float's error is relative: the scale hardly moves it, whatever the columns weigh.
        return codes
    scale = np.ascontiguousarray(np.broadcast_to(codes["scale"], x.shape[:1]))
    kernels = _kernels()
    kernel = kernels.float8_e4m3 if options["kind"] == "F8_E4M3" else kernels.float8_e5m2
    q = np.empty(x.shape, np.uint8)

    def block(a: int, w: F32, u: F32) -> None:
        found = np.empty(w.shape, np.uint8)
        kernel(w, u, scale, found)
        q[:, a : a + w.shape[1]] = found

    gptq_round(x, m.factor, block)
    return {**codes, "q": q}


def _mxfp8(
    codec: Codec, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality, m: Moments
) -> Codes:
    if m.factor is None:
        return codec.encode(x, common, options, backend, quality)
    q, scales = np.empty(x.shape, np.uint8), np.empty((x.shape[0], x.shape[1] // 32), np.uint8)
    kernels = _kernels()

    def block(a: int, w: F32, u: F32) -> None:
        s, found = np.empty((len(w), w.shape[1] // 32), np.uint8), np.empty(w.shape, np.uint8)
        kernels.mxfp8(w, u, s, found)
        q[:, a : a + w.shape[1]], scales[:, a // 32 : (a + w.shape[1]) // 32] = found, s

    gptq_round(x, m.factor, block)
    return {"q": q, "block_scale": scales}


def _kernels() -> Any:
    """The compiled loops, on the CPU whatever the backend; loaded when a layer is encoded with them."""
    from qconvert.kernels.cpu import sequential

    return sequential


_ENCODERS: dict[str, Callable[..., Any]] = {
    "nvfp4": _nvfp4,
    "w4a4": _w4a4,
    "int8": _int8,
    "w4a8": _w4a8,
    "float8": _float8,
    "mxfp8": _mxfp8,
}
#: Formats whose scales are searched with the diagonal of the moments alone.
_BY_DIAGONAL = frozenset({"nvfp4", "w4a4", "int8"})
