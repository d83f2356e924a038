"""The runtimes without ComfyUI markers: what each takes, refuses, and takes wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from qconvert.runtime.contracts.base import Verdict
from qconvert.runtime.contracts.registry import contracts_of, get_contract

SGLANG, OMNI, DIFFUSERS = "sglang-modelopt-0.5.23", "vllm-omni-0.30", "diffusers-0.42"
FASTVIDEO, LIGHTX2V = "fastvideo-0.2", "lightx2v"
L = "blocks.0.fc"

Judge = Callable[..., Verdict]


def modelopt(algo: str = "NVFP4", **keys: Any) -> dict[str, Any]:
    document = {"quant_method": "modelopt", "quant_algo": algo, "ignore": []}
    return document | ({"group_size": 16} if algo == "NVFP4" else {}) | keys


@pytest.fixture
def judge() -> Judge:
    def ask(runtime: str, made: Any, config: Any = None, header: Any = None) -> Verdict:
        view = made.view()
        if config is not None:
            view = replace(
                view, config={"quantization_config": config} if config else {"_class_name": "Model"}
            )
        if header is not None:
            view = replace(view, metadata={key: json.dumps(value) for key, value in header.items()})
        return get_contract(runtime).check(view)

    return ask


def rules(verdict: Verdict, *severities: str) -> list[str]:
    wanted = severities or ("refuse", "trap")
    return [v.rule for v in verdict.all_violations() if v.severity in wanted]


def nvfp4(header: Any, layer: str = L, n: int = 48, k: int = 96) -> Any:
    """ModelOpt's and diffusers' tensors: block scales row-major and not padded."""
    made = (
        header().put(f"{layer}.weight", "U8", n, k // 2).put(f"{layer}.weight_scale", "F8_E4M3", n, k // 16)
    )
    return made.put(f"{layer}.weight_scale_2", "F32").put(f"{layer}.input_scale", "F32")


def fp8(header: Any, *scale: int, layer: str = L, n: int = 64, k: int = 96) -> Any:
    return header().put(f"{layer}.weight", "F8_E4M3", n, k).put(f"{layer}.weight_scale", "F32", *scale)


def int8(header: Any, *scale: int, dtype: str = "F32", n: int = 64, k: int = 96) -> Any:
    return header().put(f"{L}.weight", "I8", n, k).put(f"{L}.weight_scale", dtype, *scale)


# ---- sglang's ModelOpt path


def test_sglang_takes_modelopt_folders(header: Any, judge: Judge) -> None:
    verdict = judge(SGLANG, nvfp4(header), modelopt())
    assert verdict.accepted and verdict.config == "ModelOptFp4Config"
    assert [layer.method for layer in verdict.layers] == ["ModelOptFp4LinearMethod"]
    assert rules(verdict, "environment") == ["compute-capability"]
    verdict = judge(SGLANG, fp8(header).put(f"{L}.input_scale", "F32"), modelopt("FP8"))
    assert verdict.accepted and verdict.config == "ModelOptFp8Config"
    # The same object in the header of a single file, and nvfp4 that nothing declares.
    assert judge(SGLANG, nvfp4(header), header={"quantization_config": modelopt()}).accepted
    assert judge(SGLANG, nvfp4(header)).config == "ModelOptFp4Config"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda h: h.put(f"{L}.weight_scale", "F8_E4M3", 128, 8), ["weight_scale-shape"]),
        (lambda h: h.put(f"{L}.weight_scale", "U8", 48, 6), ["nvfp4-tensors"]),
        (lambda h: h.drop(f"{L}.weight_scale_2"), ["weight_scale_2-missing"]),
        (lambda h: h.put(f"{L}.weight_scale_2", "F32", 48), ["weight_scale_2-shape"]),
        (lambda h: h.put(f"{L}.pre_quant_scale", "BF16", 96), ["parameter-unknown"]),
        (lambda h: h.put(f"{L}.svdquant_lora_a", "BF16", 8, 96), ["parameter-unknown"]),
        (lambda h: h.drop(f"{L}.input_scale"), []),
        (lambda h: h.put("double_blocks.0.img_attn.qkv.weight", "BF16", 16, 16), ["packed-qkv"]),
        (lambda h: h.mark(L, {"format": "nvfp4"}), ["comfy-markers"]),
    ],
)
def test_sglang_nvfp4_layers(change: Any, expected: list[str], header: Any, judge: Judge) -> None:
    assert rules(judge(SGLANG, change(nvfp4(header)), modelopt())) == expected


def test_sglang_nvfp4_configurations(header: Any, judge: Judge) -> None:
    def found(**keys: Any) -> list[str]:
        return rules(judge(SGLANG, nvfp4(header), modelopt(**keys)))

    assert found(group_size=None) == ["group-size"]
    assert found(group_size=None, config_groups={"group_0": {"weights": {"group_size": 16}}}) == []
    assert found(ignore=None) == ["group-size"]
    assert found(algo="MIXED_PRECISION") == ["quant-algo"]
    assert found(algo="W4A16_NVFP4") == ["quant-algo"]
    swapped = modelopt(swap_weight_nibbles=True, checkpoint_weight_scale_layout="swizzled")
    packed = nvfp4(header).put("single_blocks.3.linear1.weight", "BF16", 16, 16)
    verdict = judge(SGLANG, packed, swapped)
    assert verdict.accepted
    assert [v.message for v in verdict.violations if v.rule == "reading"] == [
        "read with the high nibble first, block scales swizzled"
    ]
    assert rules(judge(SGLANG, nvfp4(header, k=40), modelopt())) == ["shape-multiple"]


@pytest.mark.parametrize(
    ("made", "keys", "expected"),
    [
        (lambda h: fp8(h, 64), {}, ["weight_scale-shape"]),
        (lambda h: fp8(h, 64, 1), {}, ["weight_scale-shape"]),
        (lambda h: fp8(h, 1), {}, []),
        (lambda h: fp8(h).drop(f"{L}.weight_scale"), {}, ["weight_scale-missing"]),
        (lambda h: fp8(h).put(f"{L}.weight", "F8_E5M2", 64, 96), {}, ["weight-dtype"]),
        (lambda h: fp8(h), {"ignore": ["blocks.*"]}, ["ignored-quantised"]),
    ],
)
def test_sglang_fp8_layers(made: Any, keys: Any, expected: list[str], header: Any, judge: Judge) -> None:
    verdict = judge(SGLANG, made(header), modelopt("FP8", **keys))
    assert rules(verdict) == expected
    assert all(v.remedy for v in verdict.all_violations() if v.severity in ("refuse", "trap"))


def test_sglang_names_plain_layers_that_are_not_ignored(header: Any, judge: Judge) -> None:
    made = fp8(header).put("blocks.0.out.weight", "BF16", 64, 64).put("norm.weight", "BF16", 64)
    assert "not-ignored" in rules(judge(SGLANG, made, modelopt("FP8")), "note")
    assert "not-ignored" not in rules(judge(SGLANG, made, modelopt("FP8", ignore=["blocks.0.out"])), "note")


def test_sglang_without_a_declaration(header: Any, judge: Judge) -> None:
    assert rules(judge(SGLANG, fp8(header))) == ["not-declared"]
    assert rules(judge(SGLANG, fp8(header), {"quant_method": "fp8"})) == ["other-method"]
    plain = header().put("a.weight", "BF16", 8, 8)
    assert judge(SGLANG, plain).accepted and rules(judge(SGLANG, plain), "note") == ["unquantised"]


ROWS = {"format_version": "1.1", "quant_configs": {"rowwise-float8_e4m3fn": {"scale_recipe": "rowwise"}}}


@pytest.mark.parametrize(
    ("scale", "entry", "keys", "expected"),
    [
        ((64,), "rowwise-float8_e4m3fn", {}, []),
        ((64, 1), "rowwise-float8_e4m3fn", {}, ["weight_scale-shape"]),
        ((), "rowwise-float8_e4m3fn", {}, ["weight_scale-shape"]),
        ((64,), "rowwise-float8_e4m3fn", {"format_version": "1.0"}, ["format-version"]),
        ((64,), "bf16", {}, ["no-layers", "unlisted-scale"]),
        ((64,), "rowwise-float8_e4m3fn", {"quant_configs": {"rowwise-float8_e4m3fn": {}}}, ["recipe"]),
    ],
)
def test_sglang_rowwise(
    scale: Any, entry: str, keys: Any, expected: list[str], header: Any, judge: Judge
) -> None:
    document = ROWS | {"layers": {L: {"format": entry}, "k": {"format": "bf16"}}} | keys
    verdict = judge(SGLANG, fp8(header, *scale), header={"_quantization_metadata": document})
    assert verdict.config == "RowwiseFp8Config" and rules(verdict) == expected


# ---- vllm-omni

INT8 = {"quant_method": "int8", "is_checkpoint_int8_serialized": True, "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("made", "config", "expected"),
    [
        (lambda h: int8(h, 64, 1), INT8 | {"ignored_layers": ["a"]}, []),
        (lambda h: int8(h, 64), INT8, ["weight_scale-shape"]),
        (lambda h: int8(h), INT8, ["weight_scale-shape"]),
        (lambda h: int8(h, 64, 1, dtype="BF16"), INT8, ["weight_scale-dtype"]),
        (lambda h: int8(h, 64, 1).drop(f"{L}.weight_scale"), INT8, ["weight_scale-missing"]),
        (lambda h: int8(h, 64, 1), {"quant_method": "int8"}, ["not-serialized"]),
        (lambda h: int8(h, 64, 1), INT8 | {"group_size": 128}, ["config-key"]),
        (lambda h: int8(h, 64, 1), INT8 | {"activation_scheme": "static"}, ["activation-scheme"]),
        (
            lambda h: int8(h, 64, 1).mark(L, {"format": "int8_tensorwise", "convrot": True}),
            INT8,
            ["marker-unread"],
        ),
        (lambda h: h().put("a.weight", "BF16", 4, 4), INT8, ["no-layers"]),
        (lambda h: nvfp4(h), modelopt(), []),
        (lambda h: nvfp4(h).put(f"{L}.pre_quant_scale", "BF16", 96), modelopt(), ["pre-quant-scale"]),
        (lambda h: fp8(h, 64), modelopt("FP8"), []),
        (lambda h: fp8(h, 1, 1, 1, 1), modelopt("FP8"), []),
        (lambda h: fp8(h, 64, 1), modelopt("FP8"), ["weight_scale-shape"]),
        (lambda h: fp8(h).drop(f"{L}.weight_scale"), modelopt("FP8"), ["weight_scale-missing"]),
        (lambda h: nvfp4(h), modelopt("W4A8_AWQ"), ["quant-algo"]),
        (lambda h: fp8(h, 64), {"quant_method": "gguf"}, ["no-loader"]),
        (lambda h: fp8(h, 64), {"quant_method": "invented"}, ["method-unknown"]),
        (lambda h: fp8(h, 64), {}, ["not-declared"]),
        (lambda h: fp8(h, 64), None, ["not-declared"]),
    ],
)
def test_vllm_omni(made: Any, config: Any, expected: list[str], header: Any, judge: Judge) -> None:
    assert rules(judge(OMNI, made(header), config)) == expected


def test_vllm_omni_svdquant(header: Any, judge: Judge) -> None:
    made = header().put(f"{L}.qweight", "I8", 128, 64).put(f"{L}.wscales", "F8_E4M3", 8, 128)
    made.put(f"{L}.smooth_factor", "BF16", 128).put(f"{L}.wcscales", "BF16", 128).put(
        f"{L}.wtscale", "BF16", 1
    )
    config = {"quant_method": "svdquant", "precision": "nvfp4", "rank": 32}
    assert judge(OMNI, made, config).accepted
    assert rules(judge(OMNI, made, config | {"precision": "int4"})) == ["precision"]
    assert rules(judge(OMNI, made.drop(f"{L}.wtscale"), config)) == ["wtscale-missing"]


# ---- diffusers


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda h: fp8(h, 64), []),
        (lambda h: fp8(h), ["weight_scale-shape"]),
        (lambda h: fp8(h, 1), ["weight_scale-shape"]),
        (lambda h: fp8(h, 64, 1), ["weight_scale-shape"]),
        (lambda h: int8(h, 64), ["weight-dtype"]),
        (lambda h: nvfp4(h), []),
        (lambda h: nvfp4(h).drop(f"{L}.input_scale"), ["input_scale-missing"]),
        (lambda h: nvfp4(h).put(f"{L}.weight_scale", "F8_E4M3", 128, 8), ["weight_scale-shape"]),
        (lambda h: nvfp4(h, n=128, k=128).mark(L, {"format": "nvfp4"}), ["nvfp4-layout"]),
        (lambda h: h().put(f"{L}.weight", "F8_E4M3", 8, 8), ["no-weight-scale"]),
        (lambda h: fp8(h, 64).put("b.weight", "I8", 8, 8), ["not-declared"]),
        (lambda h: h().put("a.weight", "BF16", 4, 4), []),
    ],
)
def test_diffusers_single_files(made: Any, expected: list[str], header: Any, judge: Judge) -> None:
    verdict = judge(DIFFUSERS, made(header))
    assert rules(verdict) == expected
    if verdict.layers:
        assert rules(verdict, "environment") == ["config-passed"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "bfl"}, ["config-json"]),
        ({"quant_method": "compressed-tensors"}, ["method-unknown"]),
        ({"quant_method": "gguf"}, ["gguf-folder"]),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ["modelopt-layout"]),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, []),
        ({"quant_method": "torchao"}, []),
    ],
)
def test_diffusers_folders(config: Any, expected: list[str], header: Any, judge: Judge) -> None:
    assert rules(judge(DIFFUSERS, fp8(header, 64), config)) == expected


# ---- fastvideo

BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
         "modules_to_not_convert": ["model.visual"]}  # fmt: skip


def block(header: Any, n: int = 256, k: int = 384, dtype: str = "F32") -> Any:
    made = header().put(f"{L}.weight", "F8_E4M3", n, k)
    return made.put(f"{L}.weight_scale_inv", dtype, -(-n // 128), -(-k // 128))


@pytest.mark.parametrize(
    ("made", "config", "expected"),
    [
        (lambda h: block(h), BLOCK, []),
        (lambda h: block(h, n=130), BLOCK, ["shape-multiple", "weight_scale_inv-shape"]),
        (lambda h: block(h, dtype="F8_E8M0"), BLOCK, ["weight_scale_inv-dtype"]),
        (lambda h: block(h), BLOCK | {"modules_to_not_convert": []}, ["modules-to-not-convert"]),
        (lambda h: block(h), BLOCK | {"weight_block_size": [64, 64]}, ["block-size"]),
        (lambda h: block(h), BLOCK | {"activation_scheme": "static"}, ["activation-scheme"]),
        (lambda h: block(h), {"quant_method": "nvfp4"}, ["method"]),
        (lambda h: block(h), None, ["not-declared"]),
        (lambda h: fp8(h).header({L: {"format": "float8_e4m3fn"}}), None, ["no-quant-method"]),
    ],
)
def test_fastvideo(made: Any, config: Any, expected: list[str], header: Any, judge: Judge) -> None:
    assert rules(judge(FASTVIDEO, made(header), config)) == expected


def test_fastvideo_legacy(header: Any, judge: Judge) -> None:
    made = header().put("scaled_fp8", "F8_E4M3", 2).put(f"{L}.weight", "F8_E4M3", 64, 96)
    made.put(f"{L}.scale_weight", "F32").put(f"{L}.scale_input", "F32")
    verdict = judge(FASTVIDEO, made)
    assert verdict.accepted and rules(verdict, "environment") == ["override"]
    assert rules(judge(FASTVIDEO, made.drop(f"{L}.scale_input"))) == ["scale_input-missing"]


# ---- LightX2V


def lightx2v_nvfp4(header: Any, *scalars: str) -> Any:
    made = header().put(f"{L}.weight", "U8", 48, 48).put(f"{L}.weight_scale", "F8_E4M3", 128, 8)
    for suffix in scalars:
        made.put(f"{L}.{suffix}", "F32")
    return made


@pytest.mark.parametrize(
    ("made", "expected", "config"),
    [
        (lambda h: int8(h, 64, 1), [], "int8"),
        (lambda h: int8(h, 64, 1, dtype="BF16"), [], "int8"),
        (lambda h: int8(h, 64), ["weight_scale-shape"], "int8"),
        (lambda h: int8(h, 64, 1).mark(L, {"format": "int8_tensorwise", "convrot": True}), ["marker-convrot"], "int8"),
        (lambda h: fp8(h, 64, 1), [], "fp8"),
        (lambda h: fp8(h), ["input_scale-missing"], "fp8"),
        (lambda h: fp8(h).put(f"{L}.input_scale", "F32"), [], "fp8"),
        (lambda h: fp8(h, 2, 3, n=256, k=384), [], "fp8"),
        (lambda h: lightx2v_nvfp4(h, "alpha", "input_global_scale"), [], "nvfp4"),
        (lambda h: lightx2v_nvfp4(h, "weight_global_scale", "input_absmax"), [], "nvfp4"),
        (lambda h: lightx2v_nvfp4(h, "weight_global_scale"), [], "nvfp4"),
        (lambda h: lightx2v_nvfp4(h, "weight_scale_2", "input_scale"), ["global-scale"], "nvfp4"),
        (lambda h: nvfp4(h), ["weight_scale-shape", "global-scale"], "nvfp4"),
        (lambda h: fp8(h, 64, 1).put("b.weight", "I8", 8, 8).put("b.weight_scale", "F32", 8, 1),
         ["scheme-mixture"], None),
        (lambda h: h().put("a.weight", "BF16", 4, 4), [], None),
    ],
)  # fmt: skip
def test_lightx2v(made: Any, expected: list[str], config: str | None, header: Any, judge: Judge) -> None:
    verdict = judge(LIGHTX2V, made(header))
    assert rules(verdict) == expected
    if config is not None:
        assert verdict.config == config


def test_lightx2v_wants_calibration_for_what_has_none(header: Any, judge: Judge) -> None:
    verdict = judge(LIGHTX2V, lightx2v_nvfp4(header, "weight_global_scale"))
    assert rules(verdict, "environment") == ["scheme-named", "calibration"]


# ---- what planning asks


def test_planning() -> None:
    assert contracts_of("modelopt_nvfp4") == (SGLANG,)
    assert contracts_of("comfy_nvfp4") == ("sglang-0.5.23", "sglang-0132848")
    assert contracts_of("nowhere") == ()
    sglang = get_contract(SGLANG)
    assert sglang.layer_refusal("modelopt_nvfp4", "linear", "modelopt_nvfp4", 64, 96, {}) is None
    assert "multiple of 16" in str(sglang.layer_refusal("modelopt_nvfp4", "linear", "nvfp4", 64, 40, {}))
    assert sglang.layer_refusal("modelopt_nvfp4", "linear", "bf16", 64, 40, {}) is None
    assert sglang.layer_refusal("modelopt_fp8", "linear", "float8", 7, 13, {}) is None
    for name, config in (
        (OMNI, "vllm_omni_int8"),
        (DIFFUSERS, "diffusers_bfl_fp8"),
        (LIGHTX2V, "lightx2v_fp8"),
    ):
        contract = get_contract(name)
        assert contract.layer_refusal(config, "linear", "int8", 64, 96, {}) is None
        assert contract.layer_refusal(config, "embedding", "int8", 64, 96, {}) is not None
        (violation,) = contract.marker_violations(config, "linear", L, {"convrot": True}, None)
        assert violation.severity == "trap"
        assert contract.format_set_violations(config, ["nvfp4"]) == []


def test_thresholds_know_layers_without_markers() -> None:
    from qconvert.runtime.verify import default_threshold

    assert default_threshold("nvfp4") == default_threshold("modelopt_nvfp4") == 14.0
    assert default_threshold("compressed_packed") == 8.0
    assert default_threshold("BF16") == 40.0
    assert default_threshold("rowwise-float8_e4m3fn") == default_threshold("float8") == 15.0


def test_families_see_layers_under_every_name_of_their_codes() -> None:
    from qconvert.formats.tensors import Spec
    from qconvert.runtime.families.names import Names

    tensors = {
        f"x.{i}{codes}": Spec("U8", (4, 4)) for i, codes in enumerate((".weight_packed", "._weight_qdata"))
    }
    assert {"0", "1"} <= Names("x.", tensors).layers()
