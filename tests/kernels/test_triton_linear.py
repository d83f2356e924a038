"""Products by Triton's kernels against the definition (`kernels.linear`), for every kind of weight and of input.

Integer products are equal bit for bit. All others are sums of exactly the same terms in another order: the bound is
that of the output's type (half an ulp, relative to the norm), and for float32 outputs `SUMS`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.7")

from qconvert.kernels import linear as definition  # noqa: E402
from qconvert.kernels import reference as ref  # noqa: E402
from qconvert.kernels import reference_w4a8 as ref_w4a8  # noqa: E402
from qconvert.kernels import weights as w  # noqa: E402
from qconvert.kernels.codebook import USUAL  # noqa: E402
from qconvert.kernels.layout import swizzle  # noqa: E402
from qconvert.kernels.triton import launch_linear  # noqa: E402
from qconvert.kernels.triton.ops import TritonOps  # noqa: E402

Tensor = Any
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: |ours - exact| / |exact| of float32 sums. On a GPU matrix units cut low bits off partial sums of fp8 products.
SUMS = {"interpreted": 2e-6, "gpu": 1e-5, "gpu fp8": 2e-3}
ROUNDED = {F32: 0.0, F16: 2.0**-11, BF16: 2.0**-8}


def values(rows: int, k: int, seed: int) -> Tensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= 20
    return x


def tiles(scales: Tensor) -> Tensor:
    return torch.from_numpy(swizzle(scales.numpy()))


def int8(n: int, k: int) -> w.Weight:
    x = values(n, k, 1)
    scale = ref.int8_row_scale(x, "fast")
    return w.Int8Weight(ref.int8_encode(x, scale), scale)


def int8_scalar(n: int, k: int) -> w.Weight:
    x = values(n, k, 1)
    scale = ref.int8_row_scale(x, "fast").amax()
    return w.Int8Weight(ref.int8_encode(x, scale), scale)


def grid(codebook: bool, bits: int, group: int, float_scales: bool = False) -> Callable[[int, int], w.Weight]:
    def make(n: int, k: int) -> w.Weight:
        x, table = values(n, k, 2), torch.from_numpy(USUAL) if codebook else None
        if bits == 6:
            codes, s_rel, channel = ref_w4a8.w6a8_encode(x, group, "fast")
        else:
            codes, s_rel, channel = ref_w4a8.w4a8_encode(x, group, table, "fast")
        s_rel = ref.decode_e4m3(s_rel) if float_scales else s_rel
        return w.GridWeight(codes, s_rel, channel, table, None, group, bits)

    return make


def corrected(n: int, k: int) -> w.Weight:
    made = grid(True, 4, 16)(n, k)
    assert isinstance(made, w.GridWeight)
    return w.replace(made, correction=values(n, k // 16, 3) / 64)


def fp8(kind: str, per_row: bool) -> Callable[[int, int], w.Weight]:
    def make(n: int, k: int) -> w.Weight:
        x = values(n, k, 4)
        scale = x.abs().amax(dim=1) / ref.FP8_MAX[kind]
        scale = scale if per_row else scale.amax()
        return w.Fp8Weight(ref.fp8_encode(x, scale, kind), scale, kind)

    return make


def nvfp4(swizzled: bool, high_first: bool) -> Callable[[int, int], w.Weight]:
    def make(n: int, k: int) -> w.Weight:
        x = values(n, k, 5)
        total = ref.nvfp4_tensor_scale(float(x.abs().max()))
        codes, scales = ref.nvfp4_encode(x, total, "fast")
        codes = codes if high_first else (codes << 4) | (codes >> 4)
        return w.Nvfp4Weight(codes, tiles(scales) if swizzled else scales, total, swizzled, high_first)

    return make


def mxfp8(n: int, k: int) -> w.Weight:
    q, scales = ref.mxfp8_encode(values(n, k, 6))
    return w.Mxfp8Weight(q, tiles(scales))


def int4(n: int, k: int) -> w.Weight:
    return w.Int4Weight(*ref.w4a4_encode(values(n, k, 7), "fast"))


#: Name -> (weight, activation, rotation, multiple of K).
METHODS: dict[str, tuple[Callable[[int, int], w.Weight], definition.Activation, int, int]] = {
    "int8": (int8, "int8", 0, 1),
    "int8 one scale": (int8_scalar, "int8", 0, 1),
    "int8 ConvRot 64": (int8, "int8", 64, 64),
    "int8 ConvRot 256": (int8, "int8", 256, 256),
    "w4a4 int4": (int4, "int4", 16, 16),
    "w4a4 int8": (int4, "int8", 64, 64),
    "w4a8": (grid(True, 4, 16), "int8", 64, 64),
    "w4a8 groups of 4": (grid(True, 4, 4), "int8", 0, 16),
    "w4a8 groups of 128": (grid(False, 4, 128), "int8", 64, 128),
    "w4a8 float scales": (grid(False, 4, 32, float_scales=True), "int8", 0, 32),
    "w6a8": (grid(False, 6, 32), "int8", 64, 64),
    "w4a8 corrected": (corrected, "none", 64, 64),
    "fp8 weight only": (fp8("F8_E4M3", False), "none", 0, 1),
    "fp8 rows weight only": (fp8("F8_E4M3", True), "none", 0, 1),
    "e5m2 weight only": (fp8("F8_E5M2", False), "none", 0, 1),
    "fp8 static": (fp8("F8_E4M3", False), "fp8_static", 0, 1),
    "fp8 dynamic": (fp8("F8_E4M3", True), "fp8", 0, 1),
    "nvfp4 weight only": (nvfp4(True, True), "none", 0, 32),
    "nvfp4 low first": (nvfp4(False, False), "none", 0, 32),
    "nvfp4 dynamic": (nvfp4(True, True), "nvfp4", 0, 32),
    "mxfp8 weight only": (mxfp8, "none", 0, 32),
    "mxfp8 dynamic": (mxfp8, "mxfp8", 0, 32),
}
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])


def moved(weight: w.Weight, device: Any) -> w.Weight:
    fields = {
        name: value.to(device) for name, value in vars(weight).items() if isinstance(value, torch.Tensor)
    }
    return w.replace(weight, **fields)  # type: ignore[type-var]


def exact(x: Tensor, weight: w.Weight, activation: Any, rotation: int, scale: Tensor, bias: Tensor) -> Tensor:
    """The definition's terms, summed in float64."""
    wide = ref.rotate(x.to(F32), rotation) if rotation else x.to(F32)
    q = definition.quantise_activations(wide, activation, scale)
    outer = weight.outer()
    factor = torch.ones((), dtype=torch.float64) if q.factor is None else q.factor.double()
    product = (q.values.double() @ weight.values().double().T) * factor
    product = product if outer is None else product * outer.double()
    return product + bias.double()


