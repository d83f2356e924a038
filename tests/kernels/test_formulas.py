"""Decoders against FORMATS' formulas in float64, encoders against brute force, values at the edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from qconvert.kernels import layout
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.codebook import USUAL, fit_codebook
from qconvert.kernels.select import get_backend

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
CPU = get_backend("cpu")
QUALITIES: tuple[Quality, ...] = ("fast", "best")
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def weights(rows: int, cols: int, seed: int = 0) -> F32:
    return (np.random.default_rng(seed).standard_normal((rows, cols)) * 0.02).astype(np.float32)


def e4m3(codes: NDArray[np.uint8]) -> F64:
    values: F64 = CPU.to_f32(codes, "F8_E4M3").astype(np.float64)
    return values


def close(got: F32, want: F64) -> None:
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=0)


def hadamard(group: int) -> F64:
    h4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float64)
    h: NDArray[np.floating[Any]] = np.ones((1, 1))
    while h.shape[0] < group:
        h = np.kron(h, h4)
    matrix: F64 = (h / np.sqrt(group)).astype(np.float64)
    return matrix


@pytest.mark.parametrize("group", [4, 16, 64, 256, 1024])
def test_rotation_is_the_hadamard_product(group: int) -> None:
    x = weights(5, 2 * group)
    want = (x.astype(np.float64).reshape(-1, group) @ hadamard(group).T).reshape(x.shape)
    got = CPU.rotate(x, group)
    np.testing.assert_allclose(got, want, atol=1e-7 * float(np.abs(x).max()) * np.sqrt(group), rtol=0)
    np.testing.assert_allclose(CPU.rotate(got, group), x, atol=1e-6 * float(np.abs(x).max()), rtol=0)


def test_rotation_is_exact_on_integers() -> None:
    x = np.random.default_rng(0).integers(-100, 100, (4, 512)).astype(np.float32)
    want = (x.astype(np.float64).reshape(-1, 256) @ hadamard(256)).reshape(x.shape)
    np.testing.assert_array_equal(CPU.rotate(x, 256), want)


@pytest.mark.parametrize("group", [0, 1, 2, 8, 32, 128, 512])
def test_rotation_refuses(group: int) -> None:
    with pytest.raises(ValueError, match="powers of 4"):
        CPU.rotate(weights(2, 1024), group)


def test_rotation_refuses_a_remainder() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        CPU.rotate(weights(2, 96), 64)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("shape", [(), (7,)])
def test_fp8(dtype: str, shape: tuple[int, ...]) -> None:
    x = weights(7, 33)
    scale = np.full(shape, CPU.fp8_scale(CPU.amax(x), dtype), np.float32)
    q = CPU.fp8_encode(x, scale, dtype)
    column = scale.astype(np.float64).reshape(-1, 1) if shape else np.float64(scale)
    close(CPU.fp8_decode(q, scale, dtype), CPU.to_f32(q, dtype).astype(np.float64) * column)
    np.testing.assert_array_equal(q, CPU.from_f32((x / scale.reshape(-1, 1)).astype(np.float32), dtype))
    assert np.abs(CPU.to_f32(q, dtype)).max() == {"F8_E4M3": 448.0, "F8_E5M2": 57344.0}[dtype]


def test_fp8_of_any_shape_with_one_scale() -> None:
    x = weights(6, 24)
    scale = np.asarray(np.float32(0.001))
    flat = CPU.fp8_encode(x, scale, "F8_E4M3")
    np.testing.assert_array_equal(
        CPU.fp8_encode(x.reshape(2, 3, 4, 6), scale, "F8_E4M3").reshape(6, 24), flat
    )
    np.testing.assert_array_equal(CPU.fp8_encode(x.reshape(-1), scale, "F8_E4M3"), flat.reshape(-1))


def test_int8_and_w4a4() -> None:
    x = weights(9, 70)
    for quality in QUALITIES:
        scale = CPU.int8_row_scale(x, quality)
        q = CPU.int8_encode(x, scale)
        np.testing.assert_array_equal(q, np.rint(x / scale[:, None]).clip(-127, 127))
        close(CPU.int8_decode(q, scale), q.astype(np.float64) * scale.astype(np.float64)[:, None])
        codes, four = CPU.w4a4_encode(x, quality)
        nibbles = layout.unpack_nibbles(codes, high_first=False).astype(np.int8)
        signed = np.where(nibbles > 7, nibbles - 16, nibbles)
        np.testing.assert_array_equal(signed, np.rint(x / four[:, None]).clip(-7, 7))
        close(CPU.w4a4_decode(codes, four), signed * four.astype(np.float64)[:, None])
    amax = np.abs(x).max(axis=1)
    np.testing.assert_array_equal(CPU.int8_row_scale(x, "fast"), amax / np.float32(127))
    np.testing.assert_array_equal(CPU.w4a4_encode(x, "fast")[1], amax / np.float32(7))


def test_every_int4_code_decodes() -> None:
    codes = np.arange(256, dtype=np.uint8)[None]
    nibbles = layout.unpack_nibbles(codes, high_first=False).astype(np.float64)
    want = np.where(nibbles > 7, nibbles - 16, nibbles) * 0.5
    np.testing.assert_array_equal(CPU.w4a4_decode(codes, np.array([0.5], np.float32)), want)


def test_nvfp4() -> None:
    x = weights(5, 96)
    x[0, :16] = 0.0
    scale = CPU.nvfp4_tensor_scale(CPU.amax(x))
    assert scale == np.float32(CPU.amax(x)) / np.float32(2688)
    for quality in QUALITIES:
        codes, scales = CPU.nvfp4_encode(x, scale, quality)
        assert (scales & 0x80 == 0).all()
        values = E2M1[layout.unpack_nibbles(codes, high_first=True)].reshape(5, 6, 16)
        close(
            CPU.nvfp4_decode(codes, scales, scale),
            (values * (scale * e4m3(scales))[..., None]).reshape(5, 96),
        )
    _, scales = CPU.nvfp4_encode(x, scale, "fast")
    ratio = (np.abs(x.reshape(5, 6, 16)).max(axis=2) / np.float32(6)) / scale
    np.testing.assert_array_equal(scales, CPU.from_f32(ratio, "F8_E4M3"))


def test_nvfp4_best_is_the_best_of_all_block_scales() -> None:
    """Against every one of the 127 codes, in float64."""
    x = weights(8, 256, seed=3)
    scale = CPU.nvfp4_tensor_scale(CPU.amax(x))
    codes, scales = CPU.nvfp4_encode(x, scale, "best")
    blocks = x.astype(np.float64).reshape(-1, 16)
    least = np.full(len(blocks), np.inf)
    for code in range(1, 127):
        total = float(scale) * e4m3(np.array([code], np.uint8))[0]
        nearest = np.abs(np.abs(blocks[..., None]) - E2M1[:8] * total).min(axis=2)
        least = np.minimum(least, (nearest**2).sum(axis=1))
    got = CPU.nvfp4_decode(codes, scales, scale).astype(np.float64).reshape(-1, 16)
    np.testing.assert_allclose(((blocks - got) ** 2).sum(axis=1), least, rtol=2e-3)


@pytest.mark.parametrize("scale", [0.0, 1e-45, np.inf, np.nan, -1.0])
def test_nvfp4_refuses_a_scale(scale: float) -> None:
    with pytest.raises(ValueError, match="tensor scale"):
        CPU.nvfp4_encode(weights(1, 16), np.float32(scale), "fast")


def test_mxfp8() -> None:
    x = weights(6, 128)
    x[1, :32] = 0.0
    q, scales = CPU.mxfp8_encode(x, "best")
    power = np.where(scales > 0, 2.0 ** (scales.astype(np.float64) - 127), 0.0)
    close(CPU.mxfp8_decode(q, scales), (e4m3(q).reshape(6, 4, 32) * power[..., None]).reshape(6, 128))
    amax = np.abs(x.reshape(6, 4, 32)).max(axis=2).astype(np.float64)
    with np.errstate(divide="ignore"):
        want = np.where(amax > 0, np.ceil(np.log2(amax / 448)) + 127, 0)
    np.testing.assert_array_equal(scales, want)
    assert (q[1, :32] == 0).all()


def test_mxfp8_exponent_at_its_edges() -> None:
    amax = np.array(
        [448.0, np.nextafter(np.float32(448), np.float32(500)), 449.0, 224.0, 896.0, 1e-45, 1e-38, 3e38]
    )
    x = np.zeros((len(amax), 32), np.float32)
    x[:, 5] = amax
    q, scales = CPU.mxfp8_encode(x, "fast")
    np.testing.assert_array_equal(scales[:, 0], [127, 128, 128, 126, 128, 0, 1, 247])
    decoded = CPU.mxfp8_decode(q, scales)
    assert decoded[5, 5] == 0.0
    np.testing.assert_allclose(decoded[[0, 1, 2, 3, 4, 6, 7], 5], amax[[0, 1, 2, 3, 4, 6, 7]], rtol=0.0625)


def grid64(levels: F32, s_rel: F64) -> F64:
    return (
        np.rint((levels * s_rel[..., None].astype(np.float32)).astype(np.float32))
        .clip(-127, 127)
        .astype(np.float64)
    )


@pytest.mark.parametrize("group", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("codebook", [USUAL, None], ids=["codebook", "uniform"])
def test_w4a8(group: int, codebook: F32 | None) -> None:
    x = weights(5, 192)
    levels = np.arange(-8, 8, dtype=np.float32) if codebook is None else codebook
    for quality in QUALITIES:
        codes, s_rel, channel = CPU.w4a8_encode(x, group, codebook, quality)
        scales = e4m3(s_rel)
        table = grid64(levels, scales)
        index = layout.unpack_nibbles(codes, high_first=False).reshape(5, -1, group).astype(np.int64)
        want = np.take_along_axis(table, index, axis=2) * channel.astype(np.float64)[:, None, None]
        got = CPU.w4a8_decode(codes, scales.astype(np.float32), channel, codebook, group, 4, None)
        close(got, want.reshape(5, 192))
        # Each code is the nearest grid value, the first of equals.
        y = (x / channel[:, None]).reshape(5, -1, group).astype(np.float64)
        distance = np.abs(y[..., None] - table[:, :, None, :])
        chosen = np.take_along_axis(distance, index[..., None], axis=3)[..., 0]
        np.testing.assert_array_equal(chosen, distance.min(axis=3))
        correction = np.linspace(0, 0.1, scales.size, dtype=np.float32).reshape(scales.shape)
        shifted = CPU.w4a8_decode(codes, scales.astype(np.float32), channel, codebook, group, 4, correction)
        np.testing.assert_allclose(shifted, got + np.repeat(correction, group, axis=1), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_fp8_fitted_scale(dtype: str) -> None:
    """The best of one octave in sixteenths, by error sums in float64; far better than absmax for most rows."""
    x = weights(40, 192)
    scale = np.array([CPU.fp8_scale(CPU.amax(row), dtype) for row in x], np.float32)

    def error(s: F32) -> F64:
        y = CPU.fp8_decode(CPU.fp8_encode(x, s, dtype), s, dtype)
        return ((x.astype(np.float64) - y) ** 2).sum(axis=1)

    fitted = CPU.fp8_fitted_scale(x, scale, dtype)
    tried = np.array([error(scale * np.float32(1 + i / 16)) for i in range(16)])
    assert np.isin(np.rint(fitted / scale * 1e6), 1e6 + np.arange(16) * 62500).all()
    np.testing.assert_allclose(error(fitted), tried.min(axis=0), rtol=2e-4)
    assert error(fitted).sum() < 0.9 * tried[0].sum()
    zeros = np.zeros((2, 32), np.float32)
    np.testing.assert_array_equal(CPU.fp8_fitted_scale(zeros, np.ones(2, np.float32), dtype), 1)


@pytest.mark.parametrize("codebook", [USUAL, None], ids=["codebook", "uniform"])
def test_w4a8_scales_have_a_sign(codebook: F32 | None) -> None:
    """A mirrored weight has the same codes under scales of the other sign, and lopsided groups need both."""
    x = weights(9, 192)
    for quality in QUALITIES:
        codes, s_rel, channel = CPU.w4a8_encode(x, 16, codebook, quality)
        mirrored = CPU.w4a8_encode(-x, 16, codebook, quality)
        for ours, theirs in zip((codes, s_rel ^ 0x80, channel), mirrored, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert 0.2 < (s_rel > 0x7F).mean() < 0.8


def test_w6a8() -> None:
    x = weights(5, 192)
    for quality in QUALITIES:
        codes, s_rel, channel = CPU.w6a8_encode(x, 16, quality)
        scales = e4m3(s_rel)
        levels = layout.unpack_six_bits(codes).astype(np.float64) - 32
        assert levels.min() >= -31
        grid = np.rint(levels.reshape(5, 12, 16) * scales[..., None]).clip(-127, 127)
        want = (grid * channel.astype(np.float64)[:, None, None]).reshape(5, 192)
        close(CPU.w4a8_decode(codes, scales.astype(np.float32), channel, None, 16, 6, None), want)
        y = (x / channel[:, None]).reshape(5, 12, 16).astype(np.float64)
        table = grid64(np.arange(-31, 32, dtype=np.float32), scales)
        distance = np.abs(y[..., None] - table[:, :, None, :]).min(axis=3)
        np.testing.assert_array_equal(np.abs(y - grid), distance)


@pytest.mark.parametrize(
    ("shape", "group", "six_bit"),
    [
        ((2, 24), 8, False),
        ((2, 64), 5, False),
        ((2, 64), 2, False),
        ((2, 96), 24, False),
        ((2, 48), 16, True),
    ],
)
def test_w4a8_refuses(shape: tuple[int, int], group: int, six_bit: bool) -> None:
    with pytest.raises(ValueError):
        if six_bit:
            CPU.w6a8_encode(weights(*shape), group, "fast")
        else:
            CPU.w4a8_encode(weights(*shape), group, USUAL, "fast")


@pytest.mark.parametrize("table", [np.zeros(16), np.arange(15), np.arange(16)[::-1], np.full(16, np.nan)])
def test_codebooks_are_checked(table: NDArray[np.generic]) -> None:
    with pytest.raises(ValueError, match="codebook"):
        CPU.w4a8_encode(weights(2, 64), 16, table.astype(np.float32), "fast")


def test_codebook_fit() -> None:
    gaussian = CPU.rotate(weights(64, 1024), 256)
    np.testing.assert_array_equal(fit_codebook(gaussian, 16, "fast"), USUAL)
    for sample in (gaussian, np.zeros((2, 64), np.float32), np.zeros((0, 64), np.float32)):
        np.testing.assert_array_equal(fit_codebook(sample, 16, "best"), USUAL)
    skewed = np.random.default_rng(5).laplace(size=(64, 1024)).astype(np.float32)
    fitted = fit_codebook(skewed, 16, "best")
    assert (np.diff(fitted) >= 0).all() and fitted.dtype == np.float32
    np.testing.assert_array_equal(fit_codebook(skewed, 16, "best"), fitted)
    np.testing.assert_allclose(fit_codebook(skewed * np.float32(2.0**40), 16, "best"), fitted)


@pytest.mark.parametrize("backend", [CPU, get_backend("reference")], ids=lambda b: b.name)
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-38, 6e-8, 1e-5, 1.0, 1e30, 3e38])
def test_extremes_stay_finite_and_right(backend: Backend, magnitude: float) -> None:
    """A whole tensor at one magnitude, with and without a lonely outlier: finite, and close where float32 can be."""
    base = np.random.default_rng(0).uniform(-1, 1, (3, 256))
    base[0, 0] = 1.0
    for outlier in (False, True):
        x = (base * magnitude).astype(np.float32)
        if outlier:
            x[1, 7] = min(magnitude * 500, 3e38)
        amax = backend.amax(x)
        for dtype in ("F8_E4M3", "F8_E5M2"):
            scale = np.asarray(backend.fp8_scale(amax, dtype))
            check(
                x, backend.fp8_decode(backend.fp8_encode(x, scale, dtype), scale, dtype), scale, 0.13, 1e-36
            )
        for quality in QUALITIES:
            row = backend.int8_row_scale(x, quality)
            check(x, backend.int8_decode(backend.int8_encode(x, row), row), row, 0.05, 1e-28)
            t = backend.nvfp4_tensor_scale(amax)
            codes, scales = backend.nvfp4_encode(x, t, quality)
            assert not (scales & 0x7F == 0x7F).any()
            check(x, backend.nvfp4_decode(codes, scales, t), t, 0.3, 1e-36)
            q, scales = backend.mxfp8_encode(x, quality)
            check(x, backend.mxfp8_decode(q, scales), np.zeros(1), 0.08, 1e-36)
            codes, row = backend.w4a4_encode(x, quality)
            check(x, backend.w4a4_decode(codes, row), row, 0.9, 1e-28)
            codes, s_rel, channel = backend.w4a8_encode(x, 16, USUAL, quality)
            scales32 = backend.to_f32(s_rel, "F8_E4M3")
            decoded = backend.w4a8_decode(codes, scales32, channel, USUAL, 16, 4, None)
            check(x, decoded, channel, 0.5, 1e-28)


def check(
    x: F32, decoded: F32, scale: NDArray[Any] | np.float32, worst: float, from_magnitude: float
) -> None:
    assert np.isfinite(scale).all() and np.isfinite(decoded).all()
    if not x.any():
        assert not decoded.any()
    elif np.abs(x).max() > from_magnitude:
        noise = np.linalg.norm((x.astype(np.float64) - decoded).ravel())
        assert noise <= worst * np.linalg.norm(x.astype(np.float64).ravel())
