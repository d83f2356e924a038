"""Spoiled files of other containers: GGUF, and what torch.save writes."""

from __future__ import annotations

import io
import zipfile
from random import Random

from fuzz_case import Case, command
from fuzz_seeds import Seeds
from fuzz_values import hacked


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
                new.writestr(entry, body)
        data = out.getvalue()
    name = r.choice(["model.pt", "model.ckpt", "model.bin", "model.safetensors"])
    return Case("torch", {name: data}, command(r, name))
