"""GGUF's block types: how many bytes hold how many elements, and what they stand for.

A row of K elements is K / elements blocks, one after the other. Layouts: FORMATS_OTHER section 10, and the format
description of ggml for the K-quants of two and three bits. Types that are not decoded here (IQ1 to IQ3, TQ, Q8_1,
Q8_K) are left to the `gguf` package, where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qconvert.formats.errors import QConvertError
from qconvert.kernels.arrays import F32, U8, np

#: ggml's number of each type -> its name. Types of whole bytes carry the names that safetensors gives them.
TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def decode(kind: str, blocks: U8) -> F32:
    """Blocks [M, bytes] of one type -> float32 [M, elements]. NVFP4 without its tensor's scale."""
    known = _DECODERS.get(kind)
    if known is not None:
        return known(blocks)
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise QConvertError(
            f"GGUF type {kind} is decoded by the gguf package", hint="pip install gguf"
        ) from None
    try:
        values: Any = quants.dequantize(np.ascontiguousarray(blocks), GGMLQuantizationType[kind])
    except (KeyError, NotImplementedError) as error:
        raise QConvertError(f"the gguf package does not decode GGUF type {kind}: {error}") from None
    return np.ascontiguousarray(values, np.float32)


def _half(data: U8) -> F32:
    """Two bytes [M, 2] as fp16 -> [M, 1]."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _nibbles(data: U8, run: int) -> U8:
    """[M, B] -> [M, 2B]: of every `run` bytes first all low nibbles, then all high ones."""
    spread = data.reshape(len(data), -1, 1, run)
    out = np.concatenate([spread & np.uint8(15), spread >> np.uint8(4)], axis=2)
    return out.reshape(len(data), -1)


def _q4_0(b: U8) -> F32:
    return (_nibbles(b[:, 2:], 16).astype(np.float32) - np.float32(8)) * _half(b[:, :2])


def _q4_1(b: U8) -> F32:
    return _nibbles(b[:, 4:], 16).astype(np.float32) * _half(b[:, :2]) + _half(b[:, 2:4])


def _fifth_bits(data: U8) -> U8:
    """Four bytes [M, 4], bit i for element i -> [M, 32] of 0 or 16."""
    return np.unpackbits(np.ascontiguousarray(data), axis=1, bitorder="little") << np.uint8(4)


def _q5_0(b: U8) -> F32:
    q = _nibbles(b[:, 6:], 16) | _fifth_bits(b[:, 2:6])
    return (q.astype(np.float32) - np.float32(16)) * _half(b[:, :2])


def _q5_1(b: U8) -> F32:
    q = _nibbles(b[:, 8:], 16) | _fifth_bits(b[:, 4:8])
    return q.astype(np.float32) * _half(b[:, :2]) + _half(b[:, 2:4])


def _q8_0(b: U8) -> F32:
    return np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32) * _half(b[:, :2])


def k_scales(s: U8) -> tuple[F32, F32]:
    """Twelve bytes [M, 12] -> six-bit scales and minima [M, 8] of Q4_K and Q5_K."""
    low, high, both = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scale = np.concatenate([low & 63, (both & 15) | (low >> 6) << 4], axis=1)
    minimum = np.concatenate([high & 63, (both >> 4) | (high >> 6) << 4], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _k_affine(b: U8, q: U8) -> F32:
    scale, minimum = k_scales(b[:, 4:16])
    scale, minimum = scale * _half(b[:, 0:2]), minimum * _half(b[:, 2:4])
    out = q.reshape(len(b), 8, 32).astype(np.float32) * scale[..., None] - minimum[..., None]
    return np.ascontiguousarray(out.reshape(len(b), 256), np.float32)


def _q4_k(b: U8) -> F32:
    return _k_affine(b, _nibbles(b[:, 16:144], 32))


def _q5_k(b: U8) -> F32:
    bits = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _k_affine(b, _nibbles(b[:, 48:176], 32) | (bits << np.uint8(4)).reshape(len(b), 256))


def _pairs(data: U8) -> U8:
    """64 bytes [M, 64] -> two bits for each of 256 elements: element i in byte 32(i//128) + i%32, at 2(i%128//32)."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    spread = (data.reshape(len(data), 2, 1, 32) >> shifts) & np.uint8(3)
    return spread.reshape(len(data), 256)


def _q6_k(b: U8) -> F32:
    q = _nibbles(b[:, :128], 64) | _pairs(b[:, 128:192]) << np.uint8(4)
    scale = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32) * _half(b[:, 208:210])
    out = (q.astype(np.float32) - np.float32(32)).reshape(len(b), 16, 16) * scale[..., None]
    return np.ascontiguousarray(out.reshape(len(b), 256), np.float32)


