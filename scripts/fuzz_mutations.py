"""Hostile inputs: the seeds of fuzz_seeds, each spoiled in a few places, and the command that is given them.

Every choice is drawn from one `random.Random`, so a case is its seed number; a fuzzer may draw from its own bytes.
"""

from __future__ import annotations

import ast
import io
import json
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import prod
from random import Random
from typing import Any

from fuzz_seeds import ROOT, Box, Seed, Seeds, joined
from qconvert.formats.dtypes import BITS
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


NUMBERS: list[Any] = [
    0, -1, 1, 2, 3, 7, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63,
    1 << 64, -(1 << 63), 10**30, 0.5, -0.0, 1.0, 16.0, 1e308, 1e-320,
]  # fmt: skip
STRINGS = [
    "", " ", "a", "a.b", "__metadata__", "weight", "../x", "/etc/passwd", "C:\\x", "a/b", "..", "\x00", "\x1b[31m",
    "\n", "\u202e", "é", "😀", "\ud83d", "a" * 300, "." * 200, "true", "null", "NaN", "16", "1e3", "(a+)+$", ".*" * 30,
    "re:(a|aa)+$", "re:(", "re:.*", "*" * 50, "F8_E4M3", "BF16", "nvfp4", "%s%n", "${x}", "-", "--help",
]  # fmt: skip
CONSTANTS: list[Any] = [None, True, False, [], {}, [[]], [0], [{}], {"": None}]
#: What JSON is not, or what readers make different things of.
TEXTS = [
    "NaN", "Infinity", "-Infinity", "1e999", "-0", "01", "1.", ".5", "+1", "0x10", "'a'", '"\\ud800"', '"\\x00"',
    "[1,]",
    "9" * 5000, "1e-999", "/**/1", "nul", "{]", '{"a":1,"a":2}', "[" * 50 + "]" * 50, "[" * 3000 + "]" * 3000,
    '{"a":' * 1500 + "1" + "}" * 1500, "\x00", "\ufeff", '"\t"',
]  # fmt: skip


@cache
def words() -> list[str]:
    """Keys and values that the code knows: its string constants."""
    found: set[str] = set()
    for folder in ("formats", "runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and 0 < len(node.value) < 32
                ):
                    found.add(node.value)
    return sorted(word for word in found if " " not in word)


def anything(r: Random) -> Any:
    """A JSON value that was not expected."""
    kind = r.randrange(8)
    if kind < 2:
        return r.choice(NUMBERS)
    if kind < 4:
        return r.choice(STRINGS)
    if kind == 4:
        return r.choice(words())
    if kind == 5:
        # A copy: what is put into a document may be changed there.
        return json.loads(json.dumps(r.choice(CONSTANTS)))
    if kind == 6:
        return [anything(r) for _ in range(r.randrange(4))]
    return {r.choice(words()): anything(r) for _ in range(r.randrange(4))}


def places(value: Any, found: list[tuple[Any, Any]], limit: int = 4000) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    todo = [value]
    while todo and len(found) < limit:
        item = todo.pop()
        pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        for key, inner in pairs:
            found.append((item, key))
            todo.append(inner)
    return found


