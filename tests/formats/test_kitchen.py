"""comfy-kitchen decodes what we write to the values we say, and we decode what it writes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.formats.layers import take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.registry import codec
from qconvert.formats.values import change_basis, decode_rows

pytest.importorskip("comfy_kitchen")
import torch
from comfy_kitchen.tensor import (
    AsymW4A8Int8Layout,
    QuantizedTensor,
    TensorCoreAWQW4A16Layout,
    TensorCoreConvRotW4A4Layout,
    TensorCoreFP8Layout,
    TensorCoreMXFP8Layout,
    TensorCoreNVFP4Layout,
    TensorCoreSVDQuantW4A4Layout,
    TensorWiseINT8Layout,
)

Rng = np.random.Generator
Open = Callable[..., Any]
LAYOUTS: dict[str, Any] = {
    "float8": TensorCoreFP8Layout,
    "nvfp4": TensorCoreNVFP4Layout,
    "mxfp8": TensorCoreMXFP8Layout,
    "int8": TensorWiseINT8Layout,
    "w4a4": TensorCoreConvRotW4A4Layout,
    "w4a8": AsymW4A8Int8Layout,
    "awq_w4a16": TensorCoreAWQW4A16Layout,
    "svdquant_w4a4": TensorCoreSVDQuantW4A4Layout,
}


def quantized(d: ModuleType, name: str, tensors: dict[str, Any], marker: dict[str, Any], shape: Any) -> Any:
    """The layer as ComfyUI makes it from a file: tensors by suffix, options from the marker."""
    t = {suffix: d.to_torch(tensor) for suffix, tensor in tensors.items()}
    common = {"orig_dtype": torch.float32, "orig_shape": tuple(shape)}
    scale = t.get("weight_scale")
    match name:
        case "nvfp4":
            extra = {"scale": t["weight_scale_2"], "block_scale": scale.view(torch.float8_e4m3fn)}
        case "mxfp8":
            extra = {"scale": scale.view(torch.float8_e8m0fnu)}
        case "int8":
            rotated = {"convrot": bool(marker.get("convrot"))}
            extra = {"scale": scale, **rotated, "convrot_groupsize": marker.get("convrot_groupsize", 256)}
        case "w4a4":
            keys = ("convrot_groupsize", "linear_dtype")
            extra = {"scale": scale, **{key: marker[key] for key in keys if key in marker}}
        case "w4a8":
            extra = {
                "scale": t["weight_s_rel"],
                "s_channel": t["weight_s_channel"],
                "codebook": t.get("weight_codebook"),
                "correction": t.get("weight_correction"),
                "group_size": marker["group_size"],
                "convrot_groupsize": marker["convrot_groupsize"],
            }
        case "awq_w4a16":
            extra = {
                "scale": scale.float(),
                "zeros": t["weight_zeros"].float(),
                "group_size": marker["group_size"],
            }
        case "svdquant_w4a4":
            names = ("proj_down", "proj_up", "smooth_factor")
            extra = {"scale": scale.float(), **{key: t[f"weight_{key}"].float() for key in names}}
        case _:
            extra = {"scale": scale}
    layout = LAYOUTS[name]
    return QuantizedTensor(t["weight"], layout.__name__, layout.Params(**common, **extra))


def close(ours: Any, theirs: Any, rotation: int) -> bool:
    """Bit for bit where nothing is rotated (kitchen rotates by a matmul, we by butterflies)."""
    if rotation:
        return float(np.abs(ours - theirs).max()) <= 2e-6 * float(np.abs(theirs).max())
    return np.array_equal(ours, theirs)


def test_kitchen_decodes_what_we_write(
    label: str, d: ModuleType, writing: ModuleType, rng: Rng, backend: Any
) -> None:
    name, options, _ = writing.WRITTEN[label]
    it, n, k = codec(name), 128, 256
    if name == "plain" or label == "fp8_row":
        pytest.skip("kitchen has no such layout")
    codes = writing.encode(name, options, d.weights(rng, n, k), backend)
    tensors = writing.stored(d, name, options, codes, n, k)
    theirs = quantized(d, name, tensors, it.marker(options) or {}, (n, k)).dequantize().numpy()
    rotation = it.rotation(options) if name != "nvfp4" else 0
    ours = it.decode(codes, options, backend)
    assert close(change_basis(ours, rotation, 0, backend), theirs, rotation)


#: Layout, quantise arguments, marker, codec
THEIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp8": ("float8", {}, {"format": "float8_e4m3fn"}),
    "e5m2": ("float8", {"dtype": torch.float8_e5m2}, {"format": "float8_e5m2"}),
    "nvfp4": ("nvfp4", {}, {"format": "nvfp4"}),
    "mxfp8": ("mxfp8", {}, {"format": "mxfp8"}),
    "int8": ("int8", {}, {"format": "int8_tensorwise"}),
    "int8 rows": ("int8", {"per_channel": True}, {"format": "int8_tensorwise"}),
    "int8 convrot": (
        "int8",
        {"per_channel": True, "convrot": True, "convrot_groupsize": 16},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16},
    ),
    "w4a4": ("w4a4", {"convrot_groupsize": 16}, {"format": "convrot_w4a4", "convrot_groupsize": 16}),
    "w4a8": ("w4a8", {}, {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256}),
    "w4a8 groups": (
        "w4a8",
        {"group_size": 32, "convrot_groupsize": 64},
        {"format": "asym_w4a8_int8", "group_size": 32, "convrot_groupsize": 64},
    ),
    "w4a8 uniform": (
        "w4a8",
        {"codebook": False},
        {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256},
    ),
    "w4a8 asymmetric": (
        "w4a8",
        {"symmetric": False},
        {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256},
    ),
    "w4a8 float scales": (
        "w4a8",
        {"scale_dtype": torch.float32},
        {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256},
    ),
    "w6a8": ("w4a8", {"bits": 6}, {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256}),
}


@pytest.mark.parametrize("case", THEIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_we_decode_what_kitchen_writes(
    case: str, dtype: Any, d: ModuleType, rng: Rng, opened: Open, backend: Any
) -> None:
    name, kwargs, marker = THEIRS[case]
    w = torch.from_numpy(d.weights(rng, 128, 256)).to(dtype)
    qt = QuantizedTensor.from_float(w, LAYOUTS[name].__name__, **kwargs)
    tensors = {
        key: d.from_torch(value) for key, value in qt.state_dict("fc.weight").items() if value is not None
    }
    checkpoint = opened(tensors | {"fc.comfy_quant": d.marker_tensor(marker)})
    layer = take_inventory(checkpoint).layers["fc"]
    assert layer.codec.name == name and layer.marker == marker
    assert not layer.leftovers
    ours = decode_rows(layer, LayerReader(checkpoint, layer), 0, layer.n, backend)
    by_suffix = {key.removeprefix("fc."): tensor for key, tensor in tensors.items()}
    theirs = quantized(d, name, by_suffix, marker, (128, 256)).dequantize().numpy()
    assert close(ours, theirs, layer.codec.rotation(layer.options))


@pytest.mark.parametrize(
    "name", ["svdquant", "svdquant_tiled", "awq", "awq_fp16", "mxfp8_e8m0", "nvfp4_u8_scales"]
)
def test_kitchen_agrees_with_the_definitions_that_tests_use(name: str, d: ModuleType, rng: Rng) -> None:
    sample = d.SOURCES[name](rng, d.weights(rng, 256, 256))
    theirs = quantized(d, sample.codec, sample.tensors, sample.marker, (256, 256)).dequantize().numpy()
    assert (
        np.abs(theirs - sample.values).max() <= (1e-6 if name.startswith("svd") else 0) * np.abs(theirs).max()
    )
