"""Files beside the tensors: what a target's `sidecars` and `header` hooks see, and what they return.

A target with `sidecars` writes a folder: one safetensors file and what the hook returns (config.json and the like),
all of them put in place together. Both hooks are pure functions of the finished plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from qconvert.formats.tensors import Spec


class LayerForm(NamedTuple):
    """One layer as it will be written. `prefix` is its name in the output, `tensors` its tensors by suffix."""

    prefix: str
    role: str
    codec: str
    options: Mapping[str, Any]
    n: int
    k: int
    tensors: Mapping[str, Spec]

    @property
    def quantised(self) -> bool:
        return self.codec != "plain"


class OutputForm(NamedTuple):
    """A finished plan as a hook sees it. `config`: the source's config.json ({} when it had none)."""

    target: str
    layers: tuple[LayerForm, ...]
    config: Mapping[str, Any]
    file: str
    dtype: str
    #: Ids of the model families that the source was recognised as.
    families: tuple[str, ...] = ()


#: File name -> its bytes, for every file beside the safetensors file.
SidecarMaker = Callable[[OutputForm], dict[str, bytes]]
#: String entries to add to the safetensors header.
HeaderMaker = Callable[[OutputForm], dict[str, str]]


def folder_file(config: Mapping[str, Any], source: str) -> str:
    """What the tensors are called in a component folder: as in the source, or as its library calls them.

    diffusers' models are told by `_class_name` in their config.json; everything else is transformers' name.
    """
    diffusers = "diffusion_pytorch_model.safetensors"
    return diffusers if "_class_name" in config or source.startswith("diffusion_") else "model.safetensors"


def with_quantization(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> bytes:
    """config.json: the source's own entries, with `quantization_config` replaced (or removed)."""
    document = {key: value for key, value in config.items() if key != "quantization_config"}
    if quantization is not None:
        document["quantization_config"] = dict(quantization)
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
