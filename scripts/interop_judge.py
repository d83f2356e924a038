"""Let sglang's own code judge one converted file, layer by layer, on a CPU.

    interop_judge.py FILE --reference FILE --decoded FILE [--config NAME] [--min-cosine C] [--embedding REGEX]

For the file: sglang inspects the markers and resolves its config. For each marked layer: sglang's own linear or
embedding is built through that config, the file's tensors are loaded with the parameters' own loaders, and one
forward pass runs. The result is compared with the unquantised reference, and the values that comfy-kitchen decodes
are compared with those that qconvert decoded (--decoded). Exit code: 0 right, 1 wrong.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

Header = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Wrong(Exception):
    """A layer that is not what the runtime wants or does not give what it should."""


@dataclass
class Row:
    layer: str
    method: str = "-"
    cosine: float | None = None
    kitchen: float | None = None
    problem: str = ""


def opened(path: Path) -> Any:
    """Untyped, as the library is."""
    return safe_open(path, framework="pt", device="cpu")


class Checkpoint:
    """A safetensors file, read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self._file = opened(path)
        self.names = set(self._file.keys())

    def __call__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def of_layer(self, prefix: str) -> dict[str, torch.Tensor]:
        found = [name for name in self.names if name.rpartition(".")[0] == prefix]
        return {name.rpartition(".")[2]: self(name) for name in sorted(found)}


