"""sglang 0.5.23, rule by rule: a header that is taken, one change, and the rule that then speaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from qconvert.runtime.contracts.registry import get_contract

CONTRACT = get_contract("sglang-0.5.23")
Make = Callable[[Any], Any]
L = "layers.0.up"


class Case(NamedTuple):
    name: str
    right: Make
    spoil: Make
    rule: str
    words: str
    severity: str = "refuse"


def nvfp4(h: Any) -> Any:
    return h.nvfp4(L)


def w4a8(h: Any) -> Any:
    return h.w4a8(L)


def w4a4(h: Any) -> Any:
    return h.w4a4(L)


def int8(h: Any) -> Any:
    return h.int8(L)


def fp8(h: Any) -> Any:
    return h.fp8(L)


def mxfp8(h: Any) -> Any:
    return h.mxfp8(L)


def with_table(make: Make, row: bool = True) -> Make:
    return lambda h: make(h).table(row=row)


def put(suffix: str, dtype: str, *shape: int) -> Make:
    return lambda h: h.put(f"{L}.{suffix}", dtype, *shape)


def drop(suffix: str) -> Make:
    return lambda h: h.drop(f"{L}.{suffix}")


def remark(layer: str = L, **keys: Any) -> Make:
    return lambda h: h.remark(layer, **keys)


def mark(marker: Any, layer: str = L) -> Make:
    return lambda h: h.mark(layer, marker)


def metadata(**entries: str) -> Make:
    return lambda h: (h.metadata.update(entries), h)[1]


MARKERS = [
    Case("conflict", nvfp4, lambda h: h.header({L: {"format": "float8_e4m3fn"}}), "marker-conflict",
         f"Conflicting Comfy quantization markers for '{L}'"),
    Case("one key of two differs", int8, lambda h: h.header({L: {"convrot_groupsize": 64}}), "marker-conflict",
         "Conflicting Comfy quantization markers"),
    Case("NUL bytes", nvfp4, mark(bytes(29)), "marker-payload", "holds NUL bytes only"),
    Case("NUL padded", nvfp4, mark(b'{"format": "nvfp4"}\0\0'), "marker-payload", "is not JSON"),
    Case("not JSON", nvfp4, mark(b"{format: nvfp4}"), "marker-payload", "is not JSON"),
    Case("not UTF-8", nvfp4, mark(b"\xff\xfe\xfd"), "marker-payload", "is not JSON"),
    Case("a list", nvfp4, mark(["nvfp4"]), "marker-payload", "holds a JSON list"),
    Case("a marker stored as floats", nvfp4, lambda h: h.mark(L, {"format": "nvfp4"}, "BF16"), "marker-payload",
         "has dtype BF16"),
    Case("no format", nvfp4, remark(format=None), "format-set", "Unsupported Comfy quantization format(s): None"),
    Case("unmarked fp8", fp8, lambda h: h.unmark(L), "marker-missing",
         "Quantized weights are missing comfy_quant metadata"),
    Case("unmarked int8", int8, lambda h: h.unmark(L), "marker-missing",
         "Quantized weights are missing comfy_quant metadata"),
    Case("unmarked nvfp4", nvfp4, lambda h: h.unmark(L), "marker-missing",
         "Quantized weights are missing comfy_quant metadata"),
    Case("header not JSON", nvfp4, metadata(_quantization_metadata="{"), "header-metadata", "is not JSON"),
    Case("header a list", nvfp4, metadata(_quantization_metadata="[]"), "header-metadata", "is not a JSON object"),
    Case("header without layers", nvfp4, metadata(_quantization_metadata="{}"), "header-metadata",
         "has no object `layers`"),
    Case("header layer a string", nvfp4, lambda h: h.header({"x": "nvfp4"}), "header-metadata",
         "other than an object for 'x'"),
    Case("marker without a layer", nvfp4, mark({"format": "nvfp4"}, "nowhere"), "weight-2d", "no 2-D weight"),
]  # fmt: skip

FORMATS = [
    Case("fp8 beside nvfp4", nvfp4, lambda h: h.fp8("b"), "format-set",
         "Unsupported Comfy quantization format(s): float8_e4m3fn, nvfp4"),
    Case("int8 beside fp8", fp8, lambda h: h.table(), "format-set",
         "Unsupported Comfy quantization format(s): float8_e4m3fn, int8_tensorwise"),
    Case("e5m2", fp8, remark(format="float8_e5m2"), "format-set", "float8_e5m2"),
    Case("awq", w4a8, remark(format="awq_w4a16"), "format-set", "awq_w4a16"),
    Case("svdquant", w4a4, remark(format="svdquant_w4a4"), "format-set", "svdquant_w4a4"),
    Case("sym", w4a8, remark(format="sym_w4a8_int8"), "format-set",
         "Unsupported Comfy quantization format(s): sym_w4a8_int8"),
    Case("w4a8 and w4a4", w4a8, lambda h: h.w4a4("b"), "format-set", "asym_w4a8_int8, convrot_w4a4"),
]  # fmt: skip

LAYERS = [
    # nvfp4
    Case("nvfp4 padded scales", nvfp4, lambda h: h.nvfp4(L, 192).put(f"{L}.weight_scale", "F8_E4M3", 256, 8),
         "swizzle-padded", "padded to whole tiles"),
    Case("nvfp4 rows cut", nvfp4, lambda h: h.nvfp4(L, 192), "swizzle-tiles", "whole tiles", "trap"),
    Case("nvfp4 columns cut", nvfp4, lambda h: h.nvfp4(L, 128, 96), "swizzle-tiles", "whole tiles", "trap"),
    Case("nvfp4 K", nvfp4, lambda h: h.nvfp4(L, 128, 136), "shape-multiple", "multiple of 16"),
    Case("nvfp4 input_scale", nvfp4, put("input_scale", "F32"), "tensor-unknown",
         f"Parameter {L}.input_scale not found in the model"),
    Case("nvfp4 convrot", nvfp4, remark(convrot=True), "nvfp4-convrot", "rotated nvfp4"),
    Case("nvfp4 scale type", nvfp4, put("weight_scale", "U8", 128, 8), "tensor-dtype", "another dtype"),
    Case("nvfp4 second scale", nvfp4, put("weight_scale_2", "F32", 128), "tensor-shape", "another shape"),
    Case("nvfp4 no second scale", nvfp4, drop("weight_scale_2"), "tensor-missing", "weight_scale_2 is missing"),
    Case("nvfp4 pre_quant_scale", lambda h: put("pre_quant_scale", "F16", 128)(nvfp4(h)),
         put("pre_quant_scale", "F16", 64), "tensor-shape", "pre_quant_scale has another shape"),
    # w4a8
    Case("w4a8 convrot absent", w4a8, remark(convrot=None), "w4a8-convrot", "must say that it is rotated"),
    Case("w4a8 convrot a string", w4a8, remark(convrot="true"), "w4a8-convrot", "must say that it is rotated"),
    Case("w4a8 convrot one", w4a8, remark(convrot=1), "w4a8-convrot", "must say that it is rotated"),
    Case("w4a8 group 2", w4a8, lambda h: h.w4a8(L, group=2), "w4a8-group", "4, 8, 16 or a multiple of 16"),
    Case("w4a8 group 24", w4a8, lambda h: h.w4a8(L, k=768, group=24), "w4a8-group", "4, 8, 16 or a multiple"),
    Case("w4a8 group no number", w4a8, remark(group_size="x"), "w4a8-group", "4, 8, 16 or a multiple of 16"),
    Case("w4a8 K and rotation", w4a8, lambda h: h.w4a8(L, k=320), "shape-multiple", "multiple of 256"),
    Case("w4a8 K and 16", w4a8, lambda h: h.w4a8(L, k=264, group=8, convrot_groupsize=4), "shape-multiple",
         "multiple of 16"),
    Case("w4a8 K and group", w4a8, lambda h: h.w4a8(L, k=304, group=32, convrot_groupsize=16), "shape-multiple",
         "multiple of 32"),
    Case("w4a8 rotation of no power of 4", w4a8, remark(convrot_groupsize=128), "w4a8-rotation", "no ConvRot"),
    Case("w4a8 6 bits", w4a8, put("weight", "I8", 64, 192), "w4a8-six-bit", "6-bit variant"),
    Case("w4a8 correction in BF16", lambda h: put("weight_correction", "F32", 16, 64)(w4a8(h)),
         put("weight_correction", "BF16", 16, 64), "tensor-dtype", "weight_correction has another dtype"),
    Case("w4a8 codebook in BF16", lambda h: put("weight_codebook", "F32", 16)(w4a8(h)),
         put("weight_codebook", "BF16", 16), "tensor-dtype", "weight_codebook has another dtype"),
    Case("w4a8 no s_rel", w4a8, drop("weight_s_rel"), "tensor-missing", "weight_s_rel is missing"),
    Case("w4a8 no s_channel", w4a8, drop("weight_s_channel"), "tensor-missing", "weight_s_channel is missing"),
    Case("w4a8 s_rel in F32", w4a8, put("weight_s_rel", "F32", 64, 16), "tensor-dtype", "weight_s_rel has another"),
    Case("w4a8 leftover scale", w4a8, put("weight_scale", "F32", 64), "tensor-unknown",
         f"Parameter {L}.weight_scale not found in the model"),
    # w4a4
    Case("w4a4 scale 2-D", w4a4, put("weight_scale", "F32", 64, 1), "w4a4-scale-2d", "must be 1-D"),
    Case("w4a4 rotation", w4a4, remark(convrot_groupsize=4), "w4a4-rotation", "16, 64 or 256"),
    Case("w4a4 K and 64", w4a4, lambda h: h.w4a4(L, k=272, convrot_groupsize=16), "shape-multiple",
         "multiple of 64"),
    Case("w4a4 K and rotation", w4a4, lambda h: h.w4a4(L, k=320), "shape-multiple", "multiple of 256"),
    Case("w4a4 linear_dtype", w4a4, remark(linear_dtype="fp8"), "w4a4-linear-dtype", "int4 or int8"),
    # int8
    Case("int8 without convrot", int8, remark(convrot=None), "int8-linear-unrotated",
         "its int8 codes are used as weights", "trap"),
    Case("int8 convrot a string", int8, remark(convrot="true"), "int8-convrot", "every int8 marker"),
    Case("int8 no group", int8, remark(convrot_groupsize=None), "int8-rotation", "there is no default here"),
    Case("int8 group 128", int8, remark(convrot_groupsize=128), "int8-rotation", "must name its convrot_groupsize"),
    Case("int8 group as text", int8, remark(convrot_groupsize="256"), "int8-rotation", "convrot_groupsize"),
    Case("int8 1-D scale", int8, put("weight_scale", "F32", 64), "int8-scale-1d", "1-D weight_scale"),
    Case("int8 scalar scale", int8, put("weight_scale", "F32"), "tensor-shape", "another shape"),
    Case("int8 scale in BF16", int8, put("weight_scale", "BF16", 64, 1), "tensor-dtype", "another dtype"),
    Case("int8 K", int8, lambda h: h.int8(L, k=320), "shape-multiple", "multiple of 256"),
    Case("int8 linear beside nvfp4", nvfp4, lambda h: h.int8("b"), "companion-rotated", "only an int8 embedding"),
    Case("plain int8 linear beside nvfp4", nvfp4, lambda h: h.table("b"), "companion-linear", "only an embedding"),
    Case("int8 linear beside w4a8", w4a8, lambda h: h.int8("b"), "companion-rotated", "only an int8 embedding"),
    Case("plain int8 linear beside w4a4", lambda h: w4a4(h).int8("b"), lambda h: h.remark("b", convrot=None),
         "int8-linear-unrotated", "its int8 codes are used as weights", "trap"),
    # fp8
    Case("fp8 row scale", fp8, put("weight_scale", "F32", 64, 1), "fp8-row-scale", "one scale a row", "trap"),
    Case("fp8 row scale, 1-D", fp8, put("weight_scale", "F32", 64), "fp8-row-scale", "one scale a row", "trap"),
    Case("fp8 scale in BF16", fp8, put("weight_scale", "BF16"), "tensor-dtype", "another dtype"),
    Case("fp8 no scale", fp8, drop("weight_scale"), "tensor-missing", "weight_scale is missing"),
    Case("fp8 on e5m2", fp8, put("weight", "F8_E5M2", 64, 96), "fp8-weight-dtype", "would be cast", "trap"),
    Case("fp8 input_scale and full precision", lambda h: remark(full_precision_matrix_mult=True)(fp8(h)),
         put("input_scale", "F32"), "tensor-unknown", f"Parameter {L}.input_scale not found in the model"),
    Case("fp8 convolution", fp8, put("weight", "F8_E4M3", 64, 32, 3, 3), "weight-2d", "no 2-D weight"),
    # mxfp8
    Case("mxfp8 scale in F8_E8M0", mxfp8, put("weight_scale", "F8_E8M0", 128, 4), "tensor-dtype", "another dtype"),
    Case("mxfp8 padded", mxfp8, lambda h: h.mxfp8(L, 96).put(f"{L}.weight_scale", "U8", 128, 4), "swizzle-padded",
         "padded to whole tiles"),
    Case("mxfp8 rows cut", mxfp8, lambda h: h.mxfp8(L, 96), "swizzle-tiles", "whole tiles", "trap"),
    Case("mxfp8 K", mxfp8, lambda h: h.mxfp8(L, 128, 144).put(f"{L}.weight_scale", "U8", 128, 5), "shape-multiple",
         "multiple of 32"),
    Case("mxfp8 both scale names", mxfp8, put("weight_scale_inv", "U8", 128, 4), "mxfp8-two-scales",
         "the last one read wins", "trap"),
    # any
    Case("unknown tensor", fp8, put("weight_zeros", "F32"), "tensor-unknown",
         f"Parameter {L}.weight_zeros not found in the model"),
    Case("bias shape", lambda h: put("bias", "F32", 64)(fp8(h)), put("bias", "F32", 32), "tensor-shape", "bias"),
    Case("orphan scale", fp8, lambda h: h.put("norm.weight_scale", "F32"), "tensor-orphan",
         "Parameter norm.weight_scale not found in the model"),
    Case("legacy sentinel", fp8, lambda h: h.put("scaled_fp8", "F8_E4M3", 2), "tensor-orphan",
         "Parameter scaled_fp8 not found in the model"),
    Case("rotation group nested", int8, remark(params={"convrot_groupsize": 64}), "nested-params",
         "convrot_groupsize inside params is not read", "trap"),
]  # fmt: skip

TABLES = [
    Case("1-D scale", with_table(nvfp4), lambda h: h.put("embed_tokens.weight_scale", "F32", 200),
         "int8-scale-1d", "1-D weight_scale"),
    Case("rotated table beside nvfp4", with_table(nvfp4), remark("embed_tokens", convrot=True),
         "embedding-format", "Unsupported quantized embedding marker"),
    Case("rotated table beside int8", with_table(int8, row=False),
         remark("embed_tokens", convrot=True, convrot_groupsize=64), "embedding-format", "is not consumed"),
    Case("nvfp4 table", nvfp4, lambda h: h.nvfp4("embed_tokens"), "embedding-format",
         "Unsupported quantized embedding marker"),
    Case("w4a8 table", w4a8, lambda h: h.w4a8("embed_tokens"), "embedding-format",
         "Unsupported quantized embedding marker"),
    Case("table beside w4a4", w4a4, lambda h: h.table(), "embedding-format", "kitchen_w4a4 serves no quantised"),
    Case("fp8 table", fp8, lambda h: h.fp8("embed_tokens"), "embedding-format", "comfy_fp8 serves no quantised"),
    Case("mxfp8 table", mxfp8, lambda h: h.mxfp8("embed_tokens"), "embedding-format", "comfy_mxfp8 serves no"),
    Case("rotation hidden in params", with_table(nvfp4), remark("embed_tokens", params={"convrot": True}),
         "nested-params", "convrot inside params is not read", "trap"),
]  # fmt: skip

ROUTES = [
    Case("fp8 header", lambda h: h.fp8(L, full_precision_matrix_mult=True),
         lambda h: h.header({L: {"format": "float8_e4m3fn"}}), "header-fp8",
         "full_precision_matrix_mult is dropped", "trap"),
    Case("fp8 header and input_scale", lambda h: put("input_scale", "F32")(fp8(h)),
         lambda h: h.header({L: {"format": "float8_e4m3fn"}}), "header-fp8", "input_scale has no", "trap"),
    Case("fp8 header and a plain layer", lambda h: fp8(h).put("b.weight", "BF16", 64, 64),
         lambda h: h.header({L: {"format": "float8_e4m3fn"}}), "header-fp8", "would miss a weight_scale", "trap"),
    Case("quant_method in the header", fp8, metadata(quantization_config='{"quant_method": "fp8"}'),
         "header-quant-method", "before any marker", "trap"),
    Case("quanto", fp8, metadata(quantization_format="quanto"), "header-quanto", "before any marker", "trap"),
    Case("mxfp8 header that does not fit", mxfp8,
         lambda h: metadata(quant_format="mxfp8")(h).put(f"{L}.weight_scale", "U8", 128, 8), "header-mxfp8",
         "do not fit"),
]  # fmt: skip


@pytest.mark.parametrize("case", MARKERS + FORMATS + LAYERS + TABLES + ROUTES, ids=lambda case: case.name)
def test_rule(case: Case, header: Any) -> None:
    right = CONTRACT.check(case.right(header()).view())
    assert right.accepted, [v.line() for v in right.all_violations()]
    spoiled = header()
    case.right(spoiled)
    case.spoil(spoiled)
    verdict = CONTRACT.check(spoiled.view())
    assert not verdict.accepted
    hits = [v for v in verdict.all_violations() if v.rule == case.rule and v.severity == case.severity]
    assert hits, [v.line() for v in verdict.all_violations()]
    assert case.words in hits[0].message
    assert hits[0].remedy is not None and hits[0].remedy.startswith("qconvert file.safetensors --to ")


RESOLVED = [
    (nvfp4, "ComfyNvfp4Config", {L: "ComfyFullPrecisionNvfp4LinearMethod"}),
    (with_table(nvfp4), "ComfyNvfp4Config", {"embed_tokens": "ComfyInt8EmbeddingMethod"}),
    (with_table(nvfp4, row=False), "ComfyNvfp4Config", {"embed_tokens": "ComfyInt8EmbeddingMethod"}),
    (with_table(w4a8), "KitchenW4A8Config", {L: "KitchenW4A8LinearMethod"}),
    (w4a8, "KitchenW4A8Config", {L: "KitchenW4A8LinearMethod"}),
    (w4a4, "KitchenW4A4Config", {L: "KitchenW4A4LinearMethod"}),
    (lambda h: w4a4(h).int8("b"), "KitchenW4A4Config", {"b": "ConvRotInt8ComfyKitchenLinearMethod"}),
    (int8, "ConvRotInt8Config", {L: "ConvRotInt8ComfyKitchenLinearMethod"}),
    (with_table(int8), "ConvRotInt8Config", {"embed_tokens": "ComfyInt8EmbeddingMethod"}),
    (fp8, "ComfyFp8Config", {L: "Fp8LinearMethod"}),
    (lambda h: h.fp8(L, full_precision_matrix_mult=True), "ComfyFp8Config",
     {L: "ComfyFullPrecisionFp8LinearMethod"}),
    (mxfp8, "MXFP8Config", {L: "ComfyMXFP8LinearMethod"}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "config", "methods"), RESOLVED)
def test_config_and_methods(make: Make, config: str, methods: dict[str, str], header: Any) -> None:
    verdict = CONTRACT.check(make(header()).view())
    assert verdict.accepted
    assert verdict.config == config
    assert methods.items() <= {layer.layer: layer.method for layer in verdict.layers}.items()


def test_header_alone_carries_markers(header: Any) -> None:
    h = w4a8(header())
    h.header({L: json.loads(h.markers[L])}).unmark(L)
    assert CONTRACT.check(h.view()).accepted


def test_header_and_tensor_are_merged(header: Any) -> None:
    h = w4a8(header()).remark(L, convrot=None).header({L: {"format": "asym_w4a8_int8", "convrot": True}})
    assert CONTRACT.check(h.view()).accepted


def test_quant_format_mxfp8_stands_in_for_markers(header: Any) -> None:
    h = mxfp8(header()).unmark(L)
    assert not CONTRACT.check(h.view()).accepted
    h.metadata["quant_format"] = "MXFP8"
    assert CONTRACT.check(h.view()).config == "MXFP8Config"


def test_mxfp8_says_that_the_model_must_map_the_name(header: Any) -> None:
    notes = CONTRACT.check(mxfp8(header()).view()).all_violations()
    assert [note.rule for note in notes] == ["mxfp8-name"]
    h = mxfp8(header()).put(f"{L}.weight_scale_inv", "U8", 128, 4).drop(f"{L}.weight_scale")
    assert CONTRACT.check(h.view()).all_violations() == ()


def test_native_nvfp4_needs_a_gpu_and_is_accepted(header: Any) -> None:
    verdict = CONTRACT.check(header().nvfp4(L, full_precision_matrix_mult=False).view())
    assert verdict.accepted
    assert verdict.layers[0].method == "ComfyNvfp4LinearMethod"
    (violation,) = verdict.all_violations()
    assert violation.severity == "environment" and "compute capability 10.0" in violation.message
    assert violation.remedy == "qconvert file.safetensors --to comfy_nvfp4"


def test_header_of_plain_fp8_that_loses_nothing_is_only_noted(header: Any) -> None:
    verdict = CONTRACT.check(fp8(header()).header({L: {"format": "float8_e4m3fn"}}).view())
    assert verdict.accepted and [v.rule for v in verdict.violations] == ["header-fp8"]


def test_headers_of_other_formats_are_no_trap(header: Any) -> None:
    assert CONTRACT.check(nvfp4(header()).header({L: {"format": "nvfp4"}}).view()).accepted


def test_static_fp8_is_noted(header: Any) -> None:
    verdict = CONTRACT.check(put("input_scale", "F32")(fp8(header())).view())
    assert verdict.accepted and [v.rule for v in verdict.all_violations()] == ["fp8-static"]


def test_unquantised_files_are_taken(header: Any) -> None:
    verdict = CONTRACT.check(header().put("a.weight", "BF16", 8, 8).put("b.weight", "F8_E5M2", 8, 8).view())
    assert verdict.accepted and verdict.config is None
    assert [v.rule for v in verdict.violations] == ["unquantised"]


def test_markers_in_shards_are_for_diffusion_models_only(header: Any) -> None:
    h = nvfp4(header())
    h.files = ("folder/a-00001-of-00002.safetensors", "folder/a-00002-of-00002.safetensors")
    verdict = CONTRACT.check(h.view())
    assert verdict.accepted
    assert [(v.severity, v.rule, v.remedy) for v in verdict.violations] == [
        ("environment", "one-file", "qconvert folder --to comfy_nvfp4")
    ]


def test_a_missing_marker_is_one_fault(header: Any) -> None:
    violations = CONTRACT.check(w4a8(header()).w4a8("b").unmark(L).view()).all_violations()
    assert [(v.rule, v.layer) for v in violations] == [("marker-missing", L)]


@pytest.mark.parametrize(
    ("make", "target"),
    [
        (lambda h: nvfp4(h).unmark(L), "comfy_nvfp4"),
        (lambda h: w4a8(h).unmark(L), "kitchen_w4a8"),
        (lambda h: int8(h).unmark(L), "convrot_int8"),
        (lambda h: fp8(h).unmark(L), "comfy_fp8"),
        (lambda h: mxfp8(h).unmark(L), "comfy_mxfp8"),
        (lambda h: fp8(h).nvfp4("b").int8("c"), "comfy_nvfp4"),
        (lambda h: w4a8(h).fp8("b"), "kitchen_w4a8"),
        (lambda h: h.w4a8(L, format="sym_w4a8_int8"), "kitchen_w4a8"),
    ],
)
def test_remedy_names_the_nearest_target(make: Make, target: str, header: Any) -> None:
    (violation, *_) = CONTRACT.check(make(header()).view()).all_violations()
    assert violation.remedy == f"qconvert file.safetensors --to {target}"