def bent(r: Random, value: Any) -> Any:
    """A value near the one that stood there."""
    if not isinstance(value, (int, str, list, dict)) or isinstance(value, bool) or r.randrange(3) == 0:
        return anything(r)
    if isinstance(value, int):
        return r.choice(
            [value + 1, value - 1, -value, value * 2, value // 2, value << 32, float(value), str(value)]
        )
    if isinstance(value, str):
        return r.choice(
            [
                value[:-1],
                value + "x",
                value.upper(),
                "re:" + value,
                value * 3,
                [value],
                {value: 1},
                value + "\0",
            ]
        )
    if isinstance(value, list):
        return r.choice(
            [value[:-1], value + value, value[::-1], [value], [*value, anything(r)], {"0": value}]
        )
    return r.choice([list(value), {"": value}, str(value)])


def spoil(r: Random, document: Any) -> str:
    """JSON text of a document after one to four changes, some of which only text can hold."""
    document = json.loads(json.dumps(document))
    holes: list[str] = []
    for _ in range(r.randint(1, 4)):
        found = places(document, [])
        if not found or r.randrange(40) == 0:
            document = anything(r)
            continue
        owner, key = r.choice(found)
        step = r.randrange(10)
        if step < 4:
            owner[key] = bent(r, owner[key])
        elif step < 6:
            owner[key] = anything(r)
        elif step == 6:
            del owner[key]
        elif step == 7 and isinstance(owner, dict):
            owner[r.choice(words()) if r.randrange(2) else r.choice(STRINGS)] = json.loads(
                json.dumps(owner[key])
            )
        elif step == 8 and isinstance(owner, dict):
            owner[r.choice(words())] = anything(r)
        else:
            holes.append(r.choice(TEXTS))
            owner[key] = f"@hole{len(holes) - 1}@"
    text = json.dumps(document, ensure_ascii=r.randrange(2) == 0)
    for index, hole in enumerate(holes):
        text = text.replace(f'"@hole{index}@"', hole)
    if r.randrange(12) == 0 and text.startswith("{") and len(text) > 2:
        # A key twice.
        text = text[:-1] + "," + text[1:]
    return text


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def hacked(r: Random, data: bytes, within: int) -> bytes:
    """Bytes changed, cut, repeated or put in, among the first `within`."""
    out = bytearray(data)
    for _ in range(r.randint(1, 5)):
        at = r.randrange(max(1, min(within, len(out))))
        kind = r.randrange(7)
        if kind == 0:
            out[at : at + 1] = bytes([r.randrange(256)])
        elif kind == 1:
            out[at : at + 8] = struct.pack(
                "<q", r.choice([x for x in NUMBERS if isinstance(x, int) and abs(x) < 1 << 63])
            )
        elif kind == 2:
            out[at : at + 4] = struct.pack(
                "<I", r.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, len(out)])
            )
        elif kind == 3:
            del out[at : at + r.randint(1, 64)]
        elif kind == 4:
            out[at:at] = r.randbytes(r.randint(1, 16))
        elif kind == 5:
            out[at:at] = out[at : at + r.randint(1, 200)]
        else:
            del out[at + r.randrange(max(1, len(out) - at)) :]
    return bytes(out)


# ---- what is asked


def command(r: Random, main: str, *more: str) -> list[str]:
    """inspect, check, or a conversion (planned only, or done)."""
    path = "{}/" + main if main else "{}"
    kind = r.randrange(8)
    text = ["--json"] if r.randrange(2) else []
    if kind < 2 and not more:
        return ["inspect", path, *text]
    if kind < 4 and not more:
        runtime = ["--runtime", r.choice(contract_names())] if r.randrange(2) else []
        return ["check", path, *runtime, *text]
    target = r.choice(TARGETS).name
    dry = ["--dry-run"] if kind < 6 else []
    strict = ["--strict"] if r.randrange(8) == 0 else []
    return ["convert", path, "--to", target, "-o", "{}/made/out", "--jobs", "1", *dry, *strict, *more, *text]


def of_file(r: Random, category: str, seed: Seed, data: bytes) -> Case:
    return Case(category, seed.files | {seed.main: data}, command(r, seed.main), [seed.main])


# ---- the kinds


def header(r: Random, seeds: Seeds) -> Case:
    """The JSON of a safetensors header."""
    seed = r.choice(seeds.files)
    box = Box.of(seed.files[seed.main])
    payload = box.payload()
    text = encode(spoil(r, box.header()))
    if r.randrange(8) == 0:
        payload = (
            payload[: r.randrange(len(payload) + 1)]
            if r.randrange(2)
            else payload + r.randbytes(r.randint(1, 9))
        )
    data = joined(text, payload) if r.randrange(2) else struct.pack("<Q", len(text)) + text + payload
    return of_file(r, "header", seed, data)


def header_bytes(r: Random, seeds: Seeds) -> Case:
    """The bytes of a safetensors header, its length among them."""
    seed = r.choice(seeds.files)
    data = seed.files[seed.main]
    (length,) = struct.unpack("<Q", data[:8])
    return of_file(r, "header bytes", seed, hacked(r, data, 8 if r.randrange(4) == 0 else 8 + length))


