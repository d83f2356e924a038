"""What a quantised source carries already: expected against true errors of weights that we quantise ourselves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from qconvert.convert.cli import cli
from qconvert.convert.job import Request, run_job
from qconvert.convert.source_error import source_lines
from qconvert.formats.cells import cell_errors, code_errors
from qconvert.formats.checkpoint import opened
from qconvert.runtime.calibration_record import write_calibration

#: Target that makes the source -> how far the expectation may be from the true error (clipping, groups' peaks), dB.
MAKERS = {
    "comfyui:float8_e4m3fn": 0.3,
    "comfyui:float8_e5m2": 0.3,
    "rowwise_fp8": 0.6,
    "comfyui:mxfp8": 0.15,
    "comfyui:int8_tensorwise": 0.3,
    "comfyui:convrot_w4a4": 1.0,
}


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    return (np.random.default_rng(3).standard_normal((256, 512)) * 0.02).astype(np.float32)


@pytest.mark.parametrize("maker", MAKERS)
def test_the_expectation_is_near_the_true_error(maker: str, weight: np.ndarray, tmp_path: Path) -> None:
    source, quantised = tmp_path / "w.safetensors", tmp_path / "q.safetensors"
    write_calibration(source, {"blocks.0.fc.weight": weight})
    with opened(source) as checkpoint:
        made = run_job(Request(source, maker, output=quantised), checkpoint)
    true = made.results["blocks.0.fc"]
    assert not made.source_errors
    with opened(quantised) as checkpoint:
        outcome = run_job(Request(quantised, "fp32", output=tmp_path / "out.safetensors"), checkpoint)
    carried = outcome.source_errors["blocks.0.fc"]
    assert carried.sqnr == pytest.approx(10 * np.log10(true.signal / true.noise), abs=MAKERS[maker])
    (line,) = source_lines(outcome.plan, outcome.source_errors.items())
    assert "decoded exactly" in line and f"{carried.sqnr:.2f} dB" in line


@pytest.mark.parametrize("maker", ["comfyui:nvfp4", "comfyui:asym_w4a8_int8"])
def test_what_is_not_known_is_not_said(maker: str, weight: np.ndarray, tmp_path: Path) -> None:
    source, quantised = tmp_path / "w.safetensors", tmp_path / "q.safetensors"
    write_calibration(source, {"blocks.0.fc.weight": weight})
    for path, target, out in ((source, maker, quantised), (quantised, "bf16", tmp_path / "o.safetensors")):
        with opened(path) as checkpoint:
            outcome = run_job(Request(path, target, output=out), checkpoint)
    assert outcome.source_errors["blocks.0.fc"].sqnr is None
    assert "unknown" in source_lines(outcome.plan, outcome.source_errors.items())[0]


def test_it_is_said(weight: np.ndarray, tmp_path: Path) -> None:
    source, quantised = tmp_path / "w.safetensors", tmp_path / "q.safetensors"
    write_calibration(source, {"blocks.0.fc.weight": weight, "blocks.0.norm.weight": weight[0]})
    run = CliRunner().invoke(
        cli, ["convert", str(source), "--to", "comfyui:float8_e4m3fn", "-o", str(quantised)]
    )
    assert run.exit_code == 0 and "carried" not in run.output
    arguments = ["convert", str(quantised), "--to", "comfy_nvfp4", "-o"]
    run = CliRunner().invoke(cli, [*arguments, str(tmp_path / "a.safetensors")])
    assert "carried" in run.output and "float8_e4m3fn: 1 layers, decoded exactly" in run.output
    run = CliRunner().invoke(cli, [*arguments, str(tmp_path / "b.safetensors"), "--json"])
    layers = {entry["layer"]: entry for entry in json.loads(run.output)["layers"]}
    assert layers["blocks.0.fc"]["source_decoded"] == "exact"
    assert layers["blocks.0.fc"]["source_sqnr_db_expected"] == pytest.approx(31.5, abs=0.3)
    assert "source_decoded" not in layers["blocks.0.norm"]
    with opened(tmp_path / "a.safetensors") as checkpoint:
        assert json.loads(checkpoint.metadata["qconvert"])["decoded_exactly"] == 1


def test_cells() -> None:
    even = cell_errors(np.arange(-8, 8, dtype=np.float32))
    np.testing.assert_allclose(even, 1 / 12, rtol=1e-6)
    # Around 1 the steps of e4m3 are 1/16 and 1/8; 0 and -0 share a cell.
    assert code_errors("F8_E4M3")[0x38] == pytest.approx(((1 / 32) ** 3 + (1 / 16) ** 3) / (3 * 3 / 32))
    assert code_errors("F8_E4M3")[0] == code_errors("F8_E4M3")[0x80] == pytest.approx(2.0**-18 / 12)
    uneven = cell_errors(np.array([3, 0, 1], np.float32))
    np.testing.assert_allclose(uneven, [1 / 3, 1 / 12, (1 + 1 / 8) / (3 * 1.5)], rtol=1e-6)
