"""Kernels that look at single values: casts, fp8 with given scales, the largest magnitude, the rotation alone."""

from __future__ import annotations

import triton
import triton.language as tl
from qconvert.kernels.triton.bits import as_i32, narrow, widen
from qconvert.kernels.triton.rotate import rotate_flat


@triton.jit
def cast(
    x: tl.tensor, out: tl.tensor, size: tl.tensor, KIND: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Stored type KIND -> float32 -> stored type OUT, `size` values (below 2^31)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, narrow(widen(tl.load(x + i, mask=i < size, other=0), KIND), OUT), mask=i < size)


@triton.jit
def largest_bits(
    x: tl.tensor, out: tl.tensor, size: tl.tensor, KIND: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """out[program] = the largest of |x| as int32 bits, by which NaN is above infinity and both above all else."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = widen(tl.load(x + i, mask=i < size, other=0), KIND)
    tl.store(out + tl.program_id(0), tl.max(as_i32(v) & 0x7FFFFFFF, axis=0))


@triton.jit
def scale_fp8(
    x: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    k: tl.tensor,
    scale_step: tl.tensor,
    x_stride: tl.tensor,
    KIND: tl.constexpr,
    OUT: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """x [R, k] divided (or multiplied) by a given scale: one (scale_step 0) or one a row (1). Grid (R, tiles).

    Quantises with KIND a float and OUT fp8, dequantises the other way round.
    """
    r = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = widen(tl.load(x + r * x_stride + col, mask=col < k, other=0), KIND)
    s = tl.load(scale + r * scale_step)
    v = tl.div_rn(v, s) if DIVIDE else v * s
    tl.store(out + r * k + col, narrow(v, OUT), mask=col < k)


@triton.jit
def rotate(
    x: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    KIND: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Every run of GROUP values rotated; BLOCK a multiple of GROUP, `size` values (below 2^31)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = widen(tl.load(x + i, mask=i < size, other=0), KIND)
    v = rotate_flat(v, GROUP, FACTOR, BLOCK)
    tl.store(out + i, narrow(v, OUT), mask=i < size)
