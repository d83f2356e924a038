"""Which layers `--keep-layers N` leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qconvert.convert.cut import cut_layers, offer
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import UsageError
from qconvert.formats.layers import Inventory, take_inventory
from qconvert.formats.tensors import Spec
from qconvert.runtime.families import detect

save = pytest.importorskip("safetensors.numpy").save_file


def inventory_of(path: Path, shapes: dict[str, tuple[int, ...]]) -> Inventory:
    save({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path)
    with opened(path) as checkpoint:
        return take_inventory(checkpoint)


@pytest.fixture
def encoder(tmp_path: Path) -> Inventory:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,)}
    for i in range(6):
        shapes[f"model.layers.{i}.mlp.weight"] = (64, 16)
        shapes[f"model.layers.{i}.mlp.bias"] = (64,)
        shapes[f"model.layers.{i}.mlp.experts.7.weight"] = (8, 16)
        shapes[f"model.layers.{i}.rope_freqs"] = (4,)
    for i in range(9):
        shapes[f"visual.blocks.{i}.attn.weight"] = (16, 16)
    return inventory_of(tmp_path / "x.safetensors", shapes)


def test_blocks_behind_the_first_n_of_the_largest_list(encoder: Inventory) -> None:
    cut = cut_layers(encoder, 4)
    layers = {f"model.layers.{i}.{name}" for i in (4, 5) for name in ("mlp", "mlp.experts.7")}
    assert set(cut.layers) == layers
    loose = {f"model.layers.{i}.{name}" for i in (4, 5) for name in ("mlp.bias", "rope_freqs")}
    assert set(cut.tensors) == {f"{layer}.weight" for layer in layers} | loose
    assert set(cut.tensors.values()) == {"--keep-layers 4: model.layers.N with N >= 4"}
    assert cut.note == "--keep-layers 4: blocks 4 to 5 under 'model.layers.' are left out (4 layers)"


def test_nothing_is_cut_unless_asked_for(encoder: Inventory) -> None:
    assert not cut_layers(encoder, None).layers and not cut_layers(encoder, None).note
    cut = cut_layers(encoder, 6)
    assert not cut.layers
    assert cut.note == "--keep-layers 6: the file has 6 blocks under 'model.layers.'; none is left out"


def test_only_what_is_converted_counts(encoder: Inventory) -> None:
    cut = cut_layers(encoder, 8, lambda name: name.startswith("visual."))
    assert set(cut.layers) == {"visual.blocks.8.attn"}


def test_a_file_without_blocks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no layer of this file is counted in blocks"):
        cut_layers(inventory_of(tmp_path / "x.safetensors", {"head.weight": (4, 4)}), 1)


def test_cutting_is_offered_where_the_runtime_loads_fewer(skeleton: Any) -> None:
    kept = skeleton("qwen3vl_32b_minimax_h3")
    assert offer(detect(kept), "sglang-0.5.23", "nvfp4") is None
    first = {name: spec for name, spec in kept.items() if ".layers.0." in name}
    more = {
        name.replace(".layers.0.", f".layers.{i}."): s for i in range(50, 64) for name, s in first.items()
    }
    words = offer(detect(kept | more), "sglang-0.5.23", "nvfp4")
    assert words is not None and "--keep-layers 50 leaves them out" in words
    assert offer(detect(skeleton("qwen3_8b")), "sglang-0.5.23", "nvfp4") is None


@pytest.fixture
def skeleton() -> Any:
    import json
    import re
    from itertools import product

    def expand(name: str) -> list[str]:
        parts = re.split(r"(\{[^}]*\})", name)
        choices = []
        for part in parts:
            span = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", part)
            if span:
                choices.append([str(i) for i in range(int(span[1]), int(span[2]) + 1)])
            else:
                choices.append(part[1:-1].split(",") if part.startswith("{") else [part])
        return ["".join(item) for item in product(*choices)]

    def load(name: str) -> dict[str, Spec]:
        path = Path(__file__).parents[1] / "data" / "skeletons" / f"{name}.json"
        tensors = {}
        for pattern, text in json.loads(path.read_text())["tensors"].items():
            dtype, *shape = text.split()
            tensors.update((key, Spec(dtype, tuple(map(int, shape)))) for key in expand(pattern))
        return tensors

    return load
