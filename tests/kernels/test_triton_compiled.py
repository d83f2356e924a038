"""Kernels compiled ahead of time for chips that are not here, ptxas included; and what is refused below which chip.

Whether kernels are interpreted is fixed when they are defined, and the tests beside this one interpret them: kernels
are compiled in processes of their own.
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

#: Compiles samples as the dispatch would have them. Argument: JSON of a list of chips, each with names of samples and
#: with pairs (sample, entry of `chips.NEEDS`) to compile with what the chip lacks. Prints lines of JSON, one a kernel
#: or refusal.
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

every = {sample.name: sample for sample in samples()}
asked = json.loads(sys.argv[1])
for chip, name, need in [(c, *pair) for c, names, forced in asked for pair in [(n, None) for n in names] + forced]:
    line = {"chip": chip, "sample": name, "forced": need}
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


#: Compile every sample for every chip.
ALL = os.environ.get("QCONVERT_EVERY_CHIP") == "1"

Asked = tuple[int, list[str], list[tuple[str, str]]]


def classes() -> list[tuple[int, ...]]:
    """Chips that have and lack the same entries of the table."""
    found: dict[tuple[bool, ...], list[int]] = {}
    for chip in chips.CHIPS:
        found.setdefault(tuple(chip >= need.least for need in chips.NEEDS), []).append(chip)
    return [tuple(group) for group in found.values()]


def chosen(chip: int) -> list[str]:
    """Names of samples to compile for a chip.

    Products are for every chip: what multiplies differs. Of the rest a core sample is for one chip of each class, any
    other for one chip, in turn.
    """
    every = list(samples())
    if chip not in chips.CHIPS:
        return list(USERS.values())
    if ALL:
        return [sample.name for sample in every]
    core = [sample.name for sample in every if sample.core]
    products = [name for name in core if name.startswith("matmul")]
    rest = [name for name in core if name not in products]
    (group,) = (group for group in classes() if chip in group)
    others = [sample.name for sample in every if not sample.core]
    return [
        *products,
        *rest[group.index(chip) :: len(group)],
        *others[chips.CHIPS.index(chip) :: len(chips.CHIPS)],
    ]


def compiled(request: pytest.FixtureRequest, asked: list[Asked]) -> list[dict[str, Any]]:
    cache = request.config.cache
    assert cache is not None
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=1800,
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


@pytest.mark.parametrize("group", [(75,), *classes()], ids=str)
def test_chips_of_a_class(request: pytest.FixtureRequest, group: tuple[int, ...]) -> None:
    """Every kernel compiles, and what the chips lack is refused, as the table says."""
    assert set(USERS) == {need.name for need in chips.NEEDS}
    lacking = {chip: [need for need in chips.NEEDS if chip < need.least] for chip in group}
    asked = [(chip, chosen(chip), [(USERS[n.name], n.name) for n in lacking[chip]]) for chip in group]
    lines = compiled(request, asked)
    made = [line for line in lines if not line["forced"]]
    for chip in group:
        check_table(chip, [line for line in made if line["chip"] == chip])
        forced = [line for line in lines if line["forced"] and line["chip"] == chip]
        check_forced(chip, {need.name for need in lacking[chip]}, forced)
    if group[0] >= chips.OLDEST:
        check_kernels(group, made)


def check_table(chip: int, lines: list[dict[str, Any]]) -> None:
    """What the table says the chip has is used, else what stands there instead."""
    by_sample = {line["sample"]: line for line in lines}
    assert set(by_sample) == set(chosen(chip))
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


def check_forced(chip: int, lacking: set[str], lines: list[dict[str, Any]]) -> None:
    """What the chip lacks is refused by the compiler or becomes something else, as the table says."""
    forced = {line["forced"]: line for line in lines}
    assert set(forced) == lacking
    for name, line in forced.items():
        assert "refused" in line or name not in line["has"], line
    refused = {name for name, line in forced.items() if "refused" in line}
    by_compiler = {need.name for need in chips.NEEDS if "compiler refuses" in need.refused and chip < 89}
    assert refused >= by_compiler & lacking


def check_kernels(group: tuple[int, ...], lines: list[dict[str, Any]]) -> None:
    """All are there, fit the chip without spilling registers, and round every operation by itself."""
    assert not [line for line in lines if "refused" in line]
    assert len(launched_kernels()) > 10
    assert launched_kernels() - {line["kernel"] for line in lines} == (
        set() if group[0] >= 100 else {"matmul_scaled"}
    )
    for line in lines:
        assert line["cubin"] > 0 and line["shared"] <= chips.SHARED_MEMORY[line["chip"]], line
        # Registers that are spilled lie on the stack; so does a word or two of the division's subroutine.
        assert line["stack"] <= 16, line
        if not line["sample"].startswith("matmul F32"):
            assert not line["inexact"], line


def test_every_sample_is_compiled() -> None:
    """Each for some chip, the core of them for a chip of every class: with them every kernel."""
    every = list(samples())
    assert {name for chip in chips.CHIPS for name in chosen(chip)} == {sample.name for sample in every}
    for group in classes():
        assert {s.name for s in every if s.core} <= {name for chip in group for name in chosen(chip)}
    assert sorted(chip for group in classes() for chip in group) == sorted(chips.CHIPS)


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
