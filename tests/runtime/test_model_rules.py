"""What loaders of known models refuse beyond the format, seen by `check` in a finished file."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from qconvert.runtime.contracts.base import Violation
from qconvert.runtime.contracts.registry import get_contract
from qconvert.runtime.model_rules import model_violations

SKELETONS = Path(__file__).parents[1] / "data" / "skeletons"


def expand(name: str) -> list[str]:
    choices = []
    for part in re.split(r"(\{[^}]*\})", name):
        span = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", part)
        if span:
            choices.append([str(i) for i in range(int(span[1]), int(span[2]) + 1)])
        else:
            choices.append(part[1:-1].split(",") if part.startswith("{") else [part])
    return ["".join(item) for item in product(*choices)]


class Model:
    """A skeleton as a header, of which some layers can be quantised."""

    def __init__(self, header: Any, name: str, prefix: str = "") -> None:
        self.made, self.prefix = header(), prefix
        for pattern, text in json.loads((SKELETONS / f"{name}.json").read_text())["tensors"].items():
            dtype, *shape = text.split()
            for key in expand(pattern):
                self.made.put(prefix + key, dtype, *map(int, shape))

    def mark(self, maker: str, *layers: str, **keys: Any) -> Model:
        for layer in layers:
            n, k = self.made.tensors[f"{self.prefix}{layer}.weight"].shape
            getattr(self.made, maker)(self.prefix + layer, n, k, **keys)
        return self

    def judge(self, runtime: str = "sglang-0.5.23") -> list[Violation]:
        view, contract = self.made.view(), get_contract(runtime)
        found = model_violations(view, contract, contract.check(view))
        return [violation for violation in found if violation.severity != "note"]


@pytest.fixture
def model(header: Any) -> Any:
    return lambda name, prefix="": Model(header, name, prefix)


H3 = "qwen3vl_32b_minimax_h3"
UP = "model.layers.0.mlp.up_proj"


def test_a_right_text_encoder(model: Any) -> None:
    assert model(H3).mark("nvfp4", UP, "model.layers.49.mlp.down_proj").judge() == []


def test_a_marked_vision_tower_is_refused(model: Any) -> None:
    (violation,) = model(H3).mark("nvfp4", UP, "visual.blocks.0.attn.proj").judge()
    assert violation.rule == "model-layer" and violation.layer == "visual.blocks.0.attn.proj"
    assert "vision tower unquantised" in violation.message


def test_a_missing_vision_tower_is_refused(model: Any) -> None:
    found = model(H3).mark("nvfp4", UP)
    found.made.drop(*[name for name in found.made.tensors if name.startswith("visual.")])
    (violation,) = found.judge()
    assert violation.rule == "model-missing"


def test_layers_beyond_those_kept(model: Any) -> None:
    found = model(H3).mark("nvfp4", UP)
    for name, spec in list(found.made.tensors.items()):
        if name.startswith("model.layers.0."):
            found.made.put(name.replace("layers.0.", "layers.63."), spec.dtype, *spec.shape)
    found.made.mark("model.layers.63.mlp.up_proj", {"format": "nvfp4", "full_precision_matrix_mult": True})
    assert [violation.layer for violation in found.judge()] == ["model.layers.63.mlp.up_proj"]
    view, contract = found.made.view(), get_contract("sglang-0.5.23")
    notes = [
        v.message for v in model_violations(view, contract, contract.check(view)) if v.severity == "note"
    ]
    assert any("--keep-layers 50 leaves them out" in note for note in notes)


def test_shards_of_a_text_encoder(model: Any) -> None:
    found = model(H3).mark("nvfp4", UP)
    found.made.files = ("a.safetensors", "b.safetensors")
    assert [violation.rule for violation in found.judge()] == ["model-one-file"]


def test_a_format_that_the_family_cannot_take(model: Any) -> None:
    assert "model-format" in {v.rule for v in model(H3).mark("mxfp8", UP).judge()}
    layer = "transformer_blocks.0.img_mlp.gate_up"
    assert "model-format" in {v.rule for v in model("qwen_image_21").mark("nvfp4", layer).judge()}


def test_qwen_image_wants_bare_names_and_plain_outer_layers(model: Any) -> None:
    inner = (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.to_k",
        "transformer_blocks.0.attn.to_v",
    )
    assert model("qwen_image_21").mark("int8", *inner).judge() == []
    found = model("qwen_image_21", "model.diffusion_model.").mark("int8", *inner)
    assert [violation.rule for violation in found.judge()] == ["model-prefix"]
    (violation,) = model("qwen_image_21").mark("int8", *inner, "txt_in.in_layer").judge()
    assert (violation.rule, violation.layer) == ("model-layer", "txt_in.in_layer")


def test_layers_that_become_one(model: Any) -> None:
    names = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]
    found = model("qwen3_8b").mark("int8", *names)
    assert found.judge() == []
    (violation,) = model("qwen3_8b").mark("int8", *names[:2]).judge()
    assert (
        violation.rule == "model-fused" and violation.found == "int8_tensorwise, int8_tensorwise, unquantised"
    )
    (violation,) = model("qwen3_8b").mark("nvfp4", *names).judge()
    assert violation.rule == "model-fused" and "full-precision" in violation.message
    assert model("qwen3_8b").mark("nvfp4", *names, full_precision_matrix_mult=False).judge() == []


def test_unknown_models_break_no_rule(header: Any) -> None:
    view = header().nvfp4("a.b").view()
    contract = get_contract("sglang-0.5.23")
    assert model_violations(view, contract, contract.check(view)) == []
