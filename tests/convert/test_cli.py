"""The command line: what it prints, its exit codes, and that --json is JSON whatever happens."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
import pytest
from qconvert.convert.cli import cli, parse_pairs
from qconvert.formats.errors import UsageError
from qconvert.runtime.targets import get_target
from running import Ran

import qconvert

Write = Callable[..., Path]


@pytest.fixture
def fp8(sample: Any, d: ModuleType, write: Write) -> Path:
    tensors = sample("fp8", 128, 64).named("blocks.0.fc") | sample("fp8", 256, 64).named("embed_tokens")
    return write(tensors | {"blocks.0.norm.weight": d.f32_tensor(np.ones(64))})


def test_help_of_every_command(run: Callable[..., Ran]) -> None:
    top = run("--help")
    assert top.code == 0 and "comfy_nvfp4" in top.out
    for name, command in cli.commands.items():
        assert name in top.out
        inner = command.commands if isinstance(command, click.Group) else {}
        for words in [(name, part) for part in inner] or [(name,)]:
            ran = run(*words, "--help")
            assert ran.code == 0 and ran.out.startswith("Usage:") and "--json" in ran.out
    assert run("-h").out == top.out


def test_version(run: Callable[..., Ran]) -> None:
    first, packages, backends = run("--version").out.splitlines()
    assert first == f"qconvert, version {qconvert.__version__}"
    assert f"numpy {np.__version__}" in packages and "torch " in packages and "triton " in packages
    assert backends.startswith("backends cpu, reference, triton")


def test_targets(run: Callable[..., Ran]) -> None:
    names = [entry["name"] for entry in run("targets", "--json").json()]
    assert len(names) == len(set(names))
    assert {"comfy_nvfp4", "kitchen_w4a8", "kitchen_w4a4", "convrot_int8", "comfy_fp8", "comfy_mxfp8"} <= set(
        names
    )
    assert {"bf16", "fp16", "fp32", "comfyui:nvfp4", "comfyui:awq_w4a16"} <= set(names)
    text = run("targets")
    assert text.code == 0 and all(name in text.out for name in names) and "kitchen_int8" in text.out


@pytest.mark.parametrize(
    "command", [("--help",), ("--version",), ("targets",), ("inspect", "FILE"), ("check", "FILE")]
)
def test_looking_imports_neither_torch_nor_numba(command: tuple[str, ...], fp8: Path) -> None:
    args = [str(fp8) if arg == "FILE" else arg for arg in command]
    code = (
        "import sys\nfrom qconvert.convert.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numba', 'triton'} & set(sys.modules), 'heavy'\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_convert_is_the_default_command(run: Callable[..., Ran], fp8: Path, tmp_path: Path) -> None:
    a = run(fp8, "--to", "comfy_nvfp4", "-o", tmp_path / "a.safetensors")
    b = run("convert", fp8, "--to", "comfy_nvfp4", "-o", tmp_path / "b.safetensors")
    assert a.code == b.code == 0 and a.err == b.err == ""
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert "accepted  sglang-0.5.23" in a.out and "ComfyNvfp4Config" in a.out
    # Not a terminal: no progress bar, no escapes.
    assert "\x1b" not in a.out + a.err and "\r" not in a.out + a.err


def test_the_json_of_a_conversion(run: Callable[..., Ran], fp8: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    ran = run(fp8, "--to", "comfy_nvfp4", "-o", out, "--json")
    document = ran.json()
    assert ran.code == 0 and ran.err == ""
    assert (document["target"], document["output"]) == ("comfy_nvfp4", str(out))
    assert document["output_bytes"] == out.stat().st_size and document["source_bytes"] == fp8.stat().st_size
    layers = {entry["layer"]: entry for entry in document["layers"]}
    assert (layers["blocks.0.fc"]["format"], layers["blocks.0.fc"]["action"]) == ("nvfp4", "requantise")
    assert (layers["embed_tokens"]["format"], layers["embed_tokens"]["role"]) == (
        "int8_tensorwise",
        "embedding",
    )
    assert layers["blocks.0.norm"]["sqnr_db"] == "exact"
    assert 18 < layers["blocks.0.fc"]["sqnr_db"] < 30 < layers["embed_tokens"]["sqnr_db"]
    assert document["verdicts"][0]["accepted"] is True
    assert all(entry["reason"] for entry in document["layers"])


def test_dry_run(run: Callable[..., Ran], fp8: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    text = run(fp8, "--to", "comfy_nvfp4", "--dry-run")
    plan = run(fp8, "--to", "comfy_nvfp4", "--dry-run", "--json").json()
    assert text.code == 0 and "requantise" in text.out and "comfy_nvfp4" in text.out
    assert plan["output"] == str(tmp_path / "in.comfy_nvfp4.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    done = run(fp8, "--to", "comfy_nvfp4", "--json").json()
    assert {key: done[key] for key in ("output_bytes", "dropped", "findings")} == {
        key: plan[key] for key in ("output_bytes", "dropped", "findings")
    }
    assert [(x["layer"], x["action"]) for x in done["layers"]] == [
        (x["layer"], x["action"]) for x in plan["layers"]
    ]


def test_inspect(run: Callable[..., Ran], fp8: Path) -> None:
    text = run("inspect", fp8)
    assert text.code == 0 and "float8_e4m3fn" in text.out
    document = run("inspect", fp8, "--json").json()
    layers = {entry["layer"]: entry for entry in document["layers"]}
    assert (layers["blocks.0.fc"]["format"], layers["blocks.0.fc"]["n"], layers["blocks.0.fc"]["k"]) == (
        "float8_e4m3fn", 128, 64,
    )  # fmt: skip
    assert layers["blocks.0.fc"]["tensors"]["weight_scale"] == "F32[]"
    assert document["bytes"] == fp8.stat().st_size


def test_inspect_shows_shapes_as_they_are_stored(
    run: Callable[..., Ran], d: ModuleType, write: Write
) -> None:
    shapes = {"norm": (96,), "fc": (8, 16), "conv": (4, 6, 3, 3), "time": (4, 6, 1, 2, 2)}
    path = write({f"{name}.weight": d.f32_tensor(np.ones(shape)) for name, shape in shapes.items()})
    text = run("inspect", path).out
    assert f"norm {list(shapes['norm'])}" in text and f"fc {list(shapes['fc'])}" in text
    assert f"conv {list(shapes['conv'])}" in text or f"time {list(shapes['time'])}" in text
    assert ", 1]" not in text


def test_check(run: Callable[..., Ran], fp8: Path, tmp_path: Path) -> None:
    # sglang serves no quantised embedding beside fp8.
    before = run("check", fp8)
    assert before.code == 1 and "embed_tokens" in before.out
    document = run("check", fp8, "--json")
    assert document.code == 1 and document.json()["accepted"] is False
    run(fp8, "--to", "comfy_nvfp4", "-o", tmp_path / "good.safetensors")
    after = run("check", tmp_path / "good.safetensors", "--json")
    assert (
        after.code == 0 and after.json()["accepted"] is True and after.json()["config"] == "ComfyNvfp4Config"
    )
    assert run("check", fp8, "--runtime", "comfyui").code == 0
    assert run("check", fp8, "--runtime", "vortex").code == 2


def test_verify(
    run: Callable[..., Ran], fp8: Path, d: ModuleType, sample: Any, write: Write, tmp_path: Path
) -> None:
    good = tmp_path / "good.safetensors"
    run(fp8, "--to", "comfy_nvfp4", "-o", good)
    ran = run("verify", fp8, good, "--json")
    document = ran.json()
    assert ran.code == 0 and document["ok"] is True
    by_layer = {entry["layer"]: entry for entry in document["layers"]}
    assert by_layer["blocks.0.norm"]["sqnr_db"] == "exact"
    # Close to an encoding's own figure, computed independently of the tool.
    values = sample("fp8", 128, 64).values
    got = d.decode_nvfp4({k.removeprefix("blocks.0.fc."): t for k, t in d.read(good).items() if "0.fc" in k})
    assert abs(by_layer["blocks.0.fc"]["sqnr_db"] - d.sqnr(values, got)) < 1e-6
    assert run("verify", fp8, good, "--min-sqnr", 60).code == 1
    # Noise instead of a model: nibbles the other way round.
    tensors = d.read(good)
    bits = tensors["blocks.0.fc.weight"].bits
    tensors["blocks.0.fc.weight"] = d.T("U8", bits << 4 | bits >> 4)
    bad = run("verify", fp8, write(tensors, name="bad.safetensors"), "--json")
    assert bad.code == 1 and bad.json()["ok"] is False and "blocks.0.fc" in bad.json()["problems"][0]
    del (
        tensors["embed_tokens.weight"],
        tensors["embed_tokens.weight_scale"],
        tensors["embed_tokens.comfy_quant"],
    )
    tensors["blocks.0.fc.weight"] = d.T("U8", bits)
    short = run("verify", fp8, write(tensors, name="short.safetensors"), "--json")
    assert short.code == 1 and any("embed_tokens" in problem for problem in short.json()["problems"])


def test_errors_are_one_line_with_their_code(
    run: Callable[..., Ran], fp8: Path, sample: Any, write: Write, tmp_path: Path
) -> None:
    (tmp_path / "no.safetensors").write_bytes(b"no")
    guess = write(sample("fp8_cast", 128, 64).named("a"), name="guess.safetensors")
    for code, *args in (
        (2,),
        (2, "--nonsense"),
        (2, fp8),
        (2, fp8, "--to", "nvfp5"),
        (2, fp8, "--to", "comfy_nvfp4", "--dtype", "int3"),
        (2, fp8, "--to", "comfy_nvfp4", "--keep", "("),
        (2, fp8, "--to", "comfy_nvfp4", "--keep", "nothing"),
        (2, fp8, "--to", "comfy_nvfp4", "--rename", "x"),
        (2, fp8, "--to", "comfy_nvfp4", "--assume", "x"),
        (2, fp8, "--to", "comfy_nvfp4", "--jobs", "0"),
        (2, fp8, "--to", "comfy_nvfp4", "-o", fp8, "--force"),
        (2, tmp_path / "gone.safetensors", "--to", "comfy_nvfp4"),
        (1, tmp_path / "no.safetensors", "--to", "comfy_nvfp4"),
        (1, "inspect", tmp_path / "no.safetensors"),
        (1, "check", tmp_path / "no.safetensors"),
        (1, guess, "--to", "comfy_nvfp4", "--strict"),
    ):
        before = sorted(path.name for path in tmp_path.iterdir())
        ran = run(*args)
        if not args:
            assert ran.code in (0, 2)
            continue
        assert ran.code == code, (args, ran)
        # What was found may have been printed before; the fault is one line, and the last word.
        assert ran.err.startswith("qconvert: ") and ran.err.count("\n") == 1, ran.err
        assert "Traceback" not in ran.err and "Error(" not in ran.err
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_options_reach_the_plan(run: Callable[..., Ran], fp8: Path, d: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    args = (
        "--keep",
        "fc$",
        "--dtype",
        "fp32",
        "--rename",
        "^blocks=layers",
        "--quality",
        "fast",
        "--jobs",
        2,
    )
    assert run(fp8, "--to", "comfy_nvfp4", "-o", out, *args).code == 0
    after = d.read(out)
    assert after["layers.0.fc.weight"].dtype == "F32" and after["embed_tokens.weight"].dtype == "I8"
    assert run(fp8, "--to", "comfy_nvfp4", "-o", out).code == 2
    assert run(fp8, "--to", "comfy_nvfp4", "-o", out, "--force", "--native-fp4").code == 0
    assert json.loads(d.read(out)["blocks.0.fc.comfy_quant"].bits.tobytes()) == {"format": "nvfp4"}
    assert run(fp8, "--to", "comfy_fp8", "-o", out, "--force", "--full-precision").code == 0
    marker = json.loads(d.read(out)["blocks.0.fc.comfy_quant"].bits.tobytes())
    assert marker == {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}


def test_a_source_that_is_already_right_is_copied_and_said_to_be(
    run: Callable[..., Ran], fp8: Path, tmp_path: Path
) -> None:
    run(fp8, "--to", "comfy_nvfp4", "-o", tmp_path / "a.safetensors")
    again = run(tmp_path / "a.safetensors", "--to", "comfy_nvfp4", "-o", tmp_path / "b.safetensors")
    assert again.code == 0 and "already right" in again.out
    document = run("verify", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json").json()
    assert document["sqnr_db"] == "exact"


def test_the_older_contract_wants_a_scalar_table(
    run: Callable[..., Ran], sample: Any, d: ModuleType, write: Write, tmp_path: Path
) -> None:
    path = write(sample("fp8", 64, 256).named("fc") | sample("int8_row", 256, 256).named("embed_tokens"))
    out = tmp_path / "out.safetensors"
    for runtime, shape in (("sglang-0.5.23", (256, 1)), ("sglang-0132848", ())):
        ran = run(path, "--to", "kitchen_w4a8", "-o", out, "--runtime", runtime, "--force")
        assert ran.code == 0 and f"accepted  {runtime}" in ran.out
        assert d.read(out)["embed_tokens.weight_scale"].bits.shape == shape


def test_what_mends_an_output_begins_from_its_source(
    run: Callable[..., Ran], sample: Any, write: Write, tmp_path: Path
) -> None:
    """Nothing that is printed names a file that is not there: temporary names are gone by then."""
    path = write(sample("fp8", 64, 256).named("fc") | sample("int8_row", 256, 256).named("embed_tokens"))
    ran = run(path, "--to", "kitchen_w4a8", "-o", tmp_path / "out.safetensors")
    (refused,) = (line for line in ran.out.splitlines() if line.startswith("refused"))
    assert refused.startswith("refused   sglang-0132848: ") and ".partial" not in ran.out
    command = shlex.split(refused.rpartition("; ")[2])
    assert command == ["qconvert", str(path), "--to", "kitchen_w4a8", "--runtime", "sglang-0132848"]
    mended = run(*command[1:], "-o", tmp_path / "mended.safetensors")
    assert mended.code == 0 and "accepted  sglang-0132848" in mended.out


def test_what_a_plain_target_leaves_is_said(
    run: Callable[..., Ran], fp8: Path, d: ModuleType, tmp_path: Path
) -> None:
    for name, dtype in (("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")):
        assert get_target(name).summary.endswith("; norms and buffers stay as they are")
        run(fp8, "--to", name, "-o", tmp_path / f"{name}.safetensors")
        after = d.read(tmp_path / f"{name}.safetensors")
        assert after["blocks.0.fc.weight"].dtype == dtype
        assert after["blocks.0.norm.weight"].dtype == "F32"


def test_pairs() -> None:
    assert parse_pairs(("a=b", "x=y=z"), "--rename") == (("a", "b"), ("x=y", "z"))
    for text in ("a", "=b"):
        with pytest.raises(UsageError, match="REGEX=VALUE"):
            parse_pairs((text,), "--rename")


def test_a_closed_pipe_is_no_traceback(fp8: Path) -> None:
    script = Path(sys.executable).with_name("qconvert")
    if not script.exists() or os.name == "nt":
        pytest.skip("the command is not installed beside this Python")
    ran = subprocess.run(
        f"'{script}' inspect '{fp8}' --json | head -c 1", shell=True, capture_output=True, text=True
    )
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("given", [None, "3"])
def test_matrix_products_stay_in_the_thread_that_asks(given: str | None) -> None:
    """--jobs threads share the work; threads of numpy's own for each of them would wait for each other."""
    code = """
import os, sys
from qconvert.convert.cli import main
assert "numpy" not in sys.modules  # It looks at the number of threads when it is imported.
try:
    main(["--version"])
finally:
    import numpy
    a = numpy.ones((512, 512), numpy.float32)
    a @ a
    tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    print(os.environ["OPENBLAS_NUM_THREADS"], tasks)
"""
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    env |= {"OPENBLAS_NUM_THREADS": given} if given else {}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    threads, tasks = ran.stdout.split()[-2:]
    assert threads == given or (threads, tasks) == ("1", "1"), ran.stderr
