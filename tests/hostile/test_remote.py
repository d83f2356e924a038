"""File systems that lie about what they hold: one line, and no thread is left over."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fsspec")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))
lying: Any = importlib.import_module("fuzz_remote")
seeds: Any = importlib.import_module("fuzz_seeds")


def served(folder: Path, **lies: Any) -> str:
    """The URL of a checkpoint in shards, of whose files this is said."""
    folder.mkdir()
    for name, data in seeds.sharded().files.items():
        (folder / name).write_bytes(data)
    (folder / lying.LIES).write_text(json.dumps({"of": [".safetensors"], **lies}))
    return f"{lying.PROTOCOL}://{folder}"


@pytest.mark.parametrize("size", [None, -1, "5", [], {}, 1.5, 1 << 64, True])
def test_sizes_that_are_none(size: Any, tmp_path: Path, run: Callable[..., Any]) -> None:
    ran = run("inspect", served(tmp_path / "r", info={"size": size}))
    assert ran.code == 1 and ran.err.count("\n") == 1 and "how large the file is" in ran.err, ran


@pytest.mark.parametrize("version", ["\ud83d", "\x1b[31m", "", "a" * 10_000, {"a": []}])
def test_versions_of_any_kind(version: Any, tmp_path: Path, run: Callable[..., Any]) -> None:
    url = served(tmp_path / "r", info={"ETag": version})
    ran = run(url, "--to", "bf16", "-o", tmp_path / "out.safetensors", "--jobs", "1")
    assert ran.code == 0, ran


@pytest.mark.parametrize("what", ["header", "index", "size"])
def test_what_is_refused_leaves_no_thread(what: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    url = served(tmp_path / "r", info={"size": 400} if what == "size" else {})
    shard = next((tmp_path / "r").glob("*.safetensors"))
    if what == "header":
        shard.write_bytes(b"\xff" * 4096)
    elif what == "index":
        index = tmp_path / "r" / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("model.norm", "model.other"))
    before = set(threading.enumerate())
    assert run("inspect", url).code == 1
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before
