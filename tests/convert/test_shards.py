"""Output in several files: the same tensors, whole layers together, an index that says where."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from qconvert.convert.cli import cli
from qconvert.convert.job import Request, run_job
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import UsageError
from safetensors.numpy import save_file

LIMIT = 40_000


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors = {}
    for i in range(6):
        tensors[f"blocks.{i}.fc.weight"] = rng.standard_normal((64, 128)).astype(np.float32)
        tensors[f"blocks.{i}.fc.bias"] = rng.standard_normal(64).astype(np.float32)
        tensors[f"blocks.{i}.norm.weight"] = np.ones(128, np.float32)
    tensors["freqs"] = np.arange(32, dtype=np.float32)
    path = tmp_path / "source.safetensors"
    save_file(tensors, path)
    return path


def load_file(path: Path) -> dict[str, np.ndarray]:
    with opened(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


def convert(blocks: Path, output: Path, shard_size: int | None) -> None:
    with opened(blocks) as checkpoint:
        run_job(Request(blocks, "bf16", output, shard_size=shard_size), checkpoint)


def test_shards_hold_what_one_file_holds(blocks: Path, tmp_path: Path) -> None:
    one, folder = tmp_path / "one.safetensors", tmp_path / "many"
    folder.mkdir()
    convert(blocks, one, None)
    convert(blocks, folder / "model.safetensors", LIMIT)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert [p.name for p in shards] == [
        f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert len(shards) > 2
    whole, found = load_file(one), {}
    for shard in shards:
        part = load_file(shard)
        assert sum(a.nbytes for a in part.values()) <= LIMIT
        assert {index["weight_map"][name] for name in part} == {shard.name}
        # A layer's weight and bias are never in two files.
        for name in part:
            if name.endswith(".fc.bias"):
                assert name.replace(".bias", ".weight") in part
        found.update(part)
    assert found.keys() == whole.keys() == index["weight_map"].keys()
    assert all(np.array_equal(found[name].view(np.uint8), whole[name].view(np.uint8)) for name in whole)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in whole.values())
    with opened(folder) as read:
        assert read.tensors.keys() == whole.keys()


def test_a_layer_larger_than_a_shard_stands_alone(blocks: Path, tmp_path: Path) -> None:
    convert(blocks, tmp_path / "model.safetensors", 1)
    names = {frozenset(load_file(p)) for p in tmp_path.glob("model-*.safetensors")}
    assert frozenset({"blocks.0.fc.weight", "blocks.0.fc.bias"}) in names


def test_runtimes_that_read_one_file_refuse_shards(blocks: Path, tmp_path: Path) -> None:
    with opened(blocks) as checkpoint, pytest.raises(UsageError, match="comfy_nvfp4 is read from one file"):
        run_job(Request(blocks, "comfy_nvfp4", tmp_path / "o.safetensors", shard_size=LIMIT), checkpoint)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.safetensors"]


def test_size_is_checked(blocks: Path) -> None:
    result = CliRunner().invoke(cli, ["convert", str(blocks), "--to", "bf16", "--shard-size", "many"])
    assert isinstance(result.exception, UsageError)
    assert "'many' is not a size" in str(result.exception)
