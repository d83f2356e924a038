"""Markers as plain dicts, names against a model, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import qconvert.runtime as runtime
from qconvert.formats.errors import UsageError

NVFP4 = {"format": "nvfp4", "full_precision_matrix_mult": True}
ROW = {"format": "int8_tensorwise"}
CONVROT = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
W4A8 = {"format": "asym_w4a8_int8", "group_size": 16, "convrot": True, "convrot_groupsize": 256}
W4A4 = {"format": "convrot_w4a4", "convrot_groupsize": 64, "linear_dtype": "int8"}
FP8 = {"format": "float8_e4m3fn"}
MXFP8 = {"format": "mxfp8"}


def rules(markers: Any, config: str, **options: str) -> list[str]:
    return [v.rule for v in runtime.validate_markers(markers, config, **options)]


def test_right_markers() -> None:
    assert rules({"a.up": NVFP4, "embed_tokens": ROW}, "comfy_nvfp4") == []
    assert rules({"a.up": W4A8, "embed_tokens": ROW}, "kitchen_w4a8") == []
    assert rules({"a.up": W4A4, "a.down": CONVROT}, "kitchen_w4a4") == []
    assert rules({"a.up": CONVROT, "embed_tokens": ROW}, "convrot_int8") == []
    assert rules({"a.up": CONVROT}, "kitchen_int8") == []
    assert rules({"a.up": CONVROT}, "ConvRotInt8Config") == []
    assert rules({"a.up": FP8}, "comfy_fp8") == []
    assert rules({"a.up": MXFP8}, "comfy_mxfp8") == []
    assert rules({"a.up": FP8, "a.down": NVFP4, "embed_tokens": ROW}, "comfyui", runtime="comfyui") == []


def test_wrong_markers() -> None:
    assert rules({"a.up": {"format": "nvfp4"}}, "comfy_nvfp4") == ["nvfp4-native"]
    assert rules({"a.up": {**W4A8, "convrot": False}}, "kitchen_w4a8") == ["w4a8-convrot"]
    assert rules({"a.up": {**W4A4, "convrot_groupsize": 4}}, "kitchen_w4a4") == ["w4a4-rotation"]
    assert rules({"a.up": ROW}, "convrot_int8") == ["int8-linear-unrotated"]
    assert rules({"a.up": NVFP4, "a.down": FP8}, "comfy_nvfp4") == ["format-set", "format-set"]
    assert rules({"a.up": FP8, "embed_tokens": FP8}, "comfy_fp8") == ["embedding-format"]
    assert rules({"a.up": ["nvfp4"]}, "comfy_nvfp4") == ["marker-payload"]
    assert rules({}, "comfy_nvfp4") == ["no-markers"]
    assert rules({"embed_tokens": W4A8}, "comfyui", runtime="comfyui") == ["embedding-format"]


def test_markers_of_another_config() -> None:
    (violation, *_) = runtime.validate_markers({"a.up": CONVROT}, "comfy_nvfp4")
    assert violation.line() == (
        "a file with these formats is taken by ConvRotInt8Config (found int8_tensorwise, expected comfy_nvfp4)"
    )


def test_annotated_markers_tell_the_form_of_the_scale() -> None:
    older = "sglang-0132848"
    row, scalar = ROW | {"_is_rowwise": True}, ROW | {"_is_tensorwise_scalar": True}
    assert rules({"a.up": NVFP4, "embed_tokens": row}, "comfy_nvfp4", runtime=older) == []
    assert rules({"a.up": NVFP4, "embed_tokens": scalar}, "comfy_nvfp4", runtime=older) == ["embedding-scale"]
    assert rules({"a.up": W4A8, "embed_tokens": row}, "kitchen_w4a8", runtime=older) == ["embedding-scale"]
    assert rules({"a.up": W4A8, "embed_tokens": scalar}, "kitchen_w4a8", runtime=older) == []


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match="unknown runtime 'vllm'"):
        runtime.validate_markers({}, "comfy_nvfp4", runtime="vllm")
    with pytest.raises(UsageError, match="has no config 'gguf'"):
        runtime.validate_markers({}, "gguf")


def test_violations_are_structured() -> None:
    (violation,) = runtime.validate_markers({"a.up": {**W4A8, "convrot": "true"}}, "kitchen_w4a8")
    assert (violation.severity, violation.layer, violation.expected) == ("refuse", "a.up", '"convrot": true')


ALL = [NVFP4, ROW, CONVROT, W4A8, W4A4, FP8, MXFP8]


@pytest.mark.parametrize(
    ("predicate", "holds"),
    [
        (runtime.is_comfy_nvfp4_marker, [NVFP4]),
        (runtime.is_comfy_rowwise_int8_marker, [ROW]),
        (runtime.is_comfy_scalar_int8_marker, [ROW]),
        (runtime.is_convrot_int8_marker, [CONVROT]),
        (runtime.is_asym_w4a8_marker, [W4A8]),
        (runtime.is_convrot_w4a4_marker, [W4A4]),
        (runtime.is_comfy_fp8_marker, [FP8]),
        (runtime.is_comfy_mxfp8_marker, [MXFP8]),
    ],
)
def test_predicates(predicate: Any, holds: list[dict[str, Any]]) -> None:
    assert [marker for marker in ALL if predicate(marker)] == holds
    assert not predicate(None) and not predicate({}) and not predicate({"format": ["nvfp4"]})


def test_predicates_are_strict() -> None:
    assert not runtime.is_asym_w4a8_marker({**W4A8, "convrot": 1})
    assert not runtime.is_convrot_int8_marker({**CONVROT, "convrot_groupsize": 128})
    assert not runtime.is_convrot_int8_marker({"format": "int8_tensorwise", "convrot": True})
    assert not runtime.is_convrot_w4a4_marker({**W4A4, "linear_dtype": "fp8"})
    assert not runtime.is_comfy_nvfp4_marker({**NVFP4, "convrot": True})


def test_scale_shapes_tell_rows_from_one_scale() -> None:
    assert runtime.is_comfy_rowwise_int8_marker(ROW, (200, 1))
    assert not runtime.is_comfy_rowwise_int8_marker(ROW, ())
    assert not runtime.is_comfy_rowwise_int8_marker(ROW, (200,))
    assert runtime.is_comfy_scalar_int8_marker(ROW, ())
    assert not runtime.is_comfy_scalar_int8_marker(ROW, (200, 1))


def test_check_names(header: Any) -> None:
    model = ["a.up.weight", "a.up.bias", "embed_tokens.weight", "norm.weight"]
    h = header().nvfp4("a.up").put("a.up.bias", "BF16", 128).table().put("norm.weight", "BF16", 128)
    assert runtime.check_names(h.view(), model) == []
    h.put("model.diffusion_model.norm.weight", "BF16", 128).drop("norm.weight")
    h.put("norm.weight_scale", "F32").put("scaled_fp8", "F8_E4M3", 0)
    lines = [v.line() for v in runtime.check_names(h.view(), model)]
    assert lines == [
        "model.diffusion_model.norm: Parameter model.diffusion_model.norm.weight not found in the model "
        "(found BF16[128])",
        "norm: Parameter norm.weight_scale not found in the model (found F32[])",
        "Parameter scaled_fp8 not found in the model (found F8_E4M3[0])",
        "norm: the file has no tensor norm.weight",
    ]


def test_names_of_markers_in_the_header(header: Any) -> None:
    h = header().fp8("a.up").unmark("a.up").header({"a.up": FP8})
    assert runtime.check_names(h.view(), ["a.up.weight"]) == []


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from qconvert.runtime import validate_markers, get_contract; "
        "validate_markers({'a': {'format': 'nvfp4'}}, 'comfy_nvfp4'); get_contract('comfyui'); "
        "print([name for name in ('torch', 'numba', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = runtime.nothing
