"""The w4a8 level table of one tensor. One implementation for all backends: it rests on sums over many rows."""

from __future__ import annotations

import numpy as np
from qconvert.kernels.api import F32, U8, Quality
from qconvert.kernels.cpu import w4a8
from qconvert.kernels.layout import unpack_nibbles
from qconvert.kernels.search import SCALE_FLOOR

#: Levels of the form without a codebook, by code.
UNIFORM: F32 = np.arange(-8, 8, dtype=np.float32)

#: comfy-kitchen's own table (0.2.40), which it takes for nearly Gaussian weights. Its packed kernels for a few rows
#: of inputs know no other.
_USUAL = """
    -0.980602 -0.794529 -0.638165 -0.500986 -0.377321 -0.263187 -0.155210 -0.050720
    0.052541 0.156985 0.265284 0.379533 0.502636 0.638953 0.794876 0.980671
"""
USUAL: F32 = np.array(_USUAL.split(), dtype=np.float32)

#: For scales with a sign: one side reaches further than the other, and a level lies near zero, where a symmetric
#: table has two close by. Found by random steps that lowered the error of rotated Gaussian rows of 512, 1536 and
#: 3072 columns in groups of 16, through the grid that the runtime computes.
_LOPSIDED = """
    -0.345858 -0.247611 -0.197329 -0.154429 -0.115687 -0.079179 -0.042644 -0.008362
    0.026256 0.061436 0.102059 0.143413 0.191017 0.248192 0.309037 0.373049
"""
LOPSIDED: F32 = np.array(_LOPSIDED.split(), dtype=np.float32)

#: Values that a fit looks at, and its passes.
SAMPLE, PASSES = 1 << 17, 12
#: A fitted table has to leave less than this part of LOPSIDED's error.
GAIN = 0.995

#: Values of the e4m3 codes 0..126: three mantissa bits, least normal exponent -6.
_E4M3: F32 = np.array(
    [(c % 8) * 2.0**-9 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(127)], dtype=np.float32
)


def fit_codebook(sample: F32, group: int, quality: Quality) -> F32:
    """[16] ascending levels for rotated rows `sample` [S, K].

    `fast`: USUAL. `best`: Lloyd's iteration through the grid that the runtime computes, starting at LOPSIDED: group
    scales by search, codes by nearest grid value, then every level becomes the mean, weighted by squared scale, of
    the values that chose it. The table with the least error of all passes is kept if it is clearly better than
    LOPSIDED.
    """
    if quality == "fast":
        return USUAL.copy()
    rows = max(1, SAMPLE // max(1, sample.shape[1]))
    x = np.ascontiguousarray(sample[:: max(1, sample.shape[0] // rows)][:rows])
    if x.size == 0:
        return LOPSIDED.copy()
    channel = np.maximum(np.abs(x).max(axis=1) / np.float32(127.0), np.float32(SCALE_FLOOR))
    peaks = np.empty((x.shape[0], x.shape[1] // group), dtype=np.float32)
    w4a8.find_peaks(x.reshape(-1, group), peaks.reshape(-1))
    levels = best = LOPSIDED
    least = np.inf
    for step in range(PASSES + 1):
        tables = w4a8.Tables.of(levels)
        s_rel, errors = np.empty(peaks.shape, dtype=np.uint8), np.empty(peaks.shape, dtype=np.float32)
        w4a8.search(x, peaks, channel, tables.values, tables.largest, 2, s_rel, errors)
        error = float((errors.sum(axis=1, dtype=np.float64) * channel.astype(np.float64) ** 2).sum())
        if error < least:
            best, least = levels, error * (1.0 if step else GAIN)
        levels = _means(x, channel, levels, s_rel, tables.codes)
    return best.copy()


def _means(x: F32, channel: F32, levels: F32, s_rel: U8, table: U8) -> F32:
    """The levels that fit best while scales and codes stay; unused levels stay too. Largest magnitude as before."""
    packed = np.empty((x.shape[0], x.shape[1] // 2), dtype=np.uint8)
    w4a8.assign(x, channel, s_rel, table, packed)
    codes = unpack_nibbles(packed, high_first=False).reshape(-1)
    scales = _E4M3[s_rel & 0x7F] * np.where(s_rel > 0x7F, -channel[:, None], channel[:, None])
    scale = np.repeat(scales.astype(np.float64), x.shape[1] // s_rel.shape[1], axis=1).reshape(-1)
    weight = np.bincount(codes, weights=scale * scale, minlength=16)
    total = np.bincount(codes, weights=scale * x.reshape(-1), minlength=16)
    means = np.where(weight > 0.0, total / np.where(weight > 0.0, weight, 1.0), levels)
    means *= np.abs(levels).max() / max(float(np.abs(means).max()), 1e-30)
    return np.sort(means).astype(np.float32)
