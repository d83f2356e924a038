"""What a family file may say, and what runtimes do with each family."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest
from qconvert.formats.tensors import Spec
from qconvert.runtime.families import (
    FamilyDataError,
    FamilyMatch,
    canonical_format,
    detect,
    load_families,
    load_heads,
)
from qconvert.runtime.families.names import strings
from qconvert.runtime.families.schema import parse_common, parse_family

SKELETONS = Path(__file__).parents[1] / "data" / "skeletons"
SGLANG = "sglang-0.5.23"

GOOD = """
id = "toy"
title = "Toy"
component = "diffusion"

[[detect]]
required = ['blocks\\.0\\.q\\.weight']
shape = [{ tensor = 'norm\\.weight', one_of = [8, 16] }]

[[variant]]
id = "big"
shape = [{ tensor = 'norm\\.weight', dim = 0, one_of = [16] }]

[[role]]
layers = 'blocks\\.(?P<block>\\d+)\\.q'
kind = "protected"
first = 1
why = "first"

[[role]]
layers = 'blocks\\.\\d+\\.[qk]'
kind = "linear"
variants = ["big"]

[[fused]]
runtime = "sglang"
stem = 'blocks\\.\\d+'
members = ["q", "k"]

[[runtime]]
runtime = "sglang"
formats = ["nvfp4"]
effect = "max_layers"
count = 3
layers = 'blocks\\.(?P<block>\\d+)\\..*'
why = "three"
"""


def test_shipped_patterns_are_sound() -> None:
    assert load_families(trusted=False) == load_families()


def test_a_family_is_told_by_the_head_of_its_file() -> None:
    """All that recognises it stands before anything else."""
    families = load_families()
    assert [(f.id, f.component, f.detections) for f in families] == [tuple(head) for head in load_heads()]
    assert len({family.id for family in families}) == len(families) >= 25


def test_a_good_file() -> None:
    family = parse_family(GOOD, "toy.toml")
    assert (family.id, family.component, len(family.roles)) == ("toy", "diffusion", 2)
    assert family.roles[0].first == 1
    assert family.runtime_rules[0].formats == frozenset({"nvfp4"})


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('title = "Toy"', 'title = "Toy"\ntitel = "x"', "unknown key 'titel'"),
        ('why = "first"', 'why = "first"\nlast_blocks = 2', r"\[\[role\]\] 1: unknown key 'last_blocks'"),
        ("one_of = [8, 16] }", "one_of = [8, 16], axis = 1 }", "unknown key 'axis'"),
        ("blocks\\.\\d+\\.[qk]", "blocks\\.(\\d+\\.[qk]", "no regular expression"),
        ("blocks\\.\\d+\\.[qk]", "(?:blocks\\.\\d+)+", "must be plain"),
        ("blocks\\.\\d+\\.[qk]", "(?!blocks).*", "must be plain"),
        ("blocks\\.\\d+\\.[qk]", "(b)locks\\1", "must be plain"),
        ('kind = "linear"', 'kind = "lineal"', "'kind' is 'lineal', expected one of linear"),
        ('component = "diffusion"', 'component = "unet"', "expected one of diffusion, text_encoder, vae"),
        ('component = "diffusion"', "", "'component' is missing"),
        ('why = "first"', "", "needs a 'why'"),
        ('why = "first"', 'why = ""', "'why' is empty"),
        ('why = "three"', "", "'why' is missing"),
        ("(?P<block>\\d+)\\.q", "\\d+\\.q", "a group named 'block'"),
        ("(?P<block>\\d+)\\..*", "\\d+\\..*", "a group named 'block'"),
        ("count = 3", "", "needs a 'count'"),
        ("count = 3", "count = true", "must be int, found bool"),
        ("first = 1", "first = -1", "negative"),
        ('variants = ["big"]', 'variants = ["huge"]', "unknown variant huge"),
        ('formats = ["nvfp4"]', 'formats = ["nvfp44"]', "unknown format nvfp44"),
        ('formats = ["nvfp4"]', 'formats = "nvfp4"', "must be list, found str"),
        ('effect = "max_layers"', 'effect = "explode"', "expected one of keep_unquantised"),
        ('effect = "max_layers"', 'effect = "note"', "unknown key 'count', 'layers'"),
        ('members = ["q", "k"]', 'members = ["q"]', "at least two"),
        ("required = ['blocks\\.0\\.q\\.weight']", "forbidden = ['x']", "'required' is missing"),
        ("one_of = [8, 16]", "one_of = [8, '16']", "list of integers"),
        ("one_of = [8, 16]", "dim = 0", "either 'one_of' or 'none_of'"),
        ("one_of = [8, 16]", "one_of = [8], none_of = [9]", "either 'one_of' or 'none_of'"),
        ('id = "big"', 'id = "big"\nprefixes = ["x"]', "takes no 'prefixes'"),
        ('id = "toy"', 'id = "toy', "Illegal character"),
        ('runtime = "sglang"\nstem', 'runtime = "slang"\nstem', "'runtime' is 'slang'"),
    ],
)
def test_mistakes_are_named(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(FamilyDataError, match=says) as caught:
        parse_family(GOOD.replace(old, new), "toy.toml")
    assert str(caught.value).startswith("toy.toml")


def test_a_family_needs_detection_and_roles() -> None:
    top = 'id = "x"\ntitle = "X"\ncomponent = "vae"\n'
    with pytest.raises(FamilyDataError, match=r"no \[\[detect\]\]"):
        parse_family(top, "x.toml")
    with pytest.raises(FamilyDataError, match=r"no \[\[role\]\]"):
        parse_family(top + "[[detect]]\nrequired = ['a']\n", "x.toml")


def test_common_rules() -> None:
    text = """
