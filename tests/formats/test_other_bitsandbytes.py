"""bitsandbytes: goldens and layers of our own making, and the library itself where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import other_files as o
import pytest
import torch
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import take_inventory

GOLDENS = o.names("bnb*")


def state(**entries: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(json.dumps(entries).encode(), np.uint8)


def nibbles(codes: np.ndarray[Any, Any], storage: str = "u1") -> np.ndarray[Any, Any]:
    """Flat codes, high nibble first, padded to whole elements of the storage type, [X, 1]."""
    size = 2 * np.dtype(storage).itemsize
    flat = np.concatenate([codes.reshape(-1), np.zeros(-codes.size % size, codes.dtype)])
    return (flat[0::2] << 4 | flat[1::2]).astype(np.uint8).view(storage).reshape(-1, 1)


def four_bit(
    rng: Any, n: int, k: int, block: int, nested: int = 0, storage: str = "u1"
) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    q = rng.integers(0, 16, n * k)
    table = rng.normal(size=16).astype(np.float32)
    blocks = -(-n * k // block)
    tensors: dict[str, Any] = {"a.weight": nibbles(q, storage), "a.weight.quant_map": table}
    entries: dict[str, Any] = {"quant_type": "fp4", "blocksize": block, "dtype": "float32", "shape": [n, k]}
    if nested:
        codes = rng.integers(0, 256, blocks).astype(np.uint8)
        inner = rng.random(256).astype(np.float32)
        outer = rng.random(-(-blocks // nested)).astype(np.float32)
        absmax = inner[codes] * outer[np.arange(blocks) // nested] + np.float32(0.25)
        tensors |= {
            "a.weight.absmax": codes,
            "a.weight.nested_absmax": outer,
            "a.weight.nested_quant_map": inner,
        }
        entries |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.25}
    else:
        absmax = rng.random(blocks).astype(np.float32)
        tensors["a.weight.absmax"] = absmax
    tensors["a.weight.quant_state.bitsandbytes__fp4"] = state(**entries)
    return tensors, (table[q] * absmax[np.arange(n * k) // block]).reshape(n, k)


@pytest.mark.skipif(not GOLDENS, reason=o.WITHOUT)
@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_are_exact(name: str, tmp_path: Path) -> None:
    path, spec = o.place(name, tmp_path)
    layer, values = o.read_layer(path, spec["prefix"])
    assert layer.codec.name == spec["decode"]
    assert (layer.n, layer.k) == (spec["N"], spec["K"])
    assert not layer.findings and not layer.leftovers
    want = o.reference(path)
    assert torch.equal(torch.from_numpy(values).to(want.dtype), want)


@pytest.mark.parametrize("storage", ["u1", "<f2", "<f4"])
@pytest.mark.parametrize("nested", [0, 4, 256])
@pytest.mark.parametrize(("n", "k", "block"), [(24, 64, 64), (13, 50, 64), (7, 33, 64), (40, 128, 32)])
def test_four_bit(
    n: int, k: int, block: int, nested: int, storage: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    tensors, want = four_bit(rng, n, k, block, nested, storage)
    layer, values = o.read_layer(o.save(tmp_path / "m.safetensors", tensors), "a")
    assert (layer.codec.name, layer.n, layer.k) == ("bnb4", n, k)
    assert np.array_equal(values, want)
    assert not layer.leftovers


def test_int8(tmp_path: Path, rng: np.random.Generator) -> None:
    q = rng.integers(-127, 128, (24, 40)).astype(np.int8)
    scale = rng.random(24).astype(np.float32)
    tensors = {"a.weight": q, "a.SCB": scale, "a.weight_format": np.array(0, np.uint8)}
    path = o.save(tmp_path / "m.safetensors", tensors)
    layer, values = o.read_layer(path, "a")
    assert layer.codec.name == "bnb8"
    assert np.allclose(values, q * scale[:, None] / 127, rtol=1e-6)
    o.save(path, tensors | {"a.weight_format": np.array(2, np.uint8)})
    with opened(path) as checkpoint, pytest.raises(QConvertError, match="layout of old GPU kernels"):
        take_inventory(checkpoint)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.weight.quant_state.bitsandbytes__fp4": None}, "only that states the weight's shape"),
        ({"a.weight.quant_state.bitsandbytes__fp4": np.zeros(9, np.uint8)}, "is not JSON"),
        ({"a.weight.quant_state.bitsandbytes__fp4": state(shape=[24, 64])}, "states no blocksize"),
        ({"a.weight.quant_state.bitsandbytes__fp4": state(blocksize=64)}, "states no shape"),
        ({"a.weight.quant_state.bitsandbytes__fp4": state(blocksize=64, shape=[24, 63])}, "does not hold"),
        ({"a.weight.absmax": np.zeros(23, np.float32)}, "is not one for each of 24 blocks"),
    ],
)
def test_what_does_not_fit_is_named(
    change: dict[str, Any], words: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    tensors, _ = four_bit(rng, 24, 64, 64)
    tensors = {name: value for name, value in (tensors | change).items() if value is not None}
    path = o.save(tmp_path / "m.safetensors", tensors)
    with opened(path) as checkpoint, pytest.raises(QConvertError, match="no known format explains") as caught:
        take_inventory(checkpoint)
    assert words in str(caught.value)


def test_becomes_bf16(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, want = four_bit(rng, 24, 64, 64, 4)
    outcome = o.run(o.save(tmp_path / "m.safetensors", tensors), "bf16", tmp_path / "out.safetensors")
    written = o.load(outcome.output)
    assert list(written) == ["a.weight"]
    assert torch.equal(written["a.weight"], torch.from_numpy(want).bfloat16())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_library_agrees(kind: str, nested: bool, tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    layer = bnb.nn.Linear4bit(
        192, 96, bias=False, compute_dtype=torch.bfloat16, compress_statistics=nested, quant_type=kind
    )
    torch.manual_seed(1)
    weight = torch.randn(96, 192).bfloat16()
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, compress_statistics=nested, quant_type=kind)
    layer = layer.to("cpu")
    layer.weight.quantize("cpu") if hasattr(layer.weight, "quantize") else None
    tensors = {f"a.{name}": value.contiguous() for name, value in layer.state_dict().items()}
    want = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    _, values = o.read_layer(o.save(tmp_path / "m.safetensors", tensors), "a")
    assert torch.equal(torch.from_numpy(values).to(want.dtype), want)
