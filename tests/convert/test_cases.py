"""Broken and mixed checkpoints as people report them: what comes out is as close as encoding the true values."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.convert.actions import LOSSLESS
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.values import change_basis, decode_rows
from qconvert.runtime.contracts.registry import get_contract

#: case -> its target
CASES = {
    "nvfp4_no_marker": "comfy_nvfp4",
    "nul_marker_awq": "comfy_nvfp4",
    "scales_in_bf16": "comfy_fp8",
    "fp8_plain_cast": "comfy_nvfp4",
    "scaled_fp8_legacy": "comfy_fp8",
    "mixed_recipes": "comfy_nvfp4",
    "sym_w4a8": "kitchen_w4a8",
    "int8_row_plain_linears": "convrot_int8",
    "w4a4_scale_2d": "kitchen_w4a4",
    "header_tensor_conflict": "comfy_nvfp4",
    "fp8_e5m2": "comfy_fp8",
    "odd_shapes": "kitchen_w4a8",
    "zeros_and_tiny": "comfy_nvfp4",
    "w4a8_to_nvfp4_embedding_wrong": "comfy_nvfp4",
    "embedding_fp8": "comfy_nvfp4",
}
#: Tensors that carry a layer's values beside the weight.
SCALES = ("weight_scale", "weight_scale_2", "weight_s_rel", "weight_s_channel", "weight_codebook")


@pytest.fixture(scope="session")
def cases(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, written by their own script."""
    folder = tmp_path_factory.mktemp("cases")
    script = shared / "cases" / "make_cases.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder


def test_every_case_is_here(cases: Path) -> None:
    made = {path.parent.name: json.loads(path.read_text())["target"] for path in cases.glob("*/case.json")}
    assert made == CASES


