"""What the tests of other ecosystems share: goldens with their own config beside them, whole layers decoded, jobs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from qconvert.convert.job import Outcome, Request, run_job
from qconvert.convert.plan import PlanOptions
from qconvert.formats.checkpoint import Checkpoint, opened
from qconvert.formats.layers import Layer, parse_assumption, take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.values import decode_rows
from qconvert.kernels.select import get_backend
from safetensors import safe_open
from safetensors.torch import load_file, save_file

F32 = NDArray[np.float32]
SHARED = Path(os.environ.get("QCONVERT_SHARED", Path(__file__).resolve().parents[3] / "shared"))
GOLDEN = SHARED / "golden-other"
WITHOUT = "no goldens (QCONVERT_SHARED names the folder that has them)"


def names(*patterns: str) -> list[str]:
    """Goldens that match, by file name; none where there is no such folder."""
    return sorted(path.name for pattern in patterns for path in GOLDEN.glob(pattern))


def place(name: str, folder: Path, config: bool = True) -> tuple[Path, dict[str, Any]]:
    """A golden copied into `folder`, its library's config.json beside it; and what its header says of it."""
    path = folder / name
    shutil.copyfile(GOLDEN / name, path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if config and "config" in metadata:
        (folder / "config.json").write_text(metadata["config"])
    return path, json.loads(metadata["spec"])


def reference(path: Path) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor("ref.dequant")
    return tensor


def decode(checkpoint: Checkpoint, layer: Layer, step: int | None = None) -> F32:
    """All rows of a layer, `step` at a time (the codec's own step by default)."""
    reader, backend = LayerReader(checkpoint, layer), get_backend("cpu")
    step = step or layer.codec.row_step(layer.options) * 8
    runs = [decode_rows(layer, reader, a, min(a + step, layer.n), backend) for a in range(0, layer.n, step)]
    return np.concatenate(runs)


def read_layer(path: Path, prefix: str, *assume: str) -> tuple[Layer, F32]:
    """One layer of a file as recognised, and its values, the same in two ways of cutting it into runs."""
    with opened(path) as checkpoint:
        layer = take_inventory(checkpoint, [parse_assumption(text) for text in assume]).layers[prefix]
        values = decode(checkpoint, layer)
        step = layer.codec.row_step(layer.options)
        assert np.array_equal(values, decode(checkpoint, layer, step))
        assert np.array_equal(values[:step], decode_first(checkpoint, layer, step))
    return layer, values


def decode_first(checkpoint: Checkpoint, layer: Layer, step: int) -> F32:
    """The first rows, with a run that ends in the middle of a step."""
    reader, backend = LayerReader(checkpoint, layer), get_backend("cpu")
    rows = max(1, step - 1)
    first = decode_rows(layer, reader, 0, rows, backend)
    return np.concatenate([first, decode_rows(layer, reader, 0, min(step, layer.n), backend)[rows:]])


def save(path: Path, tensors: Mapping[str, Any], config: Any = None, metadata: Any = None) -> Path:
    """A safetensors file of numpy arrays and torch tensors, config.json beside it."""
    out = {
        name: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value, order="C"))
        for name, value in tensors.items()
    }
    save_file(out, path, metadata)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    return path


def load(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


def run(source: Path, target: str, out: Path, **plan: Any) -> Outcome:
    with opened(source) as checkpoint:
        return run_job(Request(source, target, out, plan=PlanOptions(**plan), jobs=2), checkpoint)


def kinds(outcome: Outcome) -> dict[str, str]:
    return {action.prefix: action.kind for action in outcome.plan.actions}
