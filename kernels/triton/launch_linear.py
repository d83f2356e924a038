"""Launching the matrix kernels: which form of them multiplies which pair of operands, and in what tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from qconvert.kernels.linear import Activation, tensor_scale_of
from qconvert.kernels.triton import launch, launch_blocks, launch_rows
from qconvert.kernels.triton.chips import can, interpreted
from qconvert.kernels.triton.launch import OPTIONS, answer, bits_of, kind_of, like, up2
from qconvert.kernels.triton.matmul import matmul
from qconvert.kernels.triton.matmul_scaled import matmul_scaled
from qconvert.kernels.weights import (
    Fp8Weight,
    GridWeight,
    Int4Weight,
    Int8Weight,
    Mxfp8Weight,
    Nvfp4Weight,
    Weight,
)
from torch import Tensor


@dataclass(frozen=True)
class Operand:
    """One side of a product as `matmul` takes it; `factor` [], [rows] or None multiplies the product."""

    q: Tensor
    kind: str
    scales: Tensor | None = None
    factor: Tensor | None = None
    codebook: Tensor | None = None
    swizzled: bool = False
    high_first: bool = True
    group: int = 16

    @property
    def stride(self) -> int:
        return self.q.stride(0)

    @property
    def step(self) -> int:
        """1 for a factor a row, 0 for one, -1 for none."""
        if self.factor is None:
            return -1
        return 0 if self.factor.numel() == 1 else 1


def weight_refusal(weight: Weight) -> str | None:
    """Why no matrix kernel takes a weight; None when one does."""
    if isinstance(weight, GridWeight):
        if not weight.integral:
            return "w4a8 without an int8 grid (a correction, or group scales alone) is decoded first"
        if weight.signed:
            return "signed w4a8 nibbles are decoded first"
        if weight.group & (weight.group - 1) or weight.group > 256:
            return f"the w4a8 kernels take groups that are powers of two up to 256, not {weight.group}"
        return None
    if isinstance(weight, Fp8Weight):
        return "fp8 with 128 x 128 scales is decoded first" if weight.blocked else None
    if isinstance(weight, Int8Weight | Int4Weight | Nvfp4Weight | Mxfp8Weight):
        return None
    return f"{type(weight).__name__} has no matrix kernel"


def weight_operand(weight: Weight) -> Operand:
    """A weight as an operand. Only for weights that `weight_refusal` lets pass."""
    if isinstance(weight, Int8Weight):
        return Operand(weight.q, "I8", factor=weight.scale)
    if isinstance(weight, Int4Weight):
        return Operand(weight.q, "int4", factor=weight.scale)
    if isinstance(weight, Fp8Weight):
        return Operand(weight.q, weight.kind, factor=weight.scale)
    if isinstance(weight, Nvfp4Weight):
        return Operand(
            weight.q,
            "nvfp4",
            weight.block_scale,
            weight.tensor_scale,
            swizzled=weight.swizzled,
            high_first=weight.high_first,
        )
    if isinstance(weight, Mxfp8Weight):
        return Operand(weight.q, "mxfp8", weight.block_scale, swizzled=weight.swizzled)
    assert isinstance(weight, GridWeight)
    kind = "grid6" if weight.bits == 6 else "grid4" if weight.codebook is None else "table4"
    return Operand(
        weight.q, kind, weight.s_rel, weight.s_channel, codebook=weight.codebook, group=weight.group
    )


def activation_operand(
    x: Tensor, activation: Activation, rotation: int, input_scale: Tensor | None
) -> Operand:
    """The input, rotated and quantised on the device, as an operand."""
    if activation in ("int8", "int4"):
        q, scale = launch_rows.quantise_rows(x, "int8" if activation == "int8" else "int7", rotation)
        return Operand(q, "I8", factor=scale)
    if activation == "fp8":
        q, scale = launch_rows.quantise_rows(x, "e4m3", rotation)
        return Operand(q, "F8_E4M3", factor=scale)
    if rotation:
        x = launch.rotate(x, rotation)
    if activation == "fp8_static":
        if input_scale is None:
            raise ValueError("static fp8 activations need an input scale")
        scale = input_scale.to(torch.float32).reshape(1)
        return Operand(launch.encode_fp8(x, scale, "F8_E4M3"), "F8_E4M3", factor=scale)
    if activation == "nvfp4":
        total = tensor_scale_of(launch.amax(x).reshape(1))
        codes, scales = launch_blocks.quantise_nvfp4(x, total)
        return Operand(codes, "nvfp4", scales, total.reshape(1))
    if activation == "mxfp8":
        return Operand(*_mxfp8(x))
    return Operand(bits_of(x), kind_of(x))


def _mxfp8(x: Tensor) -> tuple[Tensor, str, Tensor]:
    q, scales = launch_blocks.quantise_mxfp8(x)
    return q, "mxfp8", scales


def dot_type(x: str, w: str) -> str:
    """What the matrix units multiply for operands of these kinds, on the chip at hand (`operands.to_dot`)."""
    if x == "I8" and w in ("I8", "int4", "grid4", "table4", "grid6"):
        return "int8"
    if x == "F8_E4M3" and w == "F8_E4M3":
        return "fp8" if can("fp8 dot") else "f16"
    if x == "nvfp4" or (x == "F16" and w != "mxfp8"):
        return "f16"
    if x in ("BF16", "mxfp8"):
        return "f32" if interpreted() else "bf16"
    return "f32"


#: Tiles tried on a GPU: few rows (weights stream past them), then many. FLIP pays where weights are decoded.
_TILES = (
    (16, 64, 128, True, 4, 4),
    (16, 32, 256, True, 2, 4),
    (16, 128, 128, True, 4, 3),
    (32, 64, 128, True, 4, 4),
    (64, 64, 128, True, 4, 3),
    (64, 128, 64, False, 4, 4),
    (128, 128, 64, False, 8, 3),
    (128, 256, 64, False, 8, 3),
    (128, 128, 128, False, 8, 3),
)


@cache
def _tuned() -> Any:
    configs = [
        triton.Config(
            {"BM": bm, "BN": bn, "BK": bk, "FLIP": flip, "GROUP": 8}, num_warps=warps, num_stages=stages
        )
        for bm, bn, bk, flip, warps, stages in _TILES
    ]
    key = ["m_class", "n", "k", "X", "W", "DOT", "OUT"]
    return triton.autotune(configs, key, prune_configs_by={"early_config_prune": _prune})(matmul)


def _prune(configs: list[Any], args: dict[str, Any], **_: Any) -> list[Any]:
    """Tiles of about the height of the input."""
    m = args["m_class"]
    fit = [c for c in configs if c.kwargs["BM"] <= max(16, m) and (m < 64 or c.kwargs["BM"] >= 64)]
    return fit or configs


def fixed_tile(m: int, dot: str) -> dict[str, Any]:
    """One tile for everything: where nothing is tuned (the interpreter, compile tests)."""
    if m <= 16:
        return {"BM": 16, "BN": 32, "BK": 64, "FLIP": True, "GROUP": 8}
    return {"BM": 32, "BN": 32, "BK": 64, "FLIP": False, "GROUP": 8}


def multiply(x: Operand, w: Operand, k: int, bias: Tensor | None, out: str) -> Tensor:
    """[M, N] in stored type `out` (bf16 under its own type)."""
    m, n = x.q.shape[0], w.q.shape[0]
    device = x.q.device
    result = like(out, (m, n), device)
    if not result.numel():
        return answer(result, out)
    none = torch.zeros(16, device=device)
    wide_bias = none if bias is None else bias.to(torch.float32).contiguous()
    x_factor = none if x.factor is None else x.factor.contiguous()
    w_factor = none if w.factor is None else w.factor.contiguous()
    shared = {"OUT": out, "BIAS": bias is not None, "SWIZZLE": w.swizzled}
    if _scaled_natively(x, w):
        tile = {"BM": 128, "BN": 128, "BK": 128, "GROUP": 8}
        matmul_scaled[(-(-m // tile["BM"]) * -(-n // tile["BN"]),)](
            x.q,
            x.scales,
            x_factor,
            w.q,
            w.scales,
            w_factor,
            wide_bias,
            result,
            m,
            n,
            k,
            up2(min(m, 4096)),
            FORMAT=x.kind,
            **shared,
            **tile,
            # With four, sm_120 (which accumulates in registers) spills.
            num_warps=8,
            **OPTIONS,
        )
        return answer(result, out)
    dot = dot_type(x.kind, w.kind)
    fixed = fixed_tile(m, dot) if interpreted() else {}
    kernel = matmul if fixed else _tuned()

    def programs(meta: dict[str, Any]) -> tuple[int]:
        return (-(-m // meta["BM"]) * -(-n // meta["BN"]),)

    kernel[programs](
        x.q,
        none if x.scales is None else x.scales,
        x_factor,
        w.q,
        none if w.scales is None else w.scales,
        w_factor,
        none if w.codebook is None else w.codebook,
        wide_bias,
        result,
        m,
        n,
        k,
        x.stride,
        w.stride,
        n,
        up2(min(m, 4096)),
        X=x.kind,
        W=w.kind,
        DOT=dot,
        X_STEP=x.step,
        W_STEP=w.step,
        HIGH_FIRST=w.high_first,
        G=w.group,
        SREL="F8_E4M3" if w.scales is None or w.scales.dtype == torch.uint8 else "F32",
        **shared,
        **fixed,
        **OPTIONS,
    )
    return answer(result, out)


def _scaled_natively(x: Operand, w: Operand) -> bool:
    """Whether the matrix units take both operands as stored: block scales on both sides, on Blackwell."""
    same = x.kind == w.kind and x.kind in ("nvfp4", "mxfp8")
    return same and can("block-scaled dot") and w.high_first
