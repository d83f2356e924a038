"""The contract of sglang's ModelOpt path against sglang's own classes; skipped where sglang is not installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from qconvert.runtime.contracts.registry import get_contract

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
safetensors_torch = pytest.importorskip("safetensors.torch")
quantization = pytest.importorskip("sglang.multimodal_gen.runtime.utils.quantization_utils")

CONTRACT = get_contract("sglang-modelopt-0.5.23")
L = "blocks.0.fc"
TYPES = {
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F32": "float32",
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
}


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    """A file of zeros with this header."""

    def make(made: Any, metadata: dict[str, str] | None = None) -> str:
        tensors = {
            name: torch.zeros(spec.shape, dtype=getattr(torch, TYPES[spec.dtype]))
            for name, spec in made.tensors.items()
        }
        path = tmp_path / "model.safetensors"
        safetensors_torch.save_file(tensors, path, metadata)
        return str(path)

    return make


def fp8(header: Any, *scale: int, dtype: str = "F8_E4M3") -> Any:
    return header().put(f"{L}.weight", dtype, 64, 96).put(f"{L}.weight_scale", "F32", *scale)


ROW = "rowwise-float8_e4m3fn"
RECIPE = {ROW: {"scale_recipe": "rowwise"}}
LISTS = [
    {"format_version": "1.1", "quant_configs": RECIPE, "layers": {L: {"format": ROW}}},
    {
        "format_version": "1.1",
        "quant_configs": RECIPE,
        "layers": {L: {"format": ROW}, "b": {"format": "bf16"}},
    },
    {
        "format_version": "1.1",
        "quant_configs": RECIPE,
        "layers": {L: {"format": ROW}, "b": {"format": "int8"}},
    },
    {"format_version": "1.1", "quant_configs": RECIPE, "layers": {L: {"format": ROW}, "c": {"format": ROW}}},
    {"format_version": "1.1", "quant_configs": RECIPE, "layers": {L: {"format": "bf16"}}},
    {"format_version": "1.0", "quant_configs": RECIPE, "layers": {L: {"format": ROW}}},
    {"format_version": "1.1", "quant_configs": {}, "layers": {L: {"format": ROW}}},
    {
        "format_version": "1.1",
        "quant_configs": {ROW: {"scale_recipe": "block"}},
        "layers": {L: {"format": ROW}},
    },
]


@pytest.mark.parametrize("document", LISTS)
@pytest.mark.parametrize("scale", [(64,), (64, 1), ()])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_rowwise(document: Any, scale: Any, dtype: str, header: Any, file: Any) -> None:
    made = fp8(header, *scale, dtype=dtype).put("b.weight", "BF16", 4, 4)
    metadata = {"_quantization_metadata": json.dumps(document)}
    path = file(made, metadata)
    verdict = CONTRACT.check(replace(made.view(), metadata=metadata))
    try:
        accepted = quantization.get_quant_config_from_safetensors_metadata(path) is not None
    except ValueError:
        accepted = False
    assert verdict.accepted == accepted, [v.line() for v in verdict.all_violations()]


@pytest.mark.parametrize(
    "keys",
    [
        {"quant_algo": "NVFP4", "group_size": 16, "ignore": []},
        {"quant_algo": "NVFP4", "group_size": 16},
        {"quant_algo": "NVFP4", "ignore": []},
        {"quant_algo": "NVFP4", "ignore": [], "config_groups": {"g": {"weights": {"group_size": 16}}}},
        {"quant_algo": "NVFP4", "group_size": 16, "ignore": None},
        {"quant_algo": "MIXED_PRECISION", "group_size": 16, "ignore": []},
        {"quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": []},
        {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": []},
    ],
)
def test_nvfp4_configurations(keys: Any, header: Any) -> None:
    document = {"quant_method": "modelopt"} | keys
    made = header().put(f"{L}.weight", "U8", 48, 48).put(f"{L}.weight_scale", "F8_E4M3", 48, 6)
    made.put(f"{L}.weight_scale_2", "F32")
    verdict = CONTRACT.check(replace(made.view(), config={"quantization_config": document}))
    try:
        quantization.get_quant_config({"quantization_config": dict(document)}, ".")
        accepted = True
    except ValueError:
        accepted = False
    assert verdict.accepted == accepted, [v.line() for v in verdict.all_violations()]


@pytest.mark.parametrize("name", ["blocks.0.fc", "double_blocks.0.img_attn.qkv", "single_blocks.2.linear1"])
def test_how_bits_are_read(name: str, header: Any, file: Any) -> None:
    """What sglang infers for nvfp4 that nothing declares, and for names of a packed qkv."""
    made = header().put(f"{name}.weight", "U8", 48, 48).put(f"{name}.weight_scale", "F8_E4M3", 48, 6)
    made.put(f"{name}.weight_scale_2", "F32")
    config = quantization.build_nvfp4_config_from_safetensors_list([file(made)])
    swapped = config.swap_weight_nibbles and config.checkpoint_weight_scale_layout == "swizzled"
    found = [v.rule for v in CONTRACT.check(made.view()).all_violations()]
    assert ("packed-qkv" in found) == swapped
    assert config.group_size == 16
