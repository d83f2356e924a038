"""From a header to layers: grouping, markers in conflict, guesses without markers, what no format explains."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.formats.base import Codec, Group
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.finding import Finding
from qconvert.formats.layers import Inventory, parse_assumption, take_inventory
from qconvert.formats.marker import HEADER_KEY
from qconvert.formats.registry import CODECS, codec
from qconvert.formats.tensors import Spec

Rng = np.random.Generator
Open = Callable[..., Any]


def header(layers: Any) -> dict[str, str]:
    return {HEADER_KEY: json.dumps({"format_version": "1.0", "layers": layers})}


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


@pytest.fixture
def take(opened: Open) -> Callable[..., Inventory]:
    """take(tensors, metadata, *assumptions) -> Inventory"""

    def make(tensors: Any, metadata: Any = None, *assume: str) -> Inventory:
        return take_inventory(opened(tensors, metadata), [parse_assumption(text) for text in assume])

    return make


def test_tensors_are_grouped_by_layer_in_payload_order(
    d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    nv = d.nvfp4()(rng, d.weights(rng, 128, 64))
    one = d.f32_tensor([1.0])
    tensors = nv.named("blocks.1.fc") | {
        "blocks.1.fc.bias": d.f32_tensor(np.zeros(128)),
        "blocks.1.fc.input_scale": d.f32_tensor(1.0),
        "blocks.1.fc.alpha": one,
        "blocks.1.norm.weight": d.narrow(np.ones(64), "BF16"),
        "blocks.1.norm.bias": one,
        "conv.weight": d.narrow(np.ones((2, 3, 1, 1)), "F16"),
        "rope.freqs": one,
        "weight": one,
        "scalar.weight": d.f32_tensor(1.0),
        "position_ids": d.T("I64", np.arange(3)),
        "ids.weight": d.T("I64", np.arange(3)),
        "gone.comfy_quant": d.marker_tensor({"format": "nvfp4"}),
    }
    found = take(tensors)
    assert set(found.layers) == {"blocks.1.fc", "blocks.1.norm", "conv", "scalar"}
    assert {tensor.name for tensor in found.loose} == {"rope.freqs", "weight", "position_ids", "ids.weight"}
    assert [tensor.name for tensor in found.sentinels] == ["gone.comfy_quant"]
    assert levels(found.findings) == ["repair"] and found.findings[0].layer == "gone"
    fc = found.layers["blocks.1.fc"]
    assert fc.quantised and (fc.n, fc.k, fc.ndim, fc.experts, fc.params) == (128, 64, 2, 0, 8192)
    assert fc.owned == {"weight", "weight_scale", "weight_scale_2"}
    assert fc.leftovers == ["alpha"]
    assert fc.nbytes == sum(tensor.nbytes for tensor in fc.tensors.values())
    norm, conv = found.layers["blocks.1.norm"], found.layers["conv"]
    assert not norm.quantised and (norm.n, norm.k, norm.ndim) == (64, 1, 1)
    assert (conv.n, conv.k, conv.ndim) == (2, 3, 4)
    starts = [min(tensor.start for tensor in layer.tensors.values()) for layer in found.layers.values()]
    assert starts == sorted(starts)


# ---- markers and tensors that disagree


def test_the_carrier_that_fits_the_tensors_wins(
    d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    nv = d.nvfp4()(rng, d.weights(rng, 128, 64))
    for name in ("float8_e4m3fn", "int8_tensorwise", "mxfp8", "nonsense", ""):
        wrong = {"format": name}
        found = take(nv.named("fc"), header({"fc": wrong}))
        assert found.layers["fc"].codec.name == "nvfp4" and found.layers["fc"].marker == nv.marker
        assert "guess" in levels(found.all_findings())
        swapped = nv.named("fc") | {"fc.comfy_quant": d.marker_tensor(wrong)}
        found = take(swapped, header({"fc": nv.marker}))
        assert found.layers["fc"].codec.name == "nvfp4" and found.layers["fc"].marker == nv.marker
        assert "guess" in levels(found.all_findings())


def test_where_both_fit_the_layer_s_own_tensor_is_believed_as_a_guess(
    d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    plain = d.int8()(rng, d.weights(rng, 64, 64))
    rotated = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    found = take(plain.named("fc"), header({"fc": rotated}))
    layer = found.layers["fc"]
    assert layer.options["rotation"] == 0 and layer.marker == plain.marker
    (guess,) = [finding for finding in layer.findings if finding.level == "guess"]
    assert "disagree" in guess.message and "tensor" in guess.message


def test_a_marker_alone_in_the_header_counts(d: ModuleType, rng: Rng, take: Callable[..., Inventory]) -> None:
    sample = d.int8(rotation=64)(rng, d.weights(rng, 64, 64))
    tensors = {f"fc.{suffix}": tensor for suffix, tensor in sample.tensors.items()}
    found = take(tensors, header({"fc": sample.marker}))
    assert found.layers["fc"].options["rotation"] == 64
    assert found.all_findings() == []


@pytest.mark.parametrize("marker", [{"format": "nvfp4"}, {"format": "sym_int5"}, {}])
def test_a_marker_on_an_unquantised_weight_is_not_believed(
    marker: Any, d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    tensors = d.plain("BF16")(rng, d.weights(rng, 64, 64)).named("fc")
    found = take(tensors | {"fc.comfy_quant": d.marker_tensor(marker)})
    layer = found.layers["fc"]
    assert not layer.quantised and layer.marker is None
    # The bits are what they are: nothing was guessed.
    assert "guess" not in levels(layer.findings) and "repair" in levels(layer.findings)


def test_a_placeholder_marks_nothing(d: ModuleType, rng: Rng, take: Callable[..., Inventory]) -> None:
    nothing = d.T("U8", np.zeros(29, np.uint8))
    tensors = d.plain("BF16")(rng, d.weights(rng, 64, 64)).named("fc") | {"fc.comfy_quant": nothing}
    found = take(tensors)
    assert not found.layers["fc"].quantised
    assert levels(found.all_findings()) == ["note"]
    # On a quantised weight it is as good as no marker.
    nv = d.nvfp4()(rng, d.weights(rng, 128, 64)).named("fc") | {"fc.comfy_quant": nothing}
    found = take(nv)
    assert found.layers["fc"].codec.name == "nvfp4"
    assert sorted(levels(found.all_findings())) == ["guess", "note"]


@pytest.mark.parametrize("name", ["nvfp4_v2", "mxfp8", "convrot_w4a4"])
def test_a_wrong_name_on_telling_tensors_is_a_guess(
    name: str, d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    tensors = d.w4a8(codebook=True)(rng, d.weights(rng, 32, 256)).named("fc")
    found = take(tensors | {"fc.comfy_quant": d.marker_tensor({"format": name})})
    assert found.layers["fc"].codec.name == "w4a8"
    guesses = [finding.message for finding in found.all_findings() if finding.level == "guess"]
    assert any(name in message for message in guesses), guesses


# ---- options that the marker gets wrong


def test_a_marked_group_size_that_does_not_fit(
    d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    for sample, key, true in (
        (d.w4a8(32)(rng, d.weights(rng, 32, 256)), "w4a8", 32),
        (d.awq(32)(rng, d.weights(rng, 32, 256)), "awq_w4a16", 32),
    ):
        marker = d.marker_tensor(sample.marker | {"group_size": 128})
        layer = take(sample.named("fc") | {"fc.comfy_quant": marker}).layers["fc"]
        assert (layer.codec.name, layer.options["group"]) == (key, true)
        (guess,) = [finding for finding in layer.findings if finding.level == "guess"]
        assert "group_size 128" in guess.message and "32" in guess.message


def test_the_marked_group_size_tells_4_bits_from_6(
    d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    """192 bytes and 8 groups: 384 columns in groups of 48, or 256 in groups of 32 with 6 bits."""
    four = d.w4a8(48, 64)(rng, d.weights(rng, 16, 384))
    six = d.w4a8(32, 64, bits=6)(rng, d.weights(rng, 16, 256))
    assert four.tensors["weight"].bits.shape == six.tensors["weight"].bits.shape
    for sample, k in ((four, 384), (six, 256)):
        layer = take(sample.named("fc")).layers["fc"]
        assert (layer.k, layer.options["bits"]) == (k, 4 if k == 384 else 6)


@pytest.mark.parametrize("stated", [None, 40])
def test_a_marker_that_does_not_tell_4_bits_from_6_is_a_guess(
    stated: int | None, d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    for sample, k in (
        (d.w4a8(48, 64)(rng, d.weights(rng, 16, 384)), 384),
        (d.w4a8(16, 64)(rng, d.weights(rng, 16, 64)), 64),
    ):
        marker = {key: value for key, value in sample.marker.items() if key != "group_size"}
        marker |= {} if stated is None else {"group_size": stated}
        layer = take(sample.named("fc") | {"fc.comfy_quant": d.marker_tensor(marker)}).layers["fc"]
        assert (layer.k, layer.options["bits"]) == (k, 4)
        told = [f.message for f in layer.findings if f.level == "guess" and "from 6 bit" in f.message]
        # 32 bytes and 4 groups: with 6 bits K would be no whole number.
        assert len(told) == (k == 384), layer.findings


def test_fp8_bits_carry_their_own_type(d: ModuleType, rng: Rng, take: Callable[..., Inventory]) -> None:
    sample = d.fp8("F8_E5M2")(rng, d.weights(rng, 16, 16))
    tensors = sample.named("fc") | {"fc.comfy_quant": d.marker_tensor({"format": "float8_e4m3fn"})}
    layer = take(tensors).layers["fc"]
    assert layer.options["kind"] == "F8_E5M2"
    assert levels(layer.findings) == ["guess"] and "its own type is believed" in layer.findings[0].message


@pytest.mark.parametrize("convrot", [None, False])
def test_w4a8_is_always_rotated(
    convrot: Any, d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    sample = d.w4a8(rotation=64, convrot=False)(rng, d.weights(rng, 16, 64))
    marker = sample.marker | ({} if convrot is None else {"convrot": convrot})
    layer = take(sample.named("fc") | {"fc.comfy_quant": d.marker_tensor(marker)}).layers["fc"]
    assert layer.options["rotation"] == 64
    assert levels(layer.findings) == ["repair"] and "convrot: true" in layer.findings[0].message


def test_types_and_shapes_that_are_mended_are_said(
    d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    cases = {
        "fp8_bf16_scale": "weight_scale is BF16",
        "fp8_tagged_u8": "tagged U8",
        "nvfp4_u8_scales": "tagged U8",
        "mxfp8_tagged_u8": "tagged U8",
        "int8_row_1d": "row scale is F32[256], not [256, 1]",
        "int8_bf16_scale": "weight_scale is BF16",
        "w4a4_2d": "row scale is F32[256, 1], not [256]",
        "w4a4_bf16_scale": "weight_scale is BF16",
        "w4a8_srel_u8": "tagged U8",
        "w4a8_no_convrot_key": "lacks `convrot: true`",
        "int8_convrot_params": "nested params",
    }
    for name, words in cases.items():
        layer = take(d.SOURCES[name](rng, d.weights(rng, 256, 256)).named("fc")).layers["fc"]
        assert levels(layer.findings) == ["repair"], name
        assert words in layer.findings[0].message, name


# ---- legacy scaled_fp8


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "text_encoders.qwen3.transformer."])
@pytest.mark.parametrize("elements", [0, 1, 2])
def test_a_sentinel_speaks_for_the_layers_below_it(
    prefix: str, elements: int, d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    def legacy(at: str) -> dict[str, Any]:
        sample = d.fp8(marked=False, suffix="scale_weight")(rng, d.weights(rng, 16, 32))
        return {f"{at}.{suffix}": tensor for suffix, tensor in sample.tensors.items()}

    tensors = legacy(f"{prefix}blocks.0.fc") | legacy("elsewhere.fc")
    sentinel = {f"{prefix}scaled_fp8": d.T("F8_E4M3", np.zeros(elements, np.uint8))}
    found = take(tensors | sentinel)
    assert [tensor.name for tensor in found.sentinels] == [f"{prefix}scaled_fp8"]
    below = found.layers[f"{prefix}blocks.0.fc"]
    assert levels(below.findings) == []
    assert below.options["full_precision"] == (elements == 2)
    assert (below.options["scale"], below.options["source"]) == ("scalar", "scale_weight")
    outside = found.layers["elsewhere.fc"]
    assert (levels(outside.findings) == ["guess"]) == bool(prefix)
    assert outside.options["full_precision"] == (elements == 2 and not prefix)


def test_a_sentinel_says_nothing_of_marked_layers(
    d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    tensors = d.fp8()(rng, d.weights(rng, 16, 32)).named("fc")
    found = take(tensors | {"scaled_fp8": d.T("F8_E4M3", np.zeros(2, np.uint8))})
    assert found.layers["fc"].options["full_precision"] is False
    assert found.all_findings() == []


# ---- nothing fits

UNEXPLAINED: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "int8 alone": {"weight": ("I8", (16, 64))},
    "packed alone": {"weight": ("U8", (16, 64))},
    "nvfp4 without a tensor scale": {"weight": ("U8", (16, 32)), "weight_scale": ("F8_E4M3", (128, 4))},
    "scales of another size": {
        "weight": ("U8", (16, 32)),
        "weight_scale": ("F8_E4M3", (16, 5)),
        "weight_scale_2": ("F32", ()),
    },
    "int8 with scales of another size": {"weight": ("I8", (16, 64)), "weight_scale": ("F32", (15, 1))},
    "fp8 with scales of another size": {"weight": ("F8_E4M3", (16, 64)), "weight_scale": ("F32", (15, 1))},
    "w4a8 without a channel scale": {"weight": ("I8", (16, 64)), "weight_s_rel": ("F8_E4M3", (16, 8))},
}


@pytest.mark.parametrize("name", UNEXPLAINED)
def test_a_quantised_weight_that_nothing_explains_is_refused(name: str, d: ModuleType, opened: Open) -> None:
    tensors = {
        f"model.fc.{suffix}": d.T(dtype, np.zeros(shape, d.BITS[dtype]))
        for suffix, (dtype, shape) in UNEXPLAINED[name].items()
    }
    checkpoint = opened(tensors)
    with pytest.raises(QConvertError, match="no known format explains") as caught:
        take_inventory(checkpoint)
    line = caught.value.line()
    assert line.startswith(f"{checkpoint.files[0]}: model.fc: ")
    dtype, shape = UNEXPLAINED[name]["weight"]
    assert f"weight {dtype}{list(shape)}" in line and "--assume" in line


def test_w4a4_is_never_assumed(d: ModuleType, rng: Rng, take: Callable[..., Inventory]) -> None:
    """Packed int4 rows and int8 rows of half as many columns look the same."""
    sample = d.w4a4(64, shape=(-1, 1))(rng, d.weights(rng, 16, 128))
    tensors = {f"fc.{suffix}": tensor for suffix, tensor in sample.tensors.items()}
    layer = take(tensors).layers["fc"]
    assert (layer.codec.name, layer.k) == ("int8", 64)
    assert levels(layer.findings) == ["guess"]
    layer = take(tensors, None, "fc=convrot_w4a4,convrot_groupsize=64").layers["fc"]
    assert (layer.codec.name, layer.k, layer.options["rotation"]) == ("w4a4", 128, 64)
    assert "guess" not in levels(layer.findings)


# ---- --assume


def test_assumptions_replace_markers(d: ModuleType, rng: Rng, take: Callable[..., Inventory]) -> None:
    tensors = d.int8()(rng, d.weights(rng, 16, 64)).named("a.fc") | d.int8()(
        rng, d.weights(rng, 16, 64)
    ).named("b.fc")
    found = take(tensors, None, r"^a\.=int8_tensorwise,convrot=true,convrot_groupsize=16")
    assert found.layers["a.fc"].options["rotation"] == 16 and found.layers["a.fc"].assumed
    assert found.layers["b.fc"].options["rotation"] == 0 and not found.layers["b.fc"].assumed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fc", "expected REGEX=FORMAT"),
        ("=nvfp4", "expected REGEX=FORMAT"),
        ("fc=int5", "FORMAT one of"),
        ("fc=nvfp4,scales", "not key=value"),
        ("fc=nvfp4,scales=odd", "swizzled|linear"),
        ("(=nvfp4", "unterminated|missing"),
    ],
)
def test_assumptions_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_assumption(text)


def test_an_assumption_fits_something(d: ModuleType, rng: Rng, take: Callable[..., Inventory]) -> None:
    tensors = d.plain("BF16")(rng, d.weights(rng, 16, 64)).named("fc")
    with pytest.raises(UsageError, match="fits no quantised layer"):
        take(tensors, None, "fc=nvfp4")


# ---- padding that something beside the weight tells


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("zero", [True, False])
def test_a_bias_tells_the_true_n(
    name: str, zero: bool, d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    w = d.weights(rng, 250 if zero else 256, 128)
    sample = getattr(d, name)(pad=True)(rng, w)
    layer = take(sample.named("fc") | {"fc.bias": d.f32_tensor(np.zeros(250))}).layers["fc"]
    assert (layer.n, layer.k) == (250, 128)
    # Rows that hold something are cut all the same, for no other shape is possible; that is a guess.
    assert levels(layer.findings) == ["repair" if zero else "guess"]


@pytest.mark.parametrize(
    ("stated", "level", "n", "k"),
    [
        ([250, 200], "repair", 250, 200),
        ([256, 208], None, 256, 208),
        ([250, 208], "repair", 250, 208),
        ([240, 200], "guess", 256, 208),
        ([250], "guess", 256, 208),
        ("250x200", "guess", 256, 208),
        ([250, True], "guess", 256, 208),
        ([0, -3], "guess", 256, 208),
    ],
)
def test_the_marker_tells_the_true_shape(
    stated: Any, level: str | None, n: int, k: int, d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    w = d.weights(rng, n if level == "repair" else 256, k if level == "repair" else 208)
    sample = d.nvfp4(pad=True, orig_shape=stated)(rng, w)
    layer = take(sample.named("fc")).layers["fc"]
    assert (layer.n, layer.k) == (n, k)
    assert levels(layer.findings) == ([level] if level else [])


def test_a_bias_of_another_layer_s_size_is_said(
    d: ModuleType, rng: Rng, take: Callable[..., Inventory]
) -> None:
    sample = d.nvfp4()(rng, d.weights(rng, 256, 64))
    layer = take(sample.named("fc") | {"fc.bias": d.f32_tensor(np.zeros(100))}).layers["fc"]
    assert layer.n == 256
    assert levels(layer.findings) == ["guess"] and "bias F32[100] does not fit" in layer.findings[0].message


def test_an_empty_weight_is_not_padding(d: ModuleType, rng: Rng, take: Callable[..., Inventory]) -> None:
    for fill in ("all", "last tile"):
        w = d.weights(rng, 256, 64)
        w[0 if fill == "all" else 240 :] = 0
        sample = d.nvfp4()(rng, w + (1e-30 if fill == "all" else 0))
        tensors = sample.named("fc")
        if fill == "all":
            tensors["fc.weight"].bits[...] = 0
        assert take(tensors).layers["fc"].findings == []


@pytest.mark.parametrize("codec", [item for item in CODECS if item.name != "plain"], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", sorted(FLOATS))
@pytest.mark.parametrize("bias", [False, True])
def test_no_format_keeps_codes_in_floats_that_stand_alone(codec: Codec, dtype: str, bias: bool) -> None:
    """Such layers are taken as plain without asking every format."""
    for shape in ((256,), (256, 128), (64, 64, 3, 3), (8, 256, 128)):
        tensors = {"weight": Spec(dtype, shape)} | ({"bias": Spec(dtype, shape[:1])} if bias else {})
        assert isinstance(codec.recognise(Group("blocks.0.fc1", tensors), None), str)


def test_group_scales_of_another_number_of_experts_are_refused() -> None:
    def claim(experts: int) -> object:
        tensors = {
            "weight": Spec("U8", (4, 128, 128)),
            "weight_s_rel": Spec("F8_E4M3", (experts, 128, 16)),
            "weight_s_channel": Spec("F32", (4, 128, 1)),
        }
        marker = {"format": "asym_w4a8_int8", "group_size": 16, "convrot": True}
        return codec("w4a8").recognise(Group("blocks.0.experts", tensors), marker)

    assert not isinstance(claim(4), str)
    assert "does not fit" in str(claim(3))