def tensors(r: Random, seeds: Seeds) -> Case:
    """A right header of wrong tensors: renamed, of other types and shapes, missing, doubled, of other bits."""
    seed = r.choice(seeds.files)
    box = Box.of(seed.files[seed.main])
    for _ in range(r.randint(1, 4)):
        if not box.tensors:
            break
        name = r.choice(list(box.tensors))
        dtype, shape, payload = box.tensors[name]
        kind = r.randrange(9)
        if kind == 0:
            del box.tensors[name]
        elif kind == 1:
            stem, _, last = name.rpartition(".")
            new = r.choice(
                [f"{stem}.{r.choice(words())}", r.choice(words()), f"{stem}.{last}.{last}", last, name + " "]
            )
            box.tensors[new] = box.tensors.pop(name)
        elif kind == 2:
            retype(r, box.tensors[name])
        elif kind == 3:
            reshape(r, box.tensors[name])
        elif kind == 4:
            other = r.choice(list(box.tensors))
            box.tensors[name] = list(box.tensors[other])
        elif kind == 5:
            box.tensors[f"{name.rpartition('.')[0]}.{r.choice(words())}"] = list(
                box.tensors[r.choice(list(box.tensors))]
            )
        elif kind == 6:
            axis = r.randrange(len(shape)) if shape else None
            if axis is not None and shape[axis]:
                keep = r.choice([0, 1, shape[axis] - 1])
                size = len(payload) // shape[axis]
                box.tensors[name] = [dtype, [*shape[:axis], keep, *shape[axis + 1 :]], payload[: size * keep]]
        elif kind == 7:
            fill = r.choice(
                [b"\x00", b"\xff", b"\x7f", b"\x80", b"\x00\x7c", b"\x00\x00\x80\x7f", b"\x01\x00\x00\x00"]
            )
            box.tensors[name][2] = (fill * (len(payload) // len(fill) + 1))[: len(payload)]
        else:
            start = r.randrange(len(payload) + 1)
            noise = r.randbytes(min(64, len(payload) - start))
            box.tensors[name][2] = payload[:start] + noise + payload[start + len(noise) :]
    return of_file(r, "tensors", seed, box.bytes())


def retype(r: Random, tensor: list[Any]) -> None:
    """Another type over the same bytes."""
    dtype = r.choice(sorted(name for name, bits in BITS.items() if bits >= 8))
    width, shape = BITS[dtype] // 8, tensor[1]
    if not shape or len(tensor[2]) % width:
        return
    count = len(tensor[2]) // width
    lead = prod(shape[:-1])
    tensor[0], tensor[1] = dtype, [*shape[:-1], count // lead] if lead and count % lead == 0 else [count]


def reshape(r: Random, tensor: list[Any]) -> None:
    """Another shape of as many elements."""
    shape = tensor[1]
    count = prod(shape)
    options = [[count], [1, *shape], [*shape, 1], shape[::-1], [count, 1], [1] * 5 + [count]]
    if count == 1:
        options.append([])
    if count and count % 2 == 0:
        options.append([2, count // 2])
    tensor[1] = r.choice(options)


def marker(r: Random, seeds: Seeds) -> Case:
    """A layer's marker: its JSON, or its bytes."""
    marked = [s for s in seeds.files if b".comfy_quant" in s.files[s.main]]
    seed = r.choice(marked)
    box = Box.of(seed.files[seed.main])
    for name in [name for name in box.tensors if name.endswith(".comfy_quant")]:
        payload = box.tensors[name][2]
        broken = r.randrange(3) == 0
        data = hacked(r, payload, len(payload)) if broken else encode(spoil(r, json.loads(payload)))
        box.tensors[name] = ["U8", [len(data)], data]
    return of_file(r, "marker", seed, box.bytes())


KEYS = (
    "_quantization_metadata",
    "quantization_config",
    "qconvert",
    "format",
    "quant_format",
    "config",
    "modelspec.title",
)


def metadata(r: Random, seeds: Seeds) -> Case:
    """What the header says beside the tensors: lists of layers, configurations, our own provenance."""
    seed = r.choice(seeds.files)
    box = Box.of(seed.files[seed.main])
    layers = {name.rpartition(".")[0]: {"format": "nvfp4", "convrot": True} for name in box.tensors}
    known: list[Any] = [
        {"format_version": "1.0", "layers": layers},
        {
            "format_version": "1.1",
            "quant_configs": {"a": {"scale_recipe": "rowwise"}},
            "layers": dict.fromkeys(layers, "a"),
        },
        *(
            json.loads(s.files["config.json"]).get("quantization_config", {})
            for s in seeds.folders
            if "config.json" in s.files
        ),
        *(json.loads(v) for v in box.metadata.values() if isinstance(v, str) and v.startswith("{")),
    ]
    for key in r.sample(KEYS, r.randint(1, 2)):
        box.metadata[key] = spoil(r, r.choice(known)).encode("utf-8", "replace").decode()
    return of_file(r, "metadata", seed, box.bytes())


CONFIGS = (
    "config.json",
    "quantization_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
)


def config(r: Random, seeds: Seeds) -> Case:
    """config.json and its like, beside a file that needs them or does not."""
    folders = [seed for seed in seeds.folders if "config.json" in seed.files]
    seed = r.choice(folders)
    document = json.loads(r.choice(folders if r.randrange(4) == 0 else [seed]).files["config.json"])
    name = r.choice(CONFIGS) if r.randrange(3) == 0 else "config.json"
    if name != "config.json":
        document = document.get("quantization_config", document)
    files = dict(seed.files) | {name: encode(spoil(r, document))}
    if name != "config.json" and r.randrange(2):
        del files["config.json"]
    if r.randrange(20) == 0:
        files[name] = hacked(r, files[name], len(files[name]))
    return Case("config", files, command(r, seed.main))


def index(r: Random, seeds: Seeds) -> Case:
    """The index of shards, or a shard under a right index."""
    seed = seeds.sharded
    files = dict(seed.files)
    name = "model.safetensors.index.json"
    if r.randrange(4):
        files[name] = encode(spoil(r, json.loads(files[name])))
    else:
        shard = r.choice([key for key in files if key.endswith(".safetensors")])
        box = Box.of(files[shard])
        files[shard] = joined(encode(spoil(r, box.header())), box.payload())
    return Case("index", files, command(r, seed.main))


def gguf(r: Random, seeds: Seeds) -> Case:
    """A GGUF file's header."""
    seed = r.choice(seeds.gguf)
    data = seed.files[seed.main]
    return Case("gguf", {seed.main: hacked(r, data, r.choice([24, 200, 1200]))}, command(r, seed.main))


#: Pickles that run, allocate, recurse or claim; torch must refuse or survive them.
PICKLES = [
    b"cos\nsystem\n(S'echo hacked > /dev/null'\ntR.",
    b"cbuiltins\neval\n(S'1'\ntR.",
    b"\x80\x02" + b"(" * 2000 + b"t" * 2000 + b".",
    b"\x80\x02]" + b"q\x00(" + b"h\x00" * 50 + b"e.",
    b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x00tR.",
    b"\x80\x02}q\x00h\x00h\x00s.",
    b"\x80\x02N.", b"\x80\x02].", b"\x80\x02}.", b".", b"",
]  # fmt: skip


def torch_file(r: Random, seeds: Seeds) -> Case:
    """A torch.save file: its archive, its pickle, or another pickle."""
    seed = seeds.torch
    data = seed.files[seed.main]
    kind = r.randrange(4)
    if kind == 0:
        data = hacked(r, data, len(data))
    elif kind == 1:
        data = r.choice(PICKLES)
    else:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
            for entry in old.infolist():
                body = old.read(entry)
                if entry.filename.endswith("data.pkl"):
                    body = hacked(r, body, len(body)) if kind == 2 else r.choice(PICKLES)
                elif r.randrange(8) == 0:
                    continue
                new.writestr(entry.filename, body)
        data = out.getvalue()
    name = r.choice(["model.pt", "model.ckpt", "model.bin", "model.safetensors"])
    return Case("torch", {name: data}, command(r, name))


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


def model(r: Random, seeds: Seeds) -> Case:
    """What `check --model` is given."""
    seed = r.choice(seeds.files)
    names = list(Box.of(seed.files[seed.main]).tensors)
    documents: list[Any] = [
        names,
        {"weight_map": dict.fromkeys(names, "a.safetensors")},
        {
            "num_hidden_layers": 1,
            "hidden_size": 256,
            "text_config": {"num_hidden_layers": 3, "vocab_size": 5},
        },
    ]
    text = encode(spoil(r, r.choice(documents)))
    return Case("model", seed.files | {"m.json": text}, ["check", "{}/" + seed.main, "--model", "{}/m.json"])


def verify(r: Random, seeds: Seeds) -> Case:
    """Two files compared, the second one spoiled."""
    seed = r.choice(seeds.files)
    case = tensors(r, Seeds([seed], [], [], *([seed] * 5)))
    name = r.choice(["verify", "diff"])
    files = {"a.safetensors": seed.files[seed.main], "b.safetensors": case.files[seed.main]}
    return Case("verify", files, [name, "{}/a.safetensors", "{}/b.safetensors"])


#: Kind of case -> its share.
KINDS: dict[Callable[[Random, Seeds], Case], int] = {
    header: 20, header_bytes: 12, tensors: 14, marker: 12, metadata: 10, config: 12, index: 6, gguf: 6, torch_file: 3,
    plan: 4, jobs: 4, calibration: 3, options: 4, model: 3, verify: 3,
}  # fmt: skip


def make_case(
    r: Random, seeds: Seeds, kinds: dict[Callable[[Random, Seeds], Case], int] | None = None
) -> Case:
    """One hostile input, its kind drawn by share."""
    kinds = KINDS if kinds is None else kinds
    return r.choices(list(kinds), list(kinds.values()))[0](r, seeds)