[[runtime]]
component = "diffusion"
except = ["b"]
runtime = "sglang"
effect = "note"
why = "said"
"""
    rules = parse_common(text, "common.toml", {"a": "diffusion", "b": "diffusion", "c": "vae"})
    assert {family: len(found) for family, found in rules.items()} == {"a": 1, "b": 0, "c": 0}
    with pytest.raises(FamilyDataError, match="unknown family z"):
        parse_common(text.replace('"b"', '"z"'), "common.toml", {"a": "diffusion"})
    with pytest.raises(FamilyDataError, match="unknown key 'extra'"):
        parse_common(text + "extra = 1", "common.toml", {"a": "diffusion", "b": "diffusion"})


def numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        found += range(int(first), int(last or first) + 1)
    return found


def match_of(name: str, prefix: str = "", drop: str = "$^") -> FamilyMatch:
    """The single match of a skeleton under a prefix, without the names that `drop` is found in."""
    header: dict[str, Spec] = {}
    for key, text in json.loads((SKELETONS / f"{name}.json").read_text())["tensors"].items():
        dtype, *shape = text.split()
        pattern = re.sub(r"\{[^}]*\}", "{}", key)
        for choice in product(*map(numbers, re.findall(r"\{([^}]*)\}", key))):
            stored = prefix + pattern.format(*choice)
            if not re.search(drop, stored):
                header[stored] = Spec(dtype, tuple(map(int, shape)))
    (match,) = detect(header)
    return match


def test_qwen3_vl_of_minimax_h3_in_sglang() -> None:
    match = match_of("qwen3vl_32b_minimax_h3")
    for target in ("nvfp4", "asym_w4a8_int8", "convrot_int8", "float8"):
        rules = match.runtime_rules(SGLANG, target)
        assert "vision" in (rules.keep_unquantised("visual.blocks.3.attn.qkv") or "")
        assert "lm_head" in (rules.keep_unquantised("lm_head") or "")
        assert "50" in (rules.keep_unquantised("model.layers.50.mlp.up_proj") or "")
        assert rules.beyond("model.layers.63.mlp.up_proj")
        assert not rules.beyond("visual.blocks.63.mlp.linear_fc1")
        assert rules.keep_unquantised("model.layers.49.mlp.up_proj") is None
        assert rules.keep_unquantised("model.embed_tokens") is None
        assert rules.max_layers() == 50
        assert "one .safetensors" in (rules.single_file() or "")
        assert rules.refuse_target() is None
        assert rules.strip_prefix() is None
        assert rules.missing() == ()
        assert match.fused_groups([f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]) == []
    assert "weight_scale_inv" in (match.runtime_rules("sglang", "mxfp8").refuse_target() or "")
    assert match.runtime_rules("comfyui", "nvfp4").rules == ()
    assert match.runtime_rules("vllm-omni", "int8").refuse_target()
    blind = match_of("qwen3vl_32b_minimax_h3", drop="visual")
    assert (blind.family.id, blind.variant) == ("qwen3_vl", "minimax_h3")
    assert "vision tower" in blind.runtime_rules(SGLANG, "nvfp4").missing()[0]
    wrapped = match_of("qwen3vl_32b_minimax_h3", prefix="text_encoders.qwen3vl_32b.transformer.")
    layer = "text_encoders.qwen3vl_32b.transformer.visual.blocks.3.attn.qkv"
    assert wrapped.runtime_rules(SGLANG, "nvfp4").strip_prefix()
    assert wrapped.runtime_rules(SGLANG, "nvfp4").keep_unquantised(layer)
    # The 8B model is another encoder in sglang: no limit of layers.
    other = match_of("qwen3vl_8b").runtime_rules(SGLANG, "nvfp4")
    assert (other.max_layers(), other.missing()) == (None, ())
    assert other.keep_unquantised("model.visual.blocks.3.attn.qkv")


def test_a_tiny_model_of_the_same_form_has_the_same_rules() -> None:
    """No width is asked of MiniMax-H3's encoder: what tells is the missing final norm."""
    header = {
        "model.embed_tokens.weight": Spec("BF16", (320, 256)),
        "model.layers.0.input_layernorm.weight": Spec("BF16", (256,)),
        "model.layers.0.self_attn.q_norm.weight": Spec("BF16", (64,)),
        "model.layers.0.self_attn.q_proj.weight": Spec("I8", (256, 128)),
        "model.layers.0.mlp.gate_proj.weight": Spec("I8", (512, 128)),
        "visual.blocks.0.attn.qkv.weight": Spec("BF16", (96, 32)),
        "visual.merger.norm.weight": Spec("BF16", (32,)),
    }
    (match,) = detect(header)
    assert (match.family.id, match.variant) == ("qwen3_vl", "minimax_h3")
    (match,) = detect({**header, "model.norm.weight": Spec("BF16", (256,))})
    assert (match.family.id, match.variant) == ("qwen3_vl", None)
    (match,) = detect({name: spec for name, spec in header.items() if "visual" not in name})
    assert (match.family.id, match.variant) == ("qwen3_vl", "minimax_h3")
    assert len(match.runtime_rules(SGLANG, "w4a8").missing()) == 1


