"""A case: files, and the command that is given them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from fuzz_seeds import Seed
from qconvert.runtime.contracts.registry import contract_names
from qconvert.runtime.targets import TARGETS


@dataclass
class Case:
    """`arguments`: of the command line, "{}" standing for the folder that `files` are written to."""

    category: str
    files: dict[str, bytes]
    arguments: list[str]
    #: Files that the safetensors library is asked about, too.
    compared: list[str] = field(default_factory=list)


def command(r: Random, main: str, *more: str) -> list[str]:
    """inspect, check, a recipe to start from, or a conversion (planned only, or done)."""
    path = "{}/" + main if main else "{}"
    kind = r.randrange(9)
    text = ["--json"] if r.randrange(2) else []
    if kind < 2 and not more:
        return ["inspect", path, *text]
    if kind < 4 and not more:
        runtime = ["--runtime", r.choice(contract_names())] if r.randrange(2) else []
        ranks = ["--tp", r.choice(["2", "3", "64"])] if r.randrange(4) == 0 else []
        return ["check", path, *runtime, *ranks, *text]
    if kind == 8 and not more:
        return ["recipe", "init", path, *text]
    target = r.choice(TARGETS).name
    dry = ["--dry-run"] if kind < 6 else []
    strict = ["--strict"] if r.randrange(8) == 0 else []
    wishes = r.choice(WISHES) if r.randrange(4) == 0 else []
    words = ["--to", target, "-o", "{}/made/out", "--jobs", "1", *dry, *strict, *wishes, *more, *text]
    return ["convert", path, *words]


#: Options of a conversion that are right in themselves.
WISHES = [
    ["--quality", "fast"], ["--embedding", "int8"], ["--keep-layers", "1"], ["--shard-size", "20KB"],
    ["--component", "diffusion"], ["--dtype", "fp16"], ["--native-fp4"], ["--full-precision"], ["--verbose"],
    ["--budget", "6bpw"], ["--min-sqnr", "25"], ["--keep-prefix"], ["--memory", "1KB"], ["--resume"], ["--quiet"],
]  # fmt: skip


def of_file(r: Random, category: str, seed: Seed, data: bytes) -> Case:
    return Case(category, seed.files | {seed.main: data}, command(r, seed.main), [seed.main])
