"""Which tensors sglang's layers have parameters for, and what a header's layer has instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from qconvert.formats.tensors import Spec
from qconvert.runtime.contracts.base import Violation
from qconvert.runtime.contracts.common import FLOATS, Layer, shape_text, up
from qconvert.runtime.contracts.sglang_rules import FP8, INT8, MXFP8, NVFP4, W4A4, W4A8, as_int

_PACKED = frozenset({NVFP4, W4A8, W4A4})
SIX_BIT = "the 6-bit variant of asym_w4a8_int8 is not served"
_SCALAR: tuple[tuple[int, ...], ...] = ((), (1,))


class Param(NamedTuple):
    """A parameter of the runtime's layer: the types and shapes it takes from a file."""

    suffix: str
    dtypes: frozenset[str]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False

    def text(self) -> str:
        dtypes = "/".join(sorted(self.dtypes))
        return " or ".join(dtypes + shape_text(shape) for shape in self.shapes)


def size(layer: Layer) -> tuple[int, int] | None:
    """(N, K) as the weight's rows imply it, None without a 2-D weight."""
    weight = layer.specs.get("weight")
    if weight is None or len(weight.shape) != 2:
        return None
    rows, columns = weight.shape
    return rows, columns * 2 if layer.format in _PACKED else columns


def scale_form(layer: Layer) -> str | None:
    """How an int8 layer is scaled: "row" for [N,1], "scalar" for (), None for anything else."""
    scale, weight = layer.specs.get("weight_scale"), layer.specs.get("weight")
    if scale is None or weight is None or not weight.shape:
        return None
    if scale.shape == ():
        return "scalar"
    return "row" if scale.shape == (weight.shape[0], 1) else None


def tensor_violations(layer: Layer, n: int, k: int) -> Iterator[Violation]:
    """Missing, mistyped, misshapen and unknown tensors of a marked layer of N rows and K columns."""
    params = _parameters(layer, n, k)
    for param in params:
        spec = layer.specs.get(param.suffix)
        if spec is None:
            if not param.optional:
                yield Violation(
                    "refuse",
                    "tensor-missing",
                    f"{param.suffix} is missing",
                    layer.prefix,
                    expected=param.text(),
                )
        elif spec.dtype not in param.dtypes or spec.shape not in param.shapes:
            yield _misfit(layer, param, spec, n, k)
    unknown = layer.specs.keys() - {param.suffix for param in params}
    if layer.format == MXFP8 and "weight_scale" in unknown:
        unknown.remove("weight_scale")
        message = "weight_scale and weight_scale_inv both fill weight_scale_inv: the last one read wins"
        yield Violation("trap", "mxfp8-two-scales", message, layer.prefix, expected="one of the two")
    for suffix in sorted(unknown):
        yield Violation(
            "refuse",
            "tensor-unknown",
            f"Parameter {layer.prefix}.{suffix} not found in the model",
            layer.prefix,
            found=str(layer.specs[suffix]),
            expected=_why_unknown(layer, suffix),
        )


def _param(suffix: str, dtype: str, *shapes: tuple[int, ...], optional: bool = False) -> Param:
    return Param(suffix, frozenset({dtype}), shapes, optional)


