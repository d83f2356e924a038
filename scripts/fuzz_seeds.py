"""Small right inputs of every kind, which fuzz_mutations spoils: files and folders, plans, jobs, calibrations.

Needs what the tests need (torch, safetensors): layers are encoded by the tests' own definitions of each format, and
by qconvert itself for the targets that it writes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import struct
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from qconvert.convert.cli import main
from qconvert.kernels import cpu
from qconvert.kernels.cpu.jit import Kernel
from qconvert.runtime.targets import TARGETS

ROOT = Path(__file__).resolve().parents[1]
HELPERS = ROOT / "tests" / "helpers"
N, K = 64, 256


@dataclass(frozen=True)
class Seed:
    """Files by name in one folder; `main` is what a command is given, "" for the folder itself."""

    name: str
    files: dict[str, bytes]
    main: str


@dataclass
class Box:
    """A safetensors file taken apart: name -> [dtype, shape, payload]."""

    tensors: dict[str, list[Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: bytes) -> Box:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        box = cls(metadata=header.pop("__metadata__", {}))
        for name, entry in header.items():
            a, b = entry["data_offsets"]
            payload = data[8 + length + a : 8 + length + b]
            box.tensors[name] = [entry["dtype"], entry["shape"], payload]
        return box

    def header(self) -> dict[str, Any]:
        document: dict[str, Any] = {"__metadata__": self.metadata} if self.metadata else {}
        at = 0
        for name, (dtype, shape, payload) in self.tensors.items():
            document[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(payload)]}
            at += len(payload)
        return document

    def payload(self) -> bytes:
        return b"".join(payload for _, _, payload in self.tensors.values())

    def bytes(self) -> bytes:
        return joined(json.dumps(self.header()).encode(), self.payload())


def joined(header: bytes, payload: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + payload


def tests_module(name: str) -> ModuleType:
    """A module of tests/helpers."""
    if str(HELPERS) not in sys.path:
        sys.path.append(str(HELPERS))
    return importlib.import_module(name)


def encoded(only: Collection[str] = ()) -> Iterator[Seed]:
    """Every stored state that the tests know (or some), as two layers beside a norm."""
    d = tests_module("dialects")
    rng = np.random.default_rng(1)
    for name, writer in (d.SOURCES | d.BANKS | d.CONVOLUTIONS).items():
        if only and name not in only:
            continue
        n = 128 if name.startswith("svdquant") else N
        shape = (2, n, K) if name in d.BANKS else (n, K, 3, 3) if name in d.CONVOLUTIONS else (n, K)
        try:
            sample = writer(rng, d.weights(rng, *shape))
        except ValueError:
            continue
        tensors = sample.named("blocks.0.fc") | sample.named("embed_tokens")
        tensors["blocks.0.norm.weight"] = d.narrow(np.ones(K), "BF16")
        with tempfile.TemporaryDirectory() as folder:
            path = d.write(Path(folder) / "model.safetensors", tensors)
            yield Seed(name, {"model.safetensors": path.read_bytes()}, "model.safetensors")


def plain(rng: np.random.Generator) -> Box:
    """A small model without any quantisation."""

    def bf16(*shape: int) -> list[Any]:
        values = (rng.standard_normal(shape) * 0.02).astype(np.float32)
        return ["BF16", list(shape), (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()]

    return Box(
        {
            "model.embed_tokens.weight": bf16(128, K),
            "model.layers.0.self_attn.q_proj.weight": bf16(128, K),
            "model.layers.0.mlp.down_proj.weight": bf16(K, 128),
            "model.layers.0.mlp.down_proj.bias": bf16(K),
            "model.norm.weight": bf16(K),
        },
        {"format": "pt"},
    )


def read_folder(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def quietly(*args: object) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main([str(arg) for arg in args])
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


def converted(only: Collection[str] = ()) -> Iterator[Seed]:
    """What qconvert writes for each target (or some), with the files beside it."""
    model = plain(np.random.default_rng(2)).bytes()
    for target in TARGETS:
        if only and target.name not in only:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "in.safetensors").write_bytes(model)
            (folder / "out").mkdir()
            ending = "gguf" if target.container == "gguf" else "safetensors"
            out = folder / "out" if target.sidecars else folder / "out" / f"model.{ending}"
            if quietly(folder / "in.safetensors", "--to", target.name, "-o", out, "--jobs", 1) == 0:
                yield Seed(target.name, read_folder(folder / "out"), "" if target.sidecars else out.name)


def foreign() -> Iterator[Seed]:
    """Layers of other libraries, right in shape, beside the configuration that explains them."""
    rng = np.random.default_rng(3)
    width = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1}

    def tensor(dtype: str, *shape: int, value: bytes | None = None) -> list[Any]:
        count = int(np.prod(shape))
        if value is None:
            value = (
                np.full(count, 0.01, np.float32 if dtype == "F32" else np.float16).tobytes()
                if dtype in ("F32", "F16")
                else b"\x3c\x3c" * count
                if dtype == "BF16"
                else rng.integers(0, 100, count * width[dtype], np.uint8).tobytes()
            )
        return [dtype, list(shape), value]

    def folder(name: str, layer: dict[str, list[Any]], config: dict[str, Any]) -> Seed:
        box = plain(rng)
        del box.tensors["model.layers.0.self_attn.q_proj.weight"]
        for suffix, parts in layer.items():
            box.tensors[f"model.layers.0.self_attn.q_proj.{suffix}"] = parts
        document = {"architectures": ["X"], "num_hidden_layers": 1, "quantization_config": config}
        files = {"model.safetensors": box.bytes(), "config.json": json.dumps(document).encode()}
        return Seed(name, files, "")

    shape = np.array([128, K], np.int64).tobytes()
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 64, "strategy": "group"}
    scheme = {"group_0": {"targets": ["Linear", "re:.*q_proj"], "weights": weights}}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": scheme}
    yield folder(
        "compressed-tensors",
        {
            "weight_packed": tensor("I32", 128, K // 8),
            "weight_scale": tensor("BF16", 128, K // 64),
            "weight_shape": tensor("I64", 2, value=shape),
        },
        packed | {"ignore": ["lm_head", "re:.*embed.*"]},
    )
    two = {
        "group_0": {"targets": ["re:.*down.*"], "weights": {"num_bits": 8, "type": "float"}},
        "group_1": {"targets": ["re:.*q_proj"], "weights": {"num_bits": 8, "type": "float"}},
    }
    yield folder(
        "compressed-tensors fp8",
        {"weight": tensor("F8_E4M3", 128, K), "weight_scale": tensor("F32", 128, 1)},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": two},
    )
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
    packed_awq = {
        "qweight": tensor("I32", K, 16),
        "qzeros": tensor("I32", K // 64, 16),
        "scales": tensor("F16", K // 64, 128),
    }
    yield folder("awq", packed_awq, awq | {"modules_to_not_convert": ["lm_head"]})
    gptq = {
        "qweight": tensor("I32", K // 8, 128),
        "qzeros": tensor("I32", K // 64, 16),
        "scales": tensor("F16", K // 64, 128),
        "g_idx": tensor("I32", K, value=(np.arange(K, dtype=np.int32) // 64).tobytes()),
    }
    config = {"bits": 4, "group_size": 64, "desc_act": True, "sym": True, "checkpoint_format": "gptq"}
    yield folder("gptq", gptq, config | {"quant_method": "gptq"})
    extra = {".*layers\\.0.*": {"bits": 4, "group_size": 64}, "model.embed_tokens": {"bits": 16}}
    rounded = {"bits": 4, "group_size": 64, "sym": True, "data_type": "int", "extra_config": extra}
    yield folder(
        "auto-round", gptq, rounded | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    )
    state = json.dumps(
        {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [128, K]}
    ).encode()
    nf4 = {
        "weight": tensor("U8", 128 * K // 2, 1),
        "weight.absmax": tensor("F32", 128 * K // 64),
        "weight.quant_map": tensor("F32", 16),
        "weight.quant_state.bitsandbytes__nf4": tensor("U8", len(state), value=state),
    }
    yield folder("bitsandbytes", nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    block = {"weight": tensor("F8_E4M3", 128, K), "weight_scale_inv": tensor("F32", 1, 2)}
    yield folder("fp8", block, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*embed*"]}
    scaled = {
        "weight": tensor("F8_E4M3", 128, K),
        "weight_scale": tensor("F32"),
        "input_scale": tensor("F32"),
    }
    yield folder("modelopt", scaled, modelopt | {"producer": {"name": "modelopt"}})


def sharded() -> Seed:
    """Two files and their index."""
    box = plain(np.random.default_rng(4))
    names = list(box.tensors)
    files, index = {}, {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        files[name] = Box({key: box.tensors[key] for key in part}, dict(box.metadata)).bytes()
        index |= dict.fromkeys(part, name)
    document = {"metadata": {"total_size": len(box.payload())}, "weight_map": index}
    files["model.safetensors.index.json"] = json.dumps(document).encode()
    files["config.json"] = b'{"num_hidden_layers": 1, "hidden_size": 256, "vocab_size": 128}'
    return Seed("sharded", files, "")


def pickled() -> Seed:
    """A torch.save file."""
    import torch

    state = {"state_dict": {"a.weight": torch.zeros(16, 64), "b": torch.ones(3, dtype=torch.bfloat16)}}
    data = io.BytesIO()
    torch.save(state, data)
    return Seed("torch", {"model.pt": data.getvalue()}, "model.pt")


def planned() -> Seed:
    """A model and a plan of it, as --plan-out writes one."""
    model = plain(np.random.default_rng(5)).bytes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.safetensors").write_bytes(model)
        quietly(
            folder / "in.safetensors", "--to", "comfy_nvfp4", "--budget", "6bpw",
            "--plan-out", folder / "plan.json", "--dry-run",
        )  # fmt: skip
        return Seed("plan", read_folder(folder), "in.safetensors")


JOBS = """output = "done"

