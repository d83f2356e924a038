"""The definition of the arithmetic, in plain torch and float32. Other backends give the same bits.

Fixed on purpose, because every backend has to follow: IEEE float32 division, round half to even, sums in the
order of `lane_sum`, rotations in the order of `rotate`. Weights are [R, K]; formulas are those of FORMATS,
computed in float32 instead of the source's dtype. Searches measure errors in units of the scale, so that they
neither underflow nor overflow whatever the magnitude of the weights.
"""

from __future__ import annotations

import math

import torch
from qconvert.kernels.api import FP8_MAX, Quality
from qconvert.kernels.search import (
    BLOCK_LANES,
    CLIP_MARGIN,
    FP8_FACTORS,
    INT4_FACTORS,
    INT4_STEPS,
    INT8_FACTORS,
    INT8_STEPS,
    LEAST_NORMAL,
    NVFP4_OFFSETS,
    ROW_LANES,
    SCALE_FLOOR,
)
from torch import Tensor

FP8_TORCH = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def split(x: Tensor, group: int) -> Tensor:
    """The last axis in runs of `group`: [..., K] -> [..., K/group, group]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


# --- sums, casts ----------------------------------------------------------------------------------


def lane_sum(x: Tensor, lanes: int = BLOCK_LANES) -> Tensor:
    """Sum over the last axis in the one order all backends use.

    `lanes` running sums (column c goes to lane c % lanes, columns ascending), then halves added to halves:
    lane l + lane l + lanes/2, and so on down to one.
    """
    pad = -x.shape[-1] % lanes
    chunks = split(torch.nn.functional.pad(x, (0, pad)), lanes)
    acc = torch.zeros_like(chunks[..., 0, :])
    for i in range(chunks.shape[-2]):
        acc = acc + chunks[..., i, :]
    while acc.shape[-1] > 1:
        half = acc.shape[-1] // 2
        acc = acc[..., :half] + acc[..., half:]
    return acc[..., 0]


def to_f32(raw: Tensor, dtype: str) -> Tensor:
    """Stored values, bf16 as int16 bits and fp8/e8m0 as uint8 bits, widened to float32."""
    if dtype == "BF16":
        return raw.view(torch.bfloat16).to(torch.float32)
    if dtype in FP8_TORCH:
        return raw.view(FP8_TORCH[dtype]).to(torch.float32)
    if dtype == "F8_E8M0":
        return raw.view(torch.float8_e8m0fnu).to(torch.float32)
    return raw.to(torch.float32)


def from_f32(x: Tensor, dtype: str) -> Tensor:
    """float32 rounded to a stored dtype; bf16 comes back as int16 bits, fp8 (saturating) as uint8 bits.

    Any NaN becomes the one quiet NaN of the dtype, with the sign it had.
    """
    if dtype == "F32":
        return x
    if dtype == "F16":
        return x.to(torch.float16)
    if dtype == "BF16":
        bits = x.view(torch.int32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = ((bits >> 16) & 0x8000) | 0x7FC0
        return torch.where(torch.isnan(x), nan, rounded).to(torch.int16)
    limit = FP8_MAX[dtype]
    return x.clamp(-limit, limit).to(FP8_TORCH[dtype]).view(torch.uint8)


def decode_e4m3(bits: Tensor) -> Tensor:
    return bits.view(torch.float8_e4m3fn).to(torch.float32)


def encode_e4m3(x: Tensor) -> Tensor:
    return from_f32(x, "F8_E4M3")


def _per_row(scale: Tensor, x: Tensor) -> Tensor:
    """A scale [] or [R], shaped to broadcast over x [R, ...]."""
    return scale if scale.ndim == 0 else scale.reshape(-1, *[1] * (x.ndim - 1))


# --- rotation -------------------------------------------------------------------------------------


def rotate(x: Tensor, group: int) -> Tensor:
    """Each run of `group` columns times H_group/sqrt(group), FORMATS section 6.

    One stage of H4 = [[1,1,1,-1],[1,1,-1,1],[1,-1,1,1],[-1,1,1,1]] per digit of the column number in base 4,
    strides ascending, each as sums and differences of pairs; last the exact multiplication by 1/sqrt(group).
    """
    y = x.reshape(-1, group)
    stride = 1
    while stride < group:
        a, b, c, d = y.reshape(-1, group // (4 * stride), 4, stride).unbind(-2)
        ab, a_b, cd, c_d = a + b, a - b, c + d, c - d
        y = torch.stack((ab + c_d, ab - c_d, a_b + cd, cd - a_b), dim=-2).flatten(1)
        stride *= 4
    return (y * (1.0 / math.sqrt(group))).reshape(x.shape)


# --- 8-bit formats --------------------------------------------------------------------------------


def fp8_encode(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    return from_f32(x / _per_row(scale, x), dtype)


def fp8_decode(q: Tensor, scale: Tensor, dtype: str) -> Tensor:
    return to_f32(q, dtype) * _per_row(scale, q)


def fp8_fitted_scale(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """[R]: `scale` [R] or the multiple of it with the least squared error; errors in units of `scale`."""

    def error(factor: float) -> Tensor:
        f = torch.tensor(factor, dtype=torch.float32)
        u = x * (1.0 / (scale * f))[:, None]
        d = u - to_f32(from_f32(u, dtype), dtype)
        return lane_sum(d * d, ROW_LANES) * (f * f)

    best = torch.ones_like(scale)
    least = error(1.0) * torch.tensor(CLIP_MARGIN, dtype=torch.float32)
    for factor in FP8_FACTORS:
        e = error(factor)
        wins = e < least
        least, best = torch.where(wins, e, least), torch.where(wins, factor, best)
    return scale * best


def _clipped_row_scale(
    x: Tensor, levels: int, factors: tuple[float, ...], steps: tuple[float, ...]
) -> Tensor:
    """[R]: amax_row/levels, or the multiple of it with the least squared error.

    `factors` are tried after 1; then, for each of `steps`, the best so far minus and plus the step. Errors are
    in units of the absmax scale. A factor has to beat absmax by CLIP_MARGIN, more than the rounding of these
    sums, so that no row gets worse.
    """
    amax = x.abs().amax(dim=1)
    floor = torch.tensor(SCALE_FLOOR)
    scale = torch.maximum(amax / levels, floor)
    if not factors:
        return scale

    def error(factor: Tensor) -> Tensor:
        u = x * (1.0 / (scale * factor))[:, None]
        d = u - u.round().clamp(-levels, levels)
        return lane_sum(d * d, ROW_LANES) * (factor * factor)

    best = torch.ones_like(scale)
    least = error(best) * torch.tensor(CLIP_MARGIN, dtype=torch.float32)

    def try_(factor: Tensor) -> None:
        nonlocal best, least
        e = error(factor)
        wins = e < least
        least, best = torch.where(wins, e, least), torch.where(wins, factor, best)

    for f in factors:
        try_(torch.full_like(scale, f))
    for step in steps:
        middle = best
        try_(middle - step)
        try_(middle + step)
    return torch.maximum(scale * best, floor)


def int8_row_scale(x: Tensor, quality: Quality) -> Tensor:
    best = quality == "best"
    return _clipped_row_scale(x, 127, INT8_FACTORS if best else (), INT8_STEPS if best else ())


def int8_encode(x: Tensor, scale: Tensor) -> Tensor:
    return (x / _per_row(scale, x)).round().clamp(-127, 127).to(torch.int8)


def int8_decode(q: Tensor, scale: Tensor) -> Tensor:
    return q.to(torch.float32) * _per_row(scale, q)


def _mxfp8_exponent(block_amax: Tensor) -> Tensor:
    """Biased exponent of amax/448 rounded up to a power of two, from its integer bits; 0 for zero."""
    bits = (block_amax / 448.0).view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def mxfp8_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = split(x, 32)
    e = _mxfp8_exponent(blocks.abs().amax(dim=2))
    inverse: Tensor = ((254 - e) << 23).view(torch.float32)  # Exactly 1 / 2^(e - 127).
    return encode_e4m3(blocks * inverse[..., None]).reshape(x.shape), e.to(torch.uint8)


def mxfp8_decode(q: Tensor, scales: Tensor) -> Tensor:
    # Byte 0 gives bits 0, the 0.0 that comfy-kitchen decodes it to; byte 255 gives inf, it is never written.
    powers: Tensor = (scales.to(torch.int32) << 23).view(torch.float32)
    return (split(decode_e4m3(q), 32) * powers[..., None]).reshape(q.shape)


# --- 4-bit formats --------------------------------------------------------------------------------


def round_e2m1(magnitude: Tensor) -> Tensor:
    """Magnitudes to the nearest of 0 .5 1 1.5 2 3 4 6, ties to the even code, saturating.

    The step is 0.5 below 2, 1 below 4, 2 above; adding and subtracting 1.5*2^23 steps rounds half to even.
    """
    y = magnitude.clamp(max=6.0)
    magic = torch.where(y < 2.0, 6291456.0, torch.where(y < 4.0, 12582912.0, 25165824.0))
    return (y + magic) - magic


def encode_e2m1(x: Tensor) -> Tensor:
    """Codes 0..15, bit 3 the sign (kept for zeros)."""
    value = round_e2m1(x.abs())
    code = torch.searchsorted(E2M1[:8].to(x.device), value.contiguous()).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def pack_nibbles(codes: Tensor, *, high_first: bool) -> Tensor:
    even, odd = codes[..., 0::2], codes[..., 1::2]
    return (even << 4) | odd if high_first else (odd << 4) | even


def unpack_nibbles(packed: Tensor, *, high_first: bool) -> Tensor:
    high, low = packed >> 4, packed & 15
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def nvfp4_encode(x: Tensor, tensor_scale: Tensor, quality: Quality) -> tuple[Tensor, Tensor]:
    blocks = split(x, 16)
    ratio = (blocks.abs().amax(dim=2) / 6.0) / tensor_scale
    code = encode_e4m3(ratio)
    if quality == "best":
        code = _nvfp4_search(blocks.abs() * (1.0 / tensor_scale), code)
    total = tensor_scale * decode_e4m3(code)
    # A block whose scale rounds to zero has only zero codes (0/1 instead of 0/0).
    dead = (total == 0.0)[..., None]
    q = encode_e2m1(torch.where(dead, 0.0, blocks) / torch.where(total == 0.0, 1.0, total)[..., None])
    return pack_nibbles(q.flatten(1), high_first=True), code


def _nvfp4_search(y: Tensor, code: Tensor) -> Tensor:
    """e4m3 codes with the least squared error among neighbours of `code`; y: magnitudes in tensor scales."""
    start = code.to(torch.int32)
    best_code = start
    best_error = torch.full_like(y[..., 0], math.inf)
    for offset in NVFP4_OFFSETS:
        candidate = (start + offset).clamp(0, 126)
        b = decode_e4m3(candidate.to(torch.uint8))
        inverse = torch.where(candidate == 0, 0.0, 1.0 / b)
        d = y - round_e2m1(y * inverse[..., None]) * b[..., None]
        error = lane_sum(d * d)
        wins = error < best_error
        best_error = torch.where(wins, error, best_error)
        best_code = torch.where(wins, candidate, best_code)
    return best_code.to(torch.uint8)


def nvfp4_decode(codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    values = E2M1.to(codes.device)[unpack_nibbles(codes, high_first=True).to(torch.int64)]
    total = tensor_scale * decode_e4m3(scales)
    return (split(values, 16) * total[..., None]).flatten(1)


def nvfp4_tensor_scale(amax: float) -> Tensor:
    """amax/2688 (448 * 6), at least the least normal float32; 1 when amax is 0."""
    return scalar_scale(amax, 2688.0)


def scalar_scale(amax: float, largest: float) -> Tensor:
    if amax == 0.0:
        return torch.tensor(1.0)
    return torch.maximum(torch.tensor(amax, dtype=torch.float32) / largest, torch.tensor(LEAST_NORMAL))


def w4a4_encode(x: Tensor, quality: Quality) -> tuple[Tensor, Tensor]:
    best = quality == "best"
    scale = _clipped_row_scale(x, 7, INT4_FACTORS if best else (), INT4_STEPS if best else ())
    q = (x / scale[:, None]).round().clamp(-7, 7).to(torch.int8)
    return pack_nibbles(q.view(torch.uint8) & 15, high_first=False), scale


def w4a4_decode(codes: Tensor, scale: Tensor) -> Tensor:
    nibbles = unpack_nibbles(codes, high_first=False)
    return ((nibbles ^ 8).to(torch.float32) - 8.0) * scale[:, None]
