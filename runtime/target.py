"""What a target is: the form each kind of layer takes, and what is written beside the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from qconvert.formats.layers import Layer
from qconvert.runtime.sidecars import HeaderMaker, SidecarMaker

#: "others": read by libraries that no contract judges here; the format's own rules decide.
Runtime = Literal["sglang", "comfyui", "vllm-omni", "diffusers", "lightx2v", "others", "none"]
Options = dict[str, Any]


@dataclass(frozen=True)
class Wishes:
    """What the user said about form: `--native-fp4`, `--full-precision`, `--embedding`."""

    native_fp4: bool = False
    full_precision: bool = False
    scalar_embedding: bool = False


#: (layer, wishes) -> options in order of preference. The first that codec and contract accept is taken.
OptionMaker = Callable[[Layer, Wishes], Iterator[Options]]


@dataclass(frozen=True)
class Target:
    """`linear`/`embedding`: codec name and its options, None where the target keeps such layers unquantised."""

    name: str
    runtime: Runtime
    config: str
    summary: str
    linear: str
    linear_options: OptionMaker
    embedding: str | None = None
    embedding_options: OptionMaker | None = None
    #: Companion tensors that the runtime reads beside a layer of the target's own format.
    companions: frozenset[str] = frozenset({"bias"})
    #: The value of the dtype that decoded layers get; None lets `--dtype` decide.
    dtype: str | None = None
    aliases: tuple[str, ...] = ()
    #: One safetensors file is what this runtime's loader wants.
    single_file: bool = True
    container: Literal["safetensors", "gguf"] = "safetensors"
    #: Files written beside the tensors (config.json): the output is then a folder.
    sidecars: SidecarMaker | None = None
    #: Entries added to the header; per-layer markers are written only by targets of ComfyUI's formats.
    header: HeaderMaker | None = None
    #: Whether sglang's loaders of this target's config are judged by a contract; where they are not, only the
    #: format's own rules and `family_runtime`'s knowledge of fused projections are asked.
    gated: bool = True
    #: For runtimes that take 1.0 where input_scale is missing: it is the recorded largest input over this.
    static_range: float | None = None
    #: Whose fused projections and unserved layers the model families are asked for (a contract's name).
    family_runtime: str | None = None
