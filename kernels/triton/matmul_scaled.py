"""Kernel: block-scaled operands multiplied as they are stored (`tl.dot_scaled`): nvfp4 and mxfp8 on Blackwell.

The matrix units of sm_100 and later take e2m1 with e4m3 scales, and e4m3 with e8m0 scales. Both operands have
the same nibble order, so the order does not matter: the sum runs over the same pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from qconvert.kernels.triton.bits import narrow
from qconvert.kernels.triton.operands import block_scales


@triton.jit
def _bytes(
    base: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    BYTES: tl.constexpr,
) -> tl.tensor:
    """Bytes start .. start + BYTES of rows of `width` bytes, 0 outside."""
    at = start + tl.arange(0, BYTES)
    ok = inside[:, None] & (at < width)[None, :]
    return tl.load(base + row[:, None] * width + at[None, :], mask=ok, other=0)


@triton.jit
def matmul_scaled(
    x: tl.tensor,
    x_scales: tl.tensor,
    x_factor: tl.tensor,
    w: tl.tensor,
    w_scales: tl.tensor,
    w_factor: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    m_class: tl.tensor,
    FORMAT: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    SWIZZLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """FORMAT nvfp4: x [m, k/2], w [n, k/2], e4m3 scales; factors [1] are the tensor scales. mxfp8: e4m3, e8m0.

    x_scales lie in rows, w_scales as SWIZZLE says. bias [n] float32.
    """
    PACK: tl.constexpr = 2 if FORMAT == "nvfp4" else 1
    WIDTH: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    NAME: tl.constexpr = "e2m1" if FORMAT == "nvfp4" else "e4m3"
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    width = GROUP * tiles_n
    group = pid // width
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    first_m = (group * GROUP + (pid % width) % height) * BM
    first_n = ((pid % width) // height) * BN
    row_m = tl.arange(0, BM)
    row_n = tl.arange(0, BN)
    inside_m = first_m + row_m < m
    inside_n = first_n + row_n < n
    stride = k // PACK
    x_tile = x + first_m.to(tl.int64) * stride
    w_tile = w + first_n.to(tl.int64) * stride
    tiles = (k // WIDTH + 3) // 4
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k, BK):
        a = _bytes(x_tile, row_m, inside_m, start // PACK, stride, BK // PACK)
        b = _bytes(w_tile, row_n, inside_n, start // PACK, stride, BK // PACK)
        sa = block_scales(x_scales, first_m, row_m, inside_m, start, k // WIDTH, tiles, WIDTH, False, BM, BK)
        sb = block_scales(
            w_scales, first_n, row_n, inside_n, start, k // WIDTH, tiles, WIDTH, SWIZZLE, BN, BK
        )
        if FORMAT == "nvfp4":
            sa = sa.to(tl.float8e4nv, bitcast=True)
            sb = sb.to(tl.float8e4nv, bitcast=True)
        else:
            a = a.to(tl.float8e4nv, bitcast=True)
            b = b.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot_scaled(a, sa, NAME, tl.trans(b), sb, NAME, acc)
    total = acc
    if FORMAT == "nvfp4":
        total = total * (tl.load(x_factor) * tl.load(w_factor))
    at_n = first_n + row_n
    if BIAS:
        total = total + tl.load(bias + at_n, mask=inside_n, other=0.0)[None, :]
    tile = out + first_m.to(tl.int64) * n + first_n
    ok = inside_m[:, None] & inside_n[None, :]
    tl.store(tile + row_m[:, None] * n + row_n[None, :], narrow(total, OUT), mask=ok)
