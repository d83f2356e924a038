"""The w4a8 level table of one tensor. One implementation for all backends: it rests on sums over many rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from qconvert.kernels.api import F32, Quality
from qconvert.kernels.cpu import w4a8
from qconvert.kernels.layout import unpack_nibbles
from qconvert.kernels.search import SCALE_FLOOR, W4A8_OFFSETS

#: Levels of the form without a codebook, by code.
UNIFORM: F32 = np.arange(-8, 8, dtype=np.float32)

#: The usual table: random search for the least error on rotated Gaussian weights in groups of 16, measured through
#: the grid that the runtime computes.
_USUAL = """
    -0.980602 -0.794529 -0.638165 -0.500986 -0.377321 -0.263187 -0.155210 -0.050720
    0.052541 0.156985 0.265284 0.379533 0.502636 0.638953 0.794876 0.980671
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
    levels = best = USUAL
    s_rel, error = _search(x, channel, levels, group)
    least = error * GAIN
    for _ in range(PASSES):
        levels = _means(x, channel, levels, s_rel, group)
        s_rel, error = _search(x, channel, levels, group)
        if error < least:
            best, least = levels, error
    return best.copy()


def _search(x: F32, channel: F32, levels: F32, group: int) -> tuple[NDArray[np.uint8], float]:
    """Group scales [R, K/G] and the squared error of the whole."""
    s_rel = np.empty((x.shape[0], x.shape[1] // group), dtype=np.uint8)
    errors = np.empty(s_rel.shape, dtype=np.float32)
    offsets = np.array(W4A8_OFFSETS, dtype=np.int32)
    largest = np.abs(levels).max()
    w4a8.search(
        x.reshape(-1, group),
        channel,
        s_rel.shape[1],
        levels,
        largest,
        offsets,
        s_rel.reshape(-1),
        errors.reshape(-1),
    )
    return s_rel, float((errors.sum(axis=1, dtype=np.float64) * channel.astype(np.float64) ** 2).sum())


def _means(x: F32, channel: F32, levels: F32, s_rel: NDArray[np.uint8], group: int) -> F32:
    """The levels that fit best while scales and codes stay; unused levels stay too. Largest magnitude as before."""
    packed = np.empty((x.shape[0], x.shape[1] // 2), dtype=np.uint8)
    w4a8.assign(x.reshape(-1, group), channel, s_rel.shape[1], levels, s_rel.reshape(-1), packed.reshape(-1))
    codes = unpack_nibbles(packed, high_first=False).reshape(-1)
    scale = np.repeat((_E4M3[s_rel] * channel[:, None]).astype(np.float64), group, axis=1).reshape(-1)
    weight = np.bincount(codes, weights=scale * scale, minlength=16)
    total = np.bincount(codes, weights=scale * x.reshape(-1), minlength=16)
    means = np.where(weight > 0.0, total / np.where(weight > 0.0, weight, 1.0), levels)
    means *= np.abs(levels).max() / max(float(np.abs(means).max()), 1e-30)
    return np.sort(means).astype(np.float32)
