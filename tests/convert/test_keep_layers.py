"""--keep-layers: blocks behind the first N are left out of a conversion, named with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from qconvert.convert.job import Request, run_job
from qconvert.convert.plan import PlanOptions
from qconvert.formats.checkpoint import opened
from safetensors.numpy import save_file


def test_blocks_beyond_are_dropped_with_their_reason(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.mlp.fc.weight": np.full((8, 16), i, np.float32) for i in range(4)}
    tensors |= {f"layers.{i}.scale": np.ones(3, np.float32) for i in range(4)} | {
        "norm.weight": np.ones(8, np.float32)
    }
    source, output = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    save_file(tensors, source)
    with opened(source) as checkpoint:
        outcome = run_job(Request(source, "fp32", output, plan=PlanOptions(keep_layers=2)), checkpoint)
    with opened(output) as made:
        assert set(made.tensors) == {
            *(f"layers.{i}.mlp.fc.weight" for i in range(2)),
            *(f"layers.{i}.scale" for i in range(2)),
            "norm.weight",
        }
        assert np.array_equal(made.read("layers.1.mlp.fc.weight"), tensors["layers.1.mlp.fc.weight"])
    dropped = {drop.tensor: drop.reason for drop in outcome.plan.drops}
    assert set(dropped) == {f"layers.{i}.{name}" for i in (2, 3) for name in ("mlp.fc.weight", "scale")}
    assert set(dropped.values()) == {"--keep-layers 2: layers.N with N >= 2"}