@DTYPES
@pytest.mark.parametrize("name", METHODS)
def test_linear(device: Any, name: str, dtype: Any) -> None:
    make, activation, rotation, multiple = METHODS[name]
    k = multiple * (1 if multiple >= 128 else 3 if multiple > 1 else 97)
    gpu = device.type == "cuda"
    # Interpreted, every rotated row costs its time: there are few of them.
    shapes = ((1, 37), (35, 50)) if gpu or not rotation else ((3, 37), (17, 37))
    for m, n in shapes if gpu or dtype == BF16 else ((3, 41),):
        seed = zlib.crc32(f"{name} {m}".encode())
        weight, x = make(n, k), values(m, k, seed).to(dtype)
        x[m // 2] *= 0 if m > 1 else 1
        bias, scale = values(1, n, 9)[0].to(dtype), torch.tensor(0.17)
        ops = TritonOps()
        there = moved(weight, device)
        assert ops.refusal(there, activation, rotation, x.to(device)) is None
        ours = ops.linear(
            x.to(device),
            there,
            activation,
            bias=bias.to(device),
            rotation=rotation,
            input_scale=scale.to(device),
        ).cpu()
        assert (ours.dtype, ours.shape) == (dtype, (m, n))
        assert ours.isfinite().all()
        theirs = definition.linear(x, weight, activation, bias=bias, rotation=rotation, input_scale=scale)
        if activation in ("int8", "int4"):
            assert torch.equal(ours, theirs)
            continue
        want = exact(x, weight, activation, rotation, scale, bias)
        # A corrected weight is decoded and multiplied in the input's type, as the runtime does.
        cast = ROUNDED[dtype] * (2 if name == "w4a8 corrected" else 1)
        sums = SUMS["gpu fp8" if activation.startswith("fp8") else "gpu"] if gpu else SUMS["interpreted"]
        assert float((ours.double() - want).norm() / want.norm()) <= cast + sums


@pytest.mark.parametrize("activation", ["none", "int8", "fp8", "nvfp4", "mxfp8"])
def test_no_rows(device: Any, activation: Any) -> None:
    made = {
        "none": int8,
        "int8": int8,
        "fp8": fp8("F8_E4M3", True),
        "nvfp4": nvfp4(True, True),
        "mxfp8": mxfp8,
    }
    weight = moved(made[activation](40, 64), device)
    out = TritonOps().linear(
        torch.zeros(0, 64, dtype=BF16, device=device),
        weight,
        activation,
        bias=None,
        rotation=0,
        input_scale=None,
    )
    assert (out.dtype, out.shape) == (BF16, (0, 40))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_lookup(device: Any, dtype: Any) -> None:
    """Only the rows asked for are decoded; kinds without a gather kernel give the same."""
    index = torch.tensor([[3, 0], [36, 3]])
    plain = w.PlainWeight(values(37, 96, 8).to(F16))
    for make in (int8, int8_scalar, int4, fp8("F8_E5M2", True), nvfp4(True, True), mxfp8, grid(True, 4, 16)):
        for weight, rotation in ((make(37, 96), 0), (make(37, 128), 64), (plain, 0)):
            want = definition.lookup(index, weight, rotation=rotation, dtype=dtype)
            found = TritonOps().lookup(
                index.to(device), moved(weight, device), rotation=rotation, dtype=dtype
            )
            assert torch.equal(found.cpu(), want)


def test_what_has_no_kernel_is_refused_with_a_reason(device: Any) -> None:
    ops = TritonOps()
    x = torch.zeros(1, 96, dtype=BF16, device=device)
    refused = {
        "128 x 128": w.Fp8Weight(torch.zeros(8, 96, dtype=torch.uint8), torch.ones(1, 1)),
        "PlainWeight": w.PlainWeight(torch.zeros(8, 96)),
        "powers of two": grid(False, 4, 48)(8, 96),
        "signed": w.replace(grid(False, 4, 16)(8, 96), signed=True),  # type: ignore[type-var]
        "group scales alone": w.replace(grid(False, 4, 16)(8, 96), s_channel=None),  # type: ignore[type-var]
    }
    for word, weight in refused.items():
        reason = ops.refusal(moved(weight, device), "none", 0, x)
        assert reason is not None and word in reason
        with pytest.raises(ValueError, match=word):
            ops.linear(x, moved(weight, device), "none", bias=None, rotation=0, input_scale=None)
    good = moved(int8(8, 96), device)
    assert "groups of 1024" in str(ops.refusal(good, "int8", 1024, x))
    assert "float64" in str(ops.refusal(good, "int8", 0, x.double()))
    with pytest.raises(ValueError, match="input scale"):
        ops.linear(
            x,
            moved(fp8("F8_E4M3", False)(8, 96), device),
            "fp8_static",
            bias=None,
            rotation=0,
            input_scale=None,
        )


def test_dot_types_hold_their_operands(device: Any) -> None:
    """What matrix units are given holds every decoded value exactly."""
    for x_kind, w_kind in (
        ("BF16", "nvfp4"),
        ("F16", "nvfp4"),
        ("F16", "F8_E5M2"),
        ("nvfp4", "nvfp4"),
        ("mxfp8", "mxfp8"),
    ):
        dot = launch_linear.dot_type(x_kind, w_kind)
        kind = {"f16": F16, "bf16": BF16, "f32": F32}[dot]
        weight = {"nvfp4": nvfp4(False, True), "F8_E5M2": fp8("F8_E5M2", False), "mxfp8": mxfp8}[w_kind](
            64, 256
        )
        assert torch.equal(weight.values().to(kind).to(F32), weight.values())
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for kind in ("F8_E4M3", "F8_E5M2"):
        decoded = ref.to_f32(every, kind)
        finite = decoded[decoded.isfinite()]
        for dtype in (F16, BF16):
            assert torch.equal(finite.to(dtype).to(F32), finite)
