"""Integer codes with a zero point and a scale per group of input columns: what GPTQ and AWQ files share.

W[n, k] = (q[n, k] - zero[n, g]) * scale[n, g], g the group of column k (FORMATS_OTHER sections 1 and 2). Codes:

* `q` uint8 [R, K], each 0 .. 2^bits - 1;  `zero` int16 [R, groups];
* `scale` float32 [R, groups] and `scale_raw`, the same as stored (a file may hold fp16 or bf16);
* `g_idx` int32 [K], only where columns are grouped out of order.

The product of a difference of codes and a half-precision scale is exact in float32. Scales may be negative
(AutoRound's symmetric ones are, for half of the groups); nothing here takes their magnitude or sign for granted.
"""

from __future__ import annotations

from qconvert.formats.base import Codes, Options
from qconvert.formats.errors import QConvertError
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, U8, Array, NDArray, np

FAMILY = "affine"
#: Candidates of the scale search, as fractions of the scale that just spans the group: so many, from 1 to the least.
TRIALS, LEAST = 9, 0.76


def unpack_stream(words: Array, bits: int, count: int) -> U8:
    """int32 words [R, W], each row one little-endian bit string -> the first `count` codes of `bits` bits."""
    data = np.ascontiguousarray(words).view(np.uint8)
    rows = data.shape[0]
    if bits == 8:
        return np.ascontiguousarray(data[:, :count])
    if bits in (2, 4):
        per = 8 // bits
        codes = np.empty((rows, data.shape[1], per), np.uint8)
        for i in range(per):
            codes[..., i] = (data >> np.uint8(bits * i)) & np.uint8((1 << bits) - 1)
        return codes.reshape(rows, -1)[:, :count]
    # Codes that straddle bytes: bit by bit.
    planes = np.unpackbits(data, axis=1, bitorder="little")[:, : count * bits].reshape(rows, count, bits)
    codes = np.zeros((rows, count), np.uint8)
    for i in range(bits):
        codes |= planes[..., i] << np.uint8(i)
    return codes


def pack_stream(codes: U8, bits: int) -> NDArray[np.int32]:
    """The inverse of `unpack_stream`: codes [R, C] with C * bits a multiple of 32 -> int32 [R, C * bits / 32]."""
    rows, count = codes.shape
    if bits == 8:
        data = np.ascontiguousarray(codes)
    elif bits in (2, 4):
        per = 8 // bits
        spread = codes.reshape(rows, count // per, per)
        data = np.zeros((rows, count // per), np.uint8)
        for i in range(per):
            data |= spread[..., i] << np.uint8(bits * i)
    else:
        planes = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)
        data = np.packbits(planes.reshape(rows, count * bits), axis=1, bitorder="little")
    return data.view(np.int32)


def decode(codes: Codes, options: Options) -> F32:
    """[R, K] float32: (q - zero) * scale, by the groups that `g_idx` or the column's place says."""
    q, scale, zero = codes["q"], codes["scale"], codes["zero"].astype(np.float32)
    rows, k = q.shape
    if "g_idx" in codes:
        groups = codes["g_idx"]
        return np.ascontiguousarray((q - zero[:, groups]) * scale[:, groups], np.float32)
    group, count = int(options["group"]), scale.shape[1]
    if count * group != k:
        out = q - np.repeat(zero, group, axis=1)[:, :k]
        out *= np.repeat(scale, group, axis=1)[:, :k]
        return np.ascontiguousarray(out, np.float32)
    spread = q.reshape(rows, count, group) - zero[..., None]
    spread *= scale[..., None]
    return np.ascontiguousarray(spread.reshape(rows, k), np.float32)


def rounding(codes: Codes, options: Options) -> F32:
    """scale^2 / 12, as `Codec.rounding`."""
    ones = {**codes, "q": np.ones_like(codes["q"]), "zero": np.zeros_like(codes["zero"])}
    step = decode(ones, options)
    return np.asarray(step * step / np.float32(12), np.float32)


def centred(codes: Codes, options: Options) -> tuple[U8, NDArray[np.int16]]:
    """The same values about the one zero point 2^(bits-1): codes and zeros. Raises when a code does not fit."""
    half = 1 << (int(options["bits"]) - 1)
    groups = codes.get("g_idx")
    if groups is None:
        groups = np.arange(codes["q"].shape[1]) // int(options["group"])
    q = codes["q"].astype(np.int16) - codes["zero"][:, groups] + np.int16(half)
    if q.size and (q.min() < 0 or q.max() >= 2 * half):
        raise QConvertError(
            "zero points are not symmetric, as the first of them are, and codes do not fit about one zero point",
            found=f"{q.min() - half} to {q.max() - half}",
            expected=f"{-half} to {half - 1}",
        )
    return q.astype(np.uint8), np.full_like(codes["zero"], half)


def encode_symmetric(x: F32, bits: int, group: int, dtype: str, backend: Backend, best: bool) -> Codes:
    """Round to nearest with zero = 2^(bits-1) and the scale of least squared error per group of `group` columns.

    The scale that spans the group is amax / (2^(bits-1) - 1) or, with the larger end at -2^(bits-1), the signed
    amax / -2^(bits-1) that AutoRound uses; `best` also tries fractions of both. Scales are rounded to `dtype` before
    codes are chosen, so the error is that of the stored weight.
    """
    rows, k = x.shape
    half = 1 << (bits - 1)
    spread = x.reshape(rows, k // group, group)
    low, high = spread.min(axis=2), spread.max(axis=2)
    peak = np.where(-low > high, low, high)
    # The element of larger magnitude takes code -half, so the scale has the opposite sign of it.
    signed = peak / np.float32(-half)
    even = np.abs(peak) / np.float32(half - 1)
    shrink = np.linspace(1.0, LEAST, TRIALS, dtype=np.float32)[: TRIALS if best and bits <= 4 else 1]
    least = np.full(peak.shape, np.inf, np.float32)
    raw = backend.from_f32(np.ascontiguousarray(even), dtype)
    kept = backend.to_f32(raw, dtype)
    for base in (even, signed):
        for part in shrink:
            trial_raw = backend.from_f32(np.ascontiguousarray(base * part), dtype)
            trial = backend.to_f32(trial_raw, dtype)
            error = spread - _round(spread, trial, half) * trial[..., None]
            error *= error
            total = tree_sum(error)
            better = total < least
            least = np.where(better, total, least)
            kept = np.where(better, trial, kept)
            raw = np.where(better, trial_raw, raw)
    q = _round(spread, kept, half) + np.float32(half)
    return {
        "q": q.astype(np.uint8).reshape(rows, k),
        "zero": np.full(kept.shape, half, np.int16),
        "scale": np.ascontiguousarray(kept),
        "scale_raw": np.ascontiguousarray(raw),
    }


def tree_sum(x: F32) -> F32:
    """Sum over the last axis in one fixed order, halves added to halves where they are even."""
    while x.shape[-1] > 1 and x.shape[-1] % 2 == 0:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0] if x.shape[-1] == 1 else np.add.reduce(x, axis=-1)


def _round(x: F32, scale: F32, half: int) -> F32:
    """Nearest codes, in [-half, half - 1]; groups whose scale is 0 get zeros."""
    safe = np.where(scale != 0, scale, np.float32(1))[..., None]
    q = np.rint(x / safe)
    return np.clip(q, -half, half - 1, out=q)
