"""Blocks and groups side by side: sums in the order of `reference.lane_sum`, one block in each lane."""

from __future__ import annotations

from typing import Any

from qconvert.kernels.cpu.jit import helper
from qconvert.kernels.search import BLOCK_LANES

#: Blocks or groups worked on at once: enough to hide loop overhead, scratch still in the first-level cache. A
#: constant, so that rows of flat scratch lie at known distances and need no overlap checks.
LANES = 128


@helper
def halving_tree(acc: Any) -> Any:
    """The sum of a power of two of running sums, halves added to halves; acc is overwritten."""
    width = acc.size // 2
    while width > 0:
        for lane in range(width):
            acc[lane] += acc[width + lane]
        width //= 2
    return acc[0]


@helper
def sum_squares(distance: Any, column: Any, sums: Any) -> Any:
    """Add distance^2 of a column to its running sum (`reference.lane_sum`)."""
    acc = sums[column % BLOCK_LANES]
    if column < BLOCK_LANES:
        for lane in range(acc.size):
            acc[lane] = distance[lane] * distance[lane]
    else:
        for lane in range(acc.size):
            acc[lane] += distance[lane] * distance[lane]


@helper
def keep_least(sums: Any, candidate: Any, least: Any, best: Any) -> Any:
    """Halves of sums [P, L] added to halves, then the lanes that improve keep their candidate."""
    half = sums.shape[0] // 2
    while half > 0:
        for c in range(half):
            low, high = sums[c], sums[c + half]
            for lane in range(low.size):
                low[lane] += high[lane]
        half //= 2
    error = sums[0]
    for lane in range(least.size):
        wins = error[lane] < least[lane]
        best[lane] = candidate[lane] if wins else best[lane]
        least[lane] = error[lane] if wins else least[lane]
