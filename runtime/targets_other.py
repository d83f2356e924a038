"""Targets of runtimes that read no ComfyUI markers: ModelOpt folders, row-wise fp8, vllm-omni, diffusers' BFL files,
LightX2V. What each expects: FORMATS_OTHER sections 4, 5, 8 and CONTRACTS_OTHER sections 2, 3, 5.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from qconvert.formats.base import is_scalar
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.layers import Layer
from qconvert.runtime.sidecars import HeaderMaker, OutputForm, SidecarMaker, with_quantization
from qconvert.runtime.target import OptionMaker, Options, Runtime, Target, Wishes

_STATIC = frozenset({"bias", "input_scale"})
#: The row-wise fp8 format of sglang's header lists.
ROWWISE = "rowwise-float8_e4m3fn"


def carries_activation(layer: Layer, family: str) -> bool:
    """Whether the layer has a static activation scale that its codes may take along."""
    codec = layer.codec
    # ComfyUI's legacy name is no part of the codes; it stays a tensor beside the weight.
    names = [suffix for suffix in codec.activation_scales if suffix != "scale_input"]
    found = [layer.tensors[suffix] for suffix in names if suffix in layer.tensors]
    present = any(is_scalar(tensor.shape) and tensor.dtype in FLOATS for tensor in found)
    own = codec.family == family and codec.activation_moves
    return present and own and "pre_quant_scale" not in layer.tensors


def _nvfp4(**extra: Any) -> OptionMaker:
    """Low nibble first, row-major block scales, an activation scale where the source has one."""

    def make(layer: Layer, wishes: Wishes) -> Iterator[Options]:
        base: Options = {"nibbles": "low", "scales": "linear", "rotation": 0, "full_precision": False}
        yield base | {"input": carries_activation(layer, "nvfp4")} | extra

    return make


def _lightx2v_nvfp4(layer: Layer, wishes: Wishes) -> Iterator[Options]:
    known = carries_activation(layer, "nvfp4")
    base: Options = {"nibbles": "low", "scales": "swizzled", "rotation": 0, "full_precision": False}
    yield base | {"form": "alpha" if known else "global", "input": known}


def _fp8(scale: str, *, static: bool = False, **extra: Any) -> OptionMaker:
    def make(layer: Layer, wishes: Wishes) -> Iterator[Options]:
        base: Options = {"kind": "F8_E4M3", "scale": scale, "full_precision": False, "unmarked": True}
        yield base | {"input": static and carries_activation(layer, "float8")} | extra

    return make


def _int8(layer: Layer, wishes: Wishes) -> Iterator[Options]:
    yield {"scale": "row", "rotation": 0, "unmarked": True}


def unquantised_linears(form: OutputForm) -> list[str]:
    """Names of the linear layers that stay plain."""
    return sorted(layer.prefix for layer in form.layers if layer.role == "linear" and not layer.quantised)


def _modelopt(form: OutputForm) -> dict[str, Any]:
    """ModelOpt's flat configuration with sglang's keys for the order of bits; every key sglang reads is written."""
    nvfp4 = form.target == "modelopt_nvfp4"
    activations = {"dynamic": False, "num_bits": 4 if nvfp4 else 8, "type": "float"}
    weights = dict(activations)
    if nvfp4:
        activations["group_size"] = weights["group_size"] = 16
    group = {"input_activations": activations, "weights": weights, "targets": ["Linear"]}
    document: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4" if nvfp4 else "FP8",
        "config_groups": {"group_0": group},
        "ignore": unquantised_linears(form),
    }
    if nvfp4:
        document |= {
            "group_size": 16,
            "swap_weight_nibbles": False,
            "checkpoint_weight_scale_layout": "linear",
        }
    return document


def _modelopt_header(form: OutputForm) -> dict[str, str]:
    return {"format": "pt", "quantization_config": json.dumps(_modelopt(form))}


def _config(make: Callable[[OutputForm], dict[str, Any]]) -> SidecarMaker:
    """config.json with the `quantization_config` that `make` gives."""

    def sidecars(form: OutputForm) -> dict[str, bytes]:
        return {"config.json": with_quantization(form.config, make(form))}

    return sidecars


def _rowwise_header(form: OutputForm) -> dict[str, str]:
    layers: dict[str, dict[str, str]] = {}
    for layer in form.layers:
        if layer.quantised:
            layers[layer.prefix] = {"format": ROWWISE}
        elif layer.role == "linear":
            layers[layer.prefix] = {"format": "bf16"}
    document = {
        "format_version": "1.1",
        "quant_configs": {ROWWISE: {"scale_recipe": "rowwise"}},
        "layers": layers,
    }
    return {"format": "pt", "_quantization_metadata": json.dumps(document)}


def _vllm_omni(form: OutputForm) -> dict[str, Any]:
    return {
        "quant_method": "int8",
        "is_checkpoint_int8_serialized": True,
        "activation_scheme": "dynamic",
        "ignored_layers": unquantised_linears(form),
    }


def _bfl_header(scheme: str) -> HeaderMaker:
    # diffusers takes the scheme from the tensors; the entry is for tools that ask how the nibbles lie.
    def header(form: OutputForm) -> dict[str, str]:
        return {"format": "pt", "quantization_config": json.dumps({"quant_method": "bfl", "scheme": scheme})}

    return header


def _bfl_sidecars(form: OutputForm) -> dict[str, bytes]:
    """The model's own config.json: from_single_file(FILE, config=FOLDER, quantization_config=BFLQuantizationConfig()).

    It must not name a method: diffusers builds no BFL configuration from a config.json.
    """
    return {"config.json": with_quantization(form.config, None)} if form.config else {}


def _lightx2v(scheme: str) -> SidecarMaker:
    def sidecars(form: OutputForm) -> dict[str, bytes]:
        document = {"dit_quantized": True, "dit_quant_scheme": scheme, "dit_quantized_ckpt": form.file}
        files = {"lightx2v.json": (json.dumps(document, indent=2) + "\n").encode()}
        return files | ({"config.json": with_quantization(form.config, None)} if form.config else {})

    return sidecars


def _target(
    name: str,
    runtime: Runtime,
    summary: str,
    linear: str,
    options: OptionMaker,
    **keys: Any,
) -> Target:
    return Target(name, runtime, name, summary, linear, options, **keys)


OTHER_TARGETS: tuple[Target, ...] = (
    _target(
        "modelopt_nvfp4", "sglang", "a ModelOpt nvfp4 folder: low nibble first, row-major scales, config.json",
        "modelopt_nvfp4", _nvfp4(), companions=_STATIC, sidecars=_config(_modelopt), header=_modelopt_header,
        static_range=448.0 * 6,
    ),
    _target(
        "modelopt_fp8", "sglang", "a ModelOpt fp8 folder: one scale a layer, config.json",
        "float8", _fp8("scalar", static=True), companions=_STATIC, sidecars=_config(_modelopt),
        header=_modelopt_header, static_range=448.0,
    ),
    _target(
        "rowwise_fp8", "sglang", "fp8 with a scale a row, listed in the header (format_version 1.1)",
        "float8", _fp8("row", static=True, flat=True, one=(1,)), companions=_STATIC, header=_rowwise_header,
    ),
    _target(
        "vllm_omni_int8", "vllm-omni", "a vllm-omni folder: int8 rows without rotation, config.json",
        "int8", _int8, sidecars=_config(_vllm_omni),
    ),
    _target(
        "diffusers_bfl_fp8", "diffusers", "fp8 rows for diffusers' BFL reader",
        "float8", _fp8("row", flat=True), sidecars=_bfl_sidecars, header=_bfl_header("fp8r"),
    ),
    _target(
        "diffusers_bfl_nvfp4", "diffusers", "nvfp4 for diffusers' BFL reader; input_scale 1.0 where there is none",
        "modelopt_nvfp4", _nvfp4(activation=1.0), companions=_STATIC, sidecars=_bfl_sidecars,
        header=_bfl_header("nvfp4"),
    ),
    _target(
        "lightx2v_int8", "lightx2v", "int8 rows for LightX2V, with its JSON",
        "int8", _int8, sidecars=_lightx2v("int8-sgl"),
    ),
    _target(
        "lightx2v_fp8", "lightx2v", "fp8 rows for LightX2V, with its JSON",
        "float8", _fp8("row"), sidecars=_lightx2v("fp8-sgl"),
    ),
    _target(
        "lightx2v_nvfp4", "lightx2v", "nvfp4 for LightX2V, with its JSON",
        "lightx2v_nvfp4", _lightx2v_nvfp4, companions=_STATIC, sidecars=_lightx2v("nvfp4"),
    ),
)  # fmt: skip