def _parameters(layer: Layer, n: int, k: int) -> list[Param]:
    bias = Param("bias", FLOATS, ((n,),), optional=True)
    if layer.kind == "embedding":
        return [_param("weight", "I8", (n, k)), _param("weight_scale", "F32", (n, 1), ())]
    match layer.format:
        case "nvfp4":
            return [
                _param("weight", "U8", (n, k // 2)),
                _param("weight_scale", "F8_E4M3", (n, k // 16)),
                _param("weight_scale_2", "F32", *_SCALAR),
                Param("pre_quant_scale", FLOATS, ((k,),), optional=True),
                bias,
            ]
        case "asym_w4a8_int8":
            groups = k // max(as_int(layer.marker.get("group_size", 16)) or 1, 1)
            return [
                _param("weight", "I8", (n, k // 2)),
                _param("weight_s_rel", "F8_E4M3", (n, groups)),
                _param("weight_s_channel", "F32", (n,)),
                _param("weight_codebook", "F32", (16,), optional=True),
                _param("weight_correction", "F32", (groups, n), optional=True),
                bias,
            ]
        case "convrot_w4a4":
            return [_param("weight", "I8", (n, k // 2)), _param("weight_scale", "F32", (n,)), bias]
        case "int8_tensorwise":
            return [_param("weight", "I8", (n, k)), _param("weight_scale", "F32", (n, 1)), bias]
        case "mxfp8":
            scale = "weight_scale_inv" if "weight_scale_inv" in layer.specs else "weight_scale"
            return [_param("weight", "F8_E4M3", (n, k)), _param(scale, "U8", (n, -(-k // 32))), bias]
        case _:
            static = not layer.marker.get("full_precision_matrix_mult", False)
            scales = [_param("weight_scale", "F32", *_SCALAR)]
            if static:
                scales.append(_param("input_scale", "F32", *_SCALAR, optional=True))
            return [_param("weight", "F8_E4M3", (n, k)), *scales, bias]


def _misfit(layer: Layer, param: Param, spec: Spec, n: int, k: int) -> Violation:
    """A tensor of the wrong type or shape, named for what it most likely is."""
    name, suffix = layer.format, param.suffix
    rule, severity, message = (
        "tensor-shape",
        "refuse",
        f"{suffix} has another shape than the layer's parameter",
    )
    if spec.dtype not in param.dtypes:
        rule, message = "tensor-dtype", f"{suffix} has another dtype than the layer's parameter"
    if name == FP8 and suffix == "weight_scale" and spec.shape in ((n,), (n, 1)) and n != 1:
        rule, severity = "fp8-row-scale", "trap"
        message = "fp8 with one scale a row: as a scalar it is off by another factor in every row"
    elif name == FP8 and suffix == "weight" and spec.dtype in FLOATS | {"F8_E5M2"}:
        rule, severity = "fp8-weight-dtype", "trap"
        message = "the marker says float8_e4m3fn and the weight is something else: its values would be cast"
    elif spec.shape not in param.shapes and _is_padded(name, suffix, spec, n, k):
        rule, message = "swizzle-padded", "block scales padded to whole tiles are not taken"
    elif name == W4A8 and suffix == "weight_s_rel" and _is_six_bit(layer, spec, k):
        rule, message = "w4a8-six-bit", SIX_BIT
    elif name == INT8 and suffix == "weight_scale" and len(spec.shape) == 1:
        rule, message = "int8-scale-1d", "a 1-D weight_scale is refused"
    elif name == W4A4 and suffix == "weight_scale" and spec.shape == (n, 1):
        rule, message = "w4a4-scale-2d", "the weight_scale of a w4a4 layer must be 1-D"
    return Violation(
        "trap" if severity == "trap" else "refuse", rule, message, layer.prefix, str(spec), param.text()
    )


def _is_padded(name: str | None, suffix: str, spec: Spec, n: int, k: int) -> bool:
    block = {NVFP4: 16, MXFP8: 32}.get(str(name))
    scale = suffix in ("weight_scale", "weight_scale_inv")
    return block is not None and scale and spec.shape == (up(n, 128), up(-(-k // block), 4))


def _is_six_bit(layer: Layer, spec: Spec, k: int) -> bool:
    """Three bytes hold four codes, so the true K is 4/3 of a row's bytes: `k` here is twice those bytes."""
    true_k = k * 2 // 3
    group = as_int(layer.marker.get("group_size", 16)) or 16
    return k % 3 == 0 and len(spec.shape) == 2 and spec.shape[1] * group == true_k


def _why_unknown(layer: Layer, suffix: str) -> str:
    full = bool(layer.marker.get("full_precision_matrix_mult", False))
    if suffix == "input_scale" and layer.format == FP8 and full:
        return "no input_scale beside full_precision_matrix_mult"
    if suffix == "input_scale" and layer.format == NVFP4:
        return "no input_scale: activations are scaled at run time"
    return "no such tensor in this layer"
