"""Targets of other ecosystems: the tensors and the configuration beside them, from every kind of source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.convert.actions import LOSSLESS
from qconvert.formats.checkpoint import opened
from qconvert.formats.layers import take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.values import decode_rows
from qconvert.runtime.contracts.registry import contracts_of, get_contract
from qconvert.runtime.targets import get_target

FC, OUT, TABLE = "blocks.0.fc", "blocks.0.out", "embed_tokens"
Rng = np.random.Generator

#: target -> type and shape of what stands beside a weight [N, K] = [48, 256], the weight first
TENSORS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "modelopt_nvfp4": {
        "weight": ("U8", (48, 128)), "weight_scale": ("F8_E4M3", (48, 16)), "weight_scale_2": ("F32", ()),
    },
    "modelopt_fp8": {"weight": ("F8_E4M3", (48, 256)), "weight_scale": ("F32", ())},
    "rowwise_fp8": {"weight": ("F8_E4M3", (48, 256)), "weight_scale": ("F32", (48,))},
    "vllm_omni_int8": {"weight": ("I8", (48, 256)), "weight_scale": ("F32", (48, 1))},
    "diffusers_bfl_fp8": {"weight": ("F8_E4M3", (48, 256)), "weight_scale": ("F32", (48,))},
    "diffusers_bfl_nvfp4": {
        "weight": ("U8", (48, 128)), "weight_scale": ("F8_E4M3", (48, 16)), "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    },
    "lightx2v_int8": {"weight": ("I8", (48, 256)), "weight_scale": ("F32", (48, 1))},
    "lightx2v_fp8": {"weight": ("F8_E4M3", (48, 256)), "weight_scale": ("F32", (48, 1))},
    "lightx2v_nvfp4": {
        "weight": ("U8", (48, 128)), "weight_scale": ("F8_E4M3", (128, 16)), "weight_global_scale": ("F32", ()),
    },
}  # fmt: skip
#: Sources whose codes each target takes as they are.
LOSSLESS_FROM = {
    "modelopt_nvfp4": {"nvfp4", "nvfp4_input_scale"},
    "diffusers_bfl_nvfp4": {"nvfp4", "nvfp4_input_scale"},
    "lightx2v_nvfp4": {"nvfp4", "nvfp4_input_scale"},
    "modelopt_fp8": {"fp8", "fp8_input_scale", "fp8_cast"},
    "rowwise_fp8": {"fp8", "fp8_input_scale", "fp8_row", "fp8_cast"},
    "diffusers_bfl_fp8": {"fp8", "fp8_input_scale", "fp8_row", "fp8_cast"},
    "lightx2v_fp8": {"fp8", "fp8_input_scale", "fp8_row", "fp8_cast"},
    "vllm_omni_int8": {"int8_row", "int8_scalar"},
    "lightx2v_int8": {"int8_row", "int8_scalar"},
}
SOURCES = ["bf16", "nvfp4", "nvfp4_input_scale", "nvfp4_pre", "fp8", "fp8_input_scale", "fp8_row", "fp8_cast",
           "int8_row", "int8_scalar", "int8_convrot64", "w4a8"]  # fmt: skip


def make(d: ModuleType, rng: Rng, source: str) -> tuple[dict[str, Any], Any]:
    sample = d.SOURCES[source](rng, d.weights(rng, 48, 256))
    return {
        **sample.named(FC),
        f"{FC}.bias": d.narrow(rng.standard_normal(48), "BF16"),
        f"{OUT}.weight": d.narrow(rng.standard_normal((64, 48)), "BF16"),
        f"{TABLE}.weight": d.narrow(rng.standard_normal((40, 256)), "BF16"),
        "norm.weight": d.f32_tensor(rng.standard_normal(256)),
    }, sample


def folder(tmp_path: Path, target: str) -> Path:
    return tmp_path / ("out" if get_target(target).sidecars else "out.safetensors")


@pytest.mark.parametrize("state", SOURCES)
@pytest.mark.parametrize("other", TENSORS)
def test_tensors_and_values(
    other: str, state: str, d: ModuleType, rng: Rng, write: Callable[..., Path], convert: Callable[..., Any],
    backend: Any, tmp_path: Path,
) -> None:  # fmt: skip
    tensors, sample = make(d, rng, state)
    outcome = convert(write(tensors), other, folder(tmp_path, other), keep=(OUT,) if state == "bf16" else ())
    after = d.read(outcome.output)
    expected = dict(TENSORS[other])
    static = state.endswith("_input_scale") and state.startswith("nvfp4" if "nvfp4" in other else "fp8")
    if static and other == "lightx2v_nvfp4":
        del expected["weight_global_scale"]
        expected |= {"alpha": ("F32", ()), "input_global_scale": ("F32", ())}
    elif static and other in ("modelopt_nvfp4", "modelopt_fp8"):
        expected["input_scale"] = ("F32", ())
    elif static and other == "rowwise_fp8":
        expected["input_scale"] = ("F32", (1,))
    mine = {name.removeprefix(f"{FC}."): t for name, t in after.items() if name.startswith(f"{FC}.")}
    assert {k: (t.dtype, t.bits.shape) for k, t in mine.items() if k != "bias"} == expected
    assert not any(name.endswith("comfy_quant") for name in after)
    for name in (f"{OUT}.weight", f"{TABLE}.weight", "norm.weight", f"{FC}.bias"):
        assert np.array_equal(after[name].bits, tensors[name].bits)
    (action,) = [action for action in outcome.plan.actions if action.prefix == FC]
    assert (action.kind in LOSSLESS) == (state in LOSSLESS_FROM[other]), action.reason
    with opened(outcome.output.parent if get_target(other).sidecars else outcome.output) as checkpoint:
        layer = take_inventory(checkpoint).layers[FC]
        values = decode_rows(layer, LayerReader(checkpoint, layer), 0, layer.n, backend)
        verdict = get_contract(contracts_of(other)[0]).check(checkpoint.view())
        assert verdict.accepted, [v.line() for v in verdict.all_violations()]
    factor = d.widen(sample.tensors["pre_quant_scale"]) if "pre_quant_scale" in sample.tensors else 1.0
    if action.kind in LOSSLESS:
        assert np.allclose(values, sample.values, rtol=3e-7, atol=0)
    else:
        assert d.sqnr(sample.values * factor, values) > (18 if "nvfp4" in other else 28)


def written(
    tmp_path: Path, target: str, d: ModuleType, rng: Rng, write: Any, convert: Any
) -> tuple[Any, Any]:
    tensors, _ = make(d, rng, "fp8")
    path = write(tensors)
    (path.parent / "config.json").write_text(
        json.dumps({"_class_name": "Model", "quantization_config": {"quant_method": "old"}, "hidden": 256})
    )
    outcome = convert(path, target, folder(tmp_path, target))
    return outcome, outcome.output.parent


@pytest.mark.parametrize(("folder_of", "algo"), [("modelopt_nvfp4", "NVFP4"), ("modelopt_fp8", "FP8")])
def test_modelopt_folder(
    folder_of: str, algo: str, d: ModuleType, rng: Rng, write: Any, convert: Any, tmp_path: Path
) -> None:
    outcome, where = written(tmp_path, folder_of, d, rng, write, convert)
    assert outcome.output.name == "diffusion_pytorch_model.safetensors"
    config = json.loads((where / "config.json").read_text())
    assert (config["_class_name"], config["hidden"]) == ("Model", 256)
    document = config["quantization_config"]
    assert (document["quant_method"], document["quant_algo"], document["ignore"]) == ("modelopt", algo, [OUT])
    assert json.loads(d.read_metadata(outcome.output)["quantization_config"]) == document
    if algo == "NVFP4":
        assert document["group_size"] == 16 and document["swap_weight_nibbles"] is False
        assert document["checkpoint_weight_scale_layout"] == "linear"


def test_rowwise_header(d: ModuleType, rng: Rng, write: Any, convert: Any, tmp_path: Path) -> None:
    outcome, _ = written(tmp_path, "rowwise_fp8", d, rng, write, convert)
    document = json.loads(d.read_metadata(outcome.output)["_quantization_metadata"])
    assert document["format_version"] == "1.1"
    assert document["layers"] == {FC: {"format": "rowwise-float8_e4m3fn"}, OUT: {"format": "bf16"}}
    assert document["quant_configs"] == {"rowwise-float8_e4m3fn": {"scale_recipe": "rowwise"}}


def test_configurations_beside(d: ModuleType, rng: Rng, write: Any, convert: Any, tmp_path: Path) -> None:
    _, where = written(tmp_path, "vllm_omni_int8", d, rng, write, convert)
    assert json.loads((where / "config.json").read_text())["quantization_config"] == {
        "quant_method": "int8",
        "is_checkpoint_int8_serialized": True,
        "activation_scheme": "dynamic",
        "ignored_layers": [OUT],
    }


def test_bfl_config_names_no_method(
    d: ModuleType, rng: Rng, write: Any, convert: Any, tmp_path: Path
) -> None:
    outcome, where = written(tmp_path, "diffusers_bfl_nvfp4", d, rng, write, convert)
    assert "quantization_config" not in json.loads((where / "config.json").read_text())
    assert json.loads(d.read_metadata(outcome.output)["quantization_config"])["quant_method"] == "bfl"
    assert d.read(outcome.output)[f"{FC}.input_scale"].bits == 1.0


@pytest.mark.parametrize(("kind", "scheme"), [("int8", "int8-sgl"), ("fp8", "fp8-sgl"), ("nvfp4", "nvfp4")])
def test_lightx2v_json(
    kind: str, scheme: str, d: ModuleType, rng: Rng, write: Any, convert: Any, tmp_path: Path
) -> None:
    outcome, where = written(tmp_path, f"lightx2v_{kind}", d, rng, write, convert)
    document = json.loads((where / "lightx2v.json").read_text())
    assert document == {
        "dit_quantized": True,
        "dit_quant_scheme": scheme,
        "dit_quantized_ckpt": outcome.output.name,
    }


NVFP4_TARGETS = ["modelopt_nvfp4", "diffusers_bfl_nvfp4", "lightx2v_nvfp4"]


@pytest.mark.parametrize("through", NVFP4_TARGETS)
@pytest.mark.parametrize("shape", [(48, 256), (128, 128), (160, 192)])
def test_nvfp4_there_and_back(
    through: str, shape: tuple[int, int], d: ModuleType, rng: Rng, write: Any, convert: Any, tmp_path: Path
) -> None:
    """From ComfyUI into a dialect and back: nibbles and block scales bit for bit, the tensor scale within an ulp."""
    sample = d.SOURCES["nvfp4_input_scale"](rng, d.weights(rng, *shape))
    before = sample.named(FC)
    middle = convert(write(before), through, tmp_path / "middle")
    back = convert(middle.output.parent, "comfyui:nvfp4", tmp_path / "back.safetensors")
    after = d.read(back.output)
    assert [action.kind for action in back.plan.actions] == ["repack"]
    assert not back.plan.drops and not back.plan.guesses
    for suffix in ("weight", "weight_scale"):
        assert np.array_equal(after[f"{FC}.{suffix}"].bits, before[f"{FC}.{suffix}"].bits)
    for suffix in ("weight_scale_2", "input_scale"):
        a, b = (t[f"{FC}.{suffix}"].bits.reshape(1).view(np.int32)[0] for t in (after, before))
        assert abs(int(a) - int(b)) <= 1


def test_reciprocals_are_reported(d: ModuleType, rng: Rng, write: Any, convert: Any, tmp_path: Path) -> None:
    sample = d.SOURCES["nvfp4"](rng, d.weights(rng, 128, 128))
    outcome = convert(write(sample.named(FC)), "lightx2v_nvfp4", tmp_path / "out")
    assert "by way of a reciprocal, within one ulp" in outcome.plan.actions[0].reason


@pytest.mark.parametrize("packed", [True, False])
def test_compressed_integers_become_gptq_without_loss(
    packed: bool, d: ModuleType, rng: Rng, write: Any, convert: Any, backend: Any, tmp_path: Path
) -> None:
    """compressed-tensors' 4-bit groups, packed or one a byte, are GPTQ's codes and scales in other places."""
    codes = rng.integers(0, 16, (128, 256))
    scale = d.narrow(rng.uniform(1e-3, 1e-2, (128, 2)), "BF16")
    weights = {"num_bits": 4, "group_size": 128, "strategy": "group", "type": "int", "symmetric": True}
    tensors = {f"{FC}.weight_scale": scale}
    if packed:
        words = np.ascontiguousarray(d.pack4(codes, False).astype(np.uint8)).view(np.int32)
        tensors[f"{FC}.weight_packed"] = d.T("I32", words)
        tensors[f"{FC}.weight_shape"] = d.T("I64", np.array([128, 256], np.int64))
    else:
        tensors[f"{FC}.weight"] = d.T("I8", (codes - 8).astype(np.int8))
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    path = write(tensors)
    document = {"quant_method": "compressed-tensors", "config_groups": groups}
    (path.parent / "config.json").write_text(json.dumps({"quantization_config": document}))
    outcome = convert(path, "auto_gptq", tmp_path / "out")
    assert [action.kind for action in outcome.plan.actions] == ["repack"]
    with opened(outcome.output.parent) as checkpoint:
        layer = take_inventory(checkpoint).layers[FC]
        values = decode_rows(layer, LayerReader(checkpoint, layer), 0, 128, backend)
    expected = (codes - 8) * np.repeat(d.widen(scale), 128, axis=1)
    assert np.array_equal(values, expected.astype(np.float32))
