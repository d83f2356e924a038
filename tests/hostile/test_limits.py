"""Sizes, links and names: limits that hold before anything is read, and a terminal that no name acts on."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qconvert.convert.terminal import HarmlessStream, harmless
from qconvert.formats.checkpoint import MAX_CONFIG_BYTES, MAX_JSON_BYTES, MAX_MARKER_BYTES

pytest.importorskip("torch")
pytest.importorskip("safetensors")
ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "scripts") not in sys.path:
    sys.path.append(str(ROOT / "scripts"))
seeds: Any = importlib.import_module("fuzz_seeds")
Run = Callable[..., Any]


def place(seed: Any, folder: Path) -> Path:
    for name, data in seed.files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "plan", "marker"])
def test_large_files_are_refused_before_they_are_read(name: str, tmp_path: Path, run: Run) -> None:
    folder = place(seeds.sharded(), tmp_path)
    words = ["inspect", folder]
    if name == "marker":
        box = seeds.plain(np.random.default_rng(0))
        box.tensors["model.layers.0.mlp.down_proj.comfy_quant"] = [
            "U8",
            [MAX_MARKER_BYTES + 1],
            bytes(MAX_MARKER_BYTES + 1),
        ]
        (tmp_path / "one.safetensors").write_bytes(box.bytes())
        words = ["inspect", tmp_path / "one.safetensors"]
    elif name == "plan":
        words = [folder, "--to", "comfy_nvfp4", "--plan", tmp_path / name, "--dry-run"]
    if name != "marker":
        with (tmp_path / name).open("wb") as file:
            file.truncate((MAX_CONFIG_BYTES if name == "config.json" else MAX_JSON_BYTES) + 1)
    ran = run(*words)
    assert ran.code in (1, 2) and "too large" in ran.err and ran.err.count("\n") == 1


def test_an_index_follows_no_link_out_of_its_folder(tmp_path: Path, run: Run) -> None:
    seed = seeds.sharded()
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    place(seed, folder)
    shard = next(name for name in seed.files if name.endswith("00001-of-00002.safetensors"))
    (folder / shard).rename(elsewhere / shard)
    (folder / shard).symlink_to(elsewhere / shard)
    ran = run("inspect", folder)
    assert ran.code == 1 and "leaves its folder" in ran.err
    # A link within the folder, a folder that is a link, and the Hub's cache are what they seem.
    (folder / shard).unlink()
    (elsewhere / shard).rename(folder / "blob")
    (folder / shard).symlink_to("blob")
    (tmp_path / "alias").symlink_to(folder)
    assert run("inspect", folder).code == run("inspect", tmp_path / "alias").code == 0
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, (name, data) in enumerate(seed.files.items()):
        (blobs / str(number)).write_bytes(data)
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    assert run("inspect", snapshot).code == 0


HOSTILE = "blocks.0.\x1b[2Jfc\x07\x9b31m\u202eabc\r"


def test_names_do_not_act_on_a_terminal(tmp_path: Path, run: Run) -> None:
    box = seeds.plain(np.random.default_rng(0))
    box.tensors[f"{HOSTILE}.weight"] = list(box.tensors["model.layers.0.self_attn.q_proj.weight"])
    path = tmp_path / "in.safetensors"
    path.write_bytes(box.bytes())
    out = tmp_path / "out.safetensors"
    for words in (
        ("inspect", path),
        ("check", path),
        (path, "--to", "comfy_nvfp4", "-o", out),
        ("verify", path, out),
        (path, "--to", "comfy_nvfp4", "--keep", "\x1b[31m"),
    ):
        for more in ((), ("--json",)):
            ran = run(*words, *more, *(("--force",) if "-o" in words else ()))
            text = ran.out + ran.err
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text), words
            if more and ran.out:
                assert HOSTILE in json.dumps(json.loads(ran.out), ensure_ascii=False) or ran.code in (0, 2)


def test_what_an_encoding_cannot_hold_is_escaped() -> None:
    import io

    raw = io.BytesIO()
    stream = HarmlessStream(io.TextIOWrapper(raw, "ascii", write_through=True))
    stream.write('{"naïve": "😀"}\n')
    assert json.loads(raw.getvalue()) == {"naïve": "😀"}
    assert harmless("plain\ttext\n") == "plain\ttext\n" and harmless("\ud800") == "\\ud800"


def test_every_test_named_in_the_document_exists() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]
    named = re.findall(r"`((?:[\w/]+)\.py)(?:::(\w+))?`", text)
    assert len(named) >= 50 and len(rows) - 1 <= len(named)
    for file, function in named:
        path = ROOT / "tests" / file
        assert path.is_file(), file
        assert not function or re.search(rf"^def {function}\(", path.read_text("utf-8"), re.MULTILINE), (
            function
        )


@pytest.mark.parametrize("words", ["verify", "convert", "batch"])
def test_nan_is_no_threshold(words: str, tmp_path: Path, run: Any) -> None:
    """It would be neither above nor below any layer: every file would pass."""
    source = tmp_path / "in.safetensors"
    source.write_bytes(seeds.plain(np.random.default_rng(0)).bytes())
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[[job]]\nsource = "in.safetensors"\ntarget = "comfy_fp8"\nmin_sqnr = nan\n')
    ran = {
        "verify": lambda: run("verify", source, source, "--min-sqnr", "nan"),
        "convert": lambda: run(source, "--to", "comfy_fp8", "--min-sqnr", "NaN", "--dry-run"),
        "batch": lambda: run("batch", jobs),
    }[words]()
    assert ran.code == 2 and "decibels" in ran.err and ran.err.count("\n") == 1, ran
