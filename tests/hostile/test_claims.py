"""Numbers that a configuration claims and that a file cannot hold: no memory is taken on their word."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
if not sys.platform.startswith("linux"):
    pytest.skip("measured by /proc", allow_module_level=True)
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))
seeds: Any = importlib.import_module("fuzz_seeds")
Case: Any = importlib.import_module("fuzz_case").Case
harness: Any = importlib.import_module("fuzz_harness")

HUGE = (1 << 20, 1 << 31, 1 << 40, 1 << 62, 10**30, 1e300, -1, 0)


def numbers(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every number, and of every flag, in a document."""
    found = []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        found += [(value, key)] if isinstance(inner, int | float) else numbers(inner)
    return found


@pytest.mark.parametrize("seed", list(seeds.foreign()), ids=lambda seed: seed.name)
def test_numbers_of_a_configuration(seed: Any, tmp_path: Path) -> None:
    document = json.loads(seed.files["config.json"])
    for index in range(len(numbers(document))):
        for huge in HUGE:
            changed = json.loads(seed.files["config.json"])
            owner, key = numbers(changed)[index]
            owner[key] = huge
            files = seed.files | {"config.json": json.dumps(changed).encode()}
            arguments = ["convert", "{}", "--to", "bf16", "-o", "{}/made/out", "--jobs", "1"]
            report = harness.run_case(Case("claims", files, arguments), tmp_path / "case")
            assert not report.faults, (key, huge, report)


def test_numbers_of_a_bitsandbytes_state(tmp_path: Path) -> None:
    (seed,) = (seed for seed in seeds.foreign() if seed.name == "bitsandbytes")
    box = seeds.Box.of(seed.files["model.safetensors"])
    (name,) = (name for name in box.tensors if "quant_state" in name)
    absmax = name.partition(".weight.")[0] + ".weight.absmax"
    for huge in HUGE:
        state = json.loads(box.tensors[name][2]) | {"blocksize": huge}
        data = json.dumps(state).encode()
        changed = seeds.Box(dict(box.tensors), box.metadata)
        changed.tensors[name] = ["U8", [len(data)], data]
        changed.tensors[absmax] = ["F32", [1], box.tensors[absmax][2][:4]]
        files = seed.files | {"model.safetensors": changed.bytes()}
        arguments = ["convert", "{}", "--to", "bf16", "-o", "{}/made/out", "--jobs", "1"]
        report = harness.run_case(Case("claims", files, arguments), tmp_path / "case")
        assert not report.faults, (huge, report)
