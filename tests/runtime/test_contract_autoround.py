"""sglang's AutoRound path: what its configuration makes of a file, layer by layer."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from qconvert.formats.quant_config import QuantConfig
from qconvert.runtime.contracts.base import Verdict
from qconvert.runtime.contracts.registry import contracts_of, get_contract
from qconvert.runtime.contracts.sglang_autoround import LayerConfigs, _settings

NAME = "sglang-autoround-0.5.23"
GOOD = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 64,
    "sym": True,
    "data_type": "int",
}


def packed(header: Any, n: int = 128, k: int = 256, bits: int = 4, group: int = 64, prefix: str = "a") -> Any:
    groups = k // group
    made = header().put(f"{prefix}.qweight", "I32", k * bits // 32, n)
    made = made.put(f"{prefix}.qzeros", "I32", groups, n * bits // 32)
    return made.put(f"{prefix}.scales", "F16", groups, n).put(f"{prefix}.g_idx", "I32", k)


def judge(made: Any, **config: Any) -> Verdict:
    view = replace(made.view(), config={"quantization_config": GOOD | config})
    return get_contract(NAME).check(view)


def rules(verdict: Verdict) -> list[str]:
    return [v.rule for v in verdict.all_violations() if v.severity in ("refuse", "trap")]


def test_accepted(header: Any) -> None:
    verdict = judge(packed(header).put("a.bias", "BF16", 128).put("norm.weight", "BF16", 128))
    assert verdict.accepted and verdict.config == "AutoRoundConfig"
    assert [layer.method for layer in verdict.layers] == ["GPTQMarlinLinearMethod"]
    assert contracts_of("auto_gptq") == (NAME,)
    exempt = packed(header).put("b.weight", "BF16", 40, 96).put("c.0.weight", "BF16", 8, 8)
    extra = {"b": {"bits": 16}, "c\\.\\d": {"bits": 16}}
    assert judge(exempt, extra_config=extra).accepted
    eight = packed(header, bits=8, group=256)
    assert judge(eight, extra_config={"a": {"bits": 8, "group_size": -1}}).accepted


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"packing_format": "auto_round:auto_awq"}, "packing-format"),
        ({"packing_format": "auto_round:gptqmodel"}, "packing-format"),
        ({"bits": 5}, "bits"),
        ({"data_type": "mx_fp"}, "data-type"),
        ({"desc_act": True}, "desc-act"),
        ({"backend": "exllama"}, "backend"),
        ({"quant_method": "gptq"}, "other-method"),
        ({"sym": False}, "no-kernel"),
        ({"group_size": 16}, "group-size"),
        ({"extra_config": {"a": {"bits": 16}}}, "exempt-packed"),
    ],
)
def test_configurations_that_are_refused(config: dict[str, Any], rule: str, header: Any) -> None:
    verdict = judge(packed(header), **config)
    assert rule in rules(verdict)
    if rule not in ("other-method", "no-kernel"):
        assert any("auto_gptq" in (v.remedy or "") for v in verdict.all_violations())


def test_layers_that_are_refused(header: Any) -> None:
    assert rules(judge(packed(header).put("b.weight", "BF16", 64, 128))) == ["not-exempt"]
    assert rules(judge(packed(header).put("a.act_scales", "BF16", 1))) == ["unknown-tensor"]
    assert rules(judge(packed(header, n=96))) == ["marlin-n"]
    assert rules(judge(packed(header, k=192))) == ["marlin-k"]
    assert "scales-shape" in rules(judge(packed(header, group=32)))
    stock = header().put("a.qweight", "I32", 32, 128).put("a.qzeros", "I32", 4, 16)
    assert rules(judge(stock.put("a.scales", "F16", 4, 128))) == ["g_idx-missing"]
    plain = header().put("a.weight", "BF16", 64, 128)
    assert get_contract(NAME).check(plain.view()).accepted
    undeclared = get_contract(NAME).check(packed(header).view())
    assert rules(undeclared) == ["not-declared"]


def test_planned_layers() -> None:
    contract = get_contract(NAME)
    assert contract.layer_refusal("auto_gptq", "linear", "gptq", 128, 256, {}) is None
    assert "64" in (contract.layer_refusal("auto_gptq", "linear", "gptq", 40, 256, {}) or "")
    assert "128" in (contract.layer_refusal("auto_gptq", "linear", "gptq", 64, 96, {}) or "")
    assert contract.layer_refusal("auto_gptq", "embedding", "gptq", 128, 256, {})
    assert contract.layer_refusal("auto_gptq", "linear", "bf16", 5, 7, {}) is None


def some_config(chance: random.Random) -> dict[str, Any]:
    document: dict[str, Any] = {
        "bits": chance.choice([2, 3, 4, 5, 8]),
        "group_size": chance.choice([-1, 16, 64]),
        "sym": chance.random() < 0.5,
    }
    for key, values in (
        ("packing_format", ["auto_round:auto_gptq", "auto_round:auto_awq", "auto_gptq"]),
        ("data_type", ["int", "mx_fp"]),
        ("backend", ["auto", "marlin", "exllama"]),
    ):
        if chance.random() < 0.25:
            document[key] = chance.choice(values)
    if chance.random() < 0.1:
        document.pop(chance.choice(["bits", "group_size", "sym"]))
    keys = ["a.b", "x.0.fc", "x.1.fc", "y", "x\\.\\d+\\.fc", "a.*", "("]
    if chance.random() < 0.6:
        document["extra_config"] = {
            key: {"bits": chance.choice([4, 8, 16])} if chance.random() < 0.7 else {"sym": False}
            for key in chance.sample(keys, 3)
        }
    return document


def test_sglang_resolves_configurations_in_the_same_way() -> None:
    module = pytest.importorskip(
        "sglang.srt.layers.quantization.auto_round", reason="sglang is not installed", exc_type=ImportError
    )
    torch = pytest.importorskip("torch")
    chance = random.Random(1)
    for _ in range(1000):
        document = some_config(chance)
        try:
            theirs = module.AutoRoundConfig.from_config(document)
        except ValueError:
            theirs = None
        accepted = theirs is not None and "gptq" in theirs.packing_format
        assert accepted == (not list(_settings(QuantConfig("auto-round", document, "here")))), document
        for name in ("a.b", "x.0.fc", "x.7.fc", "y") if accepted else ():
            config = theirs.get_layer_config(torch.nn.Linear(2, 2), name)
            assert tuple(config) == LayerConfigs(document).of(name), (document, name)
