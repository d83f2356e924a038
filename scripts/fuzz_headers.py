"""Spoiled safetensors files: the JSON of the header, its bytes, the tensors that it names."""

from __future__ import annotations

import struct
from math import prod
from random import Random
from typing import Any

from fuzz_case import Case, of_file
from fuzz_seeds import Box, Seeds, joined
from fuzz_values import encode, hacked, spoil, words
from qconvert.formats.dtypes import BITS


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
