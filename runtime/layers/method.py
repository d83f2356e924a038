"""How a runtime computes with a stored layer, told from its format, its marker and its companions.

The rules are sglang's; ComfyUI's differ in one: its dynamic fp8 activations share one scale of 1, not one a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import Layer
from qconvert.kernels.linear import Activation
from qconvert.runtime.layers.operand import buildable
from qconvert.runtime.layers.stored import torch_dtype, used_suffixes

#: The suffixes that may hold the static activation scale.
INPUT_SCALES = ("input_scale", "scale_input")


@dataclass(frozen=True, slots=True)
class Method:
    """What happens to the input (`activation`, after a ConvRot of `rotation`, 0 for none), and why."""

    activation: Activation
    rotation: int
    reason: str

    def __str__(self) -> str:
        rotated = f"ConvRot {self.rotation}, " if self.rotation else ""
        what = "weight only" if self.activation == "none" else f"{self.activation} activations"
        return f"{rotated}{what} ({self.reason})"


def linear_method(layer: Layer) -> Method:
    """The forward pass of a linear layer. Raises QConvertError where there is none."""
    check_buildable(layer)
    name, options = layer.codec.name, layer.options
    activation, reason = _ACTIVATIONS[name](layer)
    return Method(activation, layer.codec.rotation(options), reason)


def check_buildable(layer: Layer) -> None:
    """Raises QConvertError, saying why, for a layer that cannot be run by itself."""
    if layer.experts:
        raise QConvertError(
            "a bank of experts has no single forward pass",
            layer=layer.prefix,
            hint="take one expert's rows out of it",
        )
    if not buildable(layer.codec.name):
        raise QConvertError(f"{layer.codec.name} has no forward pass here", layer=layer.prefix)
    if layer.ndim != 2:
        raise QConvertError(
            "only 2-D weights are linear layers or tables",
            layer=layer.prefix,
            found=f"{layer.ndim} axes",
        )
    for suffix in used_suffixes(layer):
        torch_dtype(layer.tensors[suffix].dtype)


Chosen = tuple[Activation, str]


def _weight_only(layer: Layer) -> Chosen:
    return "none", "the format has no activation codes"


def _plain(layer: Layer) -> Chosen:
    return "none", "unquantised"


def _int8(layer: Layer) -> Chosen:
    return "int8", "int8 weights meet per-row int8 activations"


def _w4a4(layer: Layer) -> Chosen:
    kind = layer.options["linear_dtype"]
    return ("int8" if kind == "int8" else "int4"), f"linear_dtype {kind}"


def _w4a8(layer: Layer) -> Chosen:
    if layer.options["correction"]:
        return "none", "with a correction the weight is decoded"
    if not layer.options["grid"]:
        return "none", "group scales alone give no int8 grid"
    return "int8", "decoded to the int8 grid"


def _float8(layer: Layer) -> Chosen:
    options = layer.options
    if options["full_precision"]:
        return "none", "full_precision_matrix_mult"
    if options["kind"] != "F8_E4M3":
        return "none", "no runtime multiplies e5m2 weights as they are"
    if options["scale"] in ("none", "block"):
        return "none", f"scale kind {options['scale']}"
    if any(suffix in layer.tensors for suffix in INPUT_SCALES):
        return "fp8_static", "the layer has an input_scale"
    return "fp8", "no input_scale: one scale a row"


def _nvfp4(layer: Layer) -> Chosen:
    if layer.options["full_precision"]:
        return "none", "full_precision_matrix_mult"
    return "nvfp4", "no full_precision_matrix_mult: activations are quantised"


def _mxfp8(layer: Layer) -> Chosen:
    if layer.options["full_precision"]:
        return "none", "full_precision_matrix_mult"
    return "mxfp8", "no full_precision_matrix_mult: activations are quantised"


_ACTIVATIONS = {
    "plain": _plain,
    "int8": _int8,
    "w4a4": _w4a4,
    "w4a8": _w4a8,
    "float8": _float8,
    "nvfp4": _nvfp4,
    "mxfp8": _mxfp8,
    "awq_w4a16": _weight_only,
}
