"""Markers: what is read from both carriers, what is mended, what is guessed, and that each is said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qconvert.formats.finding import Finding
from qconvert.formats.marker import (
    ALIASES,
    HEADER_KEY,
    Markers,
    collect,
    flatten,
    header_layers,
    parse_marker,
    render_header,
    render_tensor,
)
from qconvert.formats.registry import codec_for_marker
from qconvert.formats.rotation import choose_group, is_group, marker_rotation

NV = {"format": "nvfp4"}
FP8 = {"format": "float8_e4m3fn"}


def raw(marker: Any) -> bytes:
    return json.dumps(marker).encode()


def header(layers: Any, **keys: Any) -> dict[str, str]:
    return {HEADER_KEY: json.dumps({"format_version": "1.0", "layers": layers} | keys)}


def one(
    tensor: Any = None, listed: Any = None, layer: str = "a.fc"
) -> tuple[list[tuple[str, dict[str, Any]]], list[Finding], bool]:
    """Candidates, findings and placeholder of a layer with these markers."""
    data = tensor if isinstance(tensor, bytes) else raw(tensor)
    found, findings = collect(
        {} if tensor is None else {layer: data}, {} if listed is None else header({layer: listed}), [layer]
    )
    assert not findings
    state = found.get(layer, Markers())
    return state.candidates, state.findings, state.placeholder


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


# ---- bytes


@pytest.mark.parametrize("tail", [b"", b"\0", b"\0" * 9, b"  ", b"\n", b" \0 \0"])
def test_trailing_nuls_and_space_are_no_part_of_a_marker(tail: bytes) -> None:
    assert parse_marker(raw(NV) + tail) == (NV, None)


@pytest.mark.parametrize("data", [b"", b"\0" * 29, b" ", b"\0 \0"])
def test_nothing_is_a_placeholder(data: bytes) -> None:
    assert parse_marker(data) == (None, "")
    candidates, findings, placeholder = one(data)
    assert (candidates, levels(findings), placeholder) == ([], ["note"], True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"nvfp4", "not JSON"),
        (b'{"format": "nvfp4"', "not JSON"),
        (b'{"format": "nvfp4"}\0{"format": "nvfp4"}', "not JSON"),
        (b'["nvfp4"]', "a JSON list"),
        (b'"nvfp4"', "a JSON str"),
        (b"null", "a JSON NoneType"),
        (b'{"format": "nvfp4", "format": "mxfp8"}', "occurs twice"),
        (b'{"format": NaN}', "NaN is not JSON"),
        (b'{"a":' * 60_000, "nested too deeply"),
    ],
)
def test_unreadable_markers_say_why(data: bytes, words: str) -> None:
    marker, problem = parse_marker(data)
    assert marker is None and problem is not None and words in problem
    candidates, findings, placeholder = one(data)
    assert (candidates, levels(findings), placeholder) == ([], ["repair"], False)
    assert words in findings[0].message


@given(st.binary(max_size=80))
def test_no_bytes_raise(data: bytes) -> None:
    marker, problem = parse_marker(data)
    assert (marker is None) == (problem is not None)


# ---- one layer


@pytest.mark.parametrize("carrier", ["tensor", "header"])
def test_either_carrier_is_read(carrier: str) -> None:
    candidates, findings, _ = one(**{"tensor" if carrier == "tensor" else "listed": NV})
    assert (candidates, findings) == ([(carrier, NV)], [])


def test_carriers_that_agree_are_one_marker_and_others_two() -> None:
    assert one(NV, NV)[0] == [("tensor", NV)]
    assert one(NV, FP8)[0] == [("tensor", NV), ("header", FP8)]
    full = NV | {"full_precision_matrix_mult": True}
    assert one(NV, full)[0] == [("tensor", NV), ("header", full)]


def test_nested_params_come_to_the_top_and_the_top_wins() -> None:
    nested = {
        "format": "int8_tensorwise",
        "params": {"convrot": True, "convrot_groupsize": 64, "format": "x"},
    }
    flat = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    assert flatten(nested) == (flat, True)
    assert flatten(NV) == (NV, False)
    assert flatten({"params": [1]}) == ({"params": [1]}, False)
    candidates, findings, _ = one(nested)
    assert candidates == [("tensor", flat)]
    assert levels(findings) == ["repair"] and "nested params" in findings[0].message
    # A tensor's nested marker and a header's flat one agree.
    assert len(one(nested, flat)[0]) == 1


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_aliases_are_read_as_the_format_they_mean(alias: str) -> None:
    assert codec_for_marker(alias) is None
    assert codec_for_marker(ALIASES[alias]) is not None
    candidates, findings, _ = one({"format": alias})
    assert candidates[0][1] == {"format": ALIASES[alias]}
    assert levels(findings) == ["repair"] and alias in findings[0].message


@pytest.mark.parametrize(
    "marker", [{}, {"format": ""}, {"format": None}, {"format": ["nvfp4"]}, {"format": 4}]
)
def test_a_marker_without_format_names_none(marker: Any) -> None:
    candidates, findings, _ = one(marker)
    assert candidates[0][1]["format"] == ""
    assert levels(findings) == ["repair"] and "names no format" in findings[0].message


@pytest.mark.parametrize("listed", [["nvfp4"], "nvfp4", None, 3])
def test_header_markers_that_are_no_objects(listed: Any) -> None:
    found, _ = collect({}, header({"a.fc": listed}), ["a.fc"])
    assert found["a.fc"].candidates == []
    assert levels(found["a.fc"].findings) == ["repair"]


# ---- ConvRot keys


@pytest.mark.parametrize(
    ("keys", "rotation", "level"),
    [
        ({}, 0, None),
        ({"convrot": True}, 256, None),
        ({"convrot": True, "convrot_groupsize": 64}, 64, None),
        ({"convrot": True, "convrot_groupsize": None}, 256, None),
        ({"convrot": False, "convrot_groupsize": 64}, 0, None),
        ({"convrot": None, "convrot_groupsize": 64}, 0, None),
        ({"convrot_groupsize": 64}, 0, None),
        ({"convrot": "true", "convrot_groupsize": 16}, 16, "repair"),
        ({"convrot": "True"}, 256, "repair"),
        ({"convrot": "false", "convrot_groupsize": 16}, 0, "guess"),
        ({"convrot": "0"}, 0, "guess"),
        ({"convrot": 1, "convrot_groupsize": 4}, 4, "repair"),
        ({"convrot": 0}, 0, "repair"),
        ({"convrot": True, "convrot_groupsize": "64"}, 64, "repair"),
        ({"convrot": True, "convrot_groupsize": 64.0}, 64, "repair"),
        ({"convrot": True, "convrot_groupsize": 128}, 256, "guess"),
        ({"convrot": True, "convrot_groupsize": 64.5}, 256, "guess"),
        ({"convrot": True, "convrot_groupsize": True}, 256, "guess"),
        ({"convrot": True, "convrot_groupsize": [64]}, 256, "guess"),
        ({"convrot": True, "convrot_groupsize": 1}, 256, "guess"),
    ],
)
def test_rotation_keys(keys: dict[str, Any], rotation: int, level: str | None) -> None:
    candidates, findings, _ = one({"format": "int8_tensorwise"} | keys)
    assert marker_rotation(candidates[0][1], default=0) == rotation
    assert levels(findings) == ([level] if level else [])


def test_a_default_stands_where_no_marker_does() -> None:
    assert marker_rotation(None, default=256) == 256
    assert marker_rotation({}, default=256) == 256
    assert marker_rotation({"convrot": False}, default=256) == 0
    assert marker_rotation({"convrot_groupsize": 16}, default=256) == 16


def test_groups_are_powers_of_four() -> None:
    assert [size for size in range(-4, 5000) if is_group(size)] == [4, 16, 64, 256, 1024, 4096]
    assert not is_group(True) and not is_group("16") and not is_group(16.0) and not is_group(None)


def test_the_largest_group_that_divides() -> None:
    served = (256, 64, 16)
    assert [choose_group(k, served) for k in (512, 320, 48, 40, 256)] == [256, 64, 16, 0, 256]
    assert choose_group(512, ()) == 0


@pytest.mark.parametrize(("value", "read"), [("32", 32), (32.0, 32), (" 8 ", 8)])
def test_group_sizes_written_as_something_else(value: Any, read: int) -> None:
    candidates, findings, _ = one({"format": "asym_w4a8_int8", "group_size": value})
    assert candidates[0][1]["group_size"] == read and type(candidates[0][1]["group_size"]) is int
    assert levels(findings) == ["repair"]


# ---- whole files


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        ("{", "guess", "is not JSON"),
        ("[]", "note", "lists no layers"),
        ("{}", "note", "lists no layers"),
        ('{"layers": []}', "note", "lists no layers"),
        ('{"layers": {"a.fc": {}, "a.fc": {}}}', "guess", "occurs twice"),
    ],
)
def test_header_entries_that_cannot_be_read(text: str, level: str, words: str) -> None:
    layers, finding = header_layers({HEADER_KEY: text})
    assert layers == {} and finding is not None
    assert finding.level == level and words in finding.message
    found, findings = collect({"a.fc": raw(NV)}, {HEADER_KEY: text}, ["a.fc"])
    assert found["a.fc"].candidates == [("tensor", NV)] and findings == [finding]


def test_no_header_entry_is_no_finding() -> None:
    assert header_layers({"format": "pt"}) == ({}, None)


@pytest.mark.parametrize("carrier", ["tensor", "header"])
def test_a_missing_prefix_is_added_where_only_one_fits(carrier: str) -> None:
    known = [f"model.diffusion_model.blocks.{i}.fc" for i in range(3)] + ["model.diffusion_model.out"]
    named = {"blocks.0.fc": NV, "blocks.2.fc": FP8}
    tensors = {name: raw(marker) for name, marker in named.items()} if carrier == "tensor" else {}
    found, findings = collect(tensors, header(named) if carrier == "header" else {}, known)
    assert findings == []
    assert {name: state.candidates[0][1] for name, state in found.items()} == {known[0]: NV, known[2]: FP8}
    assert levels(found[known[0]].findings) == ["repair"]
    assert found[known[0]].findings[0].layer == known[0]


def test_a_prefix_too_many_is_taken_off() -> None:
    found, findings = collect({}, header({"model.diffusion_model.blocks.0.fc": NV}), ["blocks.0.fc"])
    assert findings == [] and found["blocks.0.fc"].candidates == [("header", NV)]


def test_one_prefix_has_to_explain_all_names() -> None:
    """`fc` alone ends two layers; only one prefix fits `fc` and `out` both."""
    known = ["a.fc", "b.fc", "b.out"]
    found, findings = collect({}, header({"fc": NV, "out": FP8}), known)
    assert {name: state.candidates[0][1] for name, state in found.items()} == {"b.fc": NV, "b.out": FP8}
    assert findings == []


def test_an_ambiguous_name_is_dropped_and_said() -> None:
    found, findings = collect({}, header({"fc": NV}), ["a.fc", "b.fc"])
    assert found == {}
    assert levels(findings) == ["repair"] and findings[0].layer == "fc"


def test_a_part_of_a_name_is_no_prefix() -> None:
    found, findings = collect({"c": raw(NV)}, {}, ["a.fc"])
    assert found == {} and len(findings) == 1


def test_markers_of_missing_layers_do_not_touch_others() -> None:
    found, findings = collect({"a.fc": raw(NV), "z.fc": raw(FP8)}, header({"y": NV}), ["a.fc"])
    assert list(found) == ["a.fc"] and found["a.fc"].findings == []
    assert sorted(finding.layer or "" for finding in findings) == ["y", "z.fc"]
    assert {finding.level for finding in findings} == {"repair"}


# ---- writing

MARKERS = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.one_of(st.booleans(), st.integers(), st.text(max_size=8)),
    max_size=4,
).filter(lambda marker: "params" not in marker)


@given(MARKERS)
def test_a_written_marker_reads_back(marker: dict[str, Any]) -> None:
    assert parse_marker(render_tensor(marker)) == (marker, None)


@given(st.dictionaries(st.text(max_size=8), MARKERS, max_size=3))
def test_a_written_header_entry_reads_back(layers: dict[str, dict[str, Any]]) -> None:
    text = render_header(layers)
    assert json.loads(text)["format_version"] == "1.0"
    assert header_layers({HEADER_KEY: text}) == (layers, None)
