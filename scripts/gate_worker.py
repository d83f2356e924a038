"""What the real sglang says of quantised files: one long-lived process, one JSON line in, one out.

Runs in a Python that has sglang; imports nothing of qconvert. Requests: {"path", "embeddings": [prefixes that are
tables], "capability": 0 or e.g. 100 to pretend a GPU}. Answers: {"config", "methods": {prefix: class}, "errors":
[[stage, text]], "route": class taken from the header before markers}. "config" is null when no config resolves.
Answers go to the file descriptor named by the first argument, for libraries print to stdout as they please.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from sglang.multimodal_gen.runtime.layers.linear import ReplicatedLinear
from sglang.multimodal_gen.runtime.layers.quantization.configs import quanto_int8_config
from sglang.multimodal_gen.runtime.layers.quantization.mxfp8 import MXFP8Config
from sglang.multimodal_gen.runtime.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.multimodal_gen.runtime.platforms import current_platform
from sglang.multimodal_gen.runtime.utils import quantization_utils

logging.disable(logging.WARNING)

PACKED = ("nvfp4", "asym_w4a8_int8", "convrot_w4a4")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Header = dict[str, tuple[str, tuple[int, ...]]]


class Alone:
    """A tensor-parallel group of one rank."""

    rank_in_group = 0
    world_size = 1


class Linear(ReplicatedLinear):
    tp_group = Alone()


@contextlib.contextmanager
def pretended(capability: int) -> Iterator[None]:
    """The platform says it is CUDA of this compute capability (0: as it is)."""
    if not capability:
        yield
        return
    answer = mock.Mock()
    answer.to_int.return_value = capability
    answer.as_version_str.return_value = f"{capability // 10}.{capability % 10}"
    platform = type(current_platform)
    with (
        mock.patch.object(platform, "is_cuda", lambda *_: True),
        mock.patch.object(platform, "get_device_capability", lambda *_, **__: answer),
    ):
        yield


def read_header(path: str) -> Header:
    with safe_open(path, framework="pt", device="cpu") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def header_route(path: str) -> str | None:
    """The config that a text encoder takes from the header before it looks for markers."""
    config = quantization_utils.get_quant_config_from_safetensors_metadata(path)
    config = config or quanto_int8_config.inspect_quanto_int8_checkpoint(path)
    return type(config).__name__ if config is not None else None


def differences(prefix: str, header: Header, layer: Any, is_table: bool, is_mxfp8: bool) -> Iterator[str]:
    """How the file's tensors of one layer differ from the parameters that the real layer registered."""
    params = dict(layer.named_parameters(recurse=False))
    seen = set()
    for name, (dtype, shape) in sorted(header.items()):
        owner, _, suffix = name.rpartition(".")
        if owner != prefix or suffix == "comfy_quant":
            continue
        if is_mxfp8 and suffix == "weight_scale":
            suffix = "weight_scale_inv"
        param = params.get(suffix)
        if param is None:
            yield f"{suffix}: no parameter among {sorted(params)}"
            continue
        seen.add(suffix)
        wanted = tuple(param.shape)
        if is_table and wanted and wanted[0] == layer.num_embeddings_padded:
            wanted = (layer.org_vocab_size, *wanted[1:])
        if shape != wanted and not (not is_table and shape == () and wanted == (1,)):
            yield f"{suffix}: shape {list(shape)}, parameter {list(wanted)}"
        stored = DTYPES.get(dtype)
        forgiven = suffix in ("bias", "pre_quant_scale") and stored in FLOATS and param.dtype in FLOATS
        if stored != param.dtype and not forgiven:
            yield f"{suffix}: dtype {dtype}, parameter {param.dtype}"
    for suffix in sorted(params.keys() - seen):
        yield f"{suffix}: a parameter {list(params[suffix].shape)} without a tensor"


def build(prefix: str, marker: dict[str, Any], header: Header, config: Any, is_table: bool) -> Any:
    n, columns = header[f"{prefix}.weight"][1]
    k = columns * 2 if marker.get("format") in PACKED else columns
    common: dict[str, Any] = {"params_dtype": torch.bfloat16, "quant_config": config, "prefix": prefix}
    if is_table:
        return VocabParallelEmbedding(n, k, tp_group=Alone(), **common)
    return Linear(k, n, bias=f"{prefix}.bias" in header, **common)


def judge(path: str, embeddings: list[str], capability: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"config": None, "methods": {}, "errors": [], "route": None}
    errors: list[list[str]] = answer["errors"]
    stage = "read"
    try:
        header = read_header(path)
        with contextlib.suppress(Exception):
            answer["route"] = header_route(path)
        stage = "inspect"
        markers = quantization_utils.inspect_comfy_quant_markers([path])
        if not markers:
            errors.append(["unquantised", "no markers"])
            return answer
        stage = "resolve"
        with pretended(capability):
            config = quantization_utils.resolve_comfy_checkpoint_quantization(markers)
    except Exception as error:
        errors.append([stage, f"{type(error).__name__}: {error}"])
        return answer
    answer["config"] = type(config).__name__
    for prefix, marker in sorted(markers.items()):
        if len(header.get(f"{prefix}.weight", ("", ()))[1]) != 2:
            errors.append(["weight", f"{prefix}: no 2-D weight"])
            continue
        is_table = prefix in embeddings
        try:
            with pretended(capability):
                layer = build(prefix, marker, header, config, is_table)
        except Exception as error:
            errors.append(["build", f"{prefix}: {type(error).__name__}: {error}"])
            continue
        method = answer["methods"][prefix] = type(layer.quant_method).__name__
        if method.startswith("Unquantized"):
            errors.append(["method", f"{prefix}: a marked layer got {method}"])
            continue
        found = differences(prefix, header, layer, is_table, isinstance(config, MXFP8Config))
        errors.extend(["tensors", f"{prefix}.{text}"] for text in found)
    left = set(markers) - set(config.selected) if hasattr(config, "selected") else set()
    errors.extend(["left over", prefix] for prefix in sorted(left))
    return answer


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            request = json.loads(line)
            answer = judge(request["path"], request["embeddings"], request["capability"])
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
