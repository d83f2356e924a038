"""Forward passes against comfy-kitchen's eager kernels, method by method.

`relative` is |ours - theirs| / |theirs| over the whole output. With float32 inputs both sides do the same arithmetic
but for the order of sums (and a code that falls on the other side of a rounding boundary); with bfloat16 inputs
kitchen rotates, divides and rounds in bfloat16, which moves codes by one and costs what the bounds say.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ck = pytest.importorskip("comfy_kitchen")
pytest.importorskip("safetensors")

from qconvert.formats.checkpoint import Checkpoint, opened  # noqa: E402
from qconvert.kernels import reference  # noqa: E402
from qconvert.runtime.layers import QuantEmbedding, QuantLinear  # noqa: E402
from qconvert.runtime.loader import LazyLayers  # noqa: E402
from torch.nn.functional import linear  # noqa: E402

Tensor = Any
F32, BF16 = torch.float32, torch.bfloat16


make: Any = importlib.import_module("layer_files")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("layers") / "layers.safetensors"
    make.write(path)
    with opened(path) as checkpoint:
        yield checkpoint


def relative(ours: Tensor, theirs: Tensor) -> float:
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    return float(error)


def fp8_rows(x: Tensor) -> Tensor:
    """Kitchen quantises with one scale: rows are given to it one by one."""
    rows = []
    for row in x:
        scale = row.abs().max().float() / 448
        rows.append(ck.dequantize_per_tensor_fp8(ck.quantize_per_tensor_fp8(row, scale), scale, x.dtype))
    return torch.stack(rows)


def fp8_static(x: Tensor, t: dict[str, Tensor], bias: Tensor) -> Tensor:
    q = ck.quantize_per_tensor_fp8(x, t["input_scale"])
    from comfy_kitchen.tensor.fp8 import _fp8_scaled_mm

    out: Tensor = _fp8_scaled_mm(q, t["weight"].t(), t["input_scale"], t["weight_scale"], bias, x.dtype)
    return out


def fp8_weight(t: dict[str, Tensor], dtype: Any) -> Tensor:
    return ck.dequantize_per_tensor_fp8(t["weight"], t["weight_scale"], dtype)


def nvfp4_weight(t: dict[str, Tensor], dtype: Any) -> Tensor:
    return ck.dequantize_nvfp4(t["weight"], t["weight_scale_2"], t["weight_scale"], dtype)


def nvfp4_input(x: Tensor) -> Tensor:
    scale = x.abs().max().float() / 2688
    q, blocks = ck.quantize_nvfp4(x, scale, pad_16x=True)
    return ck.dequantize_nvfp4(q, scale, blocks, x.dtype)[: x.shape[0]]


def mxfp8_input(x: Tensor) -> Tensor:
    q, blocks = ck.quantize_mxfp8(x)
    return ck.dequantize_mxfp8(q, blocks, x.dtype)


def int8(x: Tensor, t: dict[str, Tensor], bias: Tensor, rotation: int) -> Tensor:
    code = {F32: 0, torch.float16: 1, BF16: 2}[x.dtype]
    return torch.ops.comfy_kitchen.int8_linear(
        x, t["weight"], t["weight_scale"], bias, code, rotation > 0, rotation or 256
    )


def w4a8(x: Tensor, t: dict[str, Tensor], bias: Tensor, group: int) -> Tensor:
    return ck.w4a8_int8_linear(
        x,
        t["weight"],
        t["weight_s_rel"],
        t["weight_s_channel"],
        codebook=t.get("weight_codebook"),
        correction=t.get("weight_correction"),
        bias=bias,
        group_size=group,
        convrot_groupsize=make.ROTATION,
        out_dtype=x.dtype,
    )


def w4a4(x: Tensor, t: dict[str, Tensor], bias: Tensor) -> Tensor:
    """linear_dtype int8 is what kitchen's GPU kernels do: int8 codes of the input. Eager has int4 only."""
    return ck.convrot_w4a4_linear(x, t["weight"], t["weight_scale"], bias, make.ROTATION)


def w4a4_int8(x: Tensor, t: dict[str, Tensor], bias: Tensor) -> Tensor:
    from comfy_kitchen.backends.eager.convrot_w4a4 import prepare_int4_weight_for_int8_linear

    wide = {"weight": prepare_int4_weight_for_int8_linear(t["weight"]), "weight_scale": t["weight_scale"]}
    return int8(x, wide, bias, make.ROTATION)


