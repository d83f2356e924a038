"""Write a tiny but whole Qwen3-VL text encoder, with the names of ComfyUI's file for MiniMax-H3.

    interop_model.py OUT_DIR

    qwen3vl_bf16.safetensors   nothing quantised
    qwen3vl_fp8.safetensors    fp8 language layers and embedding, scalar scales, markers
    config.json                the sizes, as the runtime reads them

The weights are random. What matters is that every tensor is there that the runtime's loader asks for: language
layers, vision tower, no final norm, no lm_head. Sizes are chosen so that the language linears can be nvfp4.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 450,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 2048,
    "rope_theta": 5_000_000.0,
    # Three axes share the head's 32 rotary frequencies.
    "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
}
VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "hidden_size": 64,
    "intermediate_size": 160,
    "depth": 2,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": TEXT["hidden_size"],
    "deepstack_visual_indexes": [0],
    "hidden_act": "gelu_pytorch_tanh",
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": TEXT,
    "vision_config": VISION,
    "image_token_id": 449,
    "video_token_id": 448,
    "vision_start_token_id": 447,
    "vision_end_token_id": 446,
    "tie_word_embeddings": False,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the encoder."""
    hidden, ffn, head = TEXT["hidden_size"], TEXT["intermediate_size"], TEXT["head_dim"]
    queries, keys = TEXT["num_attention_heads"] * head, TEXT["num_key_value_heads"] * head
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (TEXT["vocab_size"], hidden)}
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    for index in range(TEXT["num_hidden_layers"]):
        out |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}

    def biased(prefix: str, *shape: int) -> None:
        out[f"visual.{prefix}.weight"], out[f"visual.{prefix}.bias"] = shape, shape[:1]

    width, inner = VISION["hidden_size"], VISION["intermediate_size"]
    patch = VISION["patch_size"]
    biased("patch_embed.proj", width, VISION["in_channels"], VISION["temporal_patch_size"], patch, patch)
    out["visual.pos_embed.weight"] = (VISION["num_position_embeddings"], width)
    for index in range(VISION["depth"]):
        block = f"blocks.{index}"
        biased(f"{block}.norm1", width)
        biased(f"{block}.attn.qkv", 3 * width, width)
        biased(f"{block}.attn.proj", width, width)
        biased(f"{block}.norm2", width)
        biased(f"{block}.mlp.linear_fc1", inner, width)
        biased(f"{block}.mlp.linear_fc2", width, inner)
    merged = width * VISION["spatial_merge_size"] ** 2
    # The mergers of deeper features normalise after merging, the last one before: hence the two widths.
    for merger, normed in (("merger", width), ("deepstack_merger_list.0", merged)):
        biased(f"{merger}.norm", normed)
        biased(f"{merger}.linear_fc1", merged, merged)
        biased(f"{merger}.linear_fc2", hidden, merged)
    return out


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(20)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes().items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith(".bias"):
            value = 0.02 * noise
        elif len(shape) == 1:
            value = 1 + 0.05 * noise
        elif name.endswith(("embed_tokens.weight", "pos_embed.weight")):
            value = noise
        else:
            value = noise / math.sqrt(math.prod(shape[1:]))
        tensors[name] = value.to(torch.bfloat16)
    return tensors


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    return name.startswith("model.") and tensor.ndim == 2


def to_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not is_quantised(name, tensor):
            out[name] = tensor
            continue
        prefix = name.removesuffix(".weight")
        scale = tensor.float().abs().max() / 448
        marker: dict[str, Any] = {"format": "float8_e4m3fn"}
        if "embed" not in name:
            marker["full_precision_matrix_mult"] = True
        out[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        out[f"{prefix}.weight_scale"] = scale
        out[f"{prefix}.comfy_quant"] = torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8)
    return out


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    tensors = weights()
    save_file(tensors, out / "qwen3vl_bf16.safetensors", {"format": "pt"})
    save_file(to_fp8(tensors), out / "qwen3vl_fp8.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=1))


if __name__ == "__main__":
    main()
