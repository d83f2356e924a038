"""Targets: what a user may ask for, and the form each kind of layer takes there.

A target names a runtime, the config that should resolve there, the codec of its linear layers and of its
embeddings, and how the options of a layer are chosen. Whether a particular layer is accepted is asked of the
runtime's contract; nothing here repeats its rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qconvert.formats.errors import UsageError, close_to
from qconvert.formats.layers import Layer
from qconvert.formats.registry import codec as get_codec
from qconvert.formats.rotation import choose_group
from qconvert.runtime.target import OptionMaker as OptionMaker
from qconvert.runtime.target import Options as Options
from qconvert.runtime.target import Target as Target
from qconvert.runtime.target import Wishes as Wishes
from qconvert.runtime.targets_gguf import GGUF_TARGETS
from qconvert.runtime.targets_gptq import GPTQ_TARGETS
from qconvert.runtime.targets_other import OTHER_TARGETS, carries_activation

#: ConvRot groups that every runtime's layers serve, the default first.
SERVED_GROUPS = (256, 64, 16)


def _same(layer: Layer, codec: str) -> bool:
    """Whether the layer holds this codec's numbers already, be it under another tool's names."""
    return layer.codec.family == get_codec(codec).family


def _nvfp4(sglang: bool) -> OptionMaker:
    def make(layer: Layer, wishes: Wishes) -> Iterator[Options]:
        own = _same(layer, "nvfp4")
        if sglang:
            full = not wishes.native_fp4
        else:
            full = wishes.full_precision or (own and bool(layer.options["full_precision"]))
        base: Options = {"nibbles": "high", "scales": "swizzled", "full_precision": full, "rotation": 0}
        if own and not sglang and layer.options["rotation"]:
            yield base | {"rotation": layer.options["rotation"]}
        # Another dialect's activation scale is rewritten; ComfyUI's own is copied as it is.
        moved = layer.codec.name != "nvfp4" and not sglang and not full
        yield base | {"input": moved and carries_activation(layer, "nvfp4")}

    return make


def _w4a8(sglang: bool) -> OptionMaker:
    def make(layer: Layer, wishes: Wishes) -> Iterator[Options]:
        base: Options = {"bits": 4, "group": 16, "codebook": True, "correction": False, "grid": True}
        base |= {"signed": False, "srel_dtype": "F8_E4M3", "source": "weight_s_rel"}
        if _same(layer, "w4a8") and layer.options["grid"] and layer.options["rotation"]:
            own = base | {
                key: layer.options[key] for key in ("bits", "group", "codebook", "rotation", "srel_dtype")
            }
            # Only sglang reads the correction; elsewhere such a layer must be encoded anew.
            if not layer.options["correction"] or sglang:
                yield own | {"correction": layer.options["correction"]}
        for group in _groups(layer):
            yield base | {"rotation": group}

    return make


def _w4a4(layer: Layer, wishes: Wishes) -> Iterator[Options]:
    if _same(layer, "w4a4"):
        yield {"rotation": layer.options["rotation"], "linear_dtype": layer.options["linear_dtype"]}
    for group in _groups(layer):
        yield {"rotation": group, "linear_dtype": "int4"}


def _groups(layer: Layer) -> Iterator[int]:
    """ConvRot groups to try: the one the source is already rotated by, then the largest that divides K."""
    own = layer.codec.rotation(layer.options)
    if own in SERVED_GROUPS:
        yield own
    best = choose_group(layer.k, SERVED_GROUPS)
    if best and best != own:
        yield best


def _int8_convrot(layer: Layer, wishes: Wishes) -> Iterator[Options]:
    for group in _groups(layer):
        yield {"scale": "row", "rotation": group}


def _int8_comfy(layer: Layer, wishes: Wishes) -> Iterator[Options]:
    if _same(layer, "int8"):
        yield {"scale": layer.options["scale"], "rotation": layer.options["rotation"]}
    yield from _int8_convrot(layer, wishes)
    yield {"scale": "row", "rotation": 0}


def _int8_table(layer: Layer, wishes: Wishes) -> Iterator[Options]:
    """Embeddings: a scale a row, unless the older contract was asked for or one scalar is what the source has."""
    own_scalar = _same(layer, "int8") and layer.options["scale"] == "scalar"
    yield {"scale": "scalar" if wishes.scalar_embedding or own_scalar else "row", "rotation": 0}
    yield {"scale": "row", "rotation": 0}


def _fp8(kind: str) -> OptionMaker:
    def make(layer: Layer, wishes: Wishes) -> Iterator[Options]:
        full = wishes.full_precision or (_same(layer, "float8") and bool(layer.options["full_precision"]))
        base: Options = {"kind": kind, "scale": "scalar", "full_precision": full, "source": "weight_scale"}
        # Both runtimes want it as F32 of one element.
        given = layer.tensors.get("input_scale")
        odd = given is not None and given.dtype != "F32" and not full
        yield base | {"input": odd and carries_activation(layer, "float8")}

    return make


def _mxfp8(layer: Layer, wishes: Wishes) -> Iterator[Options]:
    full = wishes.full_precision or (_same(layer, "mxfp8") and bool(layer.options["full_precision"]))
    yield {"scales": "swizzled", "source": "weight_scale", "full_precision": full}


def _awq(layer: Layer, wishes: Wishes) -> Iterator[Options]:
    if _same(layer, "awq_w4a16"):
        yield {"group": layer.options["group"], "dtype": layer.options["dtype"]}
    yield {"group": 64, "dtype": "BF16"}


def _plain(dtype: str) -> OptionMaker:
    def make(layer: Layer, wishes: Wishes) -> Iterator[Options]:
        yield {"dtype": dtype}

    return make


_BIAS = frozenset({"bias"})
_PRE = frozenset({"bias", "pre_quant_scale"})
_STATIC = frozenset({"bias", "input_scale"})
_COMFY_NV = frozenset({"bias", "pre_quant_scale", "input_scale"})

_INT8_ROWS: dict[str, Any] = {"embedding": "int8", "embedding_options": _int8_table}

TARGETS: tuple[Target, ...] = (
    Target(
        "comfy_nvfp4", "sglang", "comfy_nvfp4", "nvfp4 linears, row-wise int8 embedding",
        "nvfp4", _nvfp4(True), companions=_PRE, **_INT8_ROWS,
    ),
    Target(
        "kitchen_w4a8", "sglang", "kitchen_w4a8", "4-bit codes on an int8 grid, ConvRot, codebook",
        "w4a8", _w4a8(True), companions=_BIAS, **_INT8_ROWS,
    ),
    Target(
        "kitchen_w4a4", "sglang", "kitchen_w4a4", "4-bit weights and activations, ConvRot",
        "w4a4", _w4a4, companions=_BIAS,
    ),
    Target(
        "convrot_int8", "sglang", "convrot_int8", "int8 rows, ConvRot",
        "int8", _int8_convrot, companions=_BIAS, aliases=("kitchen_int8",), **_INT8_ROWS,
    ),
    Target(
        "comfy_fp8", "sglang", "comfy_fp8", "fp8 e4m3 with one scale a layer",
        "float8", _fp8("F8_E4M3"), companions=_STATIC,
    ),
    Target(
        "comfy_mxfp8", "sglang", "comfy_mxfp8", "e4m3 with e8m0 scales for blocks of 32",
        "mxfp8", _mxfp8, companions=_BIAS,
    ),
    Target("bf16", "none", "", "every layer decoded to bfloat16; norms and buffers stay as they are",
           "plain", _plain("BF16"),
           "plain", _plain("BF16"), dtype="BF16", single_file=False),
    Target("fp16", "none", "", "every layer decoded to float16; norms and buffers stay as they are",
           "plain", _plain("F16"),
           "plain", _plain("F16"), dtype="F16", single_file=False),
    Target("fp32", "none", "", "every layer decoded to float32; norms and buffers stay as they are",
           "plain", _plain("F32"),
           "plain", _plain("F32"), dtype="F32", single_file=False),
    Target("comfyui:float8_e4m3fn", "comfyui", "comfyui", "ComfyUI fp8 e4m3", "float8", _fp8("F8_E4M3"),
           "float8", _fp8("F8_E4M3"), companions=_STATIC),
    Target("comfyui:float8_e5m2", "comfyui", "comfyui", "ComfyUI fp8 e5m2", "float8", _fp8("F8_E5M2"),
           "float8", _fp8("F8_E5M2"), companions=_STATIC),
    Target("comfyui:nvfp4", "comfyui", "comfyui", "ComfyUI nvfp4", "nvfp4", _nvfp4(False),
           companions=_COMFY_NV, **_INT8_ROWS),
    Target("comfyui:mxfp8", "comfyui", "comfyui", "ComfyUI mxfp8", "mxfp8", _mxfp8, **_INT8_ROWS),
    Target("comfyui:int8_tensorwise", "comfyui", "comfyui", "ComfyUI int8, ConvRot where it divides K",
           "int8", _int8_comfy, **_INT8_ROWS),
    Target("comfyui:convrot_w4a4", "comfyui", "comfyui", "ComfyUI w4a4", "w4a4", _w4a4, **_INT8_ROWS),
    Target("comfyui:asym_w4a8_int8", "comfyui", "comfyui", "ComfyUI w4a8", "w4a8", _w4a8(False), **_INT8_ROWS),
    Target("comfyui:awq_w4a16", "comfyui", "comfyui", "ComfyUI awq", "awq_w4a16", _awq, **_INT8_ROWS),
    *GPTQ_TARGETS,
    *GGUF_TARGETS,
    *OTHER_TARGETS,
)  # fmt: skip


def get_target(name: str) -> Target:
    """The target with this name or alias. Raises UsageError naming those that exist."""
    for target in TARGETS:
        if name == target.name or name in target.aliases:
            return target
    known = [word for target in TARGETS for word in (target.name, *target.aliases)]
    hint = close_to(name, known, "")
    raise UsageError(f"unknown target {name!r}", hint=f"{hint} `qconvert targets` lists all".strip())