[options]
quality = "fast"

[[job]]
source = ["*.safetensors"]
target = ["comfy_nvfp4", "bf16"]
keep = ['down_proj$']
rename = ["^model=base"]
memory = "64MiB"

[[job]]
source = "in.safetensors"
target = "comfyui:nvfp4"
dtype = "fp16"
"""


def jobs() -> Seed:
    """A batch of one source."""
    return Seed(
        "jobs",
        {"in.safetensors": plain(np.random.default_rng(6)).bytes(), "jobs.toml": JOBS.encode()},
        "jobs.toml",
    )


def calibrated() -> Seed:
    """A model and a calibration of it."""
    rng = np.random.default_rng(7)
    moments = np.abs(rng.standard_normal(K)).astype(np.float32)
    inputs = rng.standard_normal((32, 128)).astype(np.float32)
    box = Box(
        {
            "model.layers.0.self_attn.q_proj.second_moment": ["F32", [K], moments.tobytes()],
            "model.layers.0.mlp.down_proj.inputs": ["F32", [32, 128], inputs.tobytes()],
            "model.layers.0.mlp.down_proj.input_amax": ["F32", [], moments[:1].tobytes()],
        }
    )
    return Seed(
        "calibration",
        {"in.safetensors": plain(rng).bytes(), "cal.safetensors": box.bytes()},
        "in.safetensors",
    )


@dataclass(frozen=True)
class Seeds:
    """All of them. `files`: single safetensors files; `folders`: with a config.json; `gguf`: GGUF files."""

    files: list[Seed]
    folders: list[Seed]
    gguf: list[Seed]
    sharded: Seed
    torch: Seed
    plan: Seed
    jobs: Seed
    calibration: Seed

    @classmethod
    def make(cls, formats: Collection[str] = (), targets: Collection[str] = ()) -> Seeds:
        """All, or these formats and targets only."""
        made = list(converted(targets))
        return cls(
            [*encoded(formats), *(seed for seed in made if seed.main.endswith(".safetensors"))],
            [*foreign(), *(seed for seed in made if not seed.main)],
            [seed for seed in made if seed.main.endswith(".gguf")],
            sharded(),
            pickled(),
            planned(),
            jobs(),
            calibrated(),
        )


def compile_kernels() -> None:
    """Every kernel that a conversion may call. Half a minute where numba's cache has none."""
    for module in pkgutil.iter_modules(cpu.__path__, f"{cpu.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Kernel):
                value.compiled()


def warm_up(seeds: Any) -> None:
    """What is loaded and compiled once is not a case's time or memory."""
    compile_kernels()
    for seed in (seeds.torch, seeds.files[0], seeds.gguf[0], seeds.sharded):
        with laid_out(seed) as folder:
            quietly("inspect", folder / seed.main)
            quietly(folder / seed.main, "--to", "bf16", "-o", folder / "made", "--jobs", "1")
    with laid_out(seeds.calibration) as folder:
        path, known = folder / seeds.calibration.main, folder / "cal.safetensors"
        quietly(path, "--to", "comfy_nvfp4", "--calibration", known, "-o", folder / "made", "--jobs", "1")


@contextlib.contextmanager
def laid_out(seed: Seed) -> Iterator[Path]:
    """A folder with its files."""
    with tempfile.TemporaryDirectory() as name:
        for file, data in seed.files.items():
            (Path(name) / file).write_bytes(data)
        yield Path(name)
