"""nvfp4 under every name: written and read again, and moved from each dialect to each other without a changed bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.formats.base import Codec, Codes
from qconvert.formats.layers import take_inventory
from qconvert.formats.lightx2v import factor
from qconvert.formats.nvfp4_dialect import reciprocal
from qconvert.formats.reader import LayerReader
from qconvert.formats.registry import codec

LOW = {"nibbles": "low", "rotation": 0, "full_precision": False}
HIGH = {"nibbles": "high", "rotation": 0, "full_precision": False}
#: dialect -> codec, options to write with, what a configuration must say for it to be recognised
DIALECTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "comfyui": ("nvfp4", HIGH | {"scales": "swizzled", "input": True}, {}),
    "modelopt": ("modelopt_nvfp4", LOW | {"scales": "linear", "input": True}, {"quant_method": "modelopt"}),
    "modelopt_swizzled": (
        "modelopt_nvfp4",
        LOW | {"scales": "swizzled", "input": True},
        {"quant_method": "modelopt", "checkpoint_weight_scale_layout": "swizzled"},
    ),
    "bfl": ("modelopt_nvfp4", LOW | {"scales": "linear", "input": True}, {"quant_method": "bfl"}),
    "compressed": ("compressed_nvfp4", LOW | {"scales": "linear", "input": True}, {}),
    "fastvideo": ("fastvideo_nvfp4", LOW | {"scales": "swizzled"}, {}),
    "lightx2v_alpha": ("lightx2v_nvfp4", LOW | {"scales": "swizzled", "form": "alpha"}, {}),
    "lightx2v_global": ("lightx2v_nvfp4", LOW | {"scales": "swizzled", "form": "global"}, {}),
    "torchao": ("torchao_nvfp4", LOW | {"scales": "linear"}, {}),
}
N, K = 256, 128


def written(item: Codec, codes: Codes, options: Mapping[str, Any], d: ModuleType) -> dict[str, Any]:
    """The tensors of a layer, as `parts` declares them."""
    arrays = item.store(codes, options, K)
    parts = item.parts(N, K, options)
    assert {part.suffix for part in parts} == set(arrays)
    for part in parts:
        assert arrays[part.suffix].nbytes == part.spec.nbytes
        assert arrays[part.suffix].reshape(part.spec.shape).shape == part.spec.shape
    return {part.suffix: d.T(part.spec.dtype, arrays[part.suffix].reshape(part.spec.shape)) for part in parts}


def read(
    name: str, tensors: Mapping[str, Any], opened: Callable[..., Any], d: ModuleType, backend: Any
) -> tuple[Codes, Any]:
    """Codes of what was written, through recognition."""
    wanted, _, said = DIALECTS[name]
    tensors = {f"a.fc.{suffix}": tensor for suffix, tensor in tensors.items()}
    if name == "comfyui":
        tensors["a.fc.comfy_quant"] = d.marker_tensor({"format": "nvfp4"})
    checkpoint = opened(tensors)
    checkpoint.config = {"quantization_config": said} if said else {}
    layer = take_inventory(checkpoint).layers["a.fc"]
    assert (layer.codec.name, layer.n, layer.k) == (wanted, N, K)
    reader = LayerReader(checkpoint, layer)
    whole = layer.codec.load(reader, 0, N, backend)
    halves = [layer.codec.load(reader, a, a + 128, backend) for a in (0, 128)]
    for key in ("q", "block_scale"):
        assert np.array_equal(np.concatenate([half[key] for half in halves]), whole[key])
    return whole, layer


def ordinal(tensor: Any) -> int:
    """A positive float's place among the floats."""
    return int(tensor.bits.reshape(1).view(np.int32)[0])


