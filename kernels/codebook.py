"""The w4a8 level table of one tensor. numpy only, one implementation for all backends, deterministic."""

from __future__ import annotations

import numpy as np
from qconvert.kernels.api import F32, Quality

#: The format's usual table, for rotated (nearly Gaussian) weights in units of the group's largest magnitude.
FROZEN: F32 = np.array(
    [
        "-0.980602",
        "-0.794529",
        "-0.638165",
        "-0.500986",
        "-0.377321",
        "-0.263187",
        "-0.155210",
        "-0.050720",
        "0.052541",
        "0.156985",
        "0.265284",
        "0.379533",
        "0.502636",
        "0.638953",
        "0.794876",
        "0.980671",
    ],
    dtype=np.float32,
)

#: Levels of the form without a codebook, by code.
UNIFORM: F32 = np.arange(-8, 8, dtype=np.float32)


def fit_codebook(sample: F32, group: int, quality: Quality) -> F32:
    """[16] ascending levels for rotated rows `sample` [S, K]."""
    return FROZEN.copy()
