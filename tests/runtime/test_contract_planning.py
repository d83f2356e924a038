"""What planners ask before anything is written, tensor parallelism, the registry."""

from __future__ import annotations

from typing import Any

import pytest
from qconvert.formats.errors import UsageError
from qconvert.runtime.contracts.base import Kind
from qconvert.runtime.contracts.registry import DEFAULT_CONTRACT, contract_names, get_contract
from qconvert.runtime.roles import split_axis

SGLANG = get_contract(DEFAULT_CONTRACT)
OLDER = get_contract("sglang-0132848")
COMFY = get_contract("comfyui")
FULL = {"full_precision_matrix_mult": True}
W4A8 = {"convrot": True, "convrot_groupsize": 256, "group_size": 16}
ROTATED = {"convrot": True, "convrot_groupsize": 256}

#: config, kind, format, n, k, options, and words of the refusal (None: served).
ASKED: list[tuple[str, Kind, str, int, int, dict[str, Any], str | None]] = [
    ("comfy_nvfp4", "linear", "nvfp4", 128, 64, FULL, None),
    ("comfy_nvfp4", "linear", "nvfp4", 128, 64, {}, None),
    ("comfy_nvfp4", "linear", "nvfp4", 192, 64, FULL, "whole tiles"),
    ("comfy_nvfp4", "linear", "nvfp4", 128, 96, FULL, "whole tiles"),
    ("comfy_nvfp4", "linear", "nvfp4", 128, 8, FULL, "multiple of 16"),
    ("comfy_nvfp4", "linear", "nvfp4", 128, 64, {"convrot": True}, "rotated nvfp4"),
    ("comfy_nvfp4", "linear", "nvfp4", 128, 64, FULL | {"tensors": {"input_scale"}}, "input_scale"),
    ("comfy_nvfp4", "linear", "nvfp4", 128, 64, FULL | {"partitions": 3}, "fuses"),
    ("comfy_nvfp4", "linear", "nvfp4", 128, 64, {"partitions": 3}, None),
    ("comfy_nvfp4", "linear", "int8_tensorwise", 64, 256, ROTATED, "only an int8 embedding"),
    ("comfy_nvfp4", "linear", "float8_e4m3fn", 64, 64, {}, "Unsupported Comfy quantization format(s)"),
    ("comfy_nvfp4", "embedding", "int8_tensorwise", 200, 64, {"scale": "row"}, None),
    ("comfy_nvfp4", "embedding", "int8_tensorwise", 200, 64, {"scale": "scalar"}, None),
    ("comfy_nvfp4", "embedding", "nvfp4", 256, 64, FULL, "Unsupported quantized embedding marker"),
    ("comfy_nvfp4", "embedding", "bf16", 200, 64, {}, None),
    ("kitchen_w4a8", "linear", "asym_w4a8_int8", 8, 256, W4A8, None),
    ("kitchen_w4a8", "linear", "asym_w4a8_int8", 8, 320, W4A8, "multiple of 256"),
    ("kitchen_w4a8", "linear", "asym_w4a8_int8", 8, 320, W4A8 | {"convrot_groupsize": 64}, None),
    ("kitchen_w4a8", "linear", "asym_w4a8_int8", 8, 256, {"group_size": 16}, "must say that it is rotated"),
    ("kitchen_w4a8", "linear", "asym_w4a8_int8", 8, 256, W4A8 | {"bits": 6}, "6-bit"),
    ("kitchen_w4a8", "embedding", "asym_w4a8_int8", 8, 256, W4A8, "Unsupported quantized embedding"),
    ("kitchen_w4a4", "linear", "convrot_w4a4", 8, 256, {"convrot_groupsize": 256}, None),
    ("kitchen_w4a4", "linear", "convrot_w4a4", 8, 128, {"convrot_groupsize": 256}, "multiple of 256"),
    ("kitchen_w4a4", "linear", "convrot_w4a4", 8, 80, {"convrot_groupsize": 16}, "multiple of 64"),
    ("kitchen_w4a4", "linear", "int8_tensorwise", 8, 256, ROTATED, None),
    ("kitchen_w4a4", "embedding", "int8_tensorwise", 8, 256, {}, "serves no quantised embedding"),
    ("convrot_int8", "linear", "int8_tensorwise", 8, 256, ROTATED, None),
    ("kitchen_int8", "linear", "int8_tensorwise", 8, 256, ROTATED, None),
    ("convrot_int8", "linear", "int8_tensorwise", 8, 256, ROTATED | {"scale": "scalar"}, "one scale a row"),
    ("convrot_int8", "linear", "int8_tensorwise", 8, 256, {}, "int8 codes are used as weights"),
    ("convrot_int8", "linear", "int8_tensorwise", 8, 96, ROTATED, "multiple of 256"),
    ("convrot_int8", "embedding", "int8_tensorwise", 8, 96, {"scale": "scalar"}, None),
    ("comfy_fp8", "linear", "float8_e4m3fn", 7, 13, {}, None),
    ("comfy_fp8", "linear", "float8_e4m3fn", 7, 13, {"tensors": {"input_scale"}}, None),
    ("comfy_fp8", "linear", "float8_e4m3fn", 7, 13, FULL | {"tensors": {"input_scale"}}, "input_scale"),
    ("comfy_fp8", "linear", "float8_e4m3fn", 7, 13, FULL | {"partitions": 2}, "fuses"),
    ("comfy_fp8", "embedding", "float8_e4m3fn", 7, 13, {}, "serves no quantised embedding"),
    ("comfy_mxfp8", "linear", "mxfp8", 128, 128, {}, None),
    ("comfy_mxfp8", "linear", "mxfp8", 128, 96, {}, "whole tiles"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "kind", "name", "n", "k", "options", "words"), ASKED)
