"""Run the marked layers of checkpoints through sglang's own layers on a CPU, on inputs given in files.

    interop_layers.py FILE.safetensors...

Beside each FILE lies FILE.in.safetensors with one tensor a layer, by the layer's name: rows of activations, or row
numbers of a table. FILE.out.safetensors gets what sglang's linear or embedding makes of it. Prints one line a layer
with the method that ran; a layer that sglang cannot run on a CPU is named with the reason and missing from the
output. All layers of a FILE must be of one sglang config.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def opened(path: Path) -> Any:
    return safe_open(path, framework="pt", device="cpu")


def build(prefix: str, tensors: dict[str, torch.Tensor], config: Any, x: torch.Tensor, rows: int) -> Any:
    """sglang's layer for one marked prefix, its tensors loaded by its own loaders."""
    from sglang.multimodal_gen.runtime.layers import linear, vocab_parallel_embedding

    built: Any
    if not x.is_floating_point():
        built = vocab_parallel_embedding.VocabParallelEmbedding(
            rows, tensors["weight"].shape[1], params_dtype=torch.float32, quant_config=config, prefix=prefix
        )
    else:
        built = linear.ReplicatedLinear(
            x.shape[1],
            rows,
            bias="bias" in tensors,
            params_dtype=x.dtype,
            quant_config=config,
            prefix=prefix,
        )
    if "Unquantized" in type(built.quant_method).__name__:
        raise RuntimeError("the runtime would take the codes for weights")
    parameters: dict[str, Any] = dict(built.named_parameters(recurse=False))
    for name, tensor in tensors.items():
        parameters[name].weight_loader(parameters[name], tensor.to(parameters[name].dtype))
    built.quant_method.process_weights_after_loading(built)
    return built


def run(path: Path) -> None:
    from sglang.multimodal_gen.runtime.utils import quantization_utils

    inputs, outputs = load_file(path.with_suffix(".in.safetensors")), {}
    markers = quantization_utils.inspect_comfy_quant_markers([str(path)])
    config = quantization_utils.resolve_comfy_checkpoint_quantization(markers)
    file = opened(path)
    for prefix in sorted(markers):
        names = [n for n in file.keys() if n.rpartition(".")[0] == prefix]  # noqa: SIM118
        tensors = {n.rpartition(".")[2]: file.get_tensor(n) for n in names}
        tensors.pop("comfy_quant", None)
        x = inputs[prefix]
        try:
            layer = build(prefix, tensors, config, x, tensors["weight"].shape[0])
            with torch.inference_mode():
                if x.is_floating_point():
                    out = layer.quant_method.apply(layer, x, layer.bias)
                else:
                    out = layer.quant_method.embedding(layer, x)
        except Exception as error:
            print(f"{path.name}: {prefix}: not run: {type(error).__name__}: {error}")
            continue
        outputs[prefix] = out.contiguous().clone()
        print(f"{path.name}: {prefix}: {type(layer.quant_method).__name__}")
    save_file(outputs, path.with_suffix(".out.safetensors"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()

    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    from sglang.multimodal_gen.runtime.distributed import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        parallel_state.maybe_init_distributed_environment_and_model_parallel(
            tp_size=1, sp_size=1, distributed_init_method=f"file://{folder}/meet"
        )
        for path in options.files:
            run(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
