"""The w4a8 level table of one tensor. One implementation for all backends: it rests on sums over many rows."""

from __future__ import annotations

import numpy as np
from qconvert.kernels.api import Quality
from qconvert.kernels.arrays import F32, U8
from qconvert.kernels.cpu import w4a8
from qconvert.kernels.layout import unpack_nibbles
from qconvert.kernels.search import SCALE_FLOOR

#: Levels of the form without a codebook, by code.
UNIFORM: F32 = np.arange(-8, 8, dtype=np.float32)

#: The usual table, for scales with a sign: one side reaches further than the other, and one level lies near zero
#: where a symmetric table has two close by. Found by annealing: random steps that lowered the error of rotated
#: Gaussian rows of 512, 1536 and 3072 columns in groups of 16, through the grid that the runtime computes. Its largest
#: level is 1: who quantises again with this table and absmax scales (ComfyUI, for a LoRA) clips nothing.
_USUAL = """
    -1.000000 -0.705161 -0.554059 -0.428503 -0.315617 -0.215389 -0.120052 -0.022701
    0.071668 0.169299 0.269195 0.376442 0.498232 0.635339 0.790137 0.966573
"""
USUAL: F32 = np.array(_USUAL.split(), dtype=np.float32)

#: Values that a fit looks at, and its passes.
SAMPLE, PASSES = 1 << 17, 12
#: A fitted table has to leave less than this part of the usual table's error.
GAIN = 0.995

#: Values of the e4m3 codes 0..126: three mantissa bits, least normal exponent -6.
_E4M3: F32 = np.array(
    [(c % 8) * 2.0**-9 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(127)], dtype=np.float32
)


def fit_codebook(sample: F32, group: int, quality: Quality) -> F32:
    """[16] ascending levels for rotated rows `sample` [S, K].

    `fast`: the usual table. `best`: Lloyd's iteration through the grid that the runtime computes, starting at the
    usual table: group scales by search, codes by nearest grid value, then every level becomes the mean, weighted
    by squared scale, of the values that chose it. The table with the least error of all passes is kept if it is
    clearly better than the usual one.
    """
    rows = max(1, SAMPLE // max(1, sample.shape[1]))
    x = np.ascontiguousarray(sample[:: max(1, sample.shape[0] // rows)][:rows])
    if quality == "fast" or x.size == 0:
        return USUAL.copy()
    channel = np.maximum(np.abs(x).max(axis=1) / np.float32(127.0), np.float32(SCALE_FLOOR))
    peaks = np.empty((x.shape[0], x.shape[1] // group), dtype=np.float32)
    w4a8.find_peaks(x.reshape(-1, group), peaks.reshape(-1))
    levels = best = USUAL
    least = np.inf
    for step in range(PASSES + 1):
        tables = w4a8.Tables.of(levels)
        s_rel, errors = np.empty(peaks.shape, dtype=np.uint8), np.empty(peaks.shape, dtype=np.float32)
        w4a8.search(x, peaks, channel, tables.values, tables.largest, s_rel, errors)
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