@pytest.mark.parametrize("name", CASES)
def test_case(
    name: str, cases: Path, d: ModuleType, writing: ModuleType, convert: Callable[..., Any], backend: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    folder = cases / name
    case = json.loads((folder / "case.json").read_text())
    source = folder / "source.safetensors"
    if not source.exists():
        source = folder
    strict = tmp_path / "strict.safetensors"
    if case["guess"]:
        with pytest.raises(QConvertError, match="--strict refuses a guess"):
            convert(source, case["target"], strict, strict=True)
        assert not strict.exists()
    else:
        assert convert(source, case["target"], strict, strict=True).output == strict
    outcome = convert(source, case["target"], tmp_path / "out.safetensors", jobs=2)
    reference = d.read(folder / "reference.safetensors")
    lossless = 0
    with opened(outcome.output) as written:
        verdict = get_contract("sglang-0.5.23").check(written.view())
        assert verdict.accepted, [violation.line() for violation in verdict.all_violations()]
        there = take_inventory(written)
        assert there.all_findings() == []
        for action in outcome.plan.actions:
            weight = f"{action.prefix}.weight"
            if weight not in reference:
                assert action.kind == "keep", action.prefix
                continue
            values = d.widen(reference[weight])
            layer = there.layers[action.prefix]
            got = decode_rows(layer, LayerReader(written, layer), 0, layer.n, backend)
            got = got.reshape(values.shape)
            assert np.isfinite(got).all()
            if action.kind in LOSSLESS:
                lossless += action.layer.quantised
                assert np.abs(got - values).max() <= 2e-6 * np.abs(values).max(), action.prefix
                continue
            codes = writing.encode(action.codec.name, action.options, values, backend)
            direct = action.codec.decode(codes, action.options, backend)
            direct = change_basis(direct, action.codec.rotation(action.options), 0, backend)
            assert d.sqnr(values, got) >= d.sqnr(values, direct) - 0.1, action.prefix
        assert set(reference) >= {f"{name}.weight" for name in there.layers if f"{name}.weight" in reference}
    # Every weight of the source is there, whatever became of it.
    with opened(source) as before:
        names = {n.removeprefix(outcome.plan.strip) for n in before.tensors if n.endswith(".weight")}
    assert names == {f"{prefix}.weight" for prefix in there.layers}
    if case["lossless"]:
        quantised = [action for action in outcome.plan.actions if action.layer.quantised]
        assert lossless == len(quantised) == 7
        check_same_codes(d, source, outcome)


def check_same_codes(d: ModuleType, source: Path, outcome: Any) -> None:
    """Weights and scales carry the same values bit for bit; only signed nibbles are stored as offset ones."""
    before, after = d.read(source), d.read(outcome.output)
    for action in outcome.plan.actions:
        if not action.layer.quantised:
            continue
        signed = action.layer.options.get("signed", False)
        a = before[f"{action.layer.prefix}.weight"].bits.view(np.uint8)
        b = after[f"{action.prefix}.weight"].bits.view(np.uint8)
        assert np.array_equal(a ^ np.uint8(0x88 if signed else 0), b), action.prefix
        for suffix in SCALES:
            name = f"{action.layer.prefix}.{suffix}"
            old = before.get(name) or before.get(name.replace("weight_scale", "scale_weight"))
            if old is not None:
                new = after[f"{action.prefix}.{suffix}"]
                assert np.array_equal(d.widen(old).reshape(-1), d.widen(new).reshape(-1)), name


def test_what_the_cases_say_of_companions(cases: Path, d: ModuleType, convert: Any, tmp_path: Path) -> None:
    def after(name: str) -> tuple[dict[str, Any], Any]:
        source = cases / name / "source.safetensors"
        outcome = convert(source, CASES[name], tmp_path / f"{name}.safetensors")
        return d.read(outcome.output), outcome

    tensors, outcome = after("nvfp4_no_marker")
    assert not any(name.endswith("input_scale") for name in tensors)
    dropped = [drop for drop in outcome.plan.drops if drop.tensor.endswith("input_scale")]
    assert len(dropped) == 7 and all(drop.reason for drop in dropped)
    tensors, outcome = after("nul_marker_awq")
    assert sum(name.endswith("pre_quant_scale") for name in tensors) == 2
    assert "model.embed_tokens.comfy_quant" not in tensors
    assert [drop.tensor for drop in outcome.plan.drops] == ["model.embed_tokens.comfy_quant"]
    tensors, outcome = after("scaled_fp8_legacy")
    assert not any(name.endswith(("scale_weight", "scale_input", "input_scale")) for name in tensors)
    assert "scaled_fp8" not in tensors
    markers = [json.loads(t.bits.tobytes()) for name, t in tensors.items() if name.endswith("comfy_quant")]
    assert markers == [{"format": "float8_e4m3fn", "full_precision_matrix_mult": True}] * 7
    tensors, _ = after("scales_in_bf16")
    assert {t.dtype for name, t in tensors.items() if name.endswith("weight_scale")} == {"F32"}
    tensors, _ = after("w4a4_scale_2d")
    assert all(t.bits.ndim == 1 for name, t in tensors.items() if name.endswith("weight_scale"))
    tensors, _ = after("fp8_plain_cast")
    assert not any(name.startswith("model.diffusion_model.") for name in tensors)
    for name in ("embedding_fp8", "w4a8_to_nvfp4_embedding_wrong", "mixed_recipes"):
        tensors, _ = after(name)
        marker = json.loads(tensors["model.embed_tokens.comfy_quant"].bits.tobytes())
        assert marker == {"format": "int8_tensorwise"}
        rows = len(tensors["model.embed_tokens.weight"].bits)
        assert tensors["model.embed_tokens.weight_scale"].bits.shape == (rows, 1)
    tensors, outcome = after("zeros_and_tiny")
    with opened(outcome.output) as written:
        layer = take_inventory(written).layers["blocks.0.zero_row"]
        from qconvert.kernels.select import get_backend

        values = decode_rows(layer, LayerReader(written, layer), 0, layer.n, get_backend("cpu"))
    assert not values[5].any() and np.abs(values[[4, 6]]).max() > 0


def test_the_trap_is_named_before_it_is_mended(cases: Path) -> None:
    """int8 rows without ConvRot look like an embedding's to sglang."""
    with opened(cases / "int8_row_plain_linears" / "source.safetensors") as checkpoint:
        verdict = get_contract("sglang-0.5.23").check(checkpoint.view())
    assert not verdict.accepted
    assert {v.severity for v in verdict.all_violations() if v.rule == "int8-linear-unrotated"} == {"trap"}
