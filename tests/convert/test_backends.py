"""--backend and --device: the same bytes whatever computes, and a clear line where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from running import Ran

torch = pytest.importorskip("torch")


Write = Callable[..., Path]
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


#: Runs command lines, given as JSON, one after the other.
COMMANDS = """
import contextlib, io, json, sys
from qconvert.convert.cli import main
results = []
for args in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(args)
        except SystemExit as exit:
            results.append((exit.code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


def elsewhere(*commands: tuple[object, ...], before: str = "", **env: str) -> list[Ran]:
    """Commands in a process that compiles kernels: what is interpreted is fixed when triton is imported."""
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    lists = json.dumps([[str(arg) for arg in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", before + COMMANDS, lists],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=clean | env,
    )
    assert done.returncode == 0, done.stderr
    return [Ran(*entry) for entry in json.loads(done.stdout)]


@pytest.fixture
def small(sample: Any, d: ModuleType, write: Write) -> Path:
    tensors = sample("fp8", 16, 64).named("blocks.0.fc") | sample("fp8", 8, 64).named("embed_tokens")
    return write(tensors | {"blocks.0.norm.weight": d.f32_tensor(np.ones(64))})


@pytest.mark.skipif(not INTERPRETED, reason="this process does not interpret kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("target", ["comfy_nvfp4", "kitchen_w4a4"])
def test_every_backend_writes_the_same_bytes(
    small: Path, target: str, tmp_path: Path, run: Callable[..., Ran]
) -> None:
    pytest.importorskip("triton", minversion="3.7")
    written = set()
    for name in ("cpu", "reference", "triton"):
        path = tmp_path / f"{name}.safetensors"
        ran = run(
            small, "--to", target, "--quality", "fast", "--backend", name, "--jobs", 2, "-o", path, "--json"
        )
        assert ran.code == 0, ran.err
        assert f"{name}: ready" in json.loads(ran.out)["backends"]
        written.add(path.read_bytes())
    assert len(written) == 1
    ran = run("verify", small, path, "--backend", "triton")
    assert ran.code == 0 and "verdict   right" in ran.out


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
def test_a_gpu_writes_the_same_bytes(small: Path, tmp_path: Path) -> None:
    cpu, gpu = tmp_path / "cpu.safetensors", tmp_path / "gpu.safetensors"
    for target in ("comfy_nvfp4", "kitchen_w4a8", "kitchen_w4a4", "convrot_int8", "comfy_mxfp8"):
        args = (small, "--to", target, "--force", "-o")
        for ran in elsewhere((*args, cpu), (*args, gpu, "--device", "cuda")):
            assert ran.code == 0, ran.err
        assert cpu.read_bytes() == gpu.read_bytes()


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton", minversion="3.7")
    out = tmp_path / "out.safetensors"
    commands = [
        (*command, *option)
        for option in (("--backend", "triton"), ("--device", "cuda"))
        for command in ((small, "--to", "comfy_nvfp4", "-o", out), ("verify", small, small))
    ]
    *lines, states = elsewhere(*commands, ("backends", "--json"))
    for command, ran in zip(commands, lines, strict=True):
        assert ran.code == 1 and ran.err.count("\n") == 1
        assert (
            f"{' '.join(command[-2:])} cannot run here: no GPU" in ran.err and "qconvert backends" in ran.err
        )
    assert not out.exists()
    found = json.loads(states.out)
    by_name = {row["name"]: row for row in found["backends"]}
    assert by_name["cpu"]["state"] == by_name["reference"]["state"] == "ready"
    assert by_name["triton"]["state"] == "refused" and "no GPU" in by_name["triton"]["reason"]
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("options", "interpret", "words"),
    [
        (("--device", "cuda", "--backend", "cpu"), None, "the cpu backend computes on the CPU"),
        (("--device", "cuda", "--backend", "reference"), None, "the reference backend computes on the CPU"),
        (("--device", "cpu", "--backend", "triton"), None, "computes on a GPU"),
        (("--device", "cuda"), "1", "TRITON_INTERPRET is set"),
    ],
)
def test_contradictions(
    small: Path,
    options: tuple[str, ...],
    interpret: str | None,
    words: str,
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpret:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    ran = run(small, "--to", "comfy_nvfp4", *options)
    assert ran.code == 2 and words in ran.err and ran.err.count("\n") == 1


def test_without_torch_the_reference_says_so(small: Path) -> None:
    command = (small, "--to", "comfy_nvfp4", "--backend", "reference")
    (ran,) = elsewhere(command, before="import sys\nsys.modules['torch'] = None\n")
    assert ran.code == 1 and "--backend reference cannot run here" in ran.err and "torch" in ran.err


def test_what_was_not_asked_for_is_said_to_be_so(small: Path, tmp_path: Path) -> None:
    (ran,) = elsewhere((small, "--to", "comfy_nvfp4", "-o", tmp_path / "out.safetensors", "--verbose"))
    assert "backend   cpu: ready; reference: not asked for; triton: not asked for" in ran.out
