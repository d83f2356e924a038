"""A bounded share of what scripts/fuzz does: hostile inputs of every kind, and every tensor of every format spoiled."""

from __future__ import annotations

import gc
import importlib
import mmap
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba.core import event
from qconvert.kernels.cpu.jit import Kernel
from qconvert.runtime.targets import TARGETS

pytest.importorskip("torch")
pytest.importorskip("safetensors")
if not sys.platform.startswith("linux"):
    pytest.skip("measured by /proc", allow_module_level=True)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))
seeds_module: Any = importlib.import_module("fuzz_seeds")
mutations: Any = importlib.import_module("fuzz_mutations")
harness: Any = importlib.import_module("fuzz_harness")

KINDS = {kind.__name__: kind for kind in mutations.KINDS}
#: Formats whose layers have unlike tensors; the script has them all.
FORMATS = (
    "bf16", "fp32", "fp8", "fp8_row", "fp8_block", "fp8_legacy_full", "fp8_input_scale", "e5m2_cast", "nvfp4",
    "nvfp4_pre", "mxfp8", "int8_row", "int8_convrot64", "w4a4", "w4a8", "w4a8_correction", "w4a8_6bit", "sym_g32",
    "awq", "svdquant", "svdquant_tiled", "bank_fp8", "bank_nvfp4", "bank_int8", "conv_int8",
)  # fmt: skip


@pytest.fixture(scope="module")
def all_seeds() -> Any:
    made = seeds_module.Seeds.make(
        FORMATS, ("comfy_nvfp4", "auto_gptq", "modelopt_fp8", "gguf:q8_0", "gguf:q4_k")
    )
    seeds_module.warm_up(made)
    return made


def test_no_case_waits_for_a_compiler(
    all_seeds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the warm-up, every kernel is there: whatever is decoded, whatever is encoded, calibrated or not."""
    for value in gc.get_objects():
        if type(value) is Kernel:
            monkeypatch.setattr(value, "_compiled", None)
    seeds_module.warm_up(all_seeds)
    late: list[str] = []
    compile_one = Kernel._compile
    monkeypatch.setattr(Kernel, "_compile", lambda self: late.append(self._fn.__name__) or compile_one(self))
    folder = tmp_path / "in"
    folder.mkdir()
    calls: list[list[str]] = []
    for seed in (all_seeds.calibration, *all_seeds.files):
        for name, data in seed.files.items():
            (folder / f"{seed.name}.{name}".replace(":", "_")).write_bytes(data)
    source, known = (str(folder / f"calibration.{name}.safetensors") for name in ("in", "cal"))
    for target in TARGETS:
        calls += [[source, "--to", target.name], [source, "--to", target.name, "--calibration", known]]
    calls += [[str(path), "--to", "fp32"] for path in sorted(folder.iterdir()) if str(path) != known]
    with event.install_recorder("numba:compile") as compiled:
        for number, words in enumerate(calls):
            seeds_module.quietly(*words, "-o", tmp_path / "out" / str(number), "--jobs", 1)
    assert not late and not compiled.buffer
    assert len(list((tmp_path / "out").iterdir())) > len(calls) // 2


@pytest.mark.parametrize("kind", list(KINDS))
def test_hostile_inputs_end_in_one_line(kind: str, all_seeds: Any, tmp_path: Path) -> None:
    """No traceback, no hang, no memory, nothing left behind, and no header that the safetensors library refuses."""
    make = KINDS[kind]
    share = mutations.KINDS[make]

    # The same cases every time: what is new is for the script to find, not for somebody else's change.
    @settings(
        max_examples=4 * share, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(st.randoms(use_true_random=False))
    def run(chance: Random) -> None:
        case = make(chance, all_seeds)
        report = harness.run_case(case, tmp_path / "case")
        assert not report.faults, (report, case.arguments)

    run()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits a forked child")
def test_every_case_may_map_as_much_as_the_first() -> None:
    """What a process has mapped before counts for no case: of 40,000 it is more than one may have."""
    child = os.fork()
    if not child:
        kept = []
        try:
            for _ in range(4):
                harness.limit_memory(100 << 20)
                kept.append(mmap.mmap(-1, 90 << 20))
            with pytest.raises(OSError):
                mmap.mmap(-1, 90 << 20)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
