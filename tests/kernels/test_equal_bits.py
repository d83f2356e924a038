"""Every operation of the CPU backend gives the reference's bits, on shapes and values chosen to be awkward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.codebook import USUAL
from qconvert.kernels.select import get_backend

Arrays = tuple[Any, ...]
F32 = NDArray[np.float32]

CPU, REFERENCE = get_backend("cpu"), get_backend("reference")
QUALITIES: tuple[Quality, ...] = ("fast", "best")
#: Zeros, ties of every small float, edges of their ranges, float32 subnormals, float16 subnormals, huge values.
SPECIAL = [
    0.0,
    -0.0,
    0.25,
    0.75,
    2.5,
    5.0,
    7.0,
    448.0,
    464.0,
    2.0**-10,
    3 * 2.0**-10,
    1e-45,
    1e-38,
    6e-8,
    3e38,
    -1.0,
]


def fill(rng: np.random.Generator, rows: int, cols: int, kind: str) -> F32:
    x = rng.standard_normal((rows, cols)) * 0.02
    if kind == "outliers":
        x[:, ::11] *= 60
    elif kind == "heavy":
        x = rng.standard_t(1.5, (rows, cols)) * 0.01
    elif kind == "tiny":
        x *= 1e-37
    elif kind == "huge":
        x *= 1e37
    elif kind == "ties":
        x = np.round(x * 400) / 4
    elif kind == "any magnitude":
        x = np.sign(x) * 2.0 ** rng.uniform(-149, 127, (rows, cols))
    elif kind == "special":
        x = rng.choice(SPECIAL, (rows, cols))
    elif kind == "zero rows":
        x[rng.random(rows) < 0.5] = 0.0
        x[:, : cols // 2] = 0.0
    return x.astype(np.float32)


KINDS = ["normal", "outliers", "heavy", "tiny", "huge", "ties", "any magnitude", "special", "zero rows"]


@st.composite
def matrices(draw: st.DrawFn, multiple: int, most: int, many_rows: bool) -> F32:
    """[R, K] with K a multiple; often not one of any vector width, and around the kernels' batch of 128 blocks."""
    rows = draw(st.one_of(st.integers(1, 9), st.sampled_from([33, 130] if many_rows else [17])))
    cols = multiple * draw(st.integers(1, most))
    seed, kind = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(KINDS))
    return fill(np.random.default_rng(seed), rows, cols, kind)


def assert_same_bits(ours: Any, theirs: Any) -> None:
    a, b = np.asarray(ours), np.asarray(theirs)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    bits = np.dtype(f"u{a.dtype.itemsize}")
    np.testing.assert_array_equal(a.view(bits), b.view(bits))


def cast_ops(dtype: str) -> Callable[[Backend, F32], Arrays]:
    def run(b: Backend, x: F32) -> Arrays:
        raw = b.from_f32(x, dtype)
        return raw, b.to_f32(raw, dtype)

    return run


def rotate(group: int) -> Callable[[Backend, F32], Arrays]:
    return lambda b, x: (b.rotate(x, group),)


def fp8(dtype: str, per_row: bool) -> Callable[[Backend, F32], Arrays]:
    def run(b: Backend, x: F32) -> Arrays:
        rows = [b.fp8_scale(b.amax(row), dtype) for row in (x if per_row else x[None])]
        scale = np.array(rows, dtype=np.float32) if per_row else np.asarray(rows[0])
        fitted = b.fp8_fitted_scale(x if per_row else x.reshape(1, -1), scale.reshape(-1), dtype)
        scale = fitted if per_row else fitted.reshape(())
        q = b.fp8_encode(x, scale, dtype)
        return scale, q, b.fp8_decode(q, scale, dtype)

    return run


def int8(quality: Quality) -> Callable[[Backend, F32], Arrays]:
    def run(b: Backend, x: F32) -> Arrays:
        scale = b.int8_row_scale(x, quality)
        q, whole = b.int8_encode(x, scale), np.asarray(scale.max())
        return scale, q, b.int8_decode(q, scale), b.int8_encode(x, whole), b.int8_decode(q, whole)

    return run


def nvfp4(quality: Quality, shrink: float) -> Callable[[Backend, F32], Arrays]:
    def run(b: Backend, x: F32) -> Arrays:
        scale = max(np.float32(b.nvfp4_tensor_scale(b.amax(x)) * np.float32(shrink)), np.float32(2.0**-126))
        codes, scales = b.nvfp4_encode(x, scale, quality)
        return scale, codes, scales, b.nvfp4_decode(codes, scales, scale)

    return run


def mxfp8(b: Backend, x: F32) -> Arrays:
    q, scales = b.mxfp8_encode(x, "fast")
    return q, scales, b.mxfp8_decode(q, scales)


def w4a4(quality: Quality) -> Callable[[Backend, F32], Arrays]:
    def run(b: Backend, x: F32) -> Arrays:
        codes, scale = b.w4a4_encode(x, quality)
        return codes, scale, b.w4a4_decode(codes, scale)

    return run


def w4a8(quality: Quality, group: int, codebook: F32 | None) -> Callable[[Backend, F32], Arrays]:
    def run(b: Backend, x: F32) -> Arrays:
        codes, s_rel, channel = b.w4a8_encode(x, group, codebook, quality)
        scales = b.to_f32(s_rel, "F8_E4M3")
        correction = scales * np.float32(0.125)
        plain = b.w4a8_decode(codes, scales, channel, codebook, group, 4, None)
        return (
            codes,
            s_rel,
            channel,
            plain,
            b.w4a8_decode(codes, scales, channel, codebook, group, 4, correction),
        )

    return run


