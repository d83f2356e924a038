"""Spoiled files of other containers: GGUF, and what torch.save writes."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from random import Random
from typing import Any

from fuzz_case import Case, command
from fuzz_seeds import Seeds
from fuzz_values import NUMBERS, STRINGS, hacked, words
from qconvert.formats.gguf_blocks import TYPES


def gguf(r: Random, seeds: Seeds) -> Case:
    """A GGUF file's header: its bytes, or what it says."""
    seed = r.choice(seeds.gguf)
    data = seed.files[seed.main]
    data = hacked(r, data, r.choice([24, 200, 1200])) if r.randrange(2) else misspoken(r, data)
    return Case("gguf", {seed.main: data}, command(r, seed.main))


#: GGUF's types of values: struct codes of the plain ones.
PLAIN = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


@dataclass
class Ggml:
    """A GGUF file taken apart: keys [name, type and value as they stand], tensors [name, dims, type, offset]."""

    keys: list[list[Any]]
    tensors: list[list[Any]]
    payload: bytes

    @classmethod
    def of(cls, data: bytes) -> Ggml:
        stream = io.BytesIO(data)

        def number(code: str) -> Any:
            return struct.unpack(code, stream.read(struct.calcsize(code)))[0]

        def string() -> bytes:
            return stream.read(number("<Q"))

        def skip(kind: int) -> None:
            if kind == STRING:
                string()
            elif kind == ARRAY:
                inner, count = number("<I"), number("<Q")
                for _ in range(count):
                    skip(inner)
            else:
                stream.read(struct.calcsize(PLAIN[kind]))

        stream.read(8)
        tensors, keys = number("<Q"), number("<Q")
        box = cls([], [], b"")
        for _ in range(keys):
            name, at = string(), stream.tell()
            skip(number("<I"))
            box.keys.append([name, data[at : stream.tell()]])
        for _ in range(tensors):
            name = string()
            box.tensors.append(
                [name, [number("<Q") for _ in range(number("<I"))], number("<I"), number("<Q")]
            )
        box.payload = data[-(-stream.tell() // 32) * 32 :]
        return box

    def bytes(self) -> bytes:
        out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.keys)))
        for name, value in self.keys:
            out += text(name) + value
        for name, dims, kind, offset in self.tensors:
            out += text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims)
            out += struct.pack("<IQ", kind, offset)
        out += b"\0" * (-len(out) % 32)
        return bytes(out) + self.payload


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def unsigned(r: Random, bits: int = 64) -> int:
    return int(r.choice([x for x in NUMBERS if isinstance(x, int)])) % (1 << bits)


def value(r: Random, depth: int = 0) -> bytes:
    """A key's type and value."""
    kind = r.choice([*PLAIN, STRING, ARRAY, ARRAY, 13])
    if kind == STRING:
        return struct.pack("<I", kind) + text(r.choice(STRINGS).encode("utf-8", "surrogatepass"))
    if kind == ARRAY:
        inner = value(r, depth + 1)
        count = r.randrange(5)
        said = count if r.randrange(4) else unsigned(r)
        return struct.pack("<I", kind) + inner[:4] + struct.pack("<Q", said) + inner[4:] * count
    code = PLAIN.get(kind, "<I")
    return struct.pack("<I", kind) + r.randbytes(struct.calcsize(code))


def misspoken(r: Random, data: bytes) -> bytes:
    """A GGUF file of whole keys and tensors, some of which say something else."""
    box = Ggml.of(data)
    for _ in range(r.randint(1, 4)):
        tensor = r.choice(box.tensors)
        step = r.randrange(9)
        if step == 0:
            r.choice(box.keys)[1] = value(r)
        elif step == 1:
            box.keys.append([r.choice([*words(), *STRINGS]).encode("utf-8", "surrogatepass"), value(r)])
        elif step == 2:
            number = struct.pack("<IIQ", ARRAY, 5, len(tensor[1]))
            dims = [r.choice([*tensor[1], 0, 1, -1, 2]) & 0xFFFFFFFF for _ in tensor[1]]
            shape = number + b"".join(struct.pack("<I", dim) for dim in dims)
            box.keys.append([b"comfy.gguf.orig_shape." + tensor[0], r.choice([shape, value(r)])])
        elif step == 3:
            box.keys.append([b"general.alignment", struct.pack("<II", 4, unsigned(r, 32))])
        elif step == 4:
            tensor[1] = [r.choice([*tensor[1], unsigned(r)]) for _ in range(r.randrange(10))]
        elif step == 5:
            tensor[2] = r.choice([*TYPES, unsigned(r, 32)])
        elif step == 6:
            tensor[3] = r.choice([tensor[3] + 32, tensor[3] - 32, unsigned(r)]) % (1 << 64)
        elif step == 7:
            tensor[0] = r.choice(
                [
                    r.choice(box.tensors)[0],
                    r.choice(words()).encode("utf-8", "surrogatepass"),
                    tensor[0] + b"\xff",
                ]
            )
        else:
            box.tensors.remove(tensor)
            box.tensors = box.tensors or [tensor]
    return box.bytes()


