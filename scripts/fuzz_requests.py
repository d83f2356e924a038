"""Spoiled requests: plans, jobs, calibrations, options; and two files that are compared."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from random import Random
from typing import Any

from fuzz_case import Case, command
from fuzz_headers import header, header_bytes, reshape, retype, tensors
from fuzz_markers import marked, marker
from fuzz_seeds import Box, Seeds, joined
from fuzz_values import STRINGS, anything, encode, hacked, spoil, words
from qconvert.runtime.targets import TARGETS


def plan(r: Random, seeds: Seeds) -> Case:
    """A plan file."""
    seed = seeds.plan
    document = json.loads(seed.files["plan.json"])
    target = r.choice(TARGETS).name
    if r.randrange(3) == 0:
        document |= {
            "target": target,
            "layers": {key: {"form": r.choice(["keep", target])} for key in document["layers"]},
        }
    text = encode(spoil(r, document))
    if r.randrange(10) == 0:
        text = hacked(r, text, len(text))
    dry = ["--dry-run"] if r.randrange(3) else []
    arguments = [
        "convert",
        "{}/in.safetensors",
        "--to",
        document["target"],
        "-o",
        "{}/made/out",
        "--jobs",
        "1",
    ]
    return Case("plan", seed.files | {"plan.json": text}, [*arguments, "--plan", "{}/plan.json", *dry])


#: Lines that begin something where nothing of the kind may begin.
BEGINNINGS = [
    "[job]",
    "[[job.x]]",
    "[options.a]",
    "[[options]]",
    "[[rule]]",
    "[rule]",
    "[",
    "x = " + "[" * 900,
]


def spoiled_lines(r: Random, lines: list[str], keys: list[str]) -> bytes:
    """TOML after one to four changes of its lines. `keys`: such as may stand there."""
    lines = list(lines)
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
            lines.insert(at, f"{r.choice([*words(), *keys * 20])} = {toml(r, anything(r))}")
        elif kind == 4:
            lines.insert(at, r.choice(BEGINNINGS))
        else:
            lines[at] = hacked(r, lines[at].encode(), 100).decode("utf-8", "replace")
    return encode("\n".join(lines))


def toml(r: Random, value: Any) -> str:
    if value is None or isinstance(value, dict):
        return r.choice(["{}", "nan", "inf", "1979-05-27", "{a = 1}"])
    return json.dumps(value)


def jobs(r: Random, seeds: Seeds) -> Case:
    """A batch's TOML."""
    seed = seeds.jobs
    keys = ["source", "target", "jobs", "memory", "output", "calibration", "recipe", "shard_size", "budget"]
    files = seed.files | {"jobs.toml": spoiled_lines(r, seed.files["jobs.toml"].decode().splitlines(), keys)}
    dry = ["--dry-run"] * (r.randrange(3) > 0)
    return Case("jobs", files, ["batch", "{}/jobs.toml", "--jobs", "1", *dry])


RECIPE = r"""qconvert_recipe = 1
[[rule]]
glob = "model.layers.0.self_attn.*"
keep = true
why = "the first"
[[rule]]
regex = 'model\.layers\.\d+\.mlp\..*'
to = "{}"
full_precision = true
[[rule]]
glob = "*embed*"
dtype = "fp16"
"""


def recipe(r: Random, seeds: Seeds) -> Case:
    """A recipe, right or spoiled, for a model without quantisation or a layer of any format."""
    target = r.choice(TARGETS)
    form = r.choice([t.name for t in TARGETS if t.runtime == target.runtime] + ["bf16", "fp32"])
    text = RECIPE.replace("{}", form)
    seed = seeds.plan
    if r.randrange(3) == 0:
        seed = r.choice(seeds.files)
        text = text.replace("model.layers.0.self_attn", "blocks.0")
    keys = ["glob", "regex", "keep", "to", "dtype", "full_precision", "native_fp4", "why"]
    data = spoiled_lines(r, text.splitlines(), keys) if r.randrange(4) else text.encode()
    words_ = ["--to", target.name, "-o", "{}/made/out", "--jobs", "1", "--recipe", "{}/r.toml"]
    dry = ["--dry-run"] if r.randrange(3) else []
    files = {seed.main: seed.files[seed.main], "r.toml": data}
    return Case("recipe", files, ["convert", "{}/" + seed.main, *words_, *dry])


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
    """Two files compared, the second one spoiled, on inputs that were recorded or not; or one with its digest."""
    seed = r.choice(seeds.files)
    spoiled = r.choice([header, header_bytes, tensors, marker])
    case = spoiled(r, replace(seeds, files=[seed if spoiled is not marker else r.choice(marked(seeds))]))
    (data,) = case.files.values()
    files = {"a.safetensors": seed.files[seed.main], "b.safetensors": data}
    if r.randrange(3) == 0:
        files = dict(zip(files, reversed(files.values()), strict=True))
    more = r.choice([[], ["--json"], ["--sample", r.choice(["1", "64", "1000000"])]])
    if r.randrange(2):
        return Case("verify", files, ["diff", "{}/a.safetensors", "{}/b.safetensors", *more])
    if r.randrange(6) == 0:
        return Case("verify", files, ["verify", "--digest", "{}/b.safetensors", "--jobs", "1"])
    if r.randrange(3) == 0:
        rows = r.choice([[4, 256], [0, 256], [256], [4, 255], [1, 4, 256]])
        values = r.choice([b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x3f", b"\xff\xff\x7f\x7f"]) * prod(rows)
        box = Box({"blocks.0.fc.inputs": ["F32", rows, values], "embed_tokens": ["F32", rows, values]})
        files["x.safetensors"] = box.bytes()
        if r.randrange(2):
            files["x.safetensors"] = joined(encode(spoil(r, box.header())), box.payload())
        more = [*more, "--activations", "{}/x.safetensors"]
    if r.randrange(6) == 0:
        more = [
            *more,
            "--rename",
            f"{r.choice(STRINGS)}={r.choice(STRINGS)}".encode("utf-8", "replace").decode(),
        ]
        more = [word.replace("\0", "") for word in more]
    return Case("verify", files, ["verify", "{}/a.safetensors", "{}/b.safetensors", "--jobs", "1", *more])
