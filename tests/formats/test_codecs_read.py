"""Every stored state of a layer, written by somebody else, is recognised and decoded to the values it stands for."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.formats.layers import Layer, take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.registry import codec
from qconvert.formats.tensors import TensorSpec
from qconvert.formats.values import aligned, decode_rows

NAME = "blocks.0.fc"


def decoded(checkpoint: Any, layer: Layer, backend: Any, step: int | None = None) -> np.ndarray[Any, Any]:
    """All values [.., N, K] of a layer, read in runs of `step` rows."""
    experts = range(layer.experts) if layer.experts else [None]
    out = []
    for expert in experts:
        reader = LayerReader(checkpoint, layer, expert)
        rows = layer.n if step is None else step
        starts = range(0, layer.n, rows)
        assert all(aligned(layer.codec, layer.options, a) == a for a in starts)
        out += [decode_rows(layer, reader, a, min(a + rows, layer.n), backend) for a in starts]
    return np.concatenate(out)


def check_reading(sample: Any, opened: Callable[..., Any], backend: Any) -> None:
    checkpoint = opened(sample.named(NAME))
    inventory = take_inventory(checkpoint)
    layer = inventory.layers[NAME]
    assert layer.codec.name == sample.codec
    assert {key: layer.options[key] for key in sample.options} == sample.options
    guesses = [finding for finding in inventory.all_findings() if finding.level == "guess"]
    assert bool(guesses) == sample.guess, guesses
    assert not layer.leftovers or layer.codec.name == "plain"
    values = sample.values.reshape(-1, layer.k)
    assert values.shape[0] == layer.n * max(layer.experts, 1)
    got = decoded(checkpoint, layer, backend)
    assert got.dtype == np.float32
    if sample.tolerance:
        assert np.abs(got - values).max() <= sample.tolerance
    else:
        assert np.array_equal(got.astype(np.float64), values)
    step = max(layer.codec.row_step(layer.options), 1)
    if step < layer.n:
        pieces = decoded(checkpoint, layer, backend, step if step > 1 else 37)
        if sample.exact:
            assert np.array_equal(pieces, got)
        else:
            assert np.allclose(pieces, got, rtol=0, atol=sample.tolerance)


def test_sources(
    source: str, d: ModuleType, rng: np.random.Generator, opened: Callable[..., Any], backend: Any
) -> None:
    check_reading(d.SOURCES[source](rng, d.weights(rng, 256, 256)), opened, backend)


def test_banks(
    bank: str, d: ModuleType, rng: np.random.Generator, opened: Callable[..., Any], backend: Any
) -> None:
    check_reading(d.BANKS[bank](rng, d.weights(rng, 3, 128, 256)), opened, backend)


@pytest.mark.parametrize("name", ["bank_w4a8_codebook", "bank_int8", "bank_fp8"])
def test_bank_with_as_many_experts_as_something_else(
    name: str, d: ModuleType, rng: np.random.Generator, opened: Callable[..., Any], backend: Any
) -> None:
    """A shared table of 16 levels is no table per expert, a row scale [E, N, 1] no scale an expert."""
    check_reading(d.BANKS[name](rng, d.weights(rng, 16, 16, 256)), opened, backend)


def test_convolutions(
    convolution: str, d: ModuleType, rng: np.random.Generator, opened: Callable[..., Any], backend: Any
) -> None:
    check_reading(d.CONVOLUTIONS[convolution](rng, d.weights(rng, 40, 8, 3, 3)), opened, backend)


def test_odd_sizes(
    odd: str, d: ModuleType, rng: np.random.Generator, opened: Callable[..., Any], backend: Any
) -> None:
    writer, n, k = d.ODD[odd]
    check_reading(writer(rng, d.weights(rng, n, k)), opened, backend)


# ---- every code, not only those that a quantiser happens to choose


def layer_of(checkpoint: Any, name: str, n: int, k: int, options: dict[str, Any]) -> Layer:
    tensors: dict[str, TensorSpec] = {
        key.removeprefix(f"{NAME}."): tensor for key, tensor in checkpoint.tensors.items()
    }
    return Layer(NAME, n, k, codec(name), options, tensors, frozenset(tensors))


def named(tensors: dict[str, Any]) -> dict[str, Any]:
    return {f"{NAME}.{suffix}": tensor for suffix, tensor in tensors.items()}


def check_codes(
    opened: Callable[..., Any],
    backend: Any,
    name: str,
    tensors: dict[str, Any],
    shape: tuple[int, int],
    options: dict[str, Any],
    expected: np.ndarray[Any, Any],
) -> None:
    checkpoint = opened(named(tensors))
    layer = layer_of(checkpoint, name, *shape, options)
    got = decoded(checkpoint, layer, backend)
    assert np.array_equal(got.astype(np.float64), expected, equal_nan=True)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("scale", [1.0, 3.0e-3, 1e-38, 1e30])
def test_every_fp8_code(
    kind: str, scale: float, d: ModuleType, opened: Callable[..., Any], backend: Any
) -> None:
    q = np.arange(256, dtype=np.uint8).reshape(16, 16)
    tensors = {"weight": d.T(kind, q), "weight_scale": d.f32_tensor(scale)}
    options = {"kind": kind, "scale": "scalar", "source": "weight_scale"}
    with np.errstate(over="ignore", invalid="ignore"):
        expected = d.decode_scaled(tensors)
    magnitude = (q & 0x7F).astype(int)
    if kind == "F8_E4M3":
        expected[magnitude == 0x7F] = np.nan
    else:
        expected[magnitude > 0x7C] = np.nan
        expected[magnitude == 0x7C] = np.where(q[magnitude == 0x7C] & 0x80, -np.inf, np.inf)
    check_codes(opened, backend, "float8", tensors, (16, 16), options, expected)


def test_every_int8_code(d: ModuleType, opened: Callable[..., Any], backend: Any) -> None:
    q = np.arange(-128, 128, dtype=np.int8).reshape(4, 64)
    tensors = {"weight": d.T("I8", q), "weight_scale": d.f32_tensor([[1e-30], [0.1], [3.0], [0.0]])}
    options = {"scale": "row", "rotation": 0, "shape": (4, 64)}
    check_codes(opened, backend, "int8", tensors, (4, 64), options, d.decode_scaled(tensors))


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("low_first", [False, True])
def test_every_nvfp4_code_under_every_scale(
    linear: bool,
    low_first: bool,
    d: ModuleType,
    rng: np.random.Generator,
    opened: Callable[..., Any],
    backend: Any,
) -> None:
    n, k = 254, 32
    codes = np.tile(rng.permuted(np.tile(np.arange(16), (n, 1)), axis=1), 2)
    scales = (np.arange(n * 2) % 0x7F).astype(np.uint8).reshape(n, 2)
    tensors = {
        "weight": d.T("U8", d.pack4(codes, not low_first)),
        "weight_scale": d.T("F8_E4M3", scales if linear else d.swizzle(scales)),
        "weight_scale_2": d.f32_tensor([2.9e-4]),
    }
    options = {"nibbles": "low" if low_first else "high", "scales": "linear" if linear else "swizzled"}
    expected = d.decode_nvfp4(tensors, low_first, linear)
    check_codes(opened, backend, "nvfp4", tensors, (n, k), options, expected)


@pytest.mark.parametrize("linear", [False, True])
def test_every_mxfp8_exponent(
    linear: bool, d: ModuleType, rng: np.random.Generator, opened: Callable[..., Any], backend: Any
) -> None:
    e = np.arange(255, dtype=np.uint8).reshape(255, 1).repeat(3, 1)
    q = rng.choice(np.r_[0:0x7F, 0x80:0xFF].astype(np.uint8), (255, 96))
    tensors = {
        "weight": d.T("F8_E4M3", q),
        "weight_scale": d.T("U8", e if linear else d.swizzle(e)),
    }
    options = {"scales": "linear" if linear else "swizzled", "source": "weight_scale"}
    with np.errstate(over="ignore"):
        expected = d.decode_mxfp8(tensors, linear=linear)
    assert not expected[0].any()
    check_codes(opened, backend, "mxfp8", tensors, (255, 96), options, expected)


def test_every_w4a4_code(d: ModuleType, opened: Callable[..., Any], backend: Any) -> None:
    codes = np.tile(np.arange(16), (3, 4))
    tensors = {
        "weight": d.T("I8", d.pack4(codes, False).view(np.int8)),
        "weight_scale": d.f32_tensor([0.1, 1e-10, 7.0]),
    }
    expected = d.decode_w4a4(tensors)
    assert expected[2].min() == -56
    check_codes(opened, backend, "w4a4", tensors, (3, 64), {"rotation": 0}, expected)


@pytest.mark.parametrize("form", ["uniform", "codebook", "correction", "six", "signed", "group only"])
@pytest.mark.parametrize("srel", ["F8_E4M3", "F32"])
def test_every_w4a8_code_under_every_scale(
    form: str, srel: str, d: ModuleType, rng: np.random.Generator, opened: Callable[..., Any], backend: Any
) -> None:
    n, g = 127, 64 if form == "six" else 16
    k = 2 * g
    codes = np.tile(rng.permuted(np.tile(np.arange(g), (n, 1)), axis=1), 2)
    rel = d.T("F8_E4M3", np.stack([np.arange(n), (np.arange(n) * 7) % n], 1).astype(np.uint8))
    if srel == "F32":
        rel = d.f32_tensor(d.widen(rel) * 1.01)
    packed = d.pack6(codes) if form == "six" else d.pack4(codes, False)
    tensors = {
        "weight": d.T("I8", packed.view(np.int8)),
        "weight_s_rel": rel,
        "weight_s_channel": d.f32_tensor(np.geomspace(1e-8, 10, n)),
    }
    if form == "codebook":
        tensors["weight_codebook"] = d.f32_tensor(d.CODEBOOK)
    if form == "correction":
        tensors["weight_correction"] = d.narrow(rng.standard_normal((2, n)), "BF16")
    if form == "group only":
        del tensors["weight_s_channel"]
    signed = form in ("signed", "group only")
    options = {
        "group": g,
        "rotation": 0,
        "bits": 6 if form == "six" else 4,
        "codebook": form == "codebook",
        "correction": form == "correction",
        "signed": signed,
        "grid": form != "group only",
        "source": "weight_s_rel",
        "srel_dtype": srel,
    }
    expected = d.decode_w4a8(tensors, sym=signed, bits=options["bits"])
    check_codes(opened, backend, "w4a8", tensors, (n, k), options, expected)


def test_every_awq_code(
    d: ModuleType, rng: np.random.Generator, opened: Callable[..., Any], backend: Any
) -> None:
    codes = np.tile(rng.permuted(np.tile(np.arange(16), (20, 1)), axis=1), 2)
    tensors = {
        "weight": d.T("U8", d.pack4(codes, False)),
        "weight_scale": d.narrow(rng.uniform(1e-3, 1, (2, 20)), "BF16"),
        "weight_zeros": d.narrow(rng.standard_normal((2, 20)), "BF16"),
    }
    options = {"group": 16, "dtype": "BF16"}
    check_codes(opened, backend, "awq_w4a16", tensors, (20, 32), options, d.decode_awq(tensors))
