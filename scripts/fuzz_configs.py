"""Spoiled statements beside a file: configurations, indexes of shards, what a model asks for."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fuzz_case import Case, command
from fuzz_seeds import Box, Seeds, joined
from fuzz_values import encode, hacked, spoil

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


def model(r: Random, seeds: Seeds) -> Case:
    """What `check --model` is given: names, an index, a configuration, weights of any kind, a folder."""
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
        *(json.loads(s.files["config.json"]) for s in seeds.folders if "config.json" in s.files),
    ]
    kind = r.randrange(8)
    files, given = dict(seed.files), "m.json"
    if kind < 5:
        files["m.json"] = encode(spoil(r, r.choice(documents[:3] if kind else documents)))
    else:
        other = r.choice([r.choice(seeds.files), r.choice(seeds.gguf), seeds.torch, seeds.sharded])
        for name, data in other.files.items():
            files[f"m/{name}"] = hacked(r, data, 1500) if r.randrange(2) else data
        given = "m/" + other.main if other.main and r.randrange(4) else "m"
    return Case("model", files, ["check", "{}/" + seed.main, "--model", "{}/" + given])