#: Pickles that run, allocate, recurse or claim; torch must refuse or survive them.
PICKLES = [
    b"cos\nsystem\n(S'echo hacked > /dev/null'\ntR.",
    b"cbuiltins\neval\n(S'1'\ntR.",
    b"cbuiltins\nbytearray\n(J\xff\xff\xff\x3ftR.",
    b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8tR.",
    b"\x80\x02" + b"(" * 2000 + b"t" * 2000 + b".",
    b"\x80\x02]" + b"q\x00(" + b"h\x00" * 50 + b"e.",
    b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x00tR.",
    b"\x80\x02}q\x00h\x00h\x00s.",
    # Mappings inside themselves, inside one another a thousand times, and each twice in the next.
    b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    b"\x80\x02" + b"}X\x01\x00\x00\x00a" * 1500 + b"}" + b"s" * 1500 + b".",
    b"\x80\x02}q\x00" + b"".join(
        b"}X\x01\x00\x00\x00ah%cs" b"X\x01\x00\x00\x00bh%csq%c" % (n, n, n + 1) for n in range(60)
    ) + b".",
    b"\x80\x02N.", b"\x80\x02].", b"\x80\x02}.", b".", b"",
]  # fmt: skip


def unicode(word: str) -> bytes:
    data = word.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def integer(number: int) -> bytes:
    data = number.to_bytes(16, "little", signed=True)
    return b"\x8a\x10" + data


def tensors_pickle(r: Random) -> bytes:
    """A dict of tensors as torch.save pickles one, with storages, offsets, sizes and strides that may not fit."""

    def near(number: int) -> int:
        if r.randrange(6):
            return number
        return int(r.choice([number + 1, -number, 0, *(x for x in NUMBERS if isinstance(x, int))]))

    def numbers(values: list[int]) -> bytes:
        return b"(" + b"".join(integer(near(value)) for value in values) + b"t"

    def tensor() -> bytes:
        kind = r.choice(["Float", "Half", "BFloat16", "Byte", "Bool", "Long", "ComplexFloat", "QInt8"])
        size = [r.choice([16, 4, 64, 1, 0]) for _ in range(r.randrange(4))]
        strides, step = [], 1
        for dim in size[::-1]:
            strides.insert(0, step)
            step *= dim
        stored = b"ctorch\n" + kind.encode() + b"Storage\n"
        stored = b"(" + unicode("storage") + stored + unicode("0") + unicode("cpu")
        stored += integer(near(1024)) + b"tQ"
        made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + stored + integer(near(0)) + numbers(size)
        made += numbers(strides) + b"\x89ccollections\nOrderedDict\n)R" + b"tR"
        if r.randrange(6) == 0:
            made = (
                b"ctorch._utils\n_rebuild_parameter\n(" + made + b"\x88ccollections\nOrderedDict\n)R" + b"tR"
            )
        return made

    def mapping(depth: int) -> bytes:
        out = b"}" + (b"q\x00" if depth == 0 else b"")
        for _ in range(r.randint(1, 3)):
            key = unicode(r.choice([*STRINGS, *words(), "model", "state_dict"]))
            inner = r.randrange(8)
            if inner == 0 and depth < 3:
                item = mapping(depth + 1)
            elif inner == 1:
                item = r.choice([b"h\x00", b"N", b"]", b"K\x01", unicode("a")])
            else:
                item = tensor()
            out += (key if r.randrange(10) else b"K\x05") + item + b"s"
        return out

    return b"\x80\x02" + mapping(0) + b"."


def torch_file(r: Random, seeds: Seeds) -> Case:
    """A torch.save file: its archive, its pickle, or another pickle."""
    seed = seeds.torch
    data = seed.files[seed.main]
    kind = r.randrange(5)
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
                    body = (
                        hacked(r, body, len(body))
                        if kind == 2
                        else r.choice(PICKLES)
                        if kind == 3
                        else tensors_pickle(r)
                    )
                elif entry.filename.endswith("byteorder") and r.randrange(8) == 0:
                    body = b"little" + b" " * r.choice([1, 30 << 20 if r.randrange(20) == 0 else 9])
                    entry.compress_type = r.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
                elif r.randrange(8) == 0:
                    continue
                new.writestr(entry, body)
        data = out.getvalue()
        if r.randrange(8) == 0:
            # The archive's directory, at its end.
            data = data[:-400] + hacked(r, data[-400:], 400)
    name = r.choice(["model.pt", "model.ckpt", "model.bin", "model.safetensors"])
    return Case("torch", {name: data}, command(r, name))