Kitchen = Callable[[Tensor, dict[str, Tensor], Tensor], Tensor]

#: Layer -> (kitchen's forward, bound for bfloat16 inputs). For float32 inputs one bound holds for all.
METHODS: dict[str, tuple[Kitchen, float]] = {
    "fp8_weight_only": (lambda x, t, b: linear(x, fp8_weight(t, x.dtype), b), 5e-3),
    "fp8_static": (fp8_static, 2e-2),
    "fp8_dynamic": (lambda x, t, b: linear(fp8_rows(x), fp8_weight(t, x.dtype), b), 2e-2),
    "nvfp4_weight_only": (lambda x, t, b: linear(x, nvfp4_weight(t, x.dtype), b), 5e-3),
    "nvfp4_prescaled": (
        lambda x, t, b: linear(x * t["pre_quant_scale"].to(x.dtype), nvfp4_weight(t, x.dtype), b),
        5e-3,
    ),
    "nvfp4_dynamic": (lambda x, t, b: linear(nvfp4_input(x), nvfp4_weight(t, x.dtype), b), 1e-2),
    "mxfp8": (
        lambda x, t, b: linear(
            mxfp8_input(x),
            ck.dequantize_mxfp8(t["weight"], t["weight_scale"].view(torch.float8_e8m0fnu), x.dtype),
            b,
        ),
        5e-3,
    ),
    "int8_convrot16": (lambda x, t, b: int8(x, t, b, 16), 1.5e-2),
    "int8_convrot64": (lambda x, t, b: int8(x, t, b, 64), 1.5e-2),
    "int8_convrot256": (lambda x, t, b: int8(x, t, b, 256), 1.5e-2),
    "int8_plain": (lambda x, t, b: int8(x, t, b, 0), 2e-2),
    "w4a8": (lambda x, t, b: w4a8(x, t, b, 16), 1.5e-2),
    "w4a8_no_codebook": (lambda x, t, b: w4a8(x, t, b, 32), 1.5e-2),
    "w4a8_corrected": (lambda x, t, b: w4a8(x, t, b, 16), 1e-2),
    "w6a8": (lambda x, t, b: w4a8(x, t, b, 16), 1.5e-2),
    "w4a4_int4": (w4a4, 5e-2),
    "w4a4_int8": (w4a4_int8, 1.5e-2),
}
FLOAT32_BOUND = 2e-6


def exact_output(module: QuantLinear, x: Tensor) -> Tensor:
    """What the stored weight gives in float64, with nothing done to the input but what the file asks for."""
    w, t = module.operand().decode(), module.stored()
    if module.method.rotation:
        w = reference.rotate(w, module.method.rotation)
    wide = x.double() * t["pre_quant_scale"].double() if "pre_quant_scale" in t else x.double()
    return linear(wide, w.double(), t["bias"].double() if "bias" in t else None)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", METHODS)
def test_linear(checkpoint: Checkpoint, name: str, dtype: Any) -> None:
    forward, bound = METHODS[name]
    module = LazyLayers(checkpoint)[name]
    assert isinstance(module, QuantLinear)
    x = make.input_rows(1, 19, dtype)
    stored = module.stored()
    bias = stored.get("bias")
    theirs = forward(x, stored, bias if bias is None else bias.to(dtype))
    ours = module(x)
    assert ours.dtype == dtype and ours.shape == theirs.shape
    assert relative(ours, theirs) <= (FLOAT32_BOUND if dtype == F32 else bound)
    # Nearer to the stored weight's output than kitchen is, or as near.
    want = exact_output(module, x)
    assert relative(ours, want) <= 1.02 * relative(theirs, want) + 1e-6


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["rows.embed_tokens", "scalar.embed_tokens"])
def test_embedding(checkpoint: Checkpoint, name: str, dtype: Any) -> None:
    module = LazyLayers(checkpoint, dtype=dtype)[name]
    assert isinstance(module, QuantEmbedding)
    index = torch.tensor([[3, 0, make.VOCABULARY - 1], [3, 77, 5]])
    stored = module.stored()
    code = {F32: 0, torch.float16: 1, BF16: 2}[dtype]
    theirs = torch.ops.comfy_kitchen.dequantize_int8_embedding(
        stored["weight"], stored["weight_scale"], index, 0, code
    )
    assert torch.equal(module(index), theirs)
