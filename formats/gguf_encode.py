"""Encoding into GGUF's Q8_0, Q4_0 and Q4_K: scales of least squared error, as they are stored.

FORMATS_OTHER section 10 has the layouts. Q8_0 and Q4_0 are d * (q - half) in groups of 32, which is what GPTQ's
symmetric codes are; Q4_K is d * sc[j] * q - dmin * m[j] over eight sub-blocks of 32, sc and m of six bits.
"""

from __future__ import annotations

from collections.abc import Callable

from qconvert.formats import affine
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, U8, NDArray, np

#: Parts of a sub-block's range that are tried for Q4_K.
RANGES = (1.0, 0.96, 0.92, 0.88, 0.84)


def encode(kind: str, x: F32, backend: Backend, best: bool) -> U8:
    """x [R, K] -> blocks [M, bytes]. KeyError: a type that is not written."""
    return _ENCODERS[kind](x, backend, best)


def _halves(q: U8) -> U8:
    """Codes [M, 2B] -> bytes [M, B]: the first half in the low nibbles."""
    half = q.shape[1] // 2
    return q[:, :half] | q[:, half:] << np.uint8(4)


def _q8_0(x: F32, backend: Backend, best: bool) -> U8:
    codes = affine.encode_symmetric(x, 8, 32, "F16", backend, best)
    scale = codes["scale_raw"].reshape(-1, 1).view(np.uint8)
    q = codes["q"].reshape(-1, 32) ^ np.uint8(0x80)
    return np.concatenate([scale, q], axis=1)


def _q4_0(x: F32, backend: Backend, best: bool) -> U8:
    codes = affine.encode_symmetric(x, 4, 32, "F16", backend, best)
    scale = codes["scale_raw"].reshape(-1, 1).view(np.uint8)
    return np.concatenate([scale, _halves(codes["q"].reshape(-1, 32))], axis=1)


def _q4_k(x: F32, backend: Backend, best: bool) -> U8:
    blocks = x.reshape(-1, 8, 32)
    low = np.minimum(blocks.min(axis=2), np.float32(0))
    high = np.maximum(blocks.max(axis=2), np.float32(0))
    step, offset = (high - low) / np.float32(15), -low
    if best:
        step, offset = _fitted(blocks, low, high)
    outer, sc = _six_bits(step, backend)
    base, m = _six_bits(offset, backend)
    scale = backend.to_f32(outer, "F16") * sc
    shift = backend.to_f32(base, "F16") * m
    q = _nearest(blocks, scale, shift)
    if best:
        # With codes chosen, the minimum that suits them; with that, the codes once more.
        m = _minimum(blocks, q, scale, backend.to_f32(base, "F16"), m)
        shift = backend.to_f32(base, "F16") * m
        q = _nearest(blocks, scale, shift)
    packed = _pack_six(sc.astype(np.uint8), m.astype(np.uint8))
    nibbles = _halves(q.astype(np.uint8).reshape(-1, 64)).reshape(len(blocks), 128)
    return np.concatenate([outer.view(np.uint8), base.view(np.uint8), packed, nibbles], axis=1)


def _fitted(blocks: F32, low: F32, high: F32) -> tuple[F32, F32]:
    """Step and offset [M, 8] of each sub-block: the least error over shrunk ranges."""
    least = np.full(low.shape, np.inf, np.float32)
    step, offset = np.zeros_like(low), np.zeros_like(low)
    ranges = np.array(RANGES, np.float32)
    for part_low in ranges:
        for part_high in ranges:
            a = -low * part_low
            s = (high * part_high + a) / np.float32(15)
            error = blocks - (_nearest(blocks, s, a) * s[..., None] - a[..., None])
            total = affine.tree_sum(error * error)
            better = total < least
            least = np.where(better, total, least)
            step, offset = np.where(better, s, step), np.where(better, a, offset)
    return step, offset


def _six_bits(values: F32, backend: Backend) -> tuple[NDArray[np.float16], F32]:
    """Non-negative values [M, 8] as fp16 [M, 1] times integers 0..63."""
    peak = np.ascontiguousarray(values.max(axis=1, keepdims=True) / np.float32(63))
    raw = backend.from_f32(peak, "F16")
    scale = backend.to_f32(raw, "F16")
    safe = np.where(scale > 0, scale, np.float32(1))
    factor = np.clip(np.rint(values / safe), 0, 63).astype(np.float32)
    return np.ascontiguousarray(raw).view(np.float16), np.where(scale > 0, factor, np.float32(0))


def _nearest(blocks: F32, scale: F32, shift: F32) -> F32:
    safe = np.where(scale > 0, scale, np.float32(1))[..., None]
    q = np.rint((blocks + shift[..., None]) / safe)
    return np.clip(q, 0, 15, out=q)


def _minimum(blocks: F32, q: F32, scale: F32, base: F32, m: F32) -> F32:
    """Six-bit minima [M, 8] of least squared error for codes that are given: the mean of what they leave over."""
    left = affine.tree_sum(q * scale[..., None] - blocks) / np.float32(32)
    safe = np.where(base > 0, base, np.float32(1))
    return np.where(base > 0, np.clip(np.rint(left / safe), 0, 63), m).astype(np.float32)


def _pack_six(sc: U8, m: U8) -> U8:
    """Scales and minima [M, 8] of six bits -> twelve bytes [M, 12], as `gguf_blocks.k_scales` reads them."""
    first = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    second = m[:, :4] | (m[:, 4:] >> 4) << 6
    third = (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


_ENCODERS: dict[str, Callable[[F32, Backend, bool], U8]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k}
WRITTEN = tuple(_ENCODERS)
