"""The older, stricter sglang: the few rules that are known to differ, each against the newer one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from qconvert.runtime.contracts.registry import get_contract

OLDER = get_contract("sglang-0132848")
NEWER = get_contract("sglang-0.5.23")
L = "layers.0.up"

#: Taken by both.
BOTH: dict[str, Callable[[Any], Any]] = {
    "nvfp4 in full precision": lambda h: h.nvfp4(L),
    "nvfp4 and a row-wise table": lambda h: h.nvfp4(L).table(),
    "w4a8": lambda h: h.w4a8(L),
    "w4a8 and a table of one scale": lambda h: h.w4a8(L).table(row=False),
    "int8": lambda h: h.int8(L),
    "w4a4": lambda h: h.w4a4(L),
    "w4a4 and int8": lambda h: h.w4a4(L).int8("b"),
    "fp8": lambda h: h.fp8(L),
    "mxfp8": lambda h: h.mxfp8(L),
}
#: Taken by the newer one only: rule and words of the older.
NEWER_ONLY: dict[str, tuple[Callable[[Any], Any], str, str, str]] = {
    "native nvfp4": (
        lambda h: h.nvfp4(L, full_precision_matrix_mult=False),
        "nvfp4-native",
        "full-precision matmul only",
        "comfy_nvfp4",
    ),
    "nvfp4 and a table of one scale": (
        lambda h: h.nvfp4(L).table(row=False),
        "embedding-scale",
        "Unsupported quantized embedding marker",
        "comfy_nvfp4",
    ),
    "w4a8 and a row-wise table": (
        lambda h: h.w4a8(L).table(),
        "embedding-scale",
        "Unsupported quantized embedding marker",
        "kitchen_w4a8",
    ),
    "int8 and a table": (
        lambda h: h.int8(L).table(),
        "int8-convrot",
        "every int8 marker must have convrot true",
        "convrot_int8",
    ),
}


@pytest.mark.parametrize("name", BOTH)
def test_taken_by_both(name: str, header: Any) -> None:
    view = BOTH[name](header()).view()
    assert NEWER.check(view).accepted
    verdict = OLDER.check(view)
    assert verdict.accepted and verdict.runtime == "sglang-0132848"


@pytest.mark.parametrize("name", NEWER_ONLY)
def test_taken_by_the_newer_one_only(name: str, header: Any) -> None:
    make, rule, words, target = NEWER_ONLY[name]
    view = make(header()).view()
    assert NEWER.check(view).accepted
    verdict = OLDER.check(view)
    assert not verdict.accepted
    (violation,) = [v for v in verdict.all_violations() if v.severity == "refuse"]
    assert violation.rule == rule and words in violation.message
    assert violation.remedy == f"qconvert file.safetensors --to {target} --runtime sglang-0132848"


def test_any_other_companion_of_nvfp4_is_refused(header: Any) -> None:
    assert not OLDER.check(header().nvfp4(L).int8("b").view()).accepted
    assert not OLDER.check(header().nvfp4(L).fp8("b").view()).accepted


def test_unrotated_int8_linear_is_refused_and_not_a_trap(header: Any) -> None:
    violations = OLDER.check(header().table(L).view()).all_violations()
    assert [(v.severity, v.rule) for v in violations] == [("refuse", "int8-convrot")]


def test_config_names(header: Any) -> None:
    assert OLDER.check(header().int8(L).view()).config == "KitchenInt8Config"
    assert OLDER.configs["convrot_int8"] == OLDER.configs["kitchen_int8"] == "KitchenInt8Config"
    assert NEWER.configs["kitchen_int8"] == "ConvRotInt8Config"