def test_sglang_layer_refusal(
    config: str, kind: Kind, name: str, n: int, k: int, options: dict[str, Any], words: str | None
) -> None:
    refusal = SGLANG.layer_refusal(config, kind, name, n, k, options)
    assert (refusal is None) if words is None else (refusal is not None and words in refusal)


def test_older_sglang_is_asked_about_scales_and_full_precision() -> None:
    refusals = [
        OLDER.layer_refusal("comfy_nvfp4", "linear", "nvfp4", 128, 64, {}),
        OLDER.layer_refusal("comfy_nvfp4", "embedding", "int8_tensorwise", 9, 64, {"scale": "scalar"}),
        OLDER.layer_refusal("kitchen_w4a8", "embedding", "int8_tensorwise", 9, 64, {"scale": "row"}),
        OLDER.layer_refusal("kitchen_int8", "embedding", "int8_tensorwise", 9, 64, {}),
    ]
    assert all(refusals)
    assert OLDER.layer_refusal("comfy_nvfp4", "linear", "nvfp4", 128, 64, FULL) is None
    assert (
        OLDER.layer_refusal("kitchen_w4a8", "embedding", "int8_tensorwise", 9, 64, {"scale": "scalar"})
        is None
    )


COMFY_ASKED: list[tuple[Kind, str, int, int, dict[str, Any], str | None]] = [
    ("linear", "nvfp4", 192, 80, {}, None),
    ("linear", "float8_e5m2", 7, 13, {}, None),
    ("linear", "float8_e4m3fn", 7, 13, {"scale": "row"}, "scale_b must have 1 Float element"),
    ("linear", "int8_tensorwise", 7, 13, {}, None),
    ("linear", "int8_tensorwise", 7, 64, {"convrot": True}, "multiple of 256"),
    ("linear", "int8_tensorwise", 7, 64, {"convrot": True, "convrot_groupsize": 32}, "no ConvRot rotation"),
    ("linear", "asym_w4a8_int8", 7, 256, {}, None),
    ("linear", "asym_w4a8_int8", 7, 256, {"bits": 6}, None),
    ("linear", "asym_w4a8_int8", 7, 256, {"bits": 6, "group_size": 8}, "multiple of 16"),
    ("linear", "asym_w4a8_int8", 7, 256, {"tensors": {"weight_correction"}}, "never read"),
    ("linear", "convrot_w4a4", 7, 80, {"convrot_groupsize": 16}, "multiple of 64"),
    ("linear", "awq_w4a16", 7, 96, {}, "multiple of 64"),
    ("linear", "svdquant_w4a4", 7, 96, {}, "KeyError: 'svdquant_w4a4'"),
    ("embedding", "int8_tensorwise", 7, 64, {"convrot": True, "convrot_groupsize": 64}, None),
    ("embedding", "float8_e4m3fn", 7, 64, {}, None),
    ("embedding", "float8_e4m3fn", 7, 64, {"scale": "row"}, "size mismatch at the lookup"),
    ("embedding", "nvfp4", 128, 64, {}, "size mismatch"),
    ("linear", "bf16", 7, 13, {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "n", "k", "options", "words"), COMFY_ASKED)
def test_comfyui_layer_refusal(
    kind: Kind, name: str, n: int, k: int, options: dict[str, Any], words: str | None
) -> None:
    refusal = COMFY.layer_refusal("comfyui", kind, name, n, k, options)
    assert (refusal is None) if words is None else (refusal is not None and words in refusal)


# ---- tensor parallelism


def rules(header: Any, tp: int) -> list[str]:
    return [v.rule for v in SGLANG.check(header.view(), tp=tp).all_violations()]


def test_a_ranks_share_of_k_keeps_the_multiples(header: Any) -> None:
    down = "model.layers.0.mlp.down_proj"
    assert rules(header().w4a8(down, 64, 25600), 4) == []
    assert rules(header().w4a8(down, 64, 25600), 8) == ["tp-input"]
    (violation,) = SGLANG.check(header().w4a8(down, 64, 25600).view(), tp=8).all_violations()
    assert violation.found == "3200" and "each of 8 ranks' share" in violation.message
    assert violation.remedy is None
    assert rules(header().int8(down, 64, 512), 4) == ["tp-input"]
    assert rules(header().int8(down, 64, 512, convrot_groupsize=64), 4) == []
    assert rules(header().w4a4(down, 64, 256, convrot_groupsize=16), 8) == ["tp-input"]
    assert rules(header().w4a4(down, 64, 512, convrot_groupsize=16), 8) == []
    assert rules(header().w4a8(down, 64, 768), 7) == ["tp-input"]


def test_layers_split_by_rows_keep_their_k(header: Any) -> None:
    assert rules(header().w4a8("model.layers.0.mlp.up_proj", 64, 256), 4) == []
    assert rules(header().w4a8("model.layers.0.mlp.up_proj", 66, 256), 4) == ["tp-output"]


def test_swizzled_scales_cannot_be_cut_along_k(header: Any) -> None:
    verdict = SGLANG.check(header().nvfp4("a.down_proj", 128, 256).view(), tp=2)
    assert [(v.severity, v.rule) for v in verdict.all_violations()] == [("trap", "tp-swizzle")]
    assert rules(header().nvfp4("a.up_proj", 256, 128), 2) == []
    assert rules(header().nvfp4("a.up_proj", 256, 128), 4) == ["tp-swizzle"]


def test_tables_and_plain_fp8_are_split_anywhere(header: Any) -> None:
    assert "tp-input" not in rules(header().fp8("a.down_proj", 64, 96), 2)
    assert rules(header().nvfp4("a.up_proj", 256, 128).table(), 2) == []


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("model.layers.0.self_attn.o_proj", "in"),
        ("model.layers.0.mlp.down_proj", "in"),
        ("transformer_blocks.0.attn.to_out.0", "in"),
        ("transformer_blocks.0.ff.net.2", "in"),
        ("blocks.0.mlp.fc2", "in"),
        ("layers.0.feed_forward.w2", "in"),
        ("blocks.0.self_attn.o", "in"),
        ("model.layers.0.self_attn.q_proj", "out"),
        ("transformer_blocks.0.attn.add_q_proj", "out"),
        ("transformer_blocks.0.img_mlp.net.0.proj", "out"),
        ("blocks.0.attn.qkv_proj", "out"),
        ("layers.0.feed_forward.w1", "out"),
        ("blocks.0.ffn.0", "out"),
        ("final_layer.linear", None),
        ("lm_head", None),
    ],
)
def test_split_axis(name: str, axis: str | None) -> None:
    assert split_axis(name) == axis


# ---- registry


def test_registry() -> None:
    assert contract_names() == (
        "sglang-0.5.23",
        "sglang-0132848",
        "comfyui",
        "sglang-modelopt-0.5.23",
        "sglang-autoround-0.5.23",
        "vllm-omni-0.30",
        "diffusers-0.42",
        "fastvideo-0.2",
        "lightx2v",
    )
    assert DEFAULT_CONTRACT == "sglang-0.5.23"
    assert all(get_contract(name).name == name for name in contract_names())
    with pytest.raises(UsageError) as caught:
        get_contract("sglang-1.0")
    assert str(caught.value) == (
        f"unknown runtime 'sglang-1.0' (expected one of {', '.join(contract_names())})"
    )


@pytest.mark.parametrize("name", contract_names())
def test_unknown_config(name: str) -> None:
    with pytest.raises(UsageError, match="has no config 'gguf'"):
        get_contract(name).layer_refusal("gguf", "linear", "bf16", 1, 1, {})
