"""Load a whole converted text encoder through sglang's own loader on a CPU, and compare what it computes.

    interop_load.py FILE --reference FILE --model-config CONFIG.json [--config NAME] [--min-cosine C]

Both files are loaded as the text encoder of a MiniMax-H3 pipeline and run on the same tokens; the hidden states
after the embedding and after every layer are compared. Exit code: 0 right, 1 wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file


def write_projection(folder: Path, hidden: int, layers: int, out: int) -> None:
    """What sglang asks for beside an encoder smaller than the pipeline's own: a map to the width it wants."""
    folder.mkdir()
    tensors = {
        "W": torch.randn(hidden, out, generator=torch.Generator().manual_seed(5)) / hidden**0.5,
        "mean_in": torch.zeros(hidden),
        "std_in": torch.ones(hidden),
        "mean_out": torch.zeros(out),
        "std_out": torch.ones(out),
    }
    save_file(tensors, folder / "projection.safetensors", {"tap": str(layers)})


def load(weights: Path, model_config: Path, folder: Path) -> tuple[Any, Any]:
    """(the model, the quantisation config that sglang resolved for it)"""
    from sglang.multimodal_gen.configs.pipeline_configs.minimax_h3 import MiniMaxH3PipelineConfig
    from sglang.multimodal_gen.runtime import server_args
    from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
        PipelineComponentLoader,
    )
    from sglang.multimodal_gen.runtime.models.encoders import minimax_h3_qwen3vl

    component = folder / "text_encoder"
    component.mkdir(parents=True)
    shutil.copy(model_config, component / "config.json")
    text = json.loads(model_config.read_text())["text_config"]
    projection = folder / "projection"
    width = minimax_h3_qwen3vl.MINIMAX_H3_QWEN3VL_HIDDEN_DIM
    write_projection(projection, text["hidden_size"], text["num_hidden_layers"], width)
    arguments = server_args.ServerArgs(
        model_path=str(folder),
        pipeline_config=MiniMaxH3PipelineConfig(),
        component_paths={"conditioning_projection": str(projection)},
        component_weights_paths={"text_encoder": str(weights.resolve())},
    )
    server_args.set_global_server_args(arguments)
    logging.disable(logging.WARNING)
    loaded = PipelineComponentLoader.load_component("text_encoder", str(component), "transformers", arguments)
    return loaded[0], arguments.pipeline_config.text_encoder_configs[0].quant_config


def hidden_states(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    language = model.model.language_model
    states: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output).detach().float().clone())

    hooks = [module.register_forward_hook(keep) for module in (language.embed_tokens, *language.layers)]
    try:
        with torch.inference_mode(), set_forward_context(current_timestep=0, attn_metadata=None):
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    finally:
        for hook in hooks:
            hook.remove()
    return states


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--model-config", type=Path, required=True)
    parser.add_argument("--config", default="ComfyNvfp4Config")
    parser.add_argument("--min-cosine", type=float, default=0.97)
    options = parser.parse_args()

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from sglang.multimodal_gen.runtime.distributed import parallel_state
    from sglang.srt.layers.rotary_embedding import base as rotary

    # Off a GPU its constructor would import a compiled kernel that this encoder never calls.
    setattr(rotary, "_is_cpu", True)  # noqa: B010

    vocabulary = json.loads(options.model_config.read_text())["text_config"]["vocab_size"]
    tokens = torch.randint(vocabulary - 8, (2, 32), generator=torch.Generator().manual_seed(2))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        parallel_state.maybe_init_distributed_environment_and_model_parallel(
            tp_size=1, sp_size=1, distributed_init_method=f"file://{folder}/meet"
        )
        reference, none = load(options.reference, options.model_config, root / "reference")
        if none is not None:
            print(f"{options.reference.name} is quantised: it cannot be the reference")
            return 1
        want = hidden_states(reference, tokens)
        try:
            model, config = load(options.file, options.model_config, root / "file")
        except Exception as error:
            print(f"{options.file.name}: sglang's loader refuses it: {type(error).__name__}: {error}")
            return 1
        got = hidden_states(model, tokens)

    cosines = [
        float(F.cosine_similarity(one, other, dim=-1).mean()) for one, other in zip(got, want, strict=True)
    ]
    name = type(config).__name__
    print(
        f"{options.file.name}: loaded whole, {name}, {len(config.selected if config else ())} layers quantised"
    )
    print("  cosine after the embedding and each layer: " + " ".join(f"{value:.5f}" for value in cosines))
    finite = all(bool(torch.isfinite(state).all()) for state in got)
    right = name == options.config and finite and min(cosines) >= options.min_cosine
    if not right:
        print(f"  WRONG: wanted {options.config}, finite values and cosines of {options.min_cosine} or more")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
