"""Kernel: out = (X @ W^T) * (f_x * f_w) + bias, operands decoded in registers on their way to the matrix units.

One program computes a [BM, BN] tile of the output. Tile bases are 64-bit, offsets inside a tile 32-bit: no weight is
too large. FLIP multiplies W by X^T: decoded weights then come from registers instead of going through shared memory,
and a few rows of input fill the narrow side of the matrix units.
"""

from __future__ import annotations

import triton
import triton.language as tl
from qconvert.kernels.triton.bits import narrow
from qconvert.kernels.triton.operands import load_operand


@triton.jit
def matmul(
    x: tl.tensor,
    x_scales: tl.tensor,
    x_factor: tl.tensor,
    w: tl.tensor,
    w_scales: tl.tensor,
    w_factor: tl.tensor,
    codebook: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    w_stride: tl.tensor,
    out_stride: tl.tensor,
    m_class: tl.tensor,
    X: tl.constexpr,
    W: tl.constexpr,
    DOT: tl.constexpr,
    OUT: tl.constexpr,
    X_STEP: tl.constexpr,
    W_STEP: tl.constexpr,
    BIAS: tl.constexpr,
    SWIZZLE: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    G: tl.constexpr,
    SREL: tl.constexpr,
    FLIP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """x [m, k], w [n, k], stored as X and W say (`operands.load_operand`) -> out [m, n], stored type OUT.

    x_scales [m, k/16 or k/32] and w_scales: block or group scales of nvfp4, mxfp8 and w4a8. x_factor [m] (X_STEP 1),
    [1] (0) or unused (-1), w_factor [n] or [1] likewise: applied to the product, float32. bias [n] float32.
    m_class tells sizes of m apart when tiles are tuned. GROUP: rows of tiles that share columns of W in cache.
    """
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
    KIND: tl.constexpr = tl.int32 if DOT == "int8" else tl.float32
    acc = tl.zeros((BN, BM) if FLIP else (BM, BN), dtype=KIND)
    for start in range(0, k, BK):
        a = load_operand(
            x,
            x_scales,
            codebook,
            first_m,
            row_m,
            m,
            x_stride,
            start,
            k,
            X,
            DOT,
            False,
            True,
            16,
            SREL,
            BM,
            BK,
        )
        b = load_operand(
            w,
            w_scales,
            codebook,
            first_n,
            row_n,
            n,
            w_stride,
            start,
            k,
            W,
            DOT,
            SWIZZLE,
            HIGH_FIRST,
            G,
            SREL,
            BN,
            BK,
        )
        if FLIP:
            a, b = b, a
        if DOT == "int8":
            acc = tl.dot(a, tl.trans(b), acc, out_dtype=tl.int32)
        elif DOT == "fp8":
            # Partial sums leave the tensor cores' short accumulators after every tile of K.
            acc = tl.dot(a, tl.trans(b), acc, max_num_imprecise_acc=BK)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    total = acc.to(tl.float32)
    if FLIP:
        total = tl.trans(total)
    at_m = first_m + row_m
    at_n = first_n + row_n
    if X_STEP >= 0 and W_STEP >= 0:
        fx = tl.load(x_factor + at_m * X_STEP, mask=at_m < m, other=0.0)
        fw = tl.load(w_factor + at_n * W_STEP, mask=at_n < n, other=0.0)
        total = total * (fx[:, None] * fw[None, :])
    elif X_STEP >= 0:
        total = total * tl.load(x_factor + at_m * X_STEP, mask=at_m < m, other=0.0)[:, None]
    elif W_STEP >= 0:
        total = total * tl.load(w_factor + at_n * W_STEP, mask=at_n < n, other=0.0)[None, :]
    if BIAS:
        total = total + tl.load(bias + at_n, mask=at_n < n, other=0.0)[None, :]
    tile = out + first_m.to(tl.int64) * out_stride + first_n
    ok = (at_m < m)[:, None] & (at_n < n)[None, :]
    tl.store(tile + row_m[:, None] * out_stride + row_n[None, :], narrow(total, OUT), mask=ok)