def test_a_cut_qwen3_stays_a_qwen3() -> None:
    match = match_of("qwen3_4b", drop=r"layers\.(2[7-9]|3\d)|model\.norm")
    assert (match.family.id, match.variant) == ("qwen3", "4B")


def test_qwen_image_21_in_sglang() -> None:
    match = match_of("qwen_image_21")
    gate, out = ("transformer_blocks.0.img_mlp.gate_up", "transformer_blocks.0.img_mlp.out")
    for target, splits in (("int8", True), ("w4a4", True), ("w4a8", False), ("comfy_fp8", False)):
        rules = match.runtime_rules(SGLANG, target)
        assert (rules.keep_unquantised(gate) is None) == splits
        assert rules.keep_unquantised(out) is None
        for outside in ("txt_in.in_layer", "img_in", "proj_out", "modulation.1", "norm_out.linear"):
            assert "outside the blocks" in (rules.keep_unquantised(outside) or "")
        assert rules.refuse_target() is None
        assert rules.strip_prefix() is None
        assert rules.notes() == () and rules.not_served() is None
    assert "nvfp4" in (match.runtime_rules(SGLANG, "comfy_nvfp4").refuse_target() or "")
    assert match.runtime_rules(SGLANG, "mxfp8").refuse_target()
    wrapped = match_of("qwen_image_21", prefix="model.diffusion_model.").runtime_rules(SGLANG, "int8")
    assert "bare names" in (wrapped.strip_prefix() or "")
    assert match.runtime_rules("comfyui", "nvfp4").refuse_target() is None