def fill(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load a layer's tensors as a model would, but insist on the exact types, which loaders may cast in silence."""
    wanted = dict(module.named_parameters(recurse=False))
    if missing := sorted(set(wanted) - set(tensors)):
        raise Wrong(f"the file has no {', '.join(missing)}")
    for name, tensor in tensors.items():
        if name not in wanted:
            raise Wrong(f"the runtime has no parameter for {name}")
        parameter: Any = wanted[name]
        free = name in ("bias", "pre_quant_scale")
        if tensor.dtype != parameter.dtype and not free:
            raise Wrong(f"{name} is {tensor.dtype}, the parameter is {parameter.dtype}")
        parameter.weight_loader(parameter, tensor)


def kitchen_values(tensors: Mapping[str, torch.Tensor], marker: Mapping[str, Any]) -> torch.Tensor | None:
    """The weight as comfy-kitchen decodes it, in float32; None for a format without a judge here."""
    import comfy_kitchen

    decoded: torch.Tensor
    if marker.get("format") == "nvfp4":
        decoded = comfy_kitchen.dequantize_nvfp4(
            tensors["weight"], tensors["weight_scale_2"], tensors["weight_scale"], torch.float32
        )
    elif marker.get("format") == "int8_tensorwise" and not marker.get("convrot"):
        decoded = comfy_kitchen.dequantize_int8_simple(tensors["weight"], tensors["weight_scale"])
    else:
        return None
    return decoded


def cosine(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(F.cosine_similarity(got.double().flatten(), want.double().flatten(), dim=0))


class Judge:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.file = Checkpoint(options.file)
        self.reference = Checkpoint(options.reference)
        self.decoded = Checkpoint(options.decoded)

    def layer(self, prefix: str, marker: Mapping[str, Any], config: Any, row: Row) -> None:
        from sglang.multimodal_gen.runtime.layers import linear, vocab_parallel_embedding

        tensors = self.file.of_layer(prefix)
        tensors.pop("comfy_quant", None)
        want = self.reference(f"{prefix}.weight").float()
        rows, columns = want.shape
        generator = torch.Generator().manual_seed(1)
        is_embedding = re.search(self.options.embedding, prefix) is not None
        built: Any
        if is_embedding:
            built = vocab_parallel_embedding.VocabParallelEmbedding(
                rows, columns, params_dtype=torch.bfloat16, quant_config=config, prefix=prefix
            )
        else:
            built = linear.ReplicatedLinear(
                columns,
                rows,
                bias="bias" in tensors,
                params_dtype=torch.bfloat16,
                quant_config=config,
                prefix=prefix,
            )
        row.method = type(built.quant_method).__name__
        if "Unquantized" in row.method:
            raise Wrong("the runtime would take the codes for weights")
        fill(built, tensors)
        built.quant_method.process_weights_after_loading(built)
        with torch.inference_mode():
            if is_embedding:
                tokens = torch.randint(rows, (256,), generator=generator)
                got, expected = built.quant_method.embedding(built, tokens), want[tokens]
            else:
                x = torch.randn(16, columns, generator=generator).to(torch.bfloat16)
                got = built.quant_method.apply(built, x, built.bias)
                expected = F.linear(x.float(), want)
                if built.bias is not None:
                    expected += built.bias.float()
        if got.shape != expected.shape or not bool(torch.isfinite(got).all()):
            raise Wrong(f"the output is {list(got.shape)}, finite: {bool(torch.isfinite(got).all())}")
        row.cosine = cosine(got, expected)
        if row.cosine < self.options.min_cosine:
            raise Wrong(f"cosine {row.cosine:.5f} is under {self.options.min_cosine}")
        theirs = kitchen_values(tensors, marker)
        if theirs is not None:
            ours = self.decoded(f"{prefix}.weight")
            if ours.dtype != torch.float32 or ours.shape != theirs.shape:
                raise Wrong(
                    f"decoded by qconvert to {ours.dtype}{list(ours.shape)}, not {list(theirs.shape)}"
                )
            row.kitchen = float((ours - theirs).abs().max())
            if row.kitchen != 0:
                raise Wrong(f"comfy-kitchen decodes other values, by up to {row.kitchen:.3g}")

    def run(self) -> tuple[str, list[Row], list[str]]:
        """(config, one row a marked layer, problems of the file as a whole)"""
        from sglang.multimodal_gen.runtime.utils import quantization_utils

        try:
            markers = quantization_utils.inspect_comfy_quant_markers([str(self.options.file)])
            config = quantization_utils.resolve_comfy_checkpoint_quantization(markers)
        except Exception as error:
            return "-", [], [f"{type(error).__name__}: {error}"]
        name = type(config).__name__
        problems = []
        if name != self.options.config:
            problems.append(f"the runtime resolves {name}, not {self.options.config}")
        # A text encoder's loader asks the header first, and a config found there replaces the markers'.
        from_header = quantization_utils.get_quant_config_from_safetensors_metadata(str(self.options.file))
        if from_header is not None:
            problems.append(f"the header alone resolves {type(from_header).__name__}")
        table = []
        for prefix, marker in sorted(markers.items()):
            row = Row(prefix)
            table.append(row)
            try:
                self.layer(prefix, marker, config, row)
            except Wrong as error:
                row.problem = str(error)
            except Exception as error:
                row.problem = f"{type(error).__name__}: {error}"
        if config is not None and (left := sorted(set(markers) - set(config.selected))):
            problems.append(f"markers that no layer takes: {', '.join(left)}")
        # What is not marked must be there as it was: nothing is lost.
        for tensor in sorted(self.reference.names - self.file.names):
            problems.append(f"{tensor} is in the reference and not in the file")
        return name, table, problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--decoded", type=Path, required=True)
    parser.add_argument("--config", default="ComfyNvfp4Config")
    parser.add_argument("--min-cosine", type=float, default=0.99)
    parser.add_argument("--embedding", default=r"(word_embeddings|embed_tokens)$")
    options = parser.parse_args()

    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    from sglang.multimodal_gen.runtime.distributed import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        # The embedding asks for its process group: one of a single process, which meets itself through a file.
        parallel_state.maybe_init_distributed_environment_and_model_parallel(
            tp_size=1, sp_size=1, distributed_init_method=f"file://{folder}/meet"
        )
        config, table, problems = Judge(options).run()

    print(f"{options.file.name}: {config}")
    width = max([len(row.layer) for row in table] or [0])
    for row in table:
        figures = (
            f"cosine {row.cosine:.5f}" if row.cosine is not None else "",
            f"kitchen differs by {row.kitchen:.3g}" if row.kitchen is not None else "",
        )
        print(f"  {row.layer:{width}}  {row.method}  {'  '.join(figures)}  {row.problem or 'ok'}")
    for problem in problems:
        print(f"  WRONG: {problem}")
    wrong = len(problems) + sum(bool(row.problem) for row in table)
    print(f"  {len(table)} layers, {'nothing wrong' if not wrong else f'{wrong} wrong'}")
    return 1 if wrong or not table else 0


if __name__ == "__main__":
    sys.exit(main())
