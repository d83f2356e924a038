"""scripts/bench_kernels and scripts/triton_report without a GPU: what they say, and that all they measure runs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.7")

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(SCRIPTS / name), *args],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=300,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_says_that_there_is_no_gpu() -> None:
    ran = run("bench_kernels")
    assert ran.returncode == 0 and ran.stdout.startswith("nothing was measured: no GPU") and not ran.stderr


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_everything_that_is_measured_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, on a tiny weight, with a clock that says a second: the figures follow from shapes alone."""
    from qconvert.kernels.triton.chips import interpreted

    if not interpreted():
        pytest.skip("this process compiles kernels")
    loader = SourceFileLoader("bench_kernels", str(SCRIPTS / "bench_kernels"))
    spec = spec_from_loader("bench_kernels", loader)
    assert spec is not None
    bench = module_from_spec(spec)
    # No bytecode beside the script.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(bench)

    def second(call: Any) -> float:
        call()
        return 1.0

    monkeypatch.setattr(bench, "seconds", second)
    monkeypatch.setattr(bench, "COPY", 1024)
    monkeypatch.setattr(bench, "EAGER_ROWS", 1)
    n, k = 2, 256
    lines = bench.measure(n, k, [1], "", torch.device("cpu"))
    by_name = {(line["kind"], line["what"]): line for line in lines}
    assert by_name["copy", "device to device"]["bytes_per_second"] == 2048
    assert by_name["matmul", "bf16 M=1"]["flops"] == 2 * n * k
    assert by_name["quantise", "int8 rows"]["bytes_per_second"] == n * (2 * k + k + 4)
    assert by_name["quantise", "w4a4 ConvRot 256"]["bytes_per_second"] == n * (2 * k + k // 2 + 4)
    assert by_name["quantise", "w4a8 (1 rows)"]["bytes_per_second"] == 4 * k + k // 2 + k // 16 + 4
    assert by_name["dequantise", "mxfp8"]["bytes_per_second"] == n * (k + k // 32 + 2 * k)
    assert by_name["dequantise", "int8"]["of_copy"] == n * (k + 4 + 2 * k) / 2048
    assert sum(line["kind"] == "linear" for line in lines) == 8
    assert all(line["of_bf16"] == line["eager"] == 1.0 for line in lines if line["kind"] == "linear")


def test_the_report_compiles_and_counts() -> None:
    ran = run("triton_report", "--chips", "80", "--only", "cast F32 to F8_E4M3")
    assert ran.returncode == 0, ran.stderr
    assert "sm_80" in ran.stdout and " reg, " in ran.stdout and "1 kernels, 0 that spill" in ran.stderr
    for chips in ("70", "ninety"):
        ran = run("triton_report", "--chips", chips)
        assert ran.returncode == 2 and "--chips" in ran.stderr
