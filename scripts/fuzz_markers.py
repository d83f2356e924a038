"""Spoiled statements inside a file: markers of layers, metadata of the header."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fuzz_case import Case, of_file
from fuzz_seeds import Box, Seed, Seeds
from fuzz_values import encode, hacked, spoil


def marked(seeds: Seeds) -> list[Seed]:
    """Files whose layers have markers."""
    return [seed for seed in seeds.files if b".comfy_quant" in seed.files[seed.main]]


def marker(r: Random, seeds: Seeds) -> Case:
    """A layer's marker: its JSON, or its bytes."""
    seed = r.choice(marked(seeds))
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