def _q2_k(b: U8) -> F32:
    scale = (b[:, :16] & 15).astype(np.float32) * _half(b[:, 80:82])
    minimum = (b[:, :16] >> 4).astype(np.float32) * _half(b[:, 82:84])
    q = _pairs(b[:, 16:80]).reshape(len(b), 16, 16).astype(np.float32)
    return np.ascontiguousarray((q * scale[..., None] - minimum[..., None]).reshape(len(b), 256), np.float32)


def _q3_k(b: U8) -> F32:
    packed = b[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([(packed[:, 8:] >> np.uint8(shift)) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scale = ((low | high << 4).astype(np.float32) - np.float32(32)) * _half(b[:, 108:110])
    upper = ((b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)).reshape(len(b), 256)
    # The mask says where nothing is taken off.
    q = _pairs(b[:, 32:96]).astype(np.float32) - np.float32(4) * (upper == 0)
    return np.ascontiguousarray(
        (q.reshape(len(b), 16, 16) * scale[..., None]).reshape(len(b), 256), np.float32
    )


def _iq4_nl(b: U8) -> F32:
    return np.array(_IQ4, np.float32)[_nibbles(b[:, 2:], 16)] * _half(b[:, :2])


def _iq4_xs(b: U8) -> F32:
    upper = np.ascontiguousarray(b[:, 2:4]).view("<u2")
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(len(b), 8)
    scale = low | ((upper >> np.arange(0, 16, 2, dtype=np.uint16)) & 3).astype(np.uint8) << 4
    spread = (scale.astype(np.float32) - np.float32(32)) * _half(b[:, :2])
    out = np.array(_IQ4, np.float32)[_nibbles(b[:, 8:], 16)].reshape(len(b), 8, 32) * spread[..., None]
    return np.ascontiguousarray(out.reshape(len(b), 256), np.float32)


def _mxfp4(b: U8) -> F32:
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 127)
    return np.ascontiguousarray(np.array(_E2M1, np.float32)[_nibbles(b[:, 1:], 16)] * scale, np.float32)


def nvfp4_scales(b: U8) -> F32:
    """Unsigned e4m3 of the four 16-blocks [M, 4]; 0x7F stands for 0, as ggml reads it."""
    code = b[:, :4].astype(np.int32) & 0x7F
    exponent, fraction = code >> 3, code & 7
    value = np.where(exponent == 0, np.ldexp(fraction / 8.0, -6), np.ldexp(1 + fraction / 8.0, exponent - 7))
    return np.where(code == 0x7F, 0.0, value).astype(np.float32)


def nvfp4_nibbles(b: U8) -> U8:
    """Codes of 64 elements [M, 64], in their order."""
    return _nibbles(b[:, 4:], 8)


def _nvfp4(b: U8) -> F32:
    out = np.array(_E2M1, np.float32)[nvfp4_nibbles(b)].reshape(len(b), 4, 16) * nvfp4_scales(b)[..., None]
    return np.ascontiguousarray(out.reshape(len(b), 64), np.float32)


_DECODERS: dict[str, Callable[[U8], F32]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}  # fmt: skip
