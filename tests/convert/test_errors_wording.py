"""What the most likely mistakes are answered with, word for word; nothing is left behind by any of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structured as s
from qconvert.convert.cli import main
from qconvert.runtime.contracts.registry import contract_names

FP8 = {"format": "float8_e4m3fn"}


@pytest.fixture(scope="module")
def weights() -> Any:
    return {
        name: w
        for name, w in s.network().items()
        if not name.startswith(("layers.1", "layers.2", "layers.3"))
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any) -> Path:
    """The working folder: a right fp8 file, model.safetensors."""
    monkeypatch.chdir(tmp_path)
    s.write(tmp_path / "model.safetensors", s.fp8_file(weights, mark=FP8))
    return tmp_path


@pytest.fixture
def fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Run a command that must fail with exactly this line and code, and leave the folder as it was."""

    def run(command: str | list[str], code: int, line: str) -> None:
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        with pytest.raises(SystemExit) as stop:
            main(command.split() if isinstance(command, str) else command)
        assert capsys.readouterr().err.splitlines() == [f"qconvert: {line}"]
        assert stop.value.code == code
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before

    return run


Fails = Callable[..., None]


def test_a_file_that_is_not_there(fails: Fails) -> None:
    fails(
        "modl.safetensors --to comfy_nvfp4",
        2,
        "modl.safetensors: no such file or folder; did you mean model.safetensors?",
    )
    fails("elsewhere/x.safetensors --to comfy_nvfp4", 2, "elsewhere/x.safetensors: no such file or folder")


def test_a_target_that_does_not_exist(fails: Fails) -> None:
    fails(
        "model.safetensors --to comfy_nvpf4",
        2,
        "unknown target 'comfy_nvpf4'; did you mean comfy_nvfp4? `qconvert targets` lists all",
    )


def test_no_target(fails: Fails) -> None:
    fails(
        "model.safetensors",
        2,
        "what to make is not said: --to TARGET is missing; `qconvert targets` lists all",
    )


def test_an_output_that_is_there_already(fails: Fails, folder: Path) -> None:
    (folder / "out.safetensors").write_bytes(b"precious")
    fails(
        "model.safetensors --to comfy_nvfp4 -o out.safetensors",
        2,
        "out.safetensors: already exists; --force overwrites it",
    )


def test_the_source_as_output(fails: Fails) -> None:
    fails(
        "model.safetensors --to comfy_nvfp4 -o model.safetensors --force",
        2,
        "model.safetensors: source and target are the same file; name another file with -o",
    )


def test_a_folder_of_several_files_without_index(fails: Fails, folder: Path, weights: Any) -> None:
    (folder / "both").mkdir()
    for name in ("a", "b"):
        s.write(folder / "both" / f"{name}.safetensors", s.fp8_file(weights, mark=FP8))
    fails(
        "both --to comfy_nvfp4",
        2,
        "both: 2 .safetensors files and no index (found a.safetensors, b.safetensors); name one of the files",
    )


def test_a_shard_that_is_missing(fails: Fails, folder: Path, weights: Any) -> None:
    (folder / "shards").mkdir()
    tensors = s.fp8_file(weights, mark=FP8)
    s.write(folder / "shards" / "model-1-of-2.safetensors", tensors)
    index = {
        "weight_map": {**dict.fromkeys(tensors, "model-1-of-2.safetensors"), "x": "model-2-of-2.safetensors"}
    }
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(
        "shards --to comfy_nvfp4",
        1,
        "shards/model.safetensors.index.json: index names a shard that is not there "
        "(found model-2-of-2.safetensors); put all shards beside their index",
    )


def test_a_download_that_was_cut(fails: Fails, folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(data[:-1000])
    fails(
        "cut.safetensors --to comfy_nvfp4",
        1,
        "cut.safetensors: truncated: tensor 'layers.0.mlp.down_proj.weight' ends behind the file "
        f"(found {len(data) - 1000} bytes, expected at least {len(data) - 31}); get the file again",
    )


@pytest.mark.parametrize(
    ("start", "line"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "it is a Git LFS pointer, the file itself was not fetched; fetch it with git lfs pull",
        ),
        (
            b"<!DOCTYPE html><html></html>",
            "it is a web page, not what was to be downloaded; get the file again",
        ),
    ],
)
def test_what_is_not_the_file_at_all(fails: Fails, folder: Path, start: bytes, line: str) -> None:
    (folder / "x.safetensors").write_bytes(start)
    fails("x.safetensors --to comfy_nvfp4", 1, f"x.safetensors: not a safetensors file: {line}")


