"""Conversions as a whole: the same bytes however the work is split."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.convert import copying, execute
from qconvert.formats.checkpoint import opened
from qconvert.formats.layers import take_inventory
from small_file import small

import qconvert

Rng = np.random.Generator
Write = Callable[..., Path]
Convert = Callable[..., Any]

#: Layers of one file in many states, with rows that fill no whole number of pieces or tiles.
MIXED = (
    "bf16", "fp32", "fp8", "fp8_row", "nvfp4", "nvfp4_convrot", "mxfp8", "int8_row", "int8_convrot64", "w4a4_64",
    "w4a8", "w4a8_correction", "w4a8_6bit", "sym", "awq", "svdquant", "e5m2",
)  # fmt: skip
TARGETS = (
    "comfy_nvfp4", "kitchen_w4a8", "kitchen_w4a4", "convrot_int8", "comfy_fp8", "comfyui:awq_w4a16", "comfyui:mxfp8",
    "comfyui:nvfp4", "bf16",
)  # fmt: skip


@pytest.fixture
def mixed(d: ModuleType, sample: Any, write: Write) -> Path:
    tensors: dict[str, Any] = {
        "embed_tokens.weight": d.narrow(d.weights(np.random.default_rng(1), 77, 64), "BF16")
    }
    for i, name in enumerate(MIXED):
        tensors |= sample(name, 416, 256).named(f"blocks.{i}.fc")
        tensors[f"blocks.{i}.norm.weight"] = d.f32_tensor(np.full(256, i))
    bank = sample("bank_int8_convrot", 3, 160, 256)
    linear = d.nvfp4(linear=True)(np.random.default_rng(2), d.weights(np.random.default_rng(2), 400, 96))
    tensors |= bank.named("blocks.0.experts") | linear.named("blocks.0.linear")
    return write(tensors, {"format": "pt", "author": "someone"})


@pytest.fixture
def source(rng: Rng, d: ModuleType, write: Write) -> Path:
    return write(small(rng, d), {"format": "pt", "author": "someone"})


# ---- the same bytes however the work is split


@pytest.mark.parametrize("target", TARGETS)
def test_bytes_do_not_depend_on_the_split(
    target: str, mixed: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = convert(mixed, target, tmp_path / "first.safetensors", quality="fast")
    wanted = first.output.read_bytes()
    for jobs, piece in ((3, 1 << 20), (1, 1 << 13), (2, 40_000), (4, 1)):
        monkeypatch.setattr(execute, "PIECE_ELEMENTS", piece)
        again = convert(mixed, target, tmp_path / "again.safetensors", quality="fast", jobs=jobs, force=True)
        assert again.output.read_bytes() == wanted, (jobs, piece)
        assert again.results.keys() == first.results.keys()
        for name, result in again.results.items():
            # Energies are sums over pieces: equal up to the order of addition.
            assert np.isclose(result.noise, first.results[name].noise, rtol=1e-9)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("quality", ["fast", "best"])
def test_bytes_do_not_depend_on_the_backend(
    target: str, quality: str, source: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = convert(source, target, tmp_path / "cpu.safetensors", quality=quality).output.read_bytes()
    for jobs, piece in ((1, 1 << 20), (2, 1 << 12), (4, 1 << 11)):
        monkeypatch.setattr(execute, "PIECE_ELEMENTS", piece)
        path = tmp_path / f"{jobs}.safetensors"
        got = convert(source, target, path, quality=quality, jobs=jobs, backend="reference")
        assert got.output.read_bytes() == wanted, (jobs, piece)


def test_memory_does_not_change_bytes(mixed: Path, convert: Convert, tmp_path: Path) -> None:
    wanted = convert(mixed, "kitchen_w4a8", tmp_path / "a.safetensors", quality="fast").output.read_bytes()
    got = convert(mixed, "kitchen_w4a8", tmp_path / "b.safetensors", quality="fast", memory=4 << 20, jobs=2)
    assert got.output.read_bytes() == wanted


def test_copies_by_hand_are_the_same(
    mixed: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = convert(mixed, "comfyui:nvfp4", tmp_path / "a.safetensors", quality="fast").output.read_bytes()
    monkeypatch.setattr(copying, "copy_in_kernel", lambda *args: False)
    got = convert(mixed, "comfyui:nvfp4", tmp_path / "b.safetensors", quality="fast").output.read_bytes()
    assert got == wanted


def test_energies_are_those_of_the_values(
    sample: Any, d: ModuleType, write: Write, convert: Convert, backend: Any, tmp_path: Path
) -> None:
    from qconvert.formats.reader import LayerReader
    from qconvert.formats.values import decode_rows

    made = sample("fp8", 416, 256)
    outcome = convert(write(made.named("fc")), "comfyui:nvfp4", tmp_path / "out.safetensors")
    with opened(outcome.output) as checkpoint:
        layer = take_inventory(checkpoint).layers["fc"]
        got = decode_rows(layer, LayerReader(checkpoint, layer), 0, layer.n, backend)
    result = outcome.results["fc"]
    assert np.isclose(result.signal, np.square(made.values).sum(), rtol=1e-9)
    assert np.isclose(result.noise, np.square(made.values - got).sum(), rtol=1e-9)


# ---- what is written


def test_the_source_stays_as_it_was_and_the_output_is_its_like(
    source: Path, convert: Convert, tmp_path: Path
) -> None:
    source.chmod(0o640)
    before, stat_before = source.read_bytes(), source.stat()
    outcome = convert(source, "comfy_nvfp4", tmp_path / "out.safetensors")
    assert source.read_bytes() == before
    assert source.stat().st_mtime_ns == stat_before.st_mtime_ns
    assert stat.S_IMODE(outcome.output.stat().st_mode) == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"in.safetensors", "out.safetensors"}
    assert outcome.output.stat().st_size == outcome.output_bytes


def test_provenance(
    rng: Rng, d: ModuleType, write: Write, convert: Convert, sample: Any, tmp_path: Path
) -> None:
    tensors = small(rng, d) | sample("nvfp4_unmarked", 128, 64).named("blocks.1.fc")
    layers = {"blocks.9.fc": {"format": "nvfp4"}}
    metadata = {
        "format": "pt",
        "author": "someone",
        "_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers}),
        "quantization_config": "{}",
        "quant_format": "mxfp8",
    }
    path = write(tensors, metadata, "my model.safetensors")
    outcome = convert(path, "comfy_nvfp4", tmp_path / "out.safetensors")
    written = d.read_metadata(outcome.output)
    assert written.keys() == {"format", "author", "qconvert", "qconvert_digest"}
    assert (written["format"], written["author"]) == ("pt", "someone")
    made = json.loads(written["qconvert"])
    with opened(path) as checkpoint:
        assert made["source_header_sha256"] == checkpoint.digest()
    assert made["version"] == qconvert.__version__
    assert (made["source"], made["target"]) == ("my model.safetensors", "comfy_nvfp4")
    assert made["contracts"][0] == "sglang-0.5.23"
    # A source with a quantised layer keeps what it leaves unquantised.
    assert made["actions"] == {"keep": 4, "retag": 1}
    assert len(made["guesses"]) == 1 and "blocks.1.fc" in made["guesses"][0]
    assert "/" not in made["source"] and str(tmp_path) not in written["qconvert"]


def test_equal_runs_give_equal_files(source: Path, convert: Convert, tmp_path: Path) -> None:
    a = convert(source, "comfy_nvfp4", tmp_path / "a.safetensors").output.read_bytes()
    b = convert(source, "comfy_nvfp4", tmp_path / "b.safetensors").output.read_bytes()
    assert a == b


def test_an_unquantised_source_gets_every_linear_quantised(
    source: Path, convert: Convert, d: ModuleType, tmp_path: Path
) -> None:
    outcome = convert(source, "comfy_nvfp4", tmp_path / "out.safetensors")
    after = d.read(outcome.output)
    assert after["blocks.0.a.weight"].dtype == after["blocks.0.b.weight"].dtype == "U8"
    assert after["embed_tokens.weight"].dtype == "BF16"
    outcome = convert(source, "comfy_nvfp4", tmp_path / "table.safetensors", quantise_embedding=True)
    after = d.read(outcome.output)
    assert after["embed_tokens.weight"].dtype == "I8" and after["embed_tokens.weight_scale"].bits.shape == (
        40,
        1,
    )


def test_converting_again_changes_nothing(
    source: Path, convert: Convert, d: ModuleType, tmp_path: Path
) -> None:
    once = convert(source, "comfy_nvfp4", tmp_path / "once.safetensors")
    twice = convert(once.output, "comfy_nvfp4", tmp_path / "twice.safetensors")
    assert {action.kind for action in twice.plan.actions} == {"keep", "copy"}
    a, b = d.read(once.output), d.read(twice.output)
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name].bits, b[name].bits) for name in a)


def test_shards_become_one_file(
    rng: Rng, d: ModuleType, convert: Convert, write: Write, tmp_path: Path
) -> None:
    tensors = small(rng, d)
    whole = convert(write(tensors), "comfy_nvfp4", tmp_path / "whole.safetensors")
    folder = tmp_path / "shards"
    folder.mkdir()
    names = sorted(tensors)
    weight_map = {}
    # A layer's tensors in two shards: its bias lies with another layer's weight.
    for i, part in enumerate((names[:2], names[2:])):
        file = f"model-{i + 1}-of-2.safetensors"
        d.write(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    one = convert(folder, "comfy_nvfp4", tmp_path / "one.safetensors")
    a, b = d.read(whole.output), d.read(one.output)
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name].bits, b[name].bits) for name in a)
