"""Every code of every small float, every tie between neighbours, against torch's casts and against arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from qconvert.kernels import reference
from qconvert.kernels.api import FP8_MAX, Backend
from qconvert.kernels.select import get_backend

F32 = NDArray[np.float32]
BACKENDS = [get_backend("cpu"), get_backend("reference")]
both = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)

TORCH = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
#: Mantissa bits, exponent bias, bits.
SHAPE = {"F8_E4M3": (3, 7, 8), "F8_E5M2": (2, 15, 8), "F16": (10, 15, 16), "BF16": (7, 127, 16)}


def all_codes(dtype: str) -> NDArray[np.generic]:
    if SHAPE[dtype][2] == 8:
        return np.arange(256, dtype=np.uint8)
    codes = np.arange(1 << 16, dtype=np.uint16)
    return codes.view(np.float16) if dtype == "F16" else codes


def value(code: int, dtype: str) -> float:
    """What a code means, by the definition of a float: sign, exponent, mantissa."""
    mantissa_bits, bias, bits = SHAPE[dtype]
    sign = -1.0 if code >> (bits - 1) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << (bits - 1 - mantissa_bits)) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    top = (1 << (bits - 1 - mantissa_bits)) - 1
    if dtype == "F8_E4M3":
        if exponent == top and mantissa == 7:
            return float("nan")
    elif exponent == top:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * float(np.ldexp(mantissa, 1 - bias - mantissa_bits))
    return sign * float(np.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits))


def neighbours(values: F32) -> F32:
    """Each value, the ties between neighbours, and one float32 step to either side of both; both signs."""
    v = np.unique(np.abs(values[np.isfinite(values)]).astype(np.float64))
    points = np.concatenate([v, (v[1:] + v[:-1]) / 2, [v[-1] * 1.01, v[-1] * 2, 3e38, np.inf]])
    with np.errstate(over="ignore"):
        x = points.astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))])
    return np.concatenate([x, -x])


@both
@pytest.mark.parametrize("dtype", SHAPE)
def test_widening_every_code(backend: Backend, dtype: str) -> None:
    codes = all_codes(dtype)
    got = backend.to_f32(codes, dtype)
    raw = codes.view(f"u{codes.itemsize}")
    with np.errstate(over="ignore"):
        want = np.array([value(int(c), dtype) for c in raw]).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(want)], np.signbit(want)[~np.isnan(want)])


@both
@pytest.mark.parametrize("dtype", SHAPE)
def test_narrowing_ties_and_round_trip(backend: Backend, dtype: str) -> None:
    codes = all_codes(dtype)
    values = backend.to_f32(codes, dtype)
    finite = np.isfinite(values)
    bits = np.dtype(f"u{codes.itemsize}")
    np.testing.assert_array_equal(
        backend.from_f32(values, dtype).view(bits)[finite], codes.view(bits)[finite]
    )

    x = neighbours(values)
    want = torch.from_numpy(x)
    if dtype in FP8_MAX:
        want = want.clamp(-FP8_MAX[dtype], FP8_MAX[dtype])
    expected = (
        want.to(TORCH[dtype]).view(torch.uint8 if bits.itemsize == 1 else torch.int16).numpy().view(bits)
    )
    np.testing.assert_array_equal(backend.from_f32(x, dtype).view(bits), expected)


@both
@pytest.mark.parametrize("dtype", [*SHAPE, "F32"])
def test_nan_stays_nan(backend: Backend, dtype: str) -> None:
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(backend.to_f32(backend.from_f32(nans, dtype), dtype)).all()


@both
def test_random_bits(backend: Backend) -> None:
    x = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    x = np.where(np.isnan(x), np.float32(1.0), x)
    for dtype, kind in TORCH.items():
        limit = FP8_MAX.get(dtype, float("inf"))
        want = torch.from_numpy(x).clamp(-limit, limit).to(kind)
        np.testing.assert_array_equal(backend.to_f32(backend.from_f32(x, dtype), dtype), want.float().numpy())


@both
def test_other_kinds(backend: Backend) -> None:
    e8m0 = backend.to_f32(np.arange(256, dtype=np.uint8), "F8_E8M0")
    np.testing.assert_array_equal(e8m0[:255], np.ldexp(1.0, np.arange(-127, 128)).astype(np.float32))
    assert np.isnan(e8m0[255])
    np.testing.assert_array_equal(backend.to_f32(np.array([-128, 127], np.int8), "I8"), [-128.0, 127.0])
    np.testing.assert_array_equal(backend.to_f32(np.array([0, 255], np.uint8), "U8"), [0.0, 255.0])
    halfway = np.array([1.0 + 2.0**-24, 1.0 + 3 * 2.0**-24], np.float64)
    np.testing.assert_array_equal(backend.to_f32(halfway, "F64"), [1.0, 1.0 + 2.0**-22])
    x = np.array([[1.5, -0.0]], np.float32)
    np.testing.assert_array_equal(backend.from_f32(x, "F32"), x)
    assert backend.from_f32(x, "F16").dtype == np.float16
    assert backend.from_f32(x, "BF16").dtype == np.uint16


E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest_even_e2m1(x: F32) -> NDArray[np.uint8]:
    """The nearest of the eight magnitudes, the even code on a tie, by brute force in float64."""
    distance = np.abs(np.abs(x.astype(np.float64)).clip(max=6.0)[:, None] - E2M1)
    odd = np.arange(8) % 2
    order = np.lexsort((np.broadcast_to(odd, distance.shape), distance), axis=1)
    codes: NDArray[np.uint8] = (order[:, 0] + 8 * np.signbit(x)).astype(np.uint8)
    return codes


@both
def test_e2m1_ties(backend: Backend) -> None:
    """Through nvfp4 with both scales 1: a 6 in each block makes the block scale 1."""
    x = neighbours(E2M1.astype(np.float32))
    x = x[np.abs(x) <= 6.0]
    blocks = np.zeros((len(x), 16), np.float32)
    blocks[:, 0], blocks[:, 1] = 6.0, x
    codes, scales = backend.nvfp4_encode(blocks, np.float32(1.0), "fast")
    assert (scales == 0x38).all()
    np.testing.assert_array_equal(codes[:, 0] & 15, nearest_even_e2m1(x))
    np.testing.assert_array_equal(codes[:, 0] >> 4, 7)


def test_round_e2m1_definition() -> None:
    x = np.abs(neighbours(E2M1.astype(np.float32)))
    x = np.concatenate([x, np.linspace(0, 8, 10_001, dtype=np.float32)])
    got = reference.round_e2m1(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(got, E2M1[nearest_even_e2m1(x) & 7])
