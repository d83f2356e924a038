"""Kernels compiled ahead of time for chips that are not here, ptxas included; and what is refused below which chip.

Whether kernels are interpreted is fixed when they are defined, and the tests beside this one interpret them: every
chip is compiled for in a process of its own.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.7")

from qconvert.kernels.triton import chips
from qconvert.kernels.triton.samples import samples

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "triton"

#: Compiles a core sample as the dispatch would have it for every chip, and others in turn. Argument: JSON of the chip,
#: names of samples, and pairs (sample, entry of `chips.NEEDS`) to compile with what the chip lacks. Prints lines of
#: JSON, one a kernel or refusal.
COMPILE = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from qconvert.kernels.triton.ahead import compile_samples
from qconvert.kernels.triton.chips import NEEDS
from qconvert.kernels.triton.samples import samples

def stack(cubin):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"STACK:(\\d+)", ran.stdout)))

chip, names, forced = json.loads(sys.argv[1])
every = {sample.name: sample for sample in samples()}
for name, need in [(name, None) for name in names] + forced:
    line = {"sample": name, "forced": need}
    try:
        for kernel in compile_samples([every[name]], chip, tiles=1, forced=[need] if need else []):
            ptx = kernel.kernel.asm["ptx"]
            line |= {
                "kernel": kernel.name,
                "shared": kernel.shared,
                "cubin": len(kernel.kernel.asm["cubin"]),
                "stack": stack(kernel.kernel.asm["cubin"]),
                "has": [need.name for need in NEEDS if re.search(need.instruction, ptx)],
                "inexact": sorted(set(re.findall(r"fma\\S*f32|\\w+\\.approx\\S*|div\\.full\\S*|\\w+\\.ftz\\S*", ptx))),
            }
            print(json.dumps(line))
    except Exception as error:
        print(json.dumps(line | {"refused": f"{type(error).__name__}: {error}"}))
"""

#: Entry of the table -> the sample that uses it.
USERS = {
    "int8 dot": "matmul int8 x int8, M=16",
    "bf16 dot": "matmul BF16 x nvfp4 swizzled, M=16",
    "fp8 dot": "matmul e4m3 x e4m3, M=16",
    "block-scaled dot": "matmul nvfp4 x nvfp4 swizzled, M=16",
}


def compiled(
    request: pytest.FixtureRequest, chip: int, names: list[str], forced: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    cache = request.config.cache
    assert cache is not None
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps([chip, names, forced])],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=env | {"TRITON_CACHE_DIR": str(cache.mkdir("triton"))},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def launched_kernels() -> set[str]:
    """Names of the kernels that launchers launch, read from their source: `module.kernel[grid](...)`."""
    found = set()
    for file in KERNELS.glob("launch*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                target = node.func.value
                found.add(target.attr if isinstance(target, ast.Attribute) else ast.unparse(target))
    # `multiply` launches matmul, tuned or with one tile, under the name `kernel`.
    return (found - {"kernel"}) | {"matmul"}


@pytest.mark.parametrize("chip", (75, *chips.CHIPS))
def test_chip(request: pytest.FixtureRequest, chip: int) -> None:
    """Every kernel compiles, and what the chip lacks is refused, as the table says."""
    assert set(USERS) == {need.name for need in chips.NEEDS}
    every = list(samples())
    names = [sample.name for sample in every if sample.core]
    if chip in chips.CHIPS:
        others = [sample.name for sample in every if not sample.core]
        names += others[chips.CHIPS.index(chip) :: len(chips.CHIPS)]
    else:
        names = list(USERS.values())
    lacking = [need for need in chips.NEEDS if chip < need.least]
    lines = compiled(request, chip, names, [(USERS[need.name], need.name) for need in lacking])
    chosen = [line for line in lines if not line["forced"]]
    if chip >= chips.OLDEST:
        check_kernels(chip, chosen)
    by_sample = {line["sample"]: line for line in chosen}
    for need in chips.NEEDS:
        line = by_sample[USERS[need.name]]
        if chip >= need.least:
            assert need.name in line["has"], line
        elif need.instead is not None:
            assert need.name not in line["has"] and line["cubin"] > 0, line
        else:
            # Nothing instead: such a chip is below the oldest that kernels are launched on.
            assert chip < chips.OLDEST
            assert "refused" in line or need.name not in line["has"], line
    forced = {line["forced"]: line for line in lines if line["forced"]}
    assert set(forced) == {need.name for need in lacking}
    for name, line in forced.items():
        assert "refused" in line or name not in line["has"], line
    refused = {name for name, line in forced.items() if "refused" in line}
    assert refused >= {need.name for need in lacking if "compiler refuses" in need.refused and chip < 89}


def check_kernels(chip: int, lines: list[dict[str, Any]]) -> None:
    """All are there, fit the chip without spilling registers, and round every operation by itself."""
    assert not [line for line in lines if "refused" in line]
    assert len(launched_kernels()) > 10
    assert launched_kernels() - {line["kernel"] for line in lines} == (
        set() if chip >= 100 else {"matmul_scaled"}
    )
    for line in lines:
        assert line["cubin"] > 0 and line["shared"] <= chips.SHARED_MEMORY[chip], line
        # Registers that are spilled lie on the stack; so does a word or two of the division's subroutine.
        assert line["stack"] <= 16, line
        if not line["sample"].startswith("matmul F32"):
            assert not line["inexact"], line


def test_the_documentation_shows_the_table() -> None:
    text = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
    for need in chips.NEEDS:
        row = f"| {need.what} | sm_{need.least} | {need.refused} | {need.instead or 'nothing: no kernel runs there'} |"
        assert row in text, row


def test_a_chip_that_is_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "interpreted", lambda: False)
    with chips.pretended(75):
        assert chips.refusal() == "the GPU is sm_75, the kernels need sm_80"
        with pytest.raises(ImportError, match="sm_75"):
            chips.device()
    for chip, has in ((80, set()), (89, {"fp8 dot"}), (120, {"fp8 dot", "block-scaled dot"})):
        with chips.pretended(chip):
            assert chips.refusal() is None
            assert {n.name for n in chips.NEEDS if chips.can(n.name)} == has | {"int8 dot", "bf16 dot"}


def test_instructions_are_told_apart() -> None:
    """The regular expressions of the table against lines of PTX."""
    lines = {
        "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8": {"int8 dot"},
        "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32": {"int8 dot"},
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": {"bf16 dot"},
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": set(),
        "tcgen05.mma.cta_group::1.kind::f8f6f4": {"fp8 dot"},
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16": {"block-scaled dot"},
        "fma.rn.f32 %f1, %f2, %f3, %f4": set(),
    }
    for line, names in lines.items():
        assert {need.name for need in chips.NEEDS if re.search(need.instruction, line)} == names