def test_z_image_and_minimax_h3_in_sglang() -> None:
    match = match_of("z_image")
    rules = match.runtime_rules(SGLANG, "int8")
    assert "scales would be lost" in (rules.keep_unquantised("layers.3.attention.qkv") or "")
    assert rules.keep_unquantised("layers.3.attention.out") is None
    assert "no supported native quantization declaration" in (rules.not_served() or "")
    assert match.fused_groups(["layers.0.feed_forward.w3", "layers.0.feed_forward.w1"]) == [
        ("layers.0.feed_forward.w1", "layers.0.feed_forward.w3")
    ]
    match = match_of("minimax_h3_full", prefix="model.diffusion_model.")
    for target in ("mxfp8", "nvfp4", "int8", "w4a8", "float8"):
        rules = match.runtime_rules(SGLANG, target)
        assert (rules.refuse_target(), rules.strip_prefix()) == (None, None)
        assert bool(rules.notes()) == (target != "int8") and rules.not_served() is None
        assert rules.keep_unquantised("model.diffusion_model.final_layer.video_out")
        assert rules.keep_unquantised("model.diffusion_model.blocks.7.mlp.fc2") is None
        qkv = rules.no_full_precision("model.diffusion_model.blocks.7.attn.qkv_proj")
        assert (qkv is not None) == (target == "float8")
    assert (
        match.runtime_rules(SGLANG, "float8").no_full_precision("model.diffusion_model.blocks.7.mlp.fc2")
        is None
    )


def test_pruned_adaln_stays() -> None:
    assert match_of("minimax_h3_full").role("blocks.3.adaln_proj.linear").kind == "linear"
    pruned = match_of("minimax_h3_pruned").role("blocks.3.adaln_proj.linear")
    assert (pruned.kind, pruned.quantise) == ("protected", False)


def test_fused_groups_keep_prefix_and_order() -> None:
    match = match_of("qwen3_4b", prefix="text_encoders.qwen3_4b.transformer.")
    base = "text_encoders.qwen3_4b.transformer.model.layers"
    layers = [f"{base}.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "vkqo"] + [f"{base}.0.mlp.up_proj"]
    assert match.fused_groups(layers) == [
        tuple(f"{base}.{i}.self_attn.{x}_proj" for x in "qkv") for i in (0, 1)
    ]
    assert match.fused_groups([*layers, f"{base}.0.mlp.gate_proj"])[-1] == (
        f"{base}.0.mlp.gate_proj",
        f"{base}.0.mlp.up_proj",
    )
    assert match.fused_groups([f"{base}.0.self_attn.q_proj", "elsewhere.k_proj"]) == []
    assert match.fused_groups(layers, runtime="comfyui") == []


def test_patterns_that_are_lists_of_strings() -> None:
    assert strings(r"a\.(?:b|c(?:d|e)?)\.f") == ("a.b.f", "a.c.f", "a.cd.f", "a.ce.f")
    assert strings(r"(?:x\.)?y|z") == ("y", "x.y", "z")
    assert strings(r"ab?") == ("a", "ab")
    for more in (r"a\d", r"a.b", r"a*", r"[ab]", r"(a|b)", r"a??", "".join(f"(?:{x})?" for x in "abcdefg")):
        assert strings(more) is None
    for family in load_families():
        for rule in (*family.detections, *(variant.detection for variant in family.variants)):
            patterns = (*rule.required, *rule.forbidden, *(shape.tensor for shape in rule.shapes))
            for pattern in patterns:
                for text in strings(pattern.pattern) or ():
                    assert pattern.fullmatch(text)


def test_names_of_formats_and_versions() -> None:
    assert canonical_format("asym_w4a8_int8") == canonical_format("kitchen_w4a8") == "w4a8"
    assert canonical_format("something_else") == "something_else"
    match = match_of("t5_xxl")
    for runtime in ("sglang", "sglang-0.5.23", "sglang-0132848"):
        assert match.runtime_rules(runtime, "something_else").single_file()
        assert match.runtime_rules(runtime, "something_else").refuse_target() is None
    assert match.runtime_rules("sglangish", "mxfp8").rules == ()
    assert "Qwen3-VL's encoder only" in str(match.runtime_rules("sglang", "w4a8").not_served())
    assert match_of("qwen3vl_8b").runtime_rules("sglang", "w4a8").not_served() is None


def test_every_text_for_people_is_one_line_without_a_full_stop() -> None:
    for family in load_families():
        reasons = [rule.why for rule in family.roles] + [rule.why for rule in family.runtime_rules]
        for text in filter(None, reasons):
            assert "\n" not in text and text == text.strip() and not text.endswith(".")
