"""What ComfyUI makes of a marked layer's tensors, and of quantised weights without a marker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qconvert.formats.tensors import Spec
from qconvert.runtime.contracts.base import Violation
from qconvert.runtime.contracts.comfyui_rules import FP8_FORMATS, group_size, shape_violations
from qconvert.runtime.contracts.common import FLOATS, Layer, up
from qconvert.runtime.roles import is_embedding_name

_FP8_DTYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_ONE = ((), (1,))
#: Types of weights that may hold codes.
CODE_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8"})
#: Suffixes beside which a weight without a marker is packed: more than one value a byte.
_PACKED_SIGNS = ("weight_scale_2", "weight_s_rel", "weight_zeros", "weight_s_channel")


def tensor_violations(layer: Layer) -> Iterator[Violation]:
    """Faults of one marked layer with a known format and a weight."""
    weight = layer.specs["weight"]
    if len(weight.shape) == 3:
        yield from _bank(layer)
        return
    if len(weight.shape) != 2:
        return
    n = weight.shape[0]
    match layer.format:
        case "float8_e4m3fn" | "float8_e5m2":
            yield from _fp8(layer, n)
        case "int8_tensorwise":
            yield from _int8(layer, *weight.shape)
        case "nvfp4":
            yield from _nvfp4(layer, *weight.shape)
        case "mxfp8":
            yield from _mxfp8(layer, *weight.shape)
        case "asym_w4a8_int8":
            yield from _w4a8(layer, *weight.shape)
        case "convrot_w4a4":
            yield from _w4a4(layer, *weight.shape)
        case _:
            yield from _awq(layer, *weight.shape)


def unmarked_violations(layer: str, specs: Mapping[str, Spec]) -> Iterator[Violation]:
    """A weight that nothing marks is a plain tensor: right only if it was made without a scale."""
    weight = specs.get("weight")
    if weight is None or weight.dtype not in CODE_DTYPES or len(weight.shape) < 2:
        return
    scales = sorted(suffix for suffix in specs if suffix.startswith(("weight_", "scale_weight")))
    packed = weight.dtype == "U8" or any(sign in specs for sign in _PACKED_SIGNS)
    if weight.dtype in ("F8_E4M3", "F8_E5M2"):
        if scales:
            message = "fp8 with a scale and without a marker: its codes are used as weights"
            yield Violation("trap", "unmarked", message, layer, ", ".join(scales), "a comfy_quant marker")
        else:
            message = "fp8 without a scale and a marker: right only as a plain cast"
            yield Violation("note", "plain-fp8", message, layer, weight.dtype)
    elif weight.dtype in ("I8", "U8") and packed:
        message = "mat1 and mat2 shapes cannot be multiplied"
        if is_embedding_name(layer):
            message = f"size mismatch for {layer}.weight"
        yield Violation("refuse", "unmarked-packed", message, layer, str(weight), "a comfy_quant marker")
    elif weight.dtype in ("I8", "U8"):
        message = "int8 without a marker: its codes are used as weights"
        yield Violation("trap", "unmarked", message, layer, str(weight), "a comfy_quant marker")


def _fault(
    layer: Layer, rule: str, message: str, found: Spec | None, expected: str, *, trap: bool = False
) -> Violation:
    shown = "none" if found is None else str(found)
    return Violation("trap" if trap else "refuse", rule, message, layer.prefix, shown, expected)


def _weight(layer: Layer, *dtypes: str) -> Iterator[Violation]:
    weight = layer.specs["weight"]
    if weight.dtype not in dtypes:
        message = f"the weight is cast to what its marker says ({layer.format}): another value for each code"
        yield _fault(layer, "weight-dtype", message, weight, " or ".join(dtypes), trap=True)


def _fp8(layer: Layer, n: int) -> Iterator[Violation]:
    yield from _weight(layer, _FP8_DTYPES[str(layer.format)])
    scale = layer.specs.get("weight_scale")
    columns = layer.specs["weight"].shape[1]
    if scale is None:
        message = "AttributeError 'NoneType' object has no attribute 'clone'"
        yield _fault(layer, "fp8-scale", message, None, "weight_scale")
    elif scale.shape not in _ONE and layer.kind == "embedding":
        message = "RuntimeError size mismatch at the lookup"
        yield _fault(layer, "fp8-row-scale", message, scale, "one scale ()")
    elif scale.shape == (n, 1):
        message = "scale_b must have 1 Float element (native matmul)"
        yield _fault(layer, "fp8-row-scale", message, scale, "one scale ()")
    elif scale.shape not in _ONE:
        message = "a 1-D row scale runs along K when the weight is dequantised"
        yield _fault(layer, "fp8-row-scale", message, scale, "one scale ()", trap=scale.shape == (columns,))
    elif scale.dtype not in FLOATS:
        yield _fault(layer, "scale-dtype", "weight_scale is no float", scale, "F32")
    given = layer.specs.get("input_scale")
    if given is not None and given.dtype != "F32" and not layer.marker.get("full_precision_matrix_mult"):
        message = f"NoCapableBackendError scale: dtype {given.dtype} not in {{torch.float32}} (native matmul)"
        yield _fault(layer, "input-scale-dtype", message, given, "F32")


def _int8(layer: Layer, n: int, k: int) -> Iterator[Violation]:
    yield from _weight(layer, "I8")
    scale = layer.specs.get("weight_scale")
    if scale is None:
        yield _fault(layer, "tensor-missing", "weight_scale is missing", None, "F32 () or [N,1]")
    elif scale.shape == (n,) and n > 1:
        # Along the wrong axis. Where N = K nothing fails, and the weight is off in every row.
        message = f"The size of tensor a ({k}) must match the size of tensor b ({n})"
        if n == k:
            message = "a 1-D scale runs along K when the weight is dequantised, which N = K hides"
        yield _fault(layer, "int8-scale-1d", message, scale, f"F32[{n}, 1]", trap=n == k)
    elif scale.shape not in (*_ONE, (n, 1)):
        yield _fault(layer, "tensor-shape", "weight_scale fits no row", scale, f"F32[] or F32[{n}, 1]")
    elif scale.dtype not in FLOATS:
        yield _fault(layer, "scale-dtype", "weight_scale is no float", scale, "F32")
    yield from shape_violations(layer.kind, layer.prefix, layer.marker, k, 8)


def _nvfp4(layer: Layer, rows: int, columns: int) -> Iterator[Violation]:
    yield from _weight(layer, "U8")
    scale, second = layer.specs.get("weight_scale"), layer.specs.get("weight_scale_2")
    if scale is None or second is None:
        message = f"Missing NVFP4 scales for layer {layer.prefix}"
        yield _fault(layer, "nvfp4-scales", message, None, "weight_scale and weight_scale_2")
        return
    yield from _tiles(layer, scale, rows, columns * 2 // 16, ("U8", "F8_E4M3"))
    if second.shape not in _ONE:
        yield _fault(layer, "tensor-shape", "weight_scale_2 is no scalar", second, "F32 () or [1]")


def _mxfp8(layer: Layer, rows: int, columns: int) -> Iterator[Violation]:
    yield from _weight(layer, "F8_E4M3")
    scale = layer.specs.get("weight_scale")
    if scale is None:
        message = f"Missing MXFP8 block scales for layer {layer.prefix}"
        yield _fault(layer, "mxfp8-scales", message, layer.specs.get("weight_scale_inv"), "weight_scale")
        return
    yield from _tiles(layer, scale, rows, -(-columns // 32), ("U8", "F8_E8M0"))


def _tiles(layer: Layer, scale: Spec, rows: int, blocks: int, dtypes: tuple[str, ...]) -> Iterator[Violation]:
    """Swizzled scales must be padded to whole tiles of 128 rows by 4 blocks."""
    wanted = Spec(dtypes[0], (up(rows, 128), up(blocks, 4)))
    if scale.dtype not in dtypes or scale.shape != wanted.shape:
        # The view that fails names what it wanted: tiles of rows, tiles of blocks, and one tile.
        tiles = [wanted.shape[0] // 128, wanted.shape[1] // 4, 4, 32, 4]
        message = f"RuntimeError shape '{tiles}' is invalid for input of size {_elements(scale)}"
        if scale.dtype not in dtypes:
            message = f"block scales of type {scale.dtype} are not read as bytes"
        yield _fault(layer, "scale-tiles", message, scale, str(wanted))


def _elements(spec: Spec) -> int:
    count = 1
    for length in spec.shape:
        count *= length
    return count


def _w4a8(layer: Layer, n: int, columns: int) -> Iterator[Violation]:
    yield from _weight(layer, "I8", "U8")
    group = group_size(layer.kind, layer.marker, 16)
    relative, channel = layer.specs.get("weight_s_rel"), layer.specs.get("weight_s_channel")
    if relative is None:
        message = f"Missing W4A8 group scale (weight_s_rel) for layer {layer.prefix}"
        yield _fault(layer, "w4a8-s-rel", message, None, "weight_s_rel [N,K/G]")
    if channel is None or channel.shape != (n,):
        message = f"s_channel must have shape ({n},), got {'None' if channel is None else channel.shape}"
        yield _fault(layer, "w4a8-s-channel", message, channel, f"F32[{n}]")
    codebook = layer.specs.get("weight_codebook")
    if codebook is not None and codebook.dtype != "F32":
        message = f"NoCapableBackendError codebook: dtype {codebook.dtype} not in {{torch.float32}}"
        yield _fault(layer, "w4a8-codebook", message, codebook, "F32[16]")
    correction = layer.specs.get("weight_correction")
    if correction is not None:
        message = "weight_correction is never read: asymmetric w4a8 is silently wrong"
        yield _fault(layer, "w4a8-correction", message, correction, "symmetric w4a8", trap=True)
    if relative is None or len(relative.shape) != 2 or group < 1:
        return
    k = relative.shape[1] * group
    widths = {k // 2: 4, k * 3 // 4: 6}
    if relative.shape[0] != n or columns not in widths:
        message = "weight_s_rel and the weight disagree about N, K or the group"
        yield _fault(
            layer, "tensor-shape", message, relative, f"[{n}, K/{group}], weight [{n}, K/2] or [{n}, 3K/4]"
        )
        return
    yield from shape_violations(layer.kind, layer.prefix, layer.marker, k, widths[columns])


def _w4a4(layer: Layer, n: int, columns: int) -> Iterator[Violation]:
    yield from _weight(layer, "I8")
    scale = layer.specs.get("weight_scale")
    if scale is None:
        yield _fault(layer, "tensor-missing", "weight_scale is missing", None, f"F32[{n}]")
    elif scale.shape != (n,):
        message = f"NoCapableBackendError scales: shape {list(scale.shape)} fails: exactly 1D"
        yield _fault(layer, "w4a4-scale", message, scale, f"F32[{n}]")
    yield from shape_violations(layer.kind, layer.prefix, layer.marker, columns * 2, 4)


def _awq(layer: Layer, n: int, columns: int) -> Iterator[Violation]:
    yield from _weight(layer, "I8", "U8")
    group = group_size(layer.kind, layer.marker, 64)
    for suffix in ("weight_scale", "weight_zeros"):
        spec = layer.specs.get(suffix)
        wanted = (columns * 2 // group if group > 0 else 0, n)
        if spec is None:
            yield _fault(layer, "tensor-missing", f"{suffix} is missing", None, f"BF16{list(wanted)}")
        elif spec.shape != wanted:
            yield _fault(layer, "tensor-shape", f"{suffix} fits no group", spec, f"BF16{list(wanted)}")
    yield from shape_violations(layer.kind, layer.prefix, layer.marker, columns * 2, 4)


def _bank(layer: Layer) -> Iterator[Violation]:
    """Experts of a mixture in one 3-D tensor: newer versions only."""
    message = "a bank of experts needs 0271a469 or newer: older versions refuse it or compute noise"
    shape = layer.specs["weight"].shape
    yield Violation(
        "environment", "bank-version", message, layer.prefix, "ComfyUI 0.33.0", "0271a469 or newer"
    )
    if layer.format == "asym_w4a8_int8" and "weight_codebook" in layer.specs:
        message = "a bank of w4a8 experts is read without a codebook only"
        yield _fault(layer, "bank-codebook", message, layer.specs["weight_codebook"], "no weight_codebook")
    scale = layer.specs.get("weight_scale")
    wanted = {"int8_tensorwise": [(*shape[:2], 1)]} | {f: [shape[:1], (shape[0], 1, 1)] for f in FP8_FORMATS}
    allowed = wanted.get(str(layer.format))
    if allowed is not None and (scale is None or scale.shape not in allowed):
        shapes = " or ".join(f"F32{list(one)}" for one in allowed)
        yield _fault(layer, "bank-scale", "weight_scale does not fit the bank", scale, shapes)