def w6a8(quality: Quality, group: int) -> Callable[[Backend, F32], Arrays]:
    def run(b: Backend, x: F32) -> Arrays:
        codes, s_rel, channel = b.w6a8_encode(x, group, quality)
        scales = b.to_f32(s_rel, "F8_E4M3")
        return codes, s_rel, channel, b.w4a8_decode(codes, scales, channel, None, group, 6, None)

    return run


#: Name -> (multiple of columns, operation).
OPS: dict[str, tuple[int, Callable[[Backend, F32], Arrays]]] = {
    **{f"cast {d}": (1, cast_ops(d)) for d in ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")},
    **{f"rotate {g}": (g, rotate(g)) for g in (4, 16, 64, 256, 1024)},
    **{f"fp8 {d} {r}": (1, fp8(d, r)) for d in ("F8_E4M3", "F8_E5M2") for r in (False, True)},
    **{f"int8 {q}": (1, int8(q)) for q in QUALITIES},
    **{f"nvfp4 {q} {s}": (16, nvfp4(q, s)) for q in QUALITIES for s in (1.0, 300.0, 0.001)},
    "mxfp8": (32, mxfp8),
    **{f"w4a4 {q}": (2, w4a4(q)) for q in QUALITIES},
    **{f"w4a8 {q} {g}": (max(g, 16), w4a8(q, g, USUAL)) for q in QUALITIES for g in (4, 16, 48)},
    **{f"w4a8 uniform {q}": (16, w4a8(q, 16, None)) for q in QUALITIES},
    **{f"w6a8 {q}": (32, w6a8(q, 16)) for q in QUALITIES},
}


@pytest.mark.parametrize("name", OPS)
def test_cpu_equals_reference(name: str) -> None:
    multiple, op = OPS[name]

    slow = "a8" in name  # In the reference: sixteen levels times every candidate.

    @settings(max_examples=8 if slow else 20, deadline=None, database=None)
    @given(x=matrices(multiple, most=3 if multiple >= 256 else 9, many_rows=not slow))
    def check(x: F32) -> None:
        before = x.copy()
        for ours, theirs in zip(op(CPU, x), op(REFERENCE, x), strict=True):
            assert_same_bits(ours, theirs)
        assert_same_bits(x, before)

    check()


@pytest.mark.parametrize("name", ["int8 best", "w4a4 best", "nvfp4 best 1.0", "w4a8 best 16"])
def test_wide_rows(name: str) -> None:
    """More columns than one round of running sums, and more groups a row than one batch."""
    _, op = OPS[name]
    x = fill(np.random.default_rng(1), 3, 4400, "outliers")
    for ours, theirs in zip(op(CPU, x), op(REFERENCE, x), strict=True):
        assert_same_bits(ours, theirs)


def test_rows_do_not_depend_on_their_chunk() -> None:
    """The executor splits by rows: any split gives the same bytes."""
    x = fill(np.random.default_rng(2), 37, 192, "outliers")
    for name in ("int8 best", "mxfp8", "w4a4 best", "w4a8 best 16", "w6a8 best", "rotate 64"):
        whole = OPS[name][1](CPU, x)
        parts = [OPS[name][1](CPU, chunk) for chunk in (x[:5], x[5:6], x[6:])]
        if name == "int8 best":  # Its last two results use one scale for all rows of the chunk.
            whole, parts = whole[:3], [p[:3] for p in parts]
        for i, result in enumerate(whole):
            assert_same_bits(result, np.concatenate([p[i] for p in parts]))


def test_statistics() -> None:
    x = fill(np.random.default_rng(3), 7, 301, "outliers")
    y = x + fill(np.random.default_rng(4), 7, 301, "normal")
    assert CPU.amax(x) == REFERENCE.amax(x) == float(np.abs(x).max())
    exact = (x.astype(np.float64) ** 2).sum(), ((x.astype(np.float64) - y.astype(np.float64)) ** 2).sum()
    for backend in (CPU, REFERENCE):
        assert backend.error(x, y) == pytest.approx(exact, rel=1e-12)
        assert backend.amax(np.zeros((0, 4), np.float32)) == 0.0
        assert backend.amax(np.array([1.0, -np.inf, 2.0], np.float32)) == np.inf
        assert np.isnan(backend.amax(np.array([1.0, np.nan, np.inf] + [0.0] * 40, np.float32)))


def test_read_only_and_strided_inputs() -> None:
    x = fill(np.random.default_rng(5), 6, 64, "normal")
    frozen = np.frombuffer(x.tobytes(), dtype=np.float32).reshape(x.shape)
    strided = np.repeat(x, 2, axis=1)[:, ::2]
    for name in ("int8 best", "nvfp4 best 1.0", "mxfp8", "w4a4 fast", "w4a8 best 16", "rotate 16"):
        want = OPS[name][1](CPU, x)
        for other in (frozen, strided):
            for ours, theirs in zip(OPS[name][1](CPU, other), want, strict=True):
                assert_same_bits(ours, theirs)


@pytest.mark.parametrize("backend", [CPU, REFERENCE], ids=lambda b: b.name)
def test_no_rows(backend: Backend) -> None:
    x = np.zeros((0, 256), np.float32)
    for name, (_, op) in OPS.items():
        if name.startswith(("rotate", "mxfp8", "w4a4", "nvfp4", "cast", "w4a8 best 16", "w6a8")):
            if name == "rotate 1024":
                continue
            for result in op(backend, x):
                assert np.asarray(result).size in (0, 1)
