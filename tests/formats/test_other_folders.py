"""Component folders as diffusers and ModelOpt leave them: shards, their index, and the configuration beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import UsageError
from qconvert.formats.layers import take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.values import decode_rows

STEM = "diffusion_pytorch_model"


def layer(rng: np.random.Generator, d: ModuleType, n: int = 48, k: int = 96) -> tuple[dict[str, Any], Any]:
    """A ModelOpt nvfp4 layer and its values."""
    codes, scales = rng.integers(0, 16, (n, k)), rng.integers(8, 0x70, (n, k // 16)).astype(np.uint8)
    sign = np.where(codes & 8, -1.0, 1.0)
    values = sign * d.E2M1[codes & 7] * np.repeat(d.f32(d.E4M3[scales] * np.float64(np.float32(0.01))), 16, 1)
    return {
        "weight": d.T("U8", d.pack4(codes, False)),
        "weight_scale": d.T("F8_E4M3", scales),
        "weight_scale_2": d.f32_tensor(0.01),
    }, d.f32(values)


@pytest.fixture
def component(tmp_path: Path, d: ModuleType, rng: np.random.Generator) -> Callable[..., Any]:
    """component(name -> JSON document): a folder of two shards with these files beside them, and its values."""

    def make(**documents: Any) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path / "pipeline" / "transformer"
        folder.mkdir(parents=True)
        values, index = {}, {}
        for number in (1, 2):
            tensors, values[f"blocks.{number}.fc"] = layer(rng, d)
            name = f"{STEM}-{number:05d}-of-00002.safetensors"
            named = {f"blocks.{number}.fc.{suffix}": tensor for suffix, tensor in tensors.items()}
            d.write(folder / name, named, {"format": "pt"})
            index |= dict.fromkeys(named, name)
        (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        for name, document in documents.items():
            (folder / f"{name}.json").write_text(json.dumps(document))
        return folder, values

    return make


FLAT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}}
NESTED = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}


@pytest.mark.parametrize(
    "documents",
    [
        {"config": {"_class_name": "Model"} | FLAT},
        {"config": {"_class_name": "Model"}, "hf_quant_config": NESTED},
        {"config": {"text_config": FLAT}},
    ],
)
def test_sharded_component(documents: Any, component: Callable[..., Any], backend: Any) -> None:
    folder, values = component(**documents)
    with opened(folder) as checkpoint:
        inventory = take_inventory(checkpoint)
        assert set(inventory.layers) == set(values)
        for prefix, found in inventory.layers.items():
            assert found.codec.name == "modelopt_nvfp4"
            got = decode_rows(found, LayerReader(checkpoint, found), 0, found.n, backend)
            assert np.array_equal(got, values[prefix])


def test_a_pipeline_is_no_component(component: Callable[..., Any]) -> None:
    folder, _ = component(config={"_class_name": "Model"})
    (folder.parent / "model_index.json").write_text("{}")
    with pytest.raises(UsageError, match="name one component: transformer"), opened(folder.parent):
        pass
