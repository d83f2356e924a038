"""Every family at true size, planned for every target, and the planned header checked by the target's contracts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import skeletons as s
from qconvert.convert.actions import Plan, output_header
from qconvert.convert.gate import planned_view
from qconvert.convert.job import Request, contracts_for, output_form, plan_job
from qconvert.convert.plan import PlanOptions, make_plan
from qconvert.formats.checkpoint import Checkpoint, opened
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.layers import Inventory, take_inventory
from qconvert.formats.tensors import Spec
from qconvert.runtime.families import detect, load_families
from qconvert.runtime.targets import TARGETS, Target, get_target

#: One model of each family, the one with published counts where there are any.
MODELS = (
    "chroma1", "clip_l", "cosmos_predict2_2b_t2i", "flux1_dev", "flux2_klein_4b", "gemma2_2b", "gemma3_4b",
    "hunyuan_video", "kandinsky5_lite_video", "kandinsky6_lite", "ltx2_3", "ltx2_text_projection",
    "minimax_h3_full", "mistral3_24b", "qwen25_vl_7b", "qwen3_06b", "qwen3vl_32b_minimax_h3", "qwen_image",
    "qwen_image_21", "sd35_medium", "sdxl", "t5_xxl", "vae_wan", "wan22_i2v_a14b", "z_image",
)  # fmt: skip
#: Deep models with fewer blocks, for time: list of blocks, how many stay, linears that are then left.
SHALLOW = {
    "ltx2_3": ("transformer_blocks", 8, 136),
    "kandinsky6_lite": ("visual_blocks", 4, 136),
    "qwen_image": ("transformer_blocks", 6, 60),
    "wan22_i2v_a14b": ("blocks", 10, 100),
    "qwen3vl_32b_minimax_h3": ("model.layers", 10, 70),
}
#: sglang's mxfp8 layers are loaded by one model only.
MXFP8 = ("minimax_h3_full",)
#: (model, target) -> what the runtime's loader says when it takes no such file at all.
REFUSED = {
    ("qwen_image_21", "comfy_nvfp4"): "refuses any nvfp4 layer in Qwen-Image 2.1",
    ("qwen3vl_32b_minimax_h3", "vllm_omni_int8"): "MiniMax-H3 text encoder supports online FP8 only",
}
#: (model, target) -> what the contract says of the names of a packed qkv; ComfyUI's markers settle it elsewhere.
PACKED = "names of a packed qkv"
GATED = {
    (name, "modelopt_nvfp4"): PACKED for name in ("chroma1", "flux1_dev", "flux2_klein_4b", "hunyuan_video")
}
_SPLIT = ("kitchen_w4a8", "comfy_fp8", "auto_gptq", "auto_gptq:int8", "rowwise_fp8", "modelopt_fp8")
_QKV = (*_SPLIT, "kitchen_w4a4", "convrot_int8", "modelopt_nvfp4")
#: (model, target) -> linears quantised, where those are fewer than the family has, for the reason given.
FEWER: dict[tuple[str, str], tuple[int, str]] = {
    # nvfp4 asks for full-precision matmul, which fused projections cannot use: what is left are the others.
    ("clip_l", "comfy_nvfp4"): (36, "cannot use full-precision matmul"),
    ("gemma2_2b", "comfy_nvfp4"): (52, "cannot use full-precision matmul"),
    ("gemma3_4b", "comfy_nvfp4"): (68, "cannot use full-precision matmul"),
    ("qwen3_06b", "comfy_nvfp4"): (56, "cannot use full-precision matmul"),
    ("t5_xxl", "comfy_nvfp4"): (96, "cannot use full-precision matmul"),
    ("z_image", "comfy_nvfp4"): (60, "cannot use full-precision matmul"),
    # Gates of 32 rows.
    ("ltx2_3", "comfy_nvfp4"): (112, "fill whole tiles of 128 rows"),
    ("ltx2_3", "auto_gptq"): (112, "Marlin kernel needs N % 64 = 0"),
    ("ltx2_3", "auto_gptq:int8"): (112, "Marlin kernel needs N % 64 = 0"),
    **{("qwen_image_21", name): (160, "sglang splits gate_up by rows") for name in _SPLIT},
    **{("z_image", name): (120, "sglang splits attention.qkv") for name in _QKV},
}


@contextmanager
def source(path: Path, header: Any, payload: Any = None) -> Iterator[tuple[Checkpoint, Inventory]]:
    with opened(s.sparse(path / "model.safetensors", header, payload)) as checkpoint:
        yield checkpoint, take_inventory(checkpoint)


def planned(read: tuple[Checkpoint, Inventory], target: Target, **options: Any) -> Plan:
    return make_plan(*read, target, contracts_for(target, None), PlanOptions(**options))


def refused_by(plan: Plan, checkpoint: Checkpoint) -> list[str]:
    """What the contract that the plan must meet first says against the header as it would be written."""
    form = output_form(plan, checkpoint, "model.safetensors")
    if plan.target.header is not None:
        plan = replace(plan, metadata=plan.metadata | plan.target.header(form))
    view = planned_view(plan, form)
    return [
        violation.line()
        for contract in plan.contracts[:1]
        for violation in contract.check(view).all_violations()
        if violation.severity in ("refuse", "trap")
    ]


def shallow(header: Any, blocks: str, depth: int) -> Any:
    """Without the blocks from number `depth` on."""
    number = re.compile(re.escape(blocks) + r"\.(\d+)\.")
    return {
        name: spec
        for name, spec in header.items()
        if not ((hit := number.match(name)) and int(hit[1]) >= depth)
    }


def count(plan: Plan, *kinds: str, role: str = "linear") -> int:
    return sum(action.kind in kinds and action.role == role for action in plan.actions)


def test_one_model_of_every_family() -> None:
    assert sorted(s.document(name)["family"] for name in MODELS) == [f.id for f in load_families()]


@pytest.mark.parametrize("name", MODELS)
def test_every_target(name: str, tmp_path: Path) -> None:
    expected = s.document(name)
    header, linear = s.skeleton(name), expected["linear"]
    if name in SHALLOW:
        blocks, depth, linear = SHALLOW[name]
        header = shallow(header, blocks, depth)
    with source(tmp_path, header) as read:
        for target in TARGETS:
            case = (name, target.name)
            words = REFUSED.get(case)
            if target.name == "comfy_mxfp8" and name not in MXFP8 and expected["family"] != "vae":
                words = "weight_scale_inv"
            if words is not None:
                with pytest.raises(QConvertError, match=words.replace("(", r"\(")):
                    planned(read, target)
                continue
            plan = planned(read, target)
            linears, why = FEWER.get(case, (linear, ""))
            assert count(plan, "quantise") == (0 if target.runtime == "none" else linears), case
            assert count(plan, "quantise", role="embedding") == 0, case
            left = [a for a in plan.actions if a.role == "linear" and a.kind == "keep"]
            assert not left or target.runtime == "none" or any(why in a.reason for a in left), case
            assert all(action.reason for action in plan.actions)
            assert len({name for name, _ in output_header(plan)}) == len(output_header(plan))
            if linears:
                against = refused_by(plan, read[0])
                assert bool(against) == (case in GATED), (case, against)
                assert not against or GATED[case] in against[0]


#: Layers quantised in published files of these models, over all who publish them.
PUBLISHED = [
    ("minimax_h3_full", "comfy_nvfp4", 250),
    ("minimax_h3_full", "comfyui:int8_tensorwise", 250),
    ("minimax_h3_pruned", "comfy_nvfp4", 200),
    ("minimax_h3_pruned", "comfyui:float8_e4m3fn", 200),
    ("ltx2_3", "comfyui:nvfp4", 1496),
    ("ltx2_3", "convrot_int8", 1496),
    ("wan21_t2v_14b", "kitchen_w4a8", 400),
    ("wan22_i2v_a14b", "comfy_nvfp4", 400),
    ("wan22_i2v_a14b", "kitchen_w4a8", 400),
]


def test_refused_before_any_payload_is_read(tmp_path: Path) -> None:
    """What the written header would be refused for is said of the planned one."""
    path = s.sparse(tmp_path / "flux.safetensors", s.skeleton("flux2_klein_4b"))
    with opened(path) as checkpoint, pytest.raises(QConvertError, match=PACKED):
        plan_job(Request(path, "modelopt_nvfp4"), checkpoint)
    assert [entry.name for entry in tmp_path.iterdir()] == ["flux.safetensors"]


@pytest.mark.parametrize(("name", "target", "layers"), PUBLISHED)
def test_published_counts(name: str, target: str, layers: int, tmp_path: Path) -> None:
    with source(tmp_path, s.skeleton(name)) as read:
        plan = planned(read, get_target(target))
        assert count(plan, "quantise") == layers
        assert refused_by(plan, read[0]) == []


def test_qwen_image_edit_2511(tmp_path: Path) -> None:
    header = {**s.skeleton("qwen_image"), "__index_timestep_zero__": Spec("F32", (0,))}
    with source(tmp_path, header) as read:
        plan = planned(read, get_target("kitchen_w4a4"))
        assert plan.families == ("Qwen-Image (edit 2511)",)
        assert count(plan, "quantise") == 600
        assert "__index_timestep_zero__" in dict(output_header(plan))


def published_encoder(prefix: str = "") -> Any:
    """The MiniMax-H3 encoder as published: 350 linears of the language model and its embedding in fp8."""
    header = s.prefixed(s.skeleton("qwen3vl_32b_minimax_h3"), prefix)
    (match,) = detect(header)

    def chosen(layer: str) -> bool:
        return match.role(layer).kind in ("linear", "embedding") and len(header[f"{layer}.weight"].shape) == 2

    return s.fp8(header, chosen)


@pytest.mark.parametrize(
    "prefix", ["", "text_encoders.qwen3vl.transformer.", "cond_stage_model.transformer."]
)
def test_published_encoder_of_fp8(prefix: str, tmp_path: Path) -> None:
    """The main job: fp8 linears to nvfp4, the fp8 embedding to row-wise int8, all else as it is."""
    with source(tmp_path, *published_encoder(prefix)) as read:
        plan = planned(read, get_target("comfy_nvfp4"))
        assert count(plan, "requantise") == 350
        assert count(plan, "requantise", role="embedding") == 1
        methods = Counter(a.method for a in plan.actions if a.kind == "requantise")
        assert methods == {"nvfp4": 350, "int8_tensorwise": 1}
        assert {a.kind for a in plan.actions} == {"keep", "requantise"}
        assert refused_by(plan, read[0]) == []


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("flux1_dev", "model.diffusion_model."),
        ("minimax_h3_full", "model.diffusion_model."),
        ("cosmos_predict2_2b_t2i", "net."),
        ("anima", "net."),
        ("z_image", "diffusion_model."),
        ("t5_xxl", "text_encoders.t5xxl.transformer."),
        ("qwen25_vl_7b", "text_encoders.qwen25_7b."),
        ("clip_l", "cond_stage_model.transformer."),
    ],
)
def test_a_prefix_changes_no_decision(name: str, prefix: str, tmp_path: Path) -> None:
    target = get_target("convrot_int8")
    decisions = []
    for number, stored in enumerate((s.skeleton(name), s.prefixed(s.skeleton(name), prefix))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with source(folder, stored) as read:
            plan = planned(read, target)
            assert refused_by(plan, read[0]) == []
            decisions.append([(a.kind, a.role, a.method, a.reason) for a in plan.actions])
    assert decisions[0] == decisions[1]


def all_in_one(pack: Callable[[Any], Any] = lambda header: header) -> Any:
    return {
        **s.prefixed(pack(s.skeleton("flux1_dev")), "model.diffusion_model."),
        **s.prefixed(s.skeleton("clip_l"), "text_encoders.clip_l.transformer."),
        **s.prefixed(s.skeleton("t5_xxl"), "text_encoders.t5xxl.transformer."),
        **s.prefixed(s.skeleton("vae_ldm"), "vae."),
    }


def test_all_in_one_files(tmp_path: Path) -> None:
    with source(tmp_path, all_in_one()) as read:
        with pytest.raises(UsageError, match="--component"):
            planned(read, get_target("convrot_int8"))
        plan = planned(read, get_target("convrot_int8"), component="diffusion")
        assert count(plan, "quantise") == 228
        assert all(name.startswith(("double_blocks.", "single_blocks.", "img_in", "txt_in", "time_in",
                                    "vector_in", "guidance_in", "final_layer."))
                   for name, _ in output_header(plan))  # fmt: skip
        assert refused_by(plan, read[0]) == []
        # ComfyUI loads such files whole.
        plan = planned(read, get_target("comfyui:float8_e4m3fn"))
        assert count(plan, "quantise") == 228 + 72 + 168
        assert refused_by(plan, read[0]) == []


def test_unknown_models_are_said_to_be_unknown(tmp_path: Path) -> None:
    """The generic rules: matrices that are no tables."""
    header = {f"stage.{i}.mix.weight": Spec("BF16", (1024, 512)) for i in range(8)}
    header |= {f"stage.{i}.norm.weight": Spec("BF16", (512,)) for i in range(8)}
    header |= {
        "token_embedding.weight": Spec("BF16", (4096, 512)),
        "stem.weight": Spec("BF16", (512, 3, 4, 4)),
    }
    with source(tmp_path, header) as read:
        for target in TARGETS:
            plan = planned(read, target)
            assert plan.families == ()
            assert count(plan, "quantise") == (0 if target.runtime == "none" else 8), target.name
            assert count(plan, "quantise", role="embedding") == 0
            assert refused_by(plan, read[0]) == [], target.name
