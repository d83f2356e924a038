"""Output in several files: the same tensors, whole layers together, an index that says where."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from qconvert.convert.cli import cli
from qconvert.convert.job import Request, default_output, run_job
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import UsageError
from qconvert.runtime.targets import get_target
from safetensors.numpy import save_file

LIMIT = 40_000
WEIGHTS = "--transformer-weights-path"


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


@pytest.mark.parametrize("name", ["sh", "sh.safetensors"])
@pytest.mark.parametrize("limit", ["40KB", "1GB"])
def test_what_is_printed_is_there(blocks: Path, tmp_path: Path, name: str, limit: str) -> None:
    """Every path that is printed, with shards and without, exists and is read by the other commands."""
    output = tmp_path / "h" / name
    ran = CliRunner().invoke(
        cli, ["convert", str(blocks), "--to", "bf16", "--shard-size", limit, "-o", str(output)]
    )
    assert ran.exit_code == 0, ran.output
    rows = [line.split() for line in ran.output.splitlines()]
    made = {row[0]: Path(row[1]) for row in rows if row and row[0] in ("output", "done")}
    made_of = made["done"]
    assert made["output"] == made_of and made_of.is_file()
    sharded = limit == "40KB"
    assert made_of == (tmp_path / "h" / "sh.safetensors.index.json" if sharded else output)
    served = [Path(row[row.index(WEIGHTS) + 1]) for row in rows if WEIGHTS in row]
    # sglang loads a file of weights, or the files of a folder.
    assert served and set(served) == {made_of.parent if sharded else made_of}
    for words in (["check", made_of], ["verify", "--digest", made_of], ["verify", blocks, made_of]):
        ran = CliRunner().invoke(cli, [str(word) for word in words])
        assert ran.exit_code == 0, ran.output
    for place in (made_of, made_of.parent) if sharded else (made_of,):
        with opened(place) as read, opened(blocks) as before:
            assert read.tensors.keys() == before.tensors.keys()


def test_a_dry_run_and_json_name_the_index(blocks: Path, tmp_path: Path) -> None:
    words = [
        "convert",
        str(blocks),
        "--to",
        "bf16",
        "--shard-size",
        "40KB",
        "-o",
        str(tmp_path / "h" / "sh"),
        "--json",
    ]
    planned = json.loads(CliRunner().invoke(cli, [*words, "--dry-run"]).stdout)
    made = json.loads(CliRunner().invoke(cli, words).stdout)
    assert planned["output"] == made["output"] == str(tmp_path / "h" / "sh.safetensors.index.json")


def test_an_index_as_source_gives_its_name_to_the_output(tmp_path: Path) -> None:
    for name in ("m.safetensors.index.json", "m.safetensors", "m"):
        assert default_output(tmp_path / name, get_target("bf16")) == tmp_path / "m.bf16.safetensors"


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
