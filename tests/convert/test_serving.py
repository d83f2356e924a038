"""The command that serves an output: which option, which path, for which part of which pipeline."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import skeletons as s
from qconvert.convert.job import contracts_for
from qconvert.convert.plan import PlanOptions, make_plan
from qconvert.convert.serving import component_of, serving
from qconvert.formats.checkpoint import opened
from qconvert.formats.layers import take_inventory
from qconvert.formats.tensors import Spec
from qconvert.runtime.families import detect
from qconvert.runtime.targets import get_target

UNKNOWN = {f"stage.{i}.mix.weight": Spec("BF16", (256, 256)) for i in range(3)}


def lines(
    folder: Path, header: Any, target: str, output: str = "out.safetensors", **options: Any
) -> list[str]:
    with opened(s.sparse(folder / "m.safetensors", header)) as checkpoint:
        wanted = get_target(target)
        plan = make_plan(
            checkpoint,
            take_inventory(checkpoint),
            wanted,
            contracts_for(wanted, None),
            PlanOptions(**options),
        )
        prefixes = {action.layer.prefix for action in plan.actions}
        return serving(plan, Path(output), component_of(detect(checkpoint.specs), prefixes))


def test_a_diffusion_model_for_sglang(tmp_path: Path) -> None:
    assert lines(tmp_path, s.skeleton("flux2_klein_4b"), "comfy_nvfp4") == [
        "sglang serve --model-path MODEL --transformer-weights-path out.safetensors",
        "sglang generate --model-path MODEL --transformer-weights-path out.safetensors --prompt ...",
        "(MODEL: the pipeline's folder or hub name, for Flux.2 (klein 4b))",
    ]


def test_a_text_encoder_for_sglang(tmp_path: Path) -> None:
    assert lines(tmp_path, s.skeleton("qwen3vl_4b"), "comfy_nvfp4")[0] == (
        "sglang serve --model-path MODEL --component-weights-paths.text_encoder out.safetensors"
    )


def test_a_part_of_an_all_in_one_file(tmp_path: Path) -> None:
    header = {
        **s.prefixed(s.skeleton("flux2_klein_4b"), "model.diffusion_model."),
        **s.prefixed(s.skeleton("qwen3vl_4b"), "text_encoders.qwen3vl.transformer."),
    }
    told = lines(tmp_path, header, "convrot_int8", component="text_encoder")[0]
    assert "--component-weights-paths.text_encoder" in told
    assert "--transformer-weights-path" in lines(tmp_path, header, "comfy_nvfp4", component="diffusion")[0]
    assert lines(tmp_path, header, "comfyui:nvfp4") == ["put it into ComfyUI's models/checkpoints"]
    # Nothing serves all of it as one file there.
    assert lines(tmp_path, header, "bf16") == []


def test_folders_are_named_as_components(tmp_path: Path) -> None:
    told = lines(tmp_path, s.skeleton("wan21_t2v_1_3b"), "modelopt_fp8", "wan/model.safetensors")
    assert told[0] == "sglang serve --model-path MODEL --transformer-path wan"
    told = lines(tmp_path, s.skeleton("qwen3vl_4b"), "auto_gptq", "qwen/model.safetensors")
    assert told[0] == "sglang serve --model-path MODEL --component-paths.text_encoder qwen"


@pytest.mark.parametrize(
    ("name", "folder"),
    [("anima", "models/diffusion_models"), ("t5_xxl", "models/text_encoders"), ("vae_wan", "models/vae")],
)
def test_comfyuis_folders(name: str, folder: str, tmp_path: Path) -> None:
    assert lines(tmp_path, s.skeleton(name), "comfyui:float8_e4m3fn") == [f"put it into ComfyUI's {folder}"]


def test_an_unknown_model_is_told_both_ways(tmp_path: Path) -> None:
    told = lines(tmp_path, UNKNOWN, "comfy_fp8")
    assert "--transformer-weights-path out.safetensors" in told[0]
    assert told[-1].endswith("; for a text encoder: --component-weights-paths.text_encoder)")
    assert lines(tmp_path, UNKNOWN, "comfyui:nvfp4") == [
        "put it into ComfyUI's models/diffusion_models or models/text_encoders"
    ]


def test_libraries_that_are_called_from_python_have_no_command(tmp_path: Path) -> None:
    assert lines(tmp_path, UNKNOWN, "diffusers_bfl_fp8") == []


def test_no_command_is_given_that_is_known_to_fail(tmp_path: Path) -> None:
    """sglang 0.5.23 stops at such files of such models, whatever the contract says of their layers."""
    (told,) = lines(tmp_path, s.skeleton("wan21_t2v_1_3b"), "kitchen_w4a4")
    assert told.startswith(
        "not by this version: sglang 0.5.23 resolves these markers for the transformers of"
    )
    (told,) = lines(tmp_path, s.skeleton("qwen3_06b"), "convrot_int8")
    assert told.startswith(
        "not by this version: sglang 0.5.23 consumes ComfyUI markers in Qwen3-VL's encoder only"
    )
    assert "sglang serve" in lines(tmp_path, s.skeleton("minimax_h3_pruned"), "kitchen_w4a4")[0]


@pytest.mark.skipif(os.name == "nt", reason="quoted for another shell there")
def test_paths_are_quoted(tmp_path: Path) -> None:
    told = lines(tmp_path, UNKNOWN, "comfy_fp8", "my models/it's.safetensors")[0]
    assert shlex.split(told)[-1] == "my models/it's.safetensors"
