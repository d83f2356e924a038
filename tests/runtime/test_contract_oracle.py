"""The contract against what the real sglang 0.5.23 said: recorded answers, and the runtime itself where there is one.

The record is made by `scripts/mutate_gate --record`; set QCONVERT_SGLANG_PYTHON (and QCONVERT_SGLANG_PYTHONPATH) to
ask a runtime that is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from qconvert.formats.tensors import HeaderView, Spec
from qconvert.runtime.contracts.registry import contract_names, get_contract

SCRIPTS = Path(__file__).parents[2] / "scripts"
RECORD = Path(__file__).with_name("data") / "sglang-0.5.23.json"


def load(name: str, file: str) -> ModuleType:
    loader = SourceFileLoader(name, str(SCRIPTS / file))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gate() -> Any:
    load("gate_mutations", "gate_mutations.py")
    return load("mutate_gate", "mutate_gate")


@pytest.fixture(scope="module")
def mutated(gate: Any) -> dict[str, HeaderView]:
    found = {f"{name}: right": file.view() for name, file in gate.bases().items()}
    for name, base in gate.bases().items():
        found |= {f"{name}: {what}": file.view() for what, file in gate.mutations(base)}
    return found


def recorded(headers: dict[str, Any]) -> dict[str, HeaderView]:
    return {
        name: HeaderView(
            {key: Spec(dtype, tuple(shape)) for key, (dtype, shape) in header["tensors"].items()},
            header["metadata"],
            {key: text.encode("latin-1") for key, text in header["markers"].items()},
            (name,),
        )
        for name, header in headers.items()
    }


def test_recorded_answers(gate: Any, mutated: dict[str, HeaderView]) -> None:
    record = json.loads(RECORD.read_text())
    views = mutated | recorded(record["headers"])
    contract = get_contract("sglang-0.5.23")
    count: Counter[str] = Counter()
    wrong = []
    for name, answers in record["answers"].items():
        ours = contract.check(views[name])
        for capability, real in answers.items():
            outcome = gate.Outcome(name, int(capability), real, ours)
            count["intended" if outcome.intended else "refused" if outcome.real_refuses else "taken"] += 1
            if outcome.difference and not outcome.intended:
                wrong.append((name, capability, outcome.difference, sorted(outcome.our_rules)))
    assert not wrong
    assert count["refused"] > 200 and count["taken"] > 100
    assert sum(name.endswith(".safetensors") for name in record["answers"]) >= 40


def test_right_files_are_taken_and_no_spoiled_header_breaks_a_contract(
    mutated: dict[str, HeaderView],
) -> None:
    assert len(mutated) > 10_000
    for index, (name, view) in enumerate(mutated.items()):
        if name.endswith(": right"):
            assert get_contract("sglang-0.5.23").check(view).accepted, name
        elif index % 5 == 0:
            for contract in contract_names():
                get_contract(contract).check(view, tp=2)


@pytest.mark.skipif(
    "QCONVERT_SGLANG_PYTHON" not in os.environ, reason="QCONVERT_SGLANG_PYTHON names no Python"
)
def test_the_runtime_itself() -> None:
    command = [sys.executable, str(SCRIPTS / "mutate_gate"), "--python", os.environ["QCONVERT_SGLANG_PYTHON"]]
    if path := os.environ.get("QCONVERT_SGLANG_PYTHONPATH"):
        command += ["--pythonpath", path]
    done = subprocess.run([*command, "--count", "300", "--seed", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
