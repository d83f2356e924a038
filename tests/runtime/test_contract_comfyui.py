"""ComfyUI, row by row of what was measured: taken, refused with its words, loaded and wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from qconvert.runtime.contracts.registry import get_contract

CONTRACT = get_contract("comfyui")
Make = Callable[[Any], Any]
L = "blocks.0.up"
PREFIX = "model.diffusion_model."


def relabel(h: Any, old: str, new: str) -> Any:
    h.tensors = {name.replace(old, new): spec for name, spec in h.tensors.items()}
    return h


TAKEN: dict[str, Make] = {
    "fp8": lambda h: h.fp8(L),
    "fp8, scale [1] in BF16": lambda h: h.fp8(L).put(f"{L}.weight_scale", "BF16", 1),
    "fp8 e5m2": lambda h: h.fp8(L, format="float8_e5m2").put(f"{L}.weight", "F8_E5M2", 64, 96),
    "fp8 and input_scale": lambda h: h.fp8(L).put(f"{L}.input_scale", "F32"),
    "fp8, full precision, input_scale in BF16": lambda h: h.fp8(L, full_precision_matrix_mult=True).put(
        f"{L}.input_scale", "BF16"
    ),
    "fp8 marked in the header only": lambda h: h.fp8(L).unmark(L).header({L: {"format": "float8_e4m3fn"}}),
    "fp8 legacy": lambda h: relabel(
        h.fp8(L).unmark(L).put("scaled_fp8", "F8_E4M3", 2), "weight_scale", "scale_weight"
    ),
    "fp8 legacy in a diffusion model": lambda h: relabel(
        h.fp8(PREFIX + L).unmark(PREFIX + L).put(PREFIX + "scaled_fp8", "F8_E4M3", 0),
        "weight_scale",
        "scale_weight",
    ),
    "fp8 plain cast": lambda h: h.put(f"{L}.weight", "F8_E4M3", 64, 96),
    "int8": lambda h: h.table(L),
    "int8 one scale": lambda h: h.table(L, row=False),
    "int8 scale in BF16": lambda h: h.table(L).put(f"{L}.weight_scale", "BF16", 200, 1),
    "int8 ConvRot": lambda h: h.int8(L),
    "int8 ConvRot of 4": lambda h: h.int8(L, k=20, convrot_groupsize=4),
    "int8 ConvRot nested": lambda h: h.table(L).mark(
        L, {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": 64}}
    ),
    "nvfp4": lambda h: h.nvfp4(L),
    "nvfp4 padded": lambda h: h.nvfp4(L, 192, 96).put(f"{L}.weight_scale", "U8", 256, 8),
    "nvfp4 with everything": lambda h: (
        h.nvfp4(L)
        .put(f"{L}.input_scale", "F32")
        .put(f"{L}.pre_quant_scale", "BF16", 128)
        .put(f"{L}.weight_scale_2", "F32", 1)
    ),
    "mxfp8": lambda h: h.mxfp8(L),
    "mxfp8 padded, e8m0": lambda h: h.mxfp8(L, 96, 96).put(f"{L}.weight_scale", "F8_E8M0", 128, 4),
    "w4a8": lambda h: h.w4a8(L),
    "w4a8 without convrot": lambda h: h.w4a8(L).remark(L, convrot=None),
    "w4a8 codebook": lambda h: h.w4a8(L).put(f"{L}.weight_codebook", "F32", 16),
    "w4a8 s_rel U8, weight U8": lambda h: (
        h.w4a8(L).put(f"{L}.weight_s_rel", "U8", 64, 16).put(f"{L}.weight", "U8", 64, 128)
    ),
    "w4a8 6 bits": lambda h: h.w4a8(L).put(f"{L}.weight", "I8", 64, 192),
    "w4a8 group 32": lambda h: h.w4a8(L, group=32),
    "w4a4": lambda h: h.w4a4(L),
    "table one scale": lambda h: h.table(row=False),
    "table rows": lambda h: h.table(),
    "table ConvRot": lambda h: h.table(k=64).remark("embed_tokens", convrot=True, convrot_groupsize=64),
    "table fp8": lambda h: h.fp8("embed_tokens"),
    "trailing spaces": lambda h: h.nvfp4(L).mark(L, b'{"format": "nvfp4"}   '),
    "marker as I8": lambda h: h.nvfp4(L).mark(L, {"format": "nvfp4"}, "I8"),
    "unread tensors": lambda h: h.nvfp4(L).put(f"{L}.scale_weight", "F32"),
    "marker for no layer": lambda h: h.nvfp4(L).mark("nowhere", b"\0\0"),
    "any mix": lambda h: h.fp8("a").nvfp4("b").int8("c").table().w4a8("d").w4a4("e").mxfp8("f"),
    "header repeats the tensors": lambda h: h.nvfp4(L).header({L: json.loads(h.markers[L])}),
    "prefix in tensors only": lambda h: (
        h.fp8(PREFIX + L).unmark(PREFIX + L).header({L: {"format": "float8_e4m3fn"}})
    ),
    "bf16": lambda h: h.put(f"{L}.weight", "BF16", 64, 96),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str, header: Any) -> None:
    verdict = CONTRACT.check(TAKEN[name](header()).view())
    assert verdict.accepted, [v.line() for v in verdict.all_violations()]
    assert all(v.severity == "note" for v in verdict.all_violations())


#: Rule and words. The right counterparts are above.
REFUSED: dict[str, tuple[Make, str, str]] = {
    "unknown format": (lambda h: h.w4a8(L, format="sym_w4a8_int8"), "format-unknown", "KeyError: 'sym_w4a8_int8'"),
    "svdquant": (lambda h: h.w4a4(L, format="svdquant_w4a4"), "format-unknown", "KeyError: 'svdquant_w4a4'"),
    "no format": (lambda h: h.nvfp4(L).remark(L, format=None), "format-missing",
                  f"Unknown quantization format for layer {L}"),
    "NUL": (lambda h: h.nvfp4(L).mark(L, bytes(29)), "marker-payload", "Error"),
    "NUL padded": (lambda h: h.nvfp4(L).mark(L, b'{"format": "nvfp4"}\0\0'), "marker-payload",
                   "JSONDecodeError Extra data"),
    "not JSON": (lambda h: h.nvfp4(L).mark(L, b"nvfp4!"), "marker-payload", "JSONDecodeError Expecting value"),
    "a list": (lambda h: h.nvfp4(L).mark(L, ["nvfp4"]), "marker-payload",
               "AttributeError 'list' object has no attribute 'get'"),
    "header without layers": (lambda h: h.nvfp4(L).header({}) and _header(h, "{}"), "header-metadata",
                              "KeyError 'layers'"),
    "header not JSON": (lambda h: _header(h.nvfp4(L), "{"), "header-metadata", "JSONDecodeError"),
    "nvfp4 without weight_scale_2": (lambda h: h.nvfp4(L).drop(f"{L}.weight_scale_2"), "nvfp4-scales",
                                     f"Missing NVFP4 scales for layer {L}"),
    "nvfp4 without weight_scale": (lambda h: h.nvfp4(L).drop(f"{L}.weight_scale"), "nvfp4-scales",
                                   f"Missing NVFP4 scales for layer {L}"),
    "mxfp8 with weight_scale_inv": (
        lambda h: h.mxfp8(L).drop(f"{L}.weight_scale").put(f"{L}.weight_scale_inv", "U8", 128, 4), "mxfp8-scales",
        f"Missing MXFP8 block scales for layer {L}"),
    "w4a8 without s_rel": (lambda h: h.w4a8(L).drop(f"{L}.weight_s_rel"), "w4a8-s-rel",
                           f"Missing W4A8 group scale (weight_s_rel) for layer {L}"),
    "w4a8 without s_channel": (lambda h: h.w4a8(L).drop(f"{L}.weight_s_channel"), "w4a8-s-channel",
                               "s_channel must have shape (64,), got None"),
    "w4a8 codebook in BF16": (lambda h: h.w4a8(L).put(f"{L}.weight_codebook", "BF16", 16), "w4a8-codebook",
                              "NoCapableBackendError codebook: dtype BF16 not in {torch.float32}"),
    "w4a8 group that does not fit": (lambda h: h.w4a8(L).remark(L, group_size=48), "tensor-shape", "disagree"),
    "w4a8 6 bits, group 8": (lambda h: h.w4a8(L, group=8).put(f"{L}.weight", "I8", 64, 192), "w4a8-group",
                             "group_size of 6-bit"),
    "w4a4 scale 2-D": (lambda h: h.w4a4(L).put(f"{L}.weight_scale", "F32", 64, 1), "w4a4-scale",
                       "NoCapableBackendError scales: shape [64, 1] fails: exactly 1D"),
    "nvfp4 scales cut to N rows": (lambda h: h.nvfp4(L, 192, 256), "scale-tiles",
                                   "RuntimeError shape '[2, 4, 4, 32, 4]' is invalid for input of size 3072"),
    "nvfp4 scales in F32": (lambda h: h.nvfp4(L).put(f"{L}.weight_scale", "F32", 128, 8), "scale-tiles", "F32"),
    "fp8 without scale": (lambda h: h.fp8(L).drop(f"{L}.weight_scale"), "fp8-scale",
                          "AttributeError 'NoneType' object has no attribute 'clone'"),
    "fp8 input_scale in BF16": (lambda h: h.fp8(L).put(f"{L}.input_scale", "BF16"), "input-scale-dtype",
                                "scale: dtype BF16 not in {torch.float32}"),
    "fp8 row scale": (lambda h: h.fp8(L).put(f"{L}.weight_scale", "F32", 64, 1), "fp8-row-scale",
                      "scale_b must have 1 Float element"),
    "fp8 row scale, 1-D": (lambda h: h.fp8(L).put(f"{L}.weight_scale", "F32", 64), "fp8-row-scale", "along K"),
    "fp8 table with row scales": (lambda h: h.fp8("embed_tokens").put("embed_tokens.weight_scale", "F32", 64, 1),
                                  "fp8-row-scale", "RuntimeError size mismatch at the lookup"),
    "int8 1-D scale": (lambda h: h.int8(L).put(f"{L}.weight_scale", "F32", 64), "int8-scale-1d",
                       "The size of tensor a (256) must match"),
    "int8 without scale": (lambda h: h.int8(L).drop(f"{L}.weight_scale"), "tensor-missing", "weight_scale"),
    "int8 rotation of no power of 4": (lambda h: h.int8(L, convrot_groupsize=128), "rotation-size", "no ConvRot"),
    "int8 K": (lambda h: h.int8(L, k=96), "shape-multiple", "multiple of 256"),
    "nvfp4 table": (lambda h: h.nvfp4("embed_tokens"), "embedding-format",
                    "size mismatch for embed_tokens.weight"),
    "mxfp8 table": (lambda h: h.mxfp8("embed_tokens"), "embedding-format", "size mismatch for embed_tokens.weight"),
    "w4a8 table": (lambda h: h.w4a8("embed_tokens"), "embedding-format", "size mismatch for embed_tokens.weight"),
    "w4a4 table": (lambda h: h.w4a4("embed_tokens"), "embedding-format", "size mismatch for embed_tokens.weight"),
    "packed without marker": (lambda h: h.nvfp4(L).unmark(L), "unmarked-packed",
                              "mat1 and mat2 shapes cannot be multiplied"),
    "w4a8 without marker": (lambda h: h.w4a8(L).unmark(L), "unmarked-packed", "mat1 and mat2 shapes"),
    "packed table without marker": (lambda h: h.nvfp4("embed_tokens").unmark("embed_tokens"), "unmarked-packed",
                                    "size mismatch for embed_tokens.weight"),
}  # fmt: skip

TRAPS: dict[str, tuple[Make, str, str]] = {
    "asymmetric w4a8": (lambda h: h.w4a8(L).put(f"{L}.weight_correction", "F32", 16, 64), "w4a8-correction",
                        "weight_correction is never read"),
    "int8 1-D scale and N = K": (lambda h: h.int8(L, 256).put(f"{L}.weight_scale", "F32", 256), "int8-scale-1d",
                                 "N = K hides"),
    "fp8 1-D scale and N = K": (lambda h: h.fp8(L, 96).put(f"{L}.weight_scale", "F32", 96), "fp8-row-scale",
                                "along K"),
    "table with nested convrot": (lambda h: h.table().remark("embed_tokens", params={"convrot": True}),
                                  "nested-params", "embeddings read the top level only"),
    "fp8 with a scale and no marker": (lambda h: h.fp8(L).unmark(L), "unmarked", "codes are used as weights"),
    "mxfp8 by global header": (lambda h: (h.mxfp8(L).unmark(L), h.metadata.update(quant_format="mxfp8"), h)[2],
                               "unmarked", "codes are used as weights"),
    "int8 without marker": (lambda h: h.int8(L).unmark(L), "unmarked", "codes are used as weights"),
    "e4m3 marker on e5m2": (lambda h: h.fp8(L).put(f"{L}.weight", "F8_E5M2", 64, 96), "weight-dtype", "is cast"),
    "scale_weight without sentinel": (lambda h: relabel(h.fp8(L).unmark(L), "weight_scale", "scale_weight"),
                                      "unmarked", "codes are used as weights"),
    "legacy sentinel beside a header": (
        lambda h: relabel(h.fp8(L).unmark(L).put("scaled_fp8", "F8_E4M3", 2), "weight_scale", "scale_weight").header(
            {}), "unmarked", "codes are used as weights"),
    "int8 in a legacy fp8 file": (
        lambda h: relabel(h.table(L).unmark(L).put("scaled_fp8", "F8_E4M3", 2), "weight_scale", "scale_weight"),
        "weight-dtype", "is cast"),
    "header against tensor": (lambda h: h.nvfp4(L).header({L: {"format": "nvfp4"}}), "marker-conflict",
                              "the header's entry wins"),
    "convrot a string": (lambda h: h.int8(L, convrot="false"), "convrot-string", "any string counts"),
}  # fmt: skip


def _header(h: Any, text: str) -> Any:
    h.metadata["_quantization_metadata"] = text
    return h


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, header: Any) -> None:
    make, rule, words = REFUSED[name]
    _expect("refuse", make(header()), rule, words)


@pytest.mark.parametrize("name", TRAPS)
def test_loads_and_is_wrong(name: str, header: Any) -> None:
    make, rule, words = TRAPS[name]
    _expect("trap", make(header()), rule, words)


def _expect(severity: str, h: Any, rule: str, words: str) -> None:
    verdict = CONTRACT.check(h.view())
    assert not verdict.accepted
    hits = [v for v in verdict.all_violations() if v.rule == rule and v.severity == severity]
    assert hits, [v.line() for v in verdict.all_violations()]
    assert words in hits[0].message
    assert (hits[0].remedy or "").startswith("qconvert file.safetensors --to comfyui:")


def test_a_readable_header_replaces_an_unreadable_tensor(header: Any) -> None:
    assert CONTRACT.check(
        header().nvfp4(L).mark(L, bytes(9)).header({L: {"format": "nvfp4"}}).view()
    ).accepted


def test_awq_and_banks_of_experts_need_a_newer_version(header: Any) -> None:
    h = header().put(f"{L}.weight", "I8", 64, 64).put(f"{L}.weight_scale", "BF16", 2, 64)
    h.put(f"{L}.weight_zeros", "BF16", 2, 64).mark(L, {"format": "awq_w4a16"})
    h.put("bank.weight", "I8", 4, 64, 256).put("bank.weight_scale", "F32", 4, 64, 1)
    h.mark("bank", {"format": "int8_tensorwise"})
    verdict = CONTRACT.check(h.view())
    assert verdict.accepted
    assert {v.rule for v in verdict.all_violations()} == {"awq-version", "bank-version"}
    assert not CONTRACT.check(h.put("bank.weight_scale", "F32", 64, 1).view()).accepted
    assert not CONTRACT.check(h.put(f"{L}.weight_zeros", "BF16", 64, 2).view()).accepted


def test_a_bank_with_a_codebook_is_refused(header: Any) -> None:
    h = header().put("bank.weight", "I8", 4, 64, 128).mark("bank", {"format": "asym_w4a8_int8"})
    assert CONTRACT.check(h.view()).accepted
    assert not CONTRACT.check(h.put("bank.weight_codebook", "F32", 16).view()).accepted


def test_full_precision_in_params_is_noted(header: Any) -> None:
    verdict = CONTRACT.check(header().fp8(L).remark(L, params={"full_precision_matrix_mult": True}).view())
    assert [(v.severity, v.rule) for v in verdict.all_violations()] == [("note", "nested-full-precision")]


@pytest.mark.parametrize(
    ("make", "target"),
    [
        (lambda h: h.nvfp4(L).unmark(L), "nvfp4"),
        (lambda h: h.w4a8(L).unmark(L), "asym_w4a8_int8"),
        (lambda h: h.fp8(L).unmark(L), "float8_e4m3fn"),
        (lambda h: h.int8(L).unmark(L), "int8_tensorwise"),
        (lambda h: h.fp8("a").fp8("b").int8("c", k=96), "float8_e4m3fn"),
        (lambda h: h.fp8("a").fp8("b").nvfp4("c", 192), "nvfp4"),
    ],
)
def test_remedy_names_the_nearest_target(make: Make, target: str, header: Any) -> None:
    faults = [v for v in CONTRACT.check(make(header()).view()).all_violations() if v.severity != "note"]
    assert faults and faults[0].remedy == f"qconvert file.safetensors --to comfyui:{target}"
