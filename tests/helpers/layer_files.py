"""A small checkpoint with one layer of every kind, quantised by comfy-kitchen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy_kitchen as ck
import torch
from comfy_kitchen.tensor.int8 import TensorWiseINT8Layout
from comfy_kitchen.tensor.nvfp4 import TensorCoreNVFP4Layout
from safetensors.torch import save_file
from torch import Tensor

N, K, VOCABULARY = 384, 512, 160
ROTATION = 256


def weight(seed: int, n: int = N, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Heavier tails than a Gaussian's, and a few outliers, as real layers have."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n, K, generator=generator) * (1 + torch.rand(n, 1, generator=generator))
    w[:: n // 4, 7] *= 12
    return (w * 0.03).to(dtype)


def input_rows(seed: int, rows: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, K, generator=generator)
    x[:, 3] *= 20
    return x.to(dtype)


def fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    scale = w.float().abs().max() / 448
    return ck.quantize_per_tensor_fp8(w.float(), scale), scale


def nvfp4(w: Tensor) -> dict[str, Tensor]:
    q, params = TensorCoreNVFP4Layout.quantize(w)
    return {"weight": q, "weight_scale": params.block_scale, "weight_scale_2": params.scale.float()}


def int8(w: Tensor, rotation: int, per_channel: bool = True) -> dict[str, Tensor]:
    q, params = TensorWiseINT8Layout.quantize(
        w,
        is_weight=True,
        per_channel=per_channel,
        convrot=bool(rotation),
        convrot_groupsize=rotation or ROTATION,
    )
    return {"weight": q, "weight_scale": params.scale.float()}


def w4a8(w: Tensor, group: int, **options: Any) -> dict[str, Tensor]:
    q, s_rel, s_channel, correction, codebook = ck.quantize_w4a8_int8_weight(
        w, group_size=group, convrot_groupsize=ROTATION, **options
    )
    tensors = {"weight": q, "weight_s_rel": s_rel, "weight_s_channel": s_channel}
    if codebook is not None:
        tensors["weight_codebook"] = codebook.float()
    if correction is not None:
        tensors["weight_correction"] = correction.float()
    return tensors


def layers() -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Marker and tensors of every layer, by name."""
    made: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {}
    bias = (torch.arange(N) % 7 - 3).to(torch.bfloat16) / 8
    full = {"full_precision_matrix_mult": True}
    q, scale = fp8(weight(1))
    e4m3 = {"format": "float8_e4m3fn"}
    made["fp8_weight_only"] = (e4m3 | full, {"weight": q, "weight_scale": scale, "bias": bias})
    made["fp8_static"] = (
        e4m3,
        {"weight": q, "weight_scale": scale, "input_scale": torch.tensor(0.17), "bias": bias},
    )
    made["fp8_dynamic"] = (e4m3, {"weight": q, "weight_scale": scale})
    four = nvfp4(weight(2))
    factor = (1 + torch.arange(K) % 5).to(torch.bfloat16) / 4
    made["nvfp4_weight_only"] = ({"format": "nvfp4"} | full, four | {"bias": bias})
    made["nvfp4_prescaled"] = ({"format": "nvfp4"} | full, four | {"pre_quant_scale": factor})
    made["nvfp4_dynamic"] = ({"format": "nvfp4"}, four | {"bias": bias})
    mx, mx_scale = ck.quantize_mxfp8(weight(3))
    made["mxfp8"] = ({"format": "mxfp8"}, {"weight": mx, "weight_scale": mx_scale.view(torch.uint8)})
    for rotation in (16, 64, 256):
        marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": rotation}
        made[f"int8_convrot{rotation}"] = (marker, int8(weight(4 + rotation), rotation) | {"bias": bias})
    made["int8_plain"] = ({"format": "int8_tensorwise"}, int8(weight(5), 0, per_channel=False))
    grid = {"format": "asym_w4a8_int8", "convrot": True, "convrot_groupsize": ROTATION}
    made["w4a8"] = (grid | {"group_size": 16}, w4a8(weight(6), 16) | {"bias": bias})
    made["w4a8_no_codebook"] = (grid | {"group_size": 32}, w4a8(weight(7), 32, codebook=False))
    made["w4a8_corrected"] = (grid | {"group_size": 16}, w4a8(weight(8), 16, symmetric=False))
    made["w6a8"] = (grid | {"group_size": 16}, w4a8(weight(9), 16, codebook=False, bits=6))
    for kind in ("int4", "int8"):
        codes, rows = ck.quantize_convrot_w4a4_weight(weight(10), ROTATION)
        marker = {"format": "convrot_w4a4", "convrot_groupsize": ROTATION, "linear_dtype": kind}
        made[f"w4a4_{kind}"] = (marker, {"weight": codes, "weight_scale": rows, "bias": bias})
    table = weight(11, VOCABULARY)
    made["rows.embed_tokens"] = ({"format": "int8_tensorwise"}, int8(table, 0))
    made["scalar.embed_tokens"] = ({"format": "int8_tensorwise"}, int8(table, 0, per_channel=False))
    return made


def write(path: Path) -> None:
    """The checkpoint: every layer with its marker tensor."""
    tensors: dict[str, Tensor] = {}
    for name, (marker, parts) in layers().items():
        for suffix, tensor in parts.items():
            tensors[f"{name}.{suffix}"] = tensor.clone().contiguous()
        text = json.dumps(marker).encode()
        tensors[f"{name}.comfy_quant"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    save_file(tensors, path)
