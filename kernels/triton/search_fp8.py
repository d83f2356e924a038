"""Kernel: the scale of fp8 rows by least squared error (`reference.fp8_fitted_scale`). One program a row."""

from __future__ import annotations

import triton
import triton.language as tl
from qconvert.kernels.triton.bits import decode_e4m3, decode_e5m2, encode_e4m3, encode_e5m2, halving_sum


@triton.jit
def _error(
    row: tl.tensor, k: tl.tensor, scale: tl.tensor, factor: tl.tensor, E4M3: tl.constexpr, LANES: tl.constexpr
) -> tl.tensor:
    """[1]: column c in lane c % LANES, in the order of `reference.lane_sum`."""
    inverse = tl.div_rn(1.0, scale * factor)
    lanes = tl.zeros((1, LANES), dtype=tl.float32)
    for start in range(0, k, LANES):
        col = start + tl.arange(0, LANES)
        u = (tl.load(row + col, mask=col < k, other=0.0) * inverse)[None, :]
        d = u - (decode_e4m3(encode_e4m3(u)) if E4M3 else decode_e5m2(encode_e5m2(u)))
        lanes += d * d
    return halving_sum(lanes, 1, LANES) * (factor * factor)


@triton.jit
def search_fp8_scale(
    x: tl.tensor,
    scales: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    k: tl.tensor,
    count: tl.tensor,
    E4M3: tl.constexpr,
    MARGIN: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """x float32 [R, k], scales [R] -> out [R]. factors [count]: 1 and the multiples to try."""
    r = tl.program_id(0).to(tl.int64)
    row = x + r * k
    scale = tl.load(scales + r)
    best = tl.load(factors)
    least = tl.sum(_error(row, k, scale, best, E4M3, LANES), axis=0) * MARGIN
    for i in range(1, count):
        factor = tl.load(factors + i)
        e = tl.sum(_error(row, k, scale, factor, E4M3, LANES), axis=0)
        wins = e < least
        least = tl.where(wins, e, least)
        best = tl.where(wins, factor, best)
    tl.store(out + r, scale * best)
