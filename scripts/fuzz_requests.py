"""Spoiled requests: plans, jobs, calibrations, options; and two files that are compared."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fuzz_case import Case, command
from fuzz_headers import reshape, retype, tensors
from fuzz_seeds import Box, Seeds, joined
from fuzz_values import STRINGS, anything, encode, hacked, spoil, words


def plan(r: Random, seeds: Seeds) -> Case:
    """A plan file."""
    seed = seeds.plan
    text = encode(spoil(r, json.loads(seed.files["plan.json"])))
    if r.randrange(10) == 0:
        text = hacked(r, text, len(text))
    dry = ["--dry-run"] if r.randrange(3) else []
    arguments = ["convert", "{}/in.safetensors", "--to", "comfy_nvfp4", "-o", "{}/made/out", "--jobs", "1"]
    return Case("plan", seed.files | {"plan.json": text}, [*arguments, "--plan", "{}/plan.json", *dry])


def jobs(r: Random, seeds: Seeds) -> Case:
    """A batch's TOML."""
    seed = seeds.jobs
    lines = seed.files["jobs.toml"].decode().splitlines()
    for _ in range(r.randint(1, 4)):
        at = r.randrange(len(lines))
        kind = r.randrange(6)
        if kind == 0:
            del lines[at]
            lines = lines or [""]
        elif kind == 1:
            lines.insert(at, r.choice(lines))
        elif kind == 2:
            lines[at] = f"{lines[at].partition('=')[0]}= {toml(r, anything(r))}"
        elif kind == 3:
            lines.insert(
                at, f"{r.choice([*words(), 'source', 'target', 'jobs', 'memory'])} = {toml(r, anything(r))}"
            )
        elif kind == 4:
            lines.insert(
                at, r.choice(["[job]", "[[job.x]]", "[options.a]", "[[options]]", "[", "x = " + "[" * 900])
            )
        else:
            lines[at] = hacked(r, lines[at].encode(), 100).decode("utf-8", "replace")
    text = encode("\n".join(lines))
    return Case(
        "jobs",
        seed.files | {"jobs.toml": text},
        ["batch", "{}/jobs.toml", "--jobs", "1", *["--dry-run"] * (r.randrange(3) > 0)],
    )


def toml(r: Random, value: Any) -> str:
    if value is None or isinstance(value, dict):
        return r.choice(["{}", "nan", "inf", "1979-05-27", "{a = 1}"])
    return json.dumps(value)


def calibration(r: Random, seeds: Seeds) -> Case:
    """A calibration file: its header, or its numbers."""
    seed = seeds.calibration
    box = Box.of(seed.files["cal.safetensors"])
    if r.randrange(2):
        data = joined(encode(spoil(r, box.header())), box.payload())
    else:
        for tensor in box.tensors.values():
            r.choice([retype, reshape, lambda _, t: t.__setitem__(2, r.randbytes(len(t[2])))])(r, tensor)
        data = box.bytes()
    more = ["--calibration", "{}/cal.safetensors"]
    return Case(
        "calibration",
        seed.files | {"cal.safetensors": data},
        command(r, seed.main, *more),
        ["cal.safetensors"],
    )


def options(r: Random, seeds: Seeds) -> Case:
    """Options: patterns, sizes, names."""
    seed = r.choice(seeds.files)
    pieces = [
        "(",
        ")",
        "*",
        "+",
        "?",
        "[",
        "]",
        "{2}",
        "|",
        ".",
        "a",
        "\\",
        "^",
        "$",
        "blocks",
        "0",
        "(?",
        "=",
        "{,3}",
        "\\1",
    ]
    pattern = "".join(r.choice(pieces) for _ in range(r.randint(1, 12)))
    more: list[str] = []
    for _ in range(r.randint(1, 3)):
        choice = r.choice(
            [
                "--keep",
                "--rename",
                "--assume",
                "--memory",
                "--shard-size",
                "--budget",
                "--min-sqnr",
                "--runtime",
            ]
        )
        value = {
            "--keep": pattern,
            "--rename": f"{pattern}={r.choice(STRINGS)}",
            "--assume": f"{pattern}={r.choice(words())},{r.choice(words())}={r.choice(STRINGS)}",
        }.get(choice) or r.choice([*STRINGS, "64MiB", "1e99GB", "-1", "0", "4.5bpw", "nan", "inf", "1KB"])
        more += [choice, value.replace("\x00", "").encode("utf-8", "replace").decode()]
    return Case("options", dict(seed.files), command(r, seed.main, *more))


def verify(r: Random, seeds: Seeds) -> Case:
    """Two files compared, the second one spoiled."""
    seed = r.choice(seeds.files)
    case = tensors(r, Seeds([seed], [], [], *([seed] * 5)))
    name = r.choice(["verify", "diff"])
    files = {"a.safetensors": seed.files[seed.main], "b.safetensors": case.files[seed.main]}
    return Case("verify", files, [name, "{}/a.safetensors", "{}/b.safetensors"])