def test_a_file_without_tensors(fails: Fails, folder: Path) -> None:
    s.write(folder / "empty.safetensors", {})
    fails(
        "empty.safetensors --to comfy_nvfp4",
        1,
        "empty.safetensors: the file holds no tensors; get the file again",
    )


def test_an_all_in_one_file_without_a_choice(fails: Fails, folder: Path, weights: Any) -> None:
    tensors = {f"model.diffusion_model.{k}": v for k, v in s.fp8_file(weights, mark=FP8).items()}
    tensors["first_stage_model.conv_in.weight"] = s.bf16(np.ones((4, 4)))
    s.write(folder / "aio.safetensors", tensors)
    fails(
        "aio.safetensors --to comfy_nvfp4",
        2,
        "aio.safetensors: an all-in-one file (diffusion, vae); comfy_nvfp4 is loaded one component at a time; "
        "choose with --component diffusion or --component vae",
    )


def test_a_guess_under_strict(fails: Fails, folder: Path, weights: Any) -> None:
    s.write(folder / "unmarked.safetensors", s.nvfp4_file(weights))
    fails(
        "unmarked.safetensors --to comfy_nvfp4 --strict",
        1,
        "unmarked.safetensors: layers.0.self_attn.q_proj: --strict refuses a guess: no marker; taken as nvfp4 with "
        "swizzled scales, high nibble first (and 5 more) (found weight U8[256, 128], weight_scale F8_E4M3[256, 16], "
        "weight_scale_2 F32[]); `qconvert inspect` shows what it rests on, --assume 'LAYER_REGEX=FORMAT' settles it",
    )


def test_weights_that_no_format_explains(fails: Fails, folder: Path, weights: Any) -> None:
    tensors = s.fp8_file(weights, mark=FP8)
    tensors["head.weight"] = "I8", np.ones((64, 256), np.int8)
    s.write(folder / "odd.safetensors", tensors)
    fails(
        "odd.safetensors --to comfy_nvfp4",
        1,
        "odd.safetensors: head: no known format explains this quantised weight (found weight I8[64, 256], "
        "expected scales beside it that say how to read its codes); name it with --assume 'LAYER_REGEX=FORMAT'",
    )


def test_a_runtime_that_does_not_serve_the_target(fails: Fails) -> None:
    fails(
        "model.safetensors --to comfy_nvfp4 --runtime comfyui",
        2,
        "runtime 'comfyui' does not serve the target comfy_nvfp4 (expected one of sglang-0.5.23, sglang-0132848)",
    )
    fails(
        "check model.safetensors --runtime sglang-0.6",
        2,
        f"unknown runtime 'sglang-0.6' (expected one of {', '.join(contract_names())})",
    )


def test_patterns_and_formats_with_typing_errors(fails: Fails) -> None:
    fails(
        "model.safetensors --to comfy_nvfp4 --keep o_porj",
        2,
        "model.safetensors: --keep 'o_porj' matches no layer",
    )
    fails(
        ["model.safetensors", "--to", "comfy_nvfp4", "--assume", ".=nvpf4"],
        2,
        "--assume '.=nvpf4': unknown format 'nvpf4'; did you mean nvfp4?",
    )
    fails(
        ["model.safetensors", "--to", "comfy_nvfp4", "--assume", "lm_head=nvfp4"],
        2,
        "model.safetensors: --assume 'lm_head=nvfp4' fits no quantised layer",
    )
    fails(
        "model.safetensors --to comfy_nvfp4 --rename o_proj",
        2,
        "--rename 'o_proj' (expected REGEX=VALUE)",
    )


def test_lost_scales(fails: Fails, folder: Path, weights: Any) -> None:
    s.write(folder / "lost.safetensors", s.fp8_file(weights, scale=False, lost=True, mark=None))
    fails(
        "lost.safetensors --to comfy_fp8",
        1,
        "lost.safetensors: layers.0.self_attn.q_proj: fp8 codes fill their range as scaled ones do, but there is no "
        "scale: it was lost (found the largest weight of a layer is 448 (median of 6 layers)); get the file again, "
        "or say --assume 'REGEX=float8_e4m3fn' if it is right",
    )