@pytest.fixture
def codes(rng: np.random.Generator) -> Codes:
    scales = rng.integers(8, 0x7E, (N, K // 16), dtype=np.uint8)
    total = np.float32(3.1e-4)
    return {
        "q": rng.integers(0, 256, (N, K // 2), dtype=np.uint8),
        "block_scale": scales,
        "tensor_scale": np.asarray(total),
        "input_scale": np.asarray(np.float32(0.0173)),
    }


@pytest.mark.parametrize("pair", list(itertools.permutations(DIALECTS, 2)), ids="-".join)
def test_there_and_back(
    pair: tuple[str, str], codes: Codes, opened: Callable[..., Any], d: ModuleType, backend: Any
) -> None:
    first, second = (codec(DIALECTS[name][0]) for name in pair)
    here, there = (DIALECTS[name][1] for name in pair)
    begin = written(first, codes, here, d)
    loaded, source = read(pair[0], begin, opened, d, backend)
    assert np.array_equal(loaded["q"], codes["q"])
    assert np.array_equal(loaded["block_scale"], codes["block_scale"])
    assert second.family == source.codec.family and second.carries(source.options, there)
    if "input_scale" not in loaded:
        # Not every dialect has an activation scale; LightX2V's "alpha" form cannot be without.
        loaded["input_scale"] = codes["input_scale"]
    moved = written(second, loaded, there, d)
    again, _ = read(pair[1], moved, opened, d, backend)
    again.setdefault("input_scale", codes["input_scale"])
    returned = written(first, again, here, d)
    for suffix, tensor in begin.items():
        if tensor.bits.size == 1:
            assert abs(ordinal(tensor) - ordinal(returned[suffix])) <= 1, suffix
        else:
            assert np.array_equal(tensor.bits, returned[suffix].bits), suffix
    values = [
        codec(DIALECTS[name][0]).decode(stored, DIALECTS[name][1], backend)
        for name, stored in ((pair[0], loaded), (pair[1], again))
    ]
    assert np.allclose(values[0], values[1], rtol=3e-7, atol=0)


def test_reciprocals_return() -> None:
    """Where some float has x as its reciprocal it is chosen, so that the number survives a round trip."""
    rng = np.random.default_rng(1)
    x = np.exp(rng.uniform(-12, 12, 2000)).astype(np.float32)
    exact = 0
    for value in x:
        back = reciprocal(reciprocal(value))
        assert abs(int(back.view(np.int32)) - int(value.view(np.int32))) <= 1
        exact += back == value
    assert exact > 1600
    inverse = np.float32(2688 / 3.7)
    assert all(abs(factor(v, inverse) * inverse / v - 1) < 1.2e-7 for v in x)


def test_decode_follows_each_library(codes: Codes, backend: Any, d: ModuleType) -> None:
    """Multiplied where the file holds the factor, divided where it holds the reciprocal."""
    values = d.E2M1[np.stack([codes["q"] >> 4 & 7, codes["q"] & 7], -1).reshape(N, K)]
    sign = np.where(np.stack([codes["q"] >> 7, codes["q"] >> 3 & 1], -1).reshape(N, K), -1.0, 1.0)
    scales = np.repeat(d.E4M3[codes["block_scale"]], 16, axis=1)
    item = codec("compressed_nvfp4")
    given = codes | {"global_scale": np.asarray(np.float32(3219.7))}
    expected = values * sign * d.f32(scales / np.float64(np.float32(3219.7)))
    got = item.decode(given, DIALECTS["compressed"][1], backend)
    assert np.array_equal(got, d.f32(expected).astype(np.float32))
    expected = values * sign * d.f32(scales * np.float64(codes["tensor_scale"]))
    got = codec("modelopt_nvfp4").decode(codes, DIALECTS["modelopt"][1], backend)
    assert np.array_equal(got, d.f32(expected).astype(np.float32))


def test_encode_is_what_decode_reads(rng: np.random.Generator, backend: Any) -> None:
    x = rng.standard_normal((128, K)).astype(np.float32)
    for name in ("compressed", "modelopt", "fastvideo", "lightx2v_global"):
        item, options = codec(DIALECTS[name][0]), DIALECTS[name][1] | {"input": False}
        common = item.prepare(float(np.abs(x).max()), options, backend, "best")
        got = item.encode(x, common, options, backend, "best")
        y = item.decode(got, options, backend)
        assert np.square(x - y).sum() < 0.012 * np.square(x).sum(), name
        item.store(got, options, K)
