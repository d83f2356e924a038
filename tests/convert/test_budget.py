"""Plans by budget: the choice against all choices, bits as they lie in the file, plans saved, edited and fed back."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qconvert.convert.budget import KEEP, Budget, Choice, Group, choose, parse_budget
from qconvert.convert.forms import Forms
from qconvert.convert.job import Outcome, Request, plan_job, run_job
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import UsageError
from qconvert.runtime.calibration_record import write_calibration

N, K = 128, 256
HARD, EASY, HARSH = "blocks.0.fc", "blocks.1.fc", "blocks.2.fc"


def groups(seed: int, count: int = 6) -> list[Group]:
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        p = int(rng.integers(1, 5)) * 100
        error = float(rng.random()) * p
        choices = (
            Choice(KEEP, 16 * p, 0.0),
            Choice("a", 4 * p, error),
            Choice("b", 8 * p, error * float(rng.random()) * 0.2),
        )
        out.append(Group((f"layer{i}",), p, choices))
    return out


@pytest.mark.parametrize("seed", range(8))
def test_choice_is_as_good_as_any_but_for_one_step(seed: int) -> None:
    units = groups(seed)
    total = sum(g.parameters for g in units)
    for bits in (4.0, 5.5, 7.3, 9.0, 12.0, 16.0):
        chosen = choose(units, Budget(bits_per_weight=bits))
        assert sum(c.bits for c in chosen) <= bits * total
        error = sum(c.error for c in chosen)
        best = min(
            sum(c.error for c in every)
            for every in itertools.product(*(g.choices for g in units))
            if sum(c.bits for c in every) <= bits * total
        )
        step = max(max(c.error for c in g.choices) for g in units)
        assert best <= error + 1e-9 and error <= best + step


def test_all_the_budget_buys_everything_and_none_is_refused() -> None:
    units = groups(1)
    assert all(c.error == 0 for c in choose(units, Budget(bits_per_weight=16)))
    assert all(c.form == "a" for c in choose(units, Budget(bits_per_weight=4)))
    with pytest.raises(UsageError, match="at least 4bpw"):
        choose(units, Budget(bits_per_weight=3.9))


def test_least_sqnr_takes_the_smallest_form_that_is_close_enough() -> None:
    unit = Group(("x",), 100, (Choice(KEEP, 1600, 0.0), Choice("a", 400, 1.0), Choice("b", 800, 0.01)))
    # Errors of 1/100 and 0.01/100: 20 and 40 dB.
    got = [choose([unit], Budget(min_sqnr=db))[0].form for db in (19.9, 20.1, 39.9, 40.1)]
    assert got == ["a", "b", "b", KEEP]


@pytest.mark.parametrize(("text", "bits"), [("4.8bpw", 4.8), ("4.8", 4.8), (" 5 BPW ", 5.0)])
def test_budgets_are_read(text: str, bits: float) -> None:
    assert parse_budget(text, None) == Budget(bits_per_weight=bits)


@pytest.mark.parametrize("text", ["", "bpw", "-1", "0bpw", "nan", "4.8 GB", "65"])
def test_no_budgets(text: str) -> None:
    with pytest.raises(UsageError, match="bits per weight"):
        parse_budget(text, None)


def test_two_ways_at_once() -> None:
    with pytest.raises(UsageError, match="give one"):
        parse_budget("5bpw", 30.0)


# ---- on a file


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """Three layers: Gaussian, exact in nvfp4 and in int8, and one with an outlier in every row."""
    rng = np.random.default_rng(3)
    levels = np.array([0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    easy = rng.choice(levels, (N, K)) * rng.choice([-1, 1], (N, K)).astype(np.float32)
    easy[:, ::16] = 6
    path = tmp_path / "model.safetensors"
    tensors = {HARD: rng.standard_normal((N, K)), EASY: easy, HARSH: rng.standard_t(2, (N, K))}
    write_calibration(path, {f"{name}.weight": w.astype(np.float32) for name, w in tensors.items()})
    return path


def plan(path: Path, target: str, **forms: Any) -> dict[str, str]:
    with opened(path) as checkpoint:
        made, _ = plan_job(Request(path, target, forms=Forms(**forms)), checkpoint)
        return {action.layer.prefix: action.method for action in made.actions}


def convert(path: Path, target: str, **forms: Any) -> Outcome:
    with opened(path) as checkpoint:
        request = Request(
            path, target, output=path.parent / "out.safetensors", force=True, forms=Forms(**forms)
        )
        return run_job(request, checkpoint)


def test_the_layer_that_loses_least_is_quantised_first(model_file: Path) -> None:
    # float32 sources cost 32 bits; one layer of three at 4.5 makes 22.8, two 13.7, three 4.5.
    assert plan(model_file, "comfy_nvfp4", budget="23bpw") == {HARD: "F32", EASY: "nvfp4", HARSH: "F32"}
    assert list(plan(model_file, "comfy_nvfp4", budget="32").values()).count("F32") == 2
    assert set(plan(model_file, "comfy_nvfp4", budget="4.6").values()) == {"nvfp4"}


def test_bits_are_those_of_the_file(model_file: Path) -> None:
    outcome = convert(model_file, "comfy_nvfp4", budget="14bpw")
    with opened(outcome.output) as out:
        stored = sum(tensor.nbytes for name, tensor in out.tensors.items() if "comfy_quant" not in name)
    stated = float(next(n for n in outcome.plan.notes if n.startswith("budget:")).split()[1])
    assert 8 * stored / (3 * N * K) == pytest.approx(stated, abs=1e-3)
    assert stated <= 14


def test_formats_of_one_config_are_mixed(model_file: Path) -> None:
    # w4a4 at about 19 dB, int8 at about 42: only the harder layers need the wider form.
    with pytest.raises(UsageError, match="every layer that is quantised would be convrot_int8"):
        plan(model_file, "kitchen_w4a4", min_sqnr=30.0)
    assert set(plan(model_file, "kitchen_w4a4", min_sqnr=15.0).values()) == {"convrot_w4a4"}
    forms = plan(model_file, "kitchen_w4a4", budget="5.8bpw")
    assert sorted(forms.values()) == ["convrot_w4a4", "convrot_w4a4", "int8_tensorwise"]


def test_outputs_decide_where_inputs_are_known(model_file: Path, tmp_path: Path) -> None:
    # EASY loses nothing as it is; with one column spoilt, what it loses depends on whether inputs reach that column.
    with opened(model_file) as checkpoint:
        tensors = {name: checkpoint.read(name).copy() for name in checkpoint.tensors}
    tensors[f"{EASY}.weight"][:, :16] = tensors[f"{HARD}.weight"][:, :16]
    write_calibration(model_file, tensors)
    calibration = tmp_path / "c.safetensors"
    outside, inside = np.ones(K, np.float32), np.zeros(K, np.float32)
    outside[:16], inside[:16] = 0, 1
    sums = []
    for moments in (outside, inside):
        write_calibration(calibration, {f"{EASY}.second_moment": moments})
        saved = tmp_path / "p.json"
        with opened(model_file) as checkpoint:
            forms = Forms(budget="23bpw", plan_out=saved)
            plan_job(Request(model_file, "comfy_nvfp4", calibration=calibration, forms=forms), checkpoint)
        sums.append(json.loads(saved.read_text())["layers"][EASY]["forms"]["comfy_nvfp4"]["sqnr_db"])
    assert sums[0] == "exact" or sums[0] > 60
    assert 15 < sums[1] < 30


def test_a_plan_is_saved_edited_and_followed(model_file: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    first = plan(model_file, "comfy_nvfp4", budget="14", plan_out=saved)
    document = json.loads(saved.read_text())
    assert document["target"] == "comfy_nvfp4"
    assert plan(model_file, "comfy_nvfp4", plan=saved) == first
    entry = document["layers"][EASY]
    assert entry["form"] == "comfy_nvfp4" and entry["forms"]["keep"] == {"bits": 32.0, "sqnr_db": "exact"}
    assert entry["forms"]["comfy_nvfp4"]["sqnr_db"] == "exact"
    document["layers"] = {EASY: {"form": KEEP}, HARD: "comfy_nvfp4"}
    saved.write_text(json.dumps(document))
    # HARSH is not named: planned as without the file.
    assert plan(model_file, "comfy_nvfp4", plan=saved) == {HARD: "nvfp4", EASY: "F32", HARSH: "nvfp4"}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", "cannot|can be read"),
        ({"layers": {}}, "is no plan"),
        ({"qconvert_plan": 1, "target": "kitchen_w4a8", "layers": {}}, "another target"),
        ({"qconvert_plan": 1, "target": "comfy_nvfp4"}, "no \"layers\""),
        ({"qconvert_plan": 1, "target": "comfy_nvfp4", "layers": {"blocks.0.f": KEEP}}, "no such layer"),
        ({"qconvert_plan": 1, "target": "comfy_nvfp4", "layers": {HARD: {"form": 4}}}, "no \"form\""),
        ({"qconvert_plan": 1, "target": "comfy_nvfp4", "layers": {HARD: "nvfp5"}}, "unknown target"),
        ({"qconvert_plan": 1, "target": "comfy_nvfp4", "layers": {HARD: "comfyui:mxfp8"}}, "another runtime"),
    ],
)  # fmt: skip
def test_plans_that_are_none(model_file: Path, tmp_path: Path, document: Any, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(UsageError, match=words):
        plan(model_file, "comfy_nvfp4", plan=path)


def test_requests_without_sense(model_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give one"):
        plan(model_file, "comfy_nvfp4", plan_out=tmp_path / "p.json")
    with pytest.raises(UsageError, match="leave --budget"):
        plan(model_file, "comfy_nvfp4", plan=tmp_path / "p.json", budget="5")
    with pytest.raises(UsageError, match="quantises nothing"):
        plan(model_file, "bf16", budget="5")
    with pytest.raises(UsageError, match="at least"):
        plan(model_file, "comfy_nvfp4", budget="3bpw")
