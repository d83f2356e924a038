"""optimum-quanto: goldens and layers of our own making, and the library itself where it is installed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import other_files as o
import pytest
import torch
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import take_inventory

GOLDENS = o.names("quanto*")


def grouped(
    rng: Any, n: int, k: int, bits: int, group: int, integer: bool
) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    rows = n * k // group
    q = rng.integers(0, 1 << bits, (rows, group))
    scale = (rng.random((rows, 1)) + 0.1).astype(np.float16)
    shift = rng.integers(0, 1 << bits, (rows, 1)).astype(np.int8)
    if not integer:
        shift = (rng.random((rows, 1)) * 2).astype(np.float16)
    height = rows * bits // 8
    packed = np.zeros((height, group), np.uint8)
    for row in range(rows):
        packed[row % height] |= (q[row] << (bits * (row // height))).astype(np.uint8)
    tensors = {
        "a.weight._data._data": packed,
        "a.weight._scale": scale,
        "a.weight._shift": shift,
        "a.bias": np.zeros(n, np.float16),
        "a.input_scale": np.array(1, np.float16),
        "a.output_scale": np.array(1, np.float16),
    }
    if integer:
        values = (q - shift.astype(np.float32)) * scale.astype(np.float32)
    else:
        # Both steps in half precision.
        values = (q.astype(np.float16) * scale - shift).astype(np.float32)
    return tensors, values.reshape(n, k)


@pytest.mark.skipif(not GOLDENS, reason=o.WITHOUT)
@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_are_exact(name: str, tmp_path: Path) -> None:
    path, spec = o.place(name, tmp_path)
    layer, values = o.read_layer(path, spec["prefix"])
    assert (layer.codec.name, layer.n, layer.k) == ("quanto", spec["N"], spec["K"])
    assert not layer.findings and not layer.leftovers
    want = o.reference(path)
    assert torch.equal(torch.from_numpy(values).to(want.dtype), want)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("integer", [True, False])
def test_groups(bits: int, integer: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, want = grouped(rng, 24, 96, bits, 32, integer)
    path = o.save(tmp_path / "m.safetensors", tensors)
    layer, values = o.read_layer(path, "a")
    assert (layer.n, layer.k, layer.options["bits"]) == (24, 96, bits)
    assert np.array_equal(values, want)
    del tensors["a.bias"]
    o.save(path, tensors)
    with opened(path) as checkpoint, pytest.raises(QConvertError, match="its shape is written nowhere"):
        take_inventory(checkpoint)
    _, values = o.read_layer(path, "a", "a=quanto,out_features=24")
    assert np.array_equal(values, want)
    with pytest.raises(QConvertError, match="are no weight of 25 rows"):
        o.read_layer(path, "a", "a=quanto,out_features=25")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows(dtype: torch.dtype, tmp_path: Path, rng: np.random.Generator) -> None:
    data = torch.from_numpy(rng.integers(-100, 100, (20, 48)).astype(np.float32)).to(dtype)
    scale = torch.rand(20, 1).bfloat16()
    path = o.save(tmp_path / "m.safetensors", {"a.weight._data": data, "a.weight._scale": scale})
    _, values = o.read_layer(path, "a")
    assert np.array_equal(values, (data.float() * scale.float()).numpy())


def test_becomes_int8(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, want = grouped(rng, 64, 256, 4, 128, False)
    outcome = o.run(o.save(tmp_path / "m.safetensors", tensors), "convrot_int8", tmp_path / "o.safetensors")
    _, values = o.read_layer(outcome.output, "a")
    assert 10 * np.log10((want**2).sum() / ((want - values) ** 2).sum()) > 38


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])


@pytest.fixture
def quanto(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, with its unpacking in torch: its own is C++, which it compiles when it is first called."""
    found = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    extension = found.library.extensions.get_extension("quanto_cpp")
    monkeypatch.setattr(extension, "_lib", SimpleNamespace(unpack=unpack))
    return found


@pytest.mark.parametrize("bits", [2, 4])
def test_unpacking_is_the_reverse_of_the_librarys_packing(quanto: Any, bits: int) -> None:
    from optimum.quanto.tensor.packed import pack_weights

    codes = torch.randint(0, 1 << bits, (40, 24), dtype=torch.uint8)
    assert torch.equal(unpack(pack_weights(codes, bits), bits), codes)


@pytest.mark.parametrize("kind", ["qint8", "qint4", "qint2", "qfloat8"])
def test_the_library_agrees(kind: str, quanto: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 64)).bfloat16()
    quanto.quantize(model, weights=getattr(quanto, kind))
    quanto.freeze(model)
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    _, values = o.read_layer(o.save(tmp_path / "m.safetensors", tensors), "0")
    want = model[0].weight.dequantize()
    assert torch.equal(torch.from_numpy(values).to(want.dtype), want)
