"""`qconvert verify`: worst layers first, recorded activations, samples of rows, and what --memory allows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.convert.cli import main
from qconvert.convert.verification import BYTES_PER_ELEMENT, LEAST_ELEMENTS, shares
from qconvert.formats.checkpoint import opened
from qconvert.formats.layers import take_inventory
from qconvert.runtime.verify import CHUNK_ELEMENTS

Write = Callable[..., Path]
Verify = Callable[..., Any]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    """verify(*arguments) -> the JSON that is printed, its exit code under "code"."""

    def run(*args: object) -> Any:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["verify", *map(str, args), "--json"])
        return json.loads(capsys.readouterr().out) | {"code": caught.value.code}

    return run


@pytest.fixture
def pair(sample: Any, write: Write, d: ModuleType, tmp_path: Path) -> tuple[Path, Path]:
    """Three layers in bf16, and what they become: nvfp4 linears, the widest of them in many rows."""
    tensors = sample("bf16", 640, 256).named("blocks.0.fc") | sample("bf16", 128, 64).named("blocks.1.fc")
    source = write(tensors | {"blocks.0.norm.weight": d.f32_tensor(np.ones(64))}, name="source.safetensors")
    target = tmp_path / "target.safetensors"
    with pytest.raises(SystemExit) as caught:
        main([str(source), "--to", "comfy_nvfp4", "-o", str(target), "--json"])
    assert caught.value.code == 0
    return source, target


def weights(
    d: ModuleType, source: Path, target: Path, layer: str, bf16: Callable[[Any], Any]
) -> tuple[Any, Any]:
    part = {n.removeprefix(layer + "."): t for n, t in d.read(target).items() if n.startswith(layer + ".")}
    return bf16(d.read(source)[f"{layer}.weight"]), d.decode_nvfp4(part)


def values(tensor: Any) -> Any:
    return (tensor.bits.astype(np.uint32) << 16).view(np.float32)


def test_worst_first(pair: tuple[Path, Path], verify: Verify, capsys: pytest.CaptureFixture[str]) -> None:
    found = verify(*pair)
    order = [math.inf if e["sqnr_db"] == "exact" else e["sqnr_db"] for e in found["layers"]]
    assert order == sorted(order) and len(order) == 3 and order[-1] == math.inf
    with pytest.raises(SystemExit):
        main(["verify", *map(str, pair)])
    text = capsys.readouterr().out
    first, second = (line.split()[1].rstrip(":") for line in text.splitlines() if line.startswith("worst"))
    assert [first, second] == [entry["layer"] for entry in found["layers"][:2]]
    assert text.splitlines()[-1].startswith("verdict   right: 3 layers, SQNR ")


def test_recorded_activations(pair: tuple[Path, Path], verify: Verify, d: ModuleType, write: Write) -> None:
    """Outputs are compared on what was recorded; layers without a record on seeded inputs, the same every time."""
    inputs = np.random.default_rng(5).standard_normal((3, 256)).astype(np.float32)
    inputs[:, 7] *= 50
    file = write({"blocks.0.fc.inputs": d.f32_tensor(inputs)}, name="inputs.safetensors")
    recorded = {e["layer"]: e for e in verify(*pair, "--activations", file)["layers"]}
    seeded = {e["layer"]: e for e in verify(*pair)["layers"]}
    x, y = weights(d, *pair, "blocks.0.fc", values)
    want = d.sqnr(inputs.astype(np.float64) @ x.T, inputs.astype(np.float64) @ y.T)
    assert recorded["blocks.0.fc"]["output_sqnr_db"] == pytest.approx(want, abs=1e-3)
    assert recorded["blocks.0.fc"]["output_sqnr_db"] != pytest.approx(
        seeded["blocks.0.fc"]["output_sqnr_db"], abs=1e-2
    )
    assert recorded["blocks.0.fc"]["sqnr_db"] == seeded["blocks.0.fc"]["sqnr_db"]
    assert recorded["blocks.1.fc"] == seeded["blocks.1.fc"]


def test_recorded_activations_that_do_not_fit(
    pair: tuple[Path, Path], d: ModuleType, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write({"blocks.0.fc": d.f32_tensor(np.ones((2, 255), np.float32))}, name="inputs.safetensors")
    with pytest.raises(SystemExit) as caught:
        main(["verify", *map(str, pair), "--activations", str(file)])
    said = capsys.readouterr().err
    assert caught.value.code == 1 and said.count("\n") == 1
    assert "blocks.0.fc" in said and "[2, 255]" in said and "[S, 256]" in said


def test_sample(pair: tuple[Path, Path], verify: Verify, d: ModuleType) -> None:
    """128 of 640 rows: one block; the figure is that of its rows."""
    by_layer = {e["layer"]: e for e in verify(*pair, "--sample", 128)["layers"]}
    assert by_layer["blocks.0.fc"]["rows"] == by_layer["blocks.1.fc"]["rows"] == 128
    x, y = weights(d, *pair, "blocks.0.fc", values)
    assert by_layer["blocks.0.fc"]["sqnr_db"] == pytest.approx(d.sqnr(x[:128], y[:128]), abs=1e-6)
    assert {e["rows"] for e in verify(*pair, "--sample", 300)["layers"] if e["layer"] == "blocks.0.fc"} == {
        256
    }


def test_memory_and_threads_change_no_figure(
    pair: tuple[Path, Path], verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qconvert.convert.verification.LEAST_ELEMENTS", 1 << 10)
    whole = verify(*pair, "--jobs", 1)
    pieces = verify(*pair, "--memory", "1MiB", "--jobs", 3)
    for a, b in zip(whole["layers"], pieces["layers"], strict=True):
        for key in ("sqnr_db", "output_sqnr_db"):
            if isinstance(a[key], str) or a[key] is None:
                assert a[key] == b[key]
            else:
                assert a[key] == pytest.approx(b[key], abs=1e-4)


def test_shares_stay_within_memory(pair: tuple[Path, Path], d: ModuleType, write: Write) -> None:
    with opened(pair[0]) as checkpoint:
        layers = list(take_inventory(checkpoint).layers.values())
    for memory, jobs in ((512 << 20, 8), (64 << 20, 8), (8 << 20, 4), (3 << 20, 1), (512 << 20, 1)):
        threads, elements = shares(memory, jobs, layers, None)
        assert 1 <= threads <= jobs and LEAST_ELEMENTS <= elements <= CHUNK_ELEMENTS
        assert threads * elements * BYTES_PER_ELEMENT <= memory
    assert shares(512 << 20, 8, layers, None) == (8, CHUNK_ELEMENTS)
    # Less than the least there can be: one thread, in the smallest chunks.
    assert shares(1 << 10, 8, layers, None) == (1, LEAST_ELEMENTS)
    inputs = write({"a": d.f32_tensor(np.ones((1 << 12, 256), np.float32))}, name="inputs.safetensors")
    with opened(inputs) as recorded:
        threads, elements = shares(64 << 20, 8, layers, recorded)
        assert threads * (elements * BYTES_PER_ELEMENT + 5 * (4 << 20)) <= 64 << 20
