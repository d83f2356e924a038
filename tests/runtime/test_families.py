"""Every family against true names and shapes: which one a header is, and what its layers are."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache

import pytest
import skeletons
from qconvert.formats.tensors import Spec
from qconvert.runtime.families import FamilyMatch, Role, detect, generic_role, load_families, owner
from qconvert.runtime.families.names import Names

Header = dict[str, Spec]
document, skeleton, prefixed, ALL = (
    skeletons.document,
    skeletons.skeleton,
    skeletons.prefixed,
    skeletons.ALL,
)


def nvfp4(header: Mapping[str, Spec], marked: bool = True) -> Header:
    """As ComfyUI stores it: every matrix that the format can hold packed to half its width, with side tensors."""
    out: Header = {}
    for name, spec in header.items():
        if not (name.endswith(".weight") and len(spec.shape) == 2 and spec.shape[1] % 16 == 0):
            out[name] = spec
            continue
        layer, (n, k) = name.removesuffix(".weight"), spec.shape
        out[name] = Spec("U8", (n, k // 2))
        out[f"{layer}.weight_scale"] = Spec("F8_E4M3", (n, k // 16))
        out[f"{layer}.weight_scale_2"] = Spec("F32", ())
        if marked:
            out[f"{layer}.comfy_quant"] = Spec("U8", (19,))
    return out


def gptq(header: Mapping[str, Spec]) -> Header:
    """No tensor called weight is left of a quantised matrix."""
    out: Header = {}
    for name, spec in header.items():
        if name.endswith("proj.weight") and len(spec.shape) == 2 and spec.shape[1] % 128 == 0:
            layer, (n, k) = name.removesuffix(".weight"), spec.shape
            out[f"{layer}.qweight"] = Spec("I32", (k // 8, n))
            out[f"{layer}.scales"] = Spec("F16", (k // 128, n))
        else:
            out[name] = spec
    return out


def only(header: Mapping[str, Spec]) -> FamilyMatch:
    found = detect(header)
    assert len(found) == 1, [(match.family.id, match.prefix) for match in found]
    return found[0]


def kinds(match: FamilyMatch, header: Mapping[str, Spec]) -> Counter[str]:
    """Roles of what has two dimensions, as a planner counts them."""
    return Counter(
        match.role(name.removesuffix(".weight")).kind
        for name, spec in header.items()
        if name.endswith(".weight") and len(spec.shape) == 2
    )


PREFIXES = {
    "diffusion": ("model.diffusion_model.", "net.", "diffusion_model."),
    "text_encoder": (
        "text_encoders.some_name.transformer.",
        "cond_stage_model.transformer.",
        "text_encoder_2.",
    ),
    "vae": ("vae.", "first_stage_model.", "audio_vae."),
}


@cache
def match_of(name: str) -> FamilyMatch:
    return only(skeleton(name))


@pytest.mark.parametrize("name", ALL)
def test_is_its_own_family_however_stored(name: str) -> None:
    header, expected, match = skeleton(name), document(name), match_of(name)
    found = (match.family.id, match.variant)
    assert found == (expected["family"], expected["variant"])
    if name == "ltx2_text_projection":
        assert match.prefix == "text_embedding_projection."
        return
    packed, unmarked = nvfp4(header), nvfp4(header, marked=False)
    one, two, three = PREFIXES[match.component]
    for stored, prefix in ((packed, ""), (header, one), (packed, two), (unmarked, three)):
        other = only(prefixed(stored, prefix) if prefix else stored)
        assert (other.family.id, other.variant) == found
        assert other.prefix == prefix


@pytest.mark.parametrize("name", ALL)
def test_no_other_family_would_take_it(name: str) -> None:
    """Not even one that comes later in the list."""
    header = skeleton(name)
    names = Names("", header)
    claims = [
        family.id
        for family in load_families()
        if any(rule.prefixes is None and names.holds(rule) for rule in family.detections)
    ]
    assert claims == ([] if name == "ltx2_text_projection" else [document(name)["family"]])


@pytest.mark.parametrize("name", ALL)
def test_counts(name: str) -> None:
    header, expected, match = skeleton(name), document(name), match_of(name)
    count = kinds(match, header)
    assert (count["linear"], count["embedding"]) == (expected["linear"], expected["embedding"])
    assert count["other"] == 0, "every matrix has a rule"
    for layer in match.layers:
        role = match.role(layer)
        assert role.kind != "protected" or role.why
        if len(header[layer + ".weight"].shape) != 2:
            assert not role.quantise, layer


def test_counts_under_a_prefix() -> None:
    for name in ("anima", "sd35_medium", "ltx2"):
        header = prefixed(skeleton(name), document(name)["prefix"])
        assert kinds(only(header), header)["linear"] == document(name)["linear"]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("minimax_h3_full", 250),
        ("minimax_h3_pruned", 200),
        ("qwen3vl_32b_minimax_h3", 350),
        ("ltx2_3", 1496),
        ("wan21_t2v_14b", 400),
        ("wan22_i2v_a14b", 400),
        ("qwen_image", 600),
        ("flux2_dev", 160),
        ("chroma1", 228),
        ("sdxl", 700),
    ],
)
def test_published_counts(name: str, count: int) -> None:
    assert kinds(match_of(name), skeleton(name))["linear"] == count
    assert document("qwen3vl_32b_minimax_h3")["embedding"] == 1


def test_every_family_has_a_skeleton_and_a_good_title() -> None:
    families = load_families()
    assert {family.id for family in families} == {document(name)["family"] for name in ALL}
    assert len({family.title for family in families}) == len(families)
    assert load_families() is families


def test_variants_that_add_tensors() -> None:
    header = dict(skeleton("qwen_image"))
    header["__index_timestep_zero__"] = Spec("F32", (0,))
    assert only(header).variant == "edit 2511"
    assert kinds(only(header), header)["linear"] == 600

    header = dict(skeleton("wan21_t2v_14b"))
    header["vace_patch_embedding.weight"] = Spec("BF16", (5120, 96, 1, 2, 2))
    for block in range(8):
        for name in [name for name in skeleton("wan21_t2v_14b") if name.startswith("blocks.0.")]:
            header[name.replace("blocks.0", f"vace_blocks.{block}")] = header[name]
        header[f"vace_blocks.{block}.after_proj.weight"] = Spec("BF16", (5120, 5120))
    match = only(header)
    assert match.variant == "vace"
    assert kinds(match, header)["linear"] == 480
    assert match.role("vace_blocks.3.after_proj").kind == "protected"

    schnell = {name: spec for name, spec in skeleton("flux1_dev").items() if "guidance" not in name}
    assert only(schnell).variant == "schnell"
    cut = {
        name: spec
        for name, spec in skeleton("mistral3_24b").items()
        if not re.search(r"\.3\d\.|norm\.weight$", name)
    }
    cut |= {
        name: spec for name, spec in skeleton("mistral3_24b").items() if re.search(r"layers\.[12]?\d\.", name)
    }
    assert only(cut).variant == "Mistral Small 3, cut"
    assert kinds(only(cut), cut)["linear"] == 210


def test_first_and_last_blocks_follow_the_depth_of_the_file() -> None:
    """A model of another depth keeps its own last blocks, not the ones of the published size."""
    header = {
        name: spec
        for name, spec in skeleton("ltx2_3").items()
        if not re.match(r"transformer_blocks\.[234]\d\.", name)
    }
    match = only(header)
    blocks = {block: match.role(f"transformer_blocks.{block}.attn1.to_q").kind for block in range(20)}
    assert [block for block, kind in blocks.items() if kind == "protected"] == [0, 1, 18, 19]


def test_all_in_one_files() -> None:
    flux = {
        **prefixed(skeleton("flux1_dev"), "model.diffusion_model."),
        **prefixed(skeleton("clip_l"), "text_encoders.clip_l.transformer."),
        **nvfp4(prefixed(skeleton("t5_xxl"), "text_encoders.t5xxl.transformer.")),
        **prefixed(skeleton("vae_ldm"), "vae."),
    }
    matches = detect(flux)
    assert [(match.family.id, match.prefix) for match in matches] == [
        ("flux1", "model.diffusion_model."),
        ("clip", "text_encoders.clip_l.transformer."),
        ("t5", "text_encoders.t5xxl.transformer."),
        ("vae", "vae."),
    ]
    layer = "text_encoders.t5xxl.transformer.encoder.block.3.layer.0.SelfAttention.q"
    found = owner(matches, layer)
    assert found is matches[2]
    assert found.role(layer) == Role("linear")
    assert owner(matches, "vae.decoder.conv_in") is matches[3]
    assert owner(matches, "somewhere.else") is None
    assert matches[0].role("vae.decoder.conv_in").kind == "other"

    sdxl = {
        **prefixed(skeleton("sdxl"), "model.diffusion_model."),
        **prefixed(skeleton("clip_l"), "conditioner.embedders.0.transformer."),
        **prefixed(skeleton("clip_g_open_clip"), "conditioner.embedders.1.model."),
        **prefixed(skeleton("vae_ldm"), "first_stage_model."),
    }
    assert [(match.family.id, match.variant) for match in detect(sdxl)] == [
        ("clip", "L"),
        ("clip", "bigG"),
        ("vae", None),
        ("sdxl", None),
    ]
    ltx = {
        **prefixed(skeleton("ltx2"), "model.diffusion_model."),
        **skeleton("ltx2_text_projection"),
        **prefixed(skeleton("vae_wan"), "vae."),
        "vocoder.conv_pre.weight": Spec("F32", (1024, 128, 7)),
        "audio_vae.decoder.conv_in.conv.weight": Spec("F32", (512, 8, 3, 3)),
    }
    assert Counter(match.component for match in detect(ltx)) == {"vae": 3, "text_encoder": 1, "diffusion": 1}


@pytest.mark.parametrize("name", ["qwen3_4b", "qwen3vl_32b_minimax_h3", "t5_xxl", "anima", "flux1_dev"])
def test_layouts_without_a_weight(name: str) -> None:
    match = only(gptq(skeleton(name)))
    assert (match.family.id, match.variant) == (document(name)["family"], document(name)["variant"])


def test_unknown_files_are_unknown() -> None:
    header = {f"encoder.stage{i}.mix.weight": Spec("BF16", (64, 64)) for i in range(40)}
    assert detect(header) == ()
    assert detect({}) == ()
    assert detect({"weight": Spec("F32", (2, 2)), ".weight": Spec("F32", ()), "a..b": Spec("U8", (1,))}) == ()
    # Parts of known models: the shards of one are looked at together, a single one is nothing known.
    for name in ("flux1_dev", "wan21_t2v_14b"):
        part = {key: spec for key, spec in skeleton(name).items() if "blocks.7." in key}
        assert detect(part) == ()


def test_generic_roles() -> None:
    assert generic_role("a.to_q", Spec("BF16", (64, 64))) == Role("linear")
    assert generic_role("a.to_q", Spec("U8", (64, 32))).quantise
    assert generic_role("model.embed_tokens", Spec("BF16", (1000, 64))).kind == "embedding"
    assert generic_role("a.norm", Spec("BF16", (64,))).kind == "other"
    assert generic_role("a.conv", Spec("BF16", (64, 3, 3, 3))).kind == "other"


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; import qconvert.runtime.families as f; f.load_families();"
        "print([m for m in ('torch', 'numpy', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
