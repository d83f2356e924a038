"""comfy-kitchen 0.2.40 as the outside witness: its eager code decodes ours, and its quantisers do not beat ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from qconvert.kernels.layout import swizzle, unswizzle
from qconvert.kernels.select import get_backend

pytest.importorskip("comfy_kitchen")
from comfy_kitchen.backends.eager import convrot_w4a4, quantization, w4a8_int8

F32 = NDArray[np.float32]
CPU = get_backend("cpu")
ROWS, COLS, GROUP = 128, 1024, 256
E4M3 = torch.float8_e4m3fn


@cache
def weights(kind: str) -> F32:
    """bfloat16 values, so that comfy-kitchen may take them in the dtype it is used with."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((ROWS, COLS)) if kind != "t4" else rng.standard_t(4, (ROWS, COLS))
    if kind == "outliers":
        x[:, ::97] *= 12
    return CPU.to_f32(CPU.from_f32((x * 0.02).astype(np.float32), "BF16"), "BF16")


def tensor(a: NDArray[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    t = torch.from_numpy(np.ascontiguousarray(a))
    return t if dtype is None else t.view(dtype)


def source(kind: str) -> torch.Tensor:
    return tensor(weights(kind)).to(torch.bfloat16)


def sqnr(x: F32, y: F32) -> float:
    power, noise = CPU.error(x, y)
    return 10 * math.log10(power / noise)


def raw(t: torch.Tensor) -> NDArray[np.uint8]:
    return t.contiguous().view(torch.uint8).numpy()


# Each returns: our decoded values, our bytes decoded by comfy-kitchen in float32, its bytes decoded by us.
Results = tuple[F32, F32, F32]


def fp8(kind: str) -> Results:
    x = weights(kind)
    scale = np.asarray(CPU.fp8_scale(CPU.amax(x), "F8_E4M3"))
    q = CPU.fp8_encode(x, scale, "F8_E4M3")
    witness = quantization.dequantize_per_tensor_fp8(
        tensor(q, E4M3), torch.tensor(float(scale)), torch.float32
    )
    w = source(kind)
    theirs = (w.abs().max() / 448).to(torch.float32)
    theirs_q = raw(quantization.quantize_per_tensor_fp8(w, theirs, E4M3))
    return (
        CPU.fp8_decode(q, scale, "F8_E4M3"),
        witness.numpy(),
        CPU.fp8_decode(theirs_q, theirs.numpy(), "F8_E4M3"),
    )


def int8(kind: str) -> Results:
    x = weights(kind)
    scale = CPU.int8_row_scale(x, "best")
    q = CPU.int8_encode(x, scale)
    witness = quantization.dequantize_int8_simple(tensor(q), tensor(scale)[:, None])
    theirs_q, theirs = quantization.quantize_int8_rowwise(source(kind))
    return (
        CPU.int8_decode(q, scale),
        witness.numpy(),
        CPU.int8_decode(theirs_q.numpy(), theirs.numpy().reshape(-1)),
    )


def int8_convrot(kind: str) -> Results:
    x = CPU.rotate(weights(kind), GROUP)
    scale = CPU.int8_row_scale(x, "best")
    q = CPU.int8_encode(x, scale)
    witness = quantization.dequantize_int8_convrot_weight(tensor(q), tensor(scale)[:, None], GROUP)
    theirs_q, theirs = quantization.quantize_int8_convrot_weight(source(kind), GROUP)
    return (
        CPU.rotate(CPU.int8_decode(q, scale), GROUP),
        witness.numpy(),
        CPU.rotate(CPU.int8_decode(theirs_q.numpy(), theirs.numpy().reshape(-1)), GROUP),
    )


def nvfp4(kind: str) -> Results:
    x = weights(kind)
    scale = CPU.nvfp4_tensor_scale(CPU.amax(x))
    codes, blocks = CPU.nvfp4_encode(x, scale, "best")
    witness = quantization.dequantize_nvfp4(
        tensor(codes), torch.tensor(float(scale)), tensor(swizzle(blocks), E4M3), torch.float32
    )
    w = source(kind)
    theirs = (w.abs().max() / 2688).to(torch.float32)
    theirs_codes, theirs_blocks = quantization.quantize_nvfp4(w, theirs)
    decoded = CPU.nvfp4_decode(
        theirs_codes.numpy(), unswizzle(raw(theirs_blocks), ROWS, COLS // 16), np.float32(theirs)
    )
    return CPU.nvfp4_decode(codes, blocks, scale), witness.numpy(), decoded


def mxfp8(kind: str) -> Results:
    x = weights(kind)
    q, blocks = CPU.mxfp8_encode(x, "best")
    stored = tensor(swizzle(blocks), torch.float8_e8m0fnu)
    witness = quantization.dequantize_mxfp8(tensor(q, E4M3), stored, torch.float32)
    theirs_q, theirs = quantization.quantize_mxfp8(source(kind))
    decoded = CPU.mxfp8_decode(raw(theirs_q), unswizzle(raw(theirs), ROWS, COLS // 32))
    return CPU.mxfp8_decode(q, blocks), witness.numpy(), decoded


def w4a4(kind: str) -> Results:
    x = CPU.rotate(weights(kind), GROUP)
    codes, scale = CPU.w4a4_encode(x, "best")
    witness = convrot_w4a4.dequantize_convrot_w4a4_weight(tensor(codes, torch.int8), tensor(scale), GROUP)
    theirs_codes, theirs = convrot_w4a4.quantize_convrot_w4a4_weight(source(kind), GROUP)
    decoded = CPU.rotate(CPU.w4a4_decode(raw(theirs_codes), theirs.float().numpy().reshape(-1)), GROUP)
    return CPU.rotate(CPU.w4a4_decode(codes, scale), GROUP), witness.numpy(), decoded


def w4a8(kind: str, bits: int = 4) -> Results:
    x = CPU.rotate(weights(kind), GROUP)
    codebook = CPU.w4a8_codebook(x, 16, "best") if bits == 4 else None
    if bits == 4:
        codes, s_rel, channel = CPU.w4a8_encode(x, 16, codebook, "best")
    else:
        codes, s_rel, channel = CPU.w6a8_encode(x, 16, "best")
    witness = w4a8_int8.dequantize_w4a8_int8_weight(
        tensor(codes, torch.int8),
        tensor(s_rel, E4M3),
        tensor(channel),
        None if codebook is None else tensor(codebook),
        convrot_groupsize=GROUP,
        output_dtype=torch.float32,
    )
    ours = CPU.w4a8_decode(codes, CPU.to_f32(s_rel, "F8_E4M3"), channel, codebook, 16, bits, None)
    out = w4a8_int8.quantize_w4a8_int8_weight(
        source(kind), convrot_groupsize=GROUP, codebook=bits == 4, bits=bits
    )
    theirs_codes, theirs_rel, theirs_channel = out[:3]
    table = next((t.numpy() for t in out[3:] if t is not None and t.shape == (16,)), None)
    theirs = CPU.w4a8_decode(
        raw(theirs_codes), theirs_rel.float().numpy(), theirs_channel.numpy(), table, 16, bits, None
    )
    return CPU.rotate(ours, GROUP), witness.numpy(), CPU.rotate(theirs, GROUP)


def w6a8(kind: str) -> Results:
    return w4a8(kind, bits=6)


#: Operation, whether the decoded values agree bit for bit (rotated ones: two orders of addition), and by how many
#: dB ours is at least better. fp8: both round to the same grid, and scales that differ by 0.2 % are luck.
CASES: list[tuple[Callable[[str], Results], bool, float]] = [
    (fp8, True, -0.02),
    (int8, True, 0.0),
    (int8_convrot, False, 0.05),
    (nvfp4, True, 0.3),
    (mxfp8, True, 0.0),
    (w4a4, False, 1.5),
    (w4a8, False, 0.8),
    (w6a8, False, 0.0),
]


@pytest.mark.parametrize("kind", ["gaussian", "t4", "outliers"])
@pytest.mark.parametrize(("case", "exact", "gain"), CASES, ids=[c[0].__name__ for c in CASES])
def test_kitchen(case: Callable[[str], Results], exact: bool, gain: float, kind: str) -> None:
    ours, witness, theirs = case(kind)
    if exact:
        np.testing.assert_array_equal(ours, witness)
    else:
        np.testing.assert_allclose(ours, witness, rtol=0, atol=2e-6 * CPU.amax(weights(kind)))
    x = weights(kind)
    print(f"{case.__name__} {kind}: ours {sqnr(x, ours):.3f} dB, comfy-kitchen {sqnr(x, theirs):.3f} dB")
    assert sqnr(x, ours) >= sqnr(x, theirs) + gain
