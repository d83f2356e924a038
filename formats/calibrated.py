"""Encoding a layer whose inputs are known: scales that weigh columns by them, and GPTQ-style sequential rounding.

One function a format, each with the format's own scales: nvfp4's block scales are searched when the rounding reaches
the block (on what the columns before it left of it), row scales of w4a4 and int8 and the group scales of w4a8 are
fixed beforehand. Formats without an entry are encoded as without calibration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from qconvert.formats.base import F32, Codec, Codes, Options
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.gptq import gptq_factor, gptq_round
from qconvert.kernels.layout import pack_nibbles, unpack_nibbles
from qconvert.kernels.weighted import E4M3, encode_e2m1, nvfp4_scale, round_e2m1, row_scale, unit_mean


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


def calibrates(codec: Codec, options: Options) -> bool:
    """Whether what is known of the inputs changes how this format is encoded."""
    return codec.name in _ENCODERS and (codec.name != "w4a8" or options["bits"] == 4)


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
    scales = np.zeros((x.shape[0], x.shape[1] // 16), np.uint8)
    levels = np.zeros_like(x)

    def choose(block: int, values: F32) -> None:
        scales[:, block] = nvfp4_scale(values, m.diagonal[16 * block : 16 * block + 16], t)

    def rounded(column: int, values: F32) -> F32:
        total = t * E4M3[scales[:, column // 16]]
        u = np.divide(values, total, out=np.zeros_like(values), where=total != 0)
        levels[:, column] = round_e2m1(u)
        value: F32 = levels[:, column] * total
        return value

    def sequential(column: int, window: F32) -> F32:
        if column % 16 == 0:
            choose(column // 16, np.ascontiguousarray(window[:16].T))
        return rounded(column, window[0])

    if m.factor is not None:
        gptq_round(x, m.factor, sequential)
    else:
        for block in range(scales.shape[1]):
            choose(block, x[:, 16 * block : 16 * block + 16])
        total = t * np.repeat(E4M3[scales], 16, axis=1)
        levels = round_e2m1(np.divide(x, total, out=np.zeros_like(x), where=total != 0))
    packed = pack_nibbles(encode_e2m1(levels), high_first=True)
    return {"q": packed, "block_scale": scales, "tensor_scale": common["tensor_scale"]}


def _uniform_levels(x: F32, scale: F32, levels: int, m: Moments) -> F32:
    """Integers -levels..levels [R, K] under a scale a row [R]."""
    if m.factor is None:
        nearest: F32 = np.clip(np.rint(x / scale[:, None]), -levels, levels)
        return nearest
    out = np.empty_like(x)

    def rounded(column: int, window: F32) -> F32:
        out[:, column] = np.clip(np.rint(window[0] / scale), -levels, levels)
        value: F32 = out[:, column] * scale
        return value

    gptq_round(x, m.factor, rounded)
    return out


def _w4a4(
    codec: Codec, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality, m: Moments
) -> Codes:
    scale = row_scale(x, m.diagonal, 7)
    q = _uniform_levels(x, scale, 7, m).astype(np.int8).view(np.uint8) & np.uint8(15)
    return {"q": pack_nibbles(q, high_first=False), "scale": scale}


def _int8(
    codec: Codec, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality, m: Moments
) -> Codes:
    if options["scale"] == "scalar":
        scale = common["scale"]
        rows = np.full(x.shape[0], scale, np.float32)
    else:
        scale = rows = row_scale(x, m.diagonal, 127)
    return {"q": _uniform_levels(x, rows, 127, m).astype(np.int8), "scale": scale}


def _w4a8(
    codec: Codec, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality, m: Moments
) -> Codes:
    codes = codec.encode(x, common, options, backend, quality)
    if m.factor is None:
        # Within a rotation group all weights are equal: the scales' search has nothing to weigh.
        return codes
    g = int(options["group"])
    table = common["codebook"] if options["codebook"] else np.arange(-8, 8, dtype=np.float32)
    q = unpack_nibbles(codes["q"], high_first=False)
    grid = np.empty((x.shape[0], 16), np.float32)
    # A negative scale mirrors its group's grid.
    signs = np.where(np.signbit(codes["s_rel"]), np.float32(-1), np.float32(1))
    steps = np.abs(codes["s_rel"])

    def rounded(column: int, window: F32) -> F32:
        sign = signs[:, column // g]
        if column % g == 0:
            step = np.rint(table[None, :] * steps[:, column // g, None])
            grid[:] = np.clip(step, -127, 127) * codes["s_channel"][:, None]
        middles = (grid[:, 1:] + grid[:, :-1]) / 2
        q[:, column] = ((window[0] * sign)[:, None] > middles).sum(axis=1)
        value: F32 = np.take_along_axis(grid, q[:, column, None].astype(np.int64), axis=1)[:, 0] * sign
        return value

    gptq_round(x, m.factor, rounded)
    return {**codes, "q": pack_nibbles(q, high_first=False)}


_ENCODERS: dict[str, Callable[..., Any]] = {"nvfp4": _nvfp4, "w4a4": _w4a4, "int8": _int8, "w4a8": _w4a8}
