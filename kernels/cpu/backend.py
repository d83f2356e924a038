"""The CPU backend: shapes and types at the border, kernels behind it. Imports numba, never torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from qconvert.kernels import search
from qconvert.kernels.api import FP8_MAX, Quality
from qconvert.kernels.arrays import F32, I8, U8, Raw
from qconvert.kernels.check import check_group, check_nvfp4, check_w4a8
from qconvert.kernels.codebook import UNIFORM, fit_codebook
from qconvert.kernels.cpu import blocks, casts, fp8_fit, rotate, rows, w4a8, w6a8

_NO_FACTORS = np.empty(0, dtype=np.float32)
_WIDEN = {
    "BF16": casts.widen_bf16,
    "F16": casts.widen_f16,
    "F8_E4M3": casts.widen_e4m3,
    "F8_E5M2": casts.widen_e5m2,
    "F8_E8M0": casts.widen_e8m0,
}


def _flat(a: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """The elements in order, without a copy where they already lie so."""
    return np.ascontiguousarray(a).reshape(-1).view(dtype)


def _with_scales(a: NDArray[Any], scale: F32) -> tuple[NDArray[Any], F32]:
    """`a` as [R, C] with one scale a row: a scale [] makes all of it one row."""
    rows = scale.shape[0] if scale.ndim else 1
    return np.ascontiguousarray(a).reshape(rows, -1 if a.size else 0), np.ascontiguousarray(scale).reshape(
        rows
    )


def _offsets(offsets: tuple[int, ...]) -> NDArray[np.int32]:
    return np.array(offsets, dtype=np.int32)


class CpuBackend:
    """Implements `api.Backend` with numba kernels; the same bits as `reference`."""

    name = "cpu"

    def to_f32(self, raw: Raw, dtype: str) -> F32:
        if dtype not in _WIDEN:
            return raw.astype(np.float32)
        out = np.empty(raw.shape, dtype=np.float32)
        _WIDEN[dtype](_flat(raw, np.uint16 if raw.itemsize == 2 else np.uint8), out.reshape(-1))
        return out

    def from_f32(self, x: F32, dtype: str) -> Raw:
        if dtype == "F32":
            return x.copy()
        if dtype in FP8_MAX:
            return self.fp8_encode(x, np.ones((), dtype=np.float32), dtype)
        out = np.empty(x.shape, dtype=np.uint16)
        (casts.narrow_bf16 if dtype == "BF16" else casts.narrow_f16)(_flat(x, np.float32), out.reshape(-1))
        return out if dtype == "BF16" else out.view(np.float16)

    def amax(self, x: F32) -> float:
        out = np.empty(1, dtype=np.float32)
        casts.amax(_flat(x, np.float32), out)
        return float(out[0])

    def error(self, x: F32, y: F32) -> tuple[float, float]:
        out = np.empty(2, dtype=np.float64)
        casts.error(_flat(x, np.float32), _flat(y, np.float32), out)
        return float(out[0]), float(out[1])

    def rotate(self, x: F32, group: int) -> F32:
        check_group(x, group)
        out = np.empty(x.shape, dtype=np.float32)
        kernel = rotate.rotate_4 if group == 4 else rotate.rotate
        kernel(np.ascontiguousarray(x).reshape(-1, group), out.reshape(-1, group), np.float32(group**-0.5))
        return out

    def _tensor_scale(self, amax: float, largest: float) -> np.float32:
        if amax == 0.0:
            return np.float32(1.0)
        return max(np.float32(amax) / np.float32(largest), np.float32(search.LEAST_NORMAL))

    def fp8_scale(self, amax: float, dtype: str) -> np.float32:
        return self._tensor_scale(amax, FP8_MAX[dtype])

    def fp8_fitted_scale(self, x: F32, scale: F32, dtype: str) -> F32:
        out = np.empty(x.shape[0], dtype=np.float32)
        fp8_fit.fitted_scale(
            np.ascontiguousarray(x),
            np.ascontiguousarray(scale),
            *fp8_fit.GRIDS[dtype],
            np.array(search.FP8_FACTORS, dtype=np.float32),
            np.float32(search.CLIP_MARGIN),
            out,
        )
        return out

    def fp8_encode(self, x: F32, scale: F32, dtype: str) -> U8:
        out = np.empty(x.shape, dtype=np.uint8)
        source, scales = _with_scales(x, scale)
        kernel = rows.encode_e4m3 if dtype == "F8_E4M3" else rows.encode_e5m2
        kernel(source, scales, out.reshape(source.shape))
        return out

    def fp8_decode(self, q: U8, scale: F32, dtype: str) -> F32:
        out = np.empty(q.shape, dtype=np.float32)
        source, scales = _with_scales(q, scale)
        kernel = rows.decode_e4m3 if dtype == "F8_E4M3" else rows.decode_e5m2
        kernel(source, scales, out.reshape(source.shape))
        return out

    def _row_scale(
        self, x: F32, levels: int, quality: Quality, factors: tuple[float, ...], steps: tuple[float, ...]
    ) -> F32:
        out = np.empty(x.shape[0], dtype=np.float32)
        best = quality == "best"
        rows.row_scale(
            np.ascontiguousarray(x),
            np.float32(levels),
            np.float32(search.SCALE_FLOOR),
            np.array(factors, dtype=np.float32) if best else _NO_FACTORS,
            np.array(steps, dtype=np.float32) if best else _NO_FACTORS,
            np.float32(search.CLIP_MARGIN),
            out,
        )
        return out

    def int8_row_scale(self, x: F32, quality: Quality) -> F32:
        return self._row_scale(x, 127, quality, search.INT8_FACTORS, search.INT8_STEPS)

    def int8_encode(self, x: F32, scale: F32) -> I8:
        out = np.empty(x.shape, dtype=np.int8)
        source, scales = _with_scales(x, scale)
        rows.encode_int8(source, scales, out.reshape(source.shape))
        return out

    def int8_decode(self, q: I8, scale: F32) -> F32:
        out = np.empty(q.shape, dtype=np.float32)
        source, scales = _with_scales(q, scale)
        rows.decode_int8(source, scales, out.reshape(source.shape))
        return out

    def nvfp4_tensor_scale(self, amax: float) -> np.float32:
        return self._tensor_scale(amax, 2688.0)

    def nvfp4_encode(self, x: F32, tensor_scale: np.float32, quality: Quality) -> tuple[U8, U8]:
        check_nvfp4(x, tensor_scale)
        x = np.ascontiguousarray(x)
        codes = np.empty((x.shape[0], x.shape[1] // 2), dtype=np.uint8)
        scales = np.empty((x.shape[0], x.shape[1] // 16), dtype=np.uint8)
        offsets = _offsets(search.NVFP4_OFFSETS if quality == "best" else ())
        tiles = x.reshape(-1, 16)
        blocks.encode_nvfp4(tiles, np.float32(tensor_scale), offsets, codes.reshape(-1), scales.reshape(-1))
        return codes, scales

    def nvfp4_decode(self, codes: U8, scales: U8, tensor_scale: np.float32) -> F32:
        out = np.empty((codes.shape[0], codes.shape[1] * 2), dtype=np.float32)
        source = _flat(codes, np.uint8)
        blocks.decode_nvfp4(source, _flat(scales, np.uint8), np.float32(tensor_scale), out.reshape(-1, 16))
        return out

    def mxfp8_encode(self, x: F32, quality: Quality) -> tuple[U8, U8]:
        check_group(x, 32, power_of_4=False)
        q = np.empty(x.shape, dtype=np.uint8)
        scales = np.empty((x.shape[0], x.shape[1] // 32), dtype=np.uint8)
        blocks.encode_mxfp8(np.ascontiguousarray(x).reshape(-1, 32), q.reshape(-1, 32), scales.reshape(-1))
        return q, scales

    def mxfp8_decode(self, q: U8, scales: U8) -> F32:
        out = np.empty(q.shape, dtype=np.float32)
        source = np.ascontiguousarray(q).reshape(-1, 32)
        blocks.decode_mxfp8(source, _flat(scales, np.uint8), out.reshape(-1, 32))
        return out

    def w4a4_encode(self, x: F32, quality: Quality) -> tuple[U8, F32]:
        check_group(x, 2, power_of_4=False)
        scale = self._row_scale(x, 7, quality, search.INT4_FACTORS, search.INT4_STEPS)
        out = np.empty((x.shape[0], x.shape[1] // 2), dtype=np.uint8)
        rows.encode_w4a4(np.ascontiguousarray(x), scale, out)
        return out, scale

    def w4a4_decode(self, codes: U8, scale: F32) -> F32:
        out = np.empty((codes.shape[0], codes.shape[1] * 2), dtype=np.float32)
        rows.decode_w4a4(np.ascontiguousarray(codes), np.ascontiguousarray(scale), out)
        return out

    def w4a8_codebook(self, sample: F32, group: int, quality: Quality) -> F32:
        check_w4a8(sample, group)
        return fit_codebook(sample, group, quality)

    def _search_channels(
        self, x: F32, group: int, multiples: tuple[float, ...], run: Callable[[F32, U8, F32], None]
    ) -> tuple[U8, F32]:
        """s_rel [R, K/G] and s_channel [R] (see `reference_w4a8`).

        `run(channel, s_rel, error)` finds the best group scales, and their errors, for one scale a row.
        """
        base = self._row_scale(x, 127, "fast", (), ())
        shape = (x.shape[0], x.shape[1] // group)
        s_rel, best_rel = np.empty(shape, dtype=np.uint8), np.empty(shape, dtype=np.uint8)
        error, best_channel = np.empty(shape, dtype=np.float32), np.empty_like(base)
        least = np.full_like(base, np.inf)
        for m in multiples:
            multiple = np.float32(m)
            channel = base * multiple
            run(channel, s_rel, error)
            w4a8.keep_rows(error, multiple, channel, s_rel, least, best_channel, best_rel)
        return best_rel, best_channel

    def w4a8_encode(self, x: F32, group: int, codebook: F32 | None, quality: Quality) -> tuple[U8, U8, F32]:
        check_w4a8(x, group, codebook)
        x = np.ascontiguousarray(x)
        tables = w4a8.Tables.of(UNIFORM if codebook is None else codebook)
        peaks = np.empty((x.shape[0], x.shape[1] // group), dtype=np.float32)
        w4a8.find_peaks(x.reshape(-1, group), peaks.reshape(-1))

        def run(channel: F32, s_rel: U8, error: F32) -> None:
            w4a8.search(x, peaks, channel, tables.values, tables.largest, s_rel, error)

        multiples = search.W4A8_MULTIPLES if quality == "best" else (1.0,)
        s_rel, channel = self._search_channels(x, group, multiples, run)
        codes = np.empty((x.shape[0], x.shape[1] // 2), dtype=np.uint8)
        w4a8.assign(x, channel, s_rel, tables.codes, codes)
        return codes, s_rel, channel

    def w4a8_decode(
        self,
        codes: U8,
        s_rel: F32,
        s_channel: F32,
        codebook: F32 | None,
        group: int,
        bits: int,
        correction: F32 | None,
    ) -> F32:
        out = np.empty((codes.shape[0], s_rel.shape[1] * group), dtype=np.float32)
        codes, s_rel, s_channel = map(np.ascontiguousarray, (codes, s_rel, s_channel))
        if bits == 6:
            w6a8.decode(codes, s_rel, s_channel, out)
        else:
            w4a8.decode(codes, s_rel, s_channel, UNIFORM if codebook is None else codebook, out)
        if correction is not None:
            runs = out.reshape(*s_rel.shape, group)
            runs += correction[..., None]
        return out

    def w6a8_encode(self, x: F32, group: int, quality: Quality) -> tuple[U8, U8, F32]:
        check_w4a8(x, group, six_bit=True)
        x = np.ascontiguousarray(x)
        groups, per_row = x.reshape(-1, group), x.shape[1] // group
        offsets = _offsets(search.W6A8_OFFSETS if quality == "best" else (0,))

        def run(channel: F32, s_rel: U8, error: F32) -> None:
            w6a8.search(groups, channel, per_row, offsets, s_rel.reshape(-1), error.reshape(-1))

        multiples = search.W6A8_MULTIPLES if quality == "best" else (1.0,)
        s_rel, channel = self._search_channels(x, group, multiples, run)
        codes = np.empty((x.shape[0], x.shape[1] // 4 * 3), dtype=np.uint8)
        w6a8.assign(x, self.to_f32(s_rel, "F8_E4M3"), channel, codes)
        return codes, s_rel, channel
