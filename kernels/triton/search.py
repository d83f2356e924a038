"""Kernel: the clipped row scale of least squared error (`reference._clipped_row_scale`). One program a row."""

from __future__ import annotations

import triton
import triton.language as tl
from qconvert.kernels.triton.bits import halving_sum, magnitude, round_clamped


@triton.jit
def _errors(
    row: tl.tensor,
    k: tl.tensor,
    scale: tl.tensor,
    factors: tl.tensor,
    LEVELS: tl.constexpr,
    COUNT: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """[COUNT]: the squared error of each factor, column c in lane c % LANES, in the order of `reference.lane_sum`."""
    inverse = tl.div_rn(1.0, scale * factors)[:, None]
    lanes = tl.zeros((COUNT, LANES), dtype=tl.float32)
    for start in range(0, k, LANES):
        col = start + tl.arange(0, LANES)
        u = tl.load(row + col, mask=col < k, other=0.0)[None, :] * inverse
        d = u - round_clamped(u, LEVELS)
        lanes += d * d
    return halving_sum(lanes, COUNT, LANES) * (factors * factors)


@triton.jit
def _pick(x: tl.tensor, i: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """x[i]: one term of the sum is not zero."""
    return tl.sum(tl.where(tl.arange(0, COUNT) == i, x, 0.0), axis=0)


@triton.jit
def search_row_scale(
    x: tl.tensor,
    scales: tl.tensor,
    factors: tl.tensor,
    steps: tl.tensor,
    k: tl.tensor,
    count: tl.tensor,
    step_count: tl.tensor,
    LEVELS: tl.constexpr,
    FLOOR: tl.constexpr,
    MARGIN: tl.constexpr,
    COUNT: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """x float32 [R, k] -> scales [R].

    factors [COUNT]: 1, the `count - 1` multiples of absmax to try, then padding (a power of two in all). steps
    [step_count]: then the best so far minus and plus each.
    """
    r = tl.program_id(0).to(tl.int64)
    row = x + r * k
    largest = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, k, LANES):
        col = start + tl.arange(0, LANES)
        largest = tl.maximum(largest, magnitude(tl.load(row + col, mask=col < k, other=0.0)))
    scale = tl.maximum(tl.div_rn(tl.max(largest, axis=0), LEVELS), FLOOR)
    tried = tl.load(factors + tl.arange(0, COUNT))
    errors = _errors(row, k, scale, tried, LEVELS, COUNT, LANES)
    best = _pick(tried, 0, COUNT)
    least = _pick(errors, 0, COUNT) * MARGIN
    for i in range(1, count):
        e = _pick(errors, i, COUNT)
        wins = e < least
        least = tl.where(wins, e, least)
        best = tl.where(wins, _pick(tried, i, COUNT), best)
    for s in range(step_count):
        step = tl.load(steps + s)
        two = tl.where(tl.arange(0, 2) == 0, best - step, best + step)
        around = _errors(row, k, scale, two, LEVELS, 2, LANES)
        for i in range(2):
            e = _pick(around, i, 2)
            wins = e < least
            least = tl.where(wins, e, least)
            best = tl.where(wins, _pick(two, i, 2), best)
    tl.store(scales + r, tl.maximum(scale * best, FLOOR))
