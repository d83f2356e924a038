"""Launching the block-scale kernels: nvfp4 and mxfp8."""

from __future__ import annotations

import torch
from qconvert.kernels.api import Quality
from qconvert.kernels.search import NVFP4_OFFSETS
from qconvert.kernels.triton import blocks
from qconvert.kernels.triton.launch import OPTIONS, answer, bits_of, kind_of, like, up2, warps
from torch import Tensor


def _block_scales(r: int, count: int, swizzle: bool, device: torch.device) -> tuple[Tensor, int]:
    """Room for scales, and the tiles a row."""
    if not swizzle:
        return torch.empty(r, count, dtype=torch.uint8, device=device), 0
    shape = (-(-r // 128) * 128, -(-count // 4) * 4)
    return torch.zeros(shape, dtype=torch.uint8, device=device), shape[1] // 4


def _block_tile(r: int, count: int, width: int) -> dict[str, int]:
    """A few rows only: long runs of blocks; else whole scale tiles, 128 x 4. Threads for all of it: 32 values each."""
    many = min(128, up2(r))
    blocks_each = max(4, min(4096 // (many * width), up2(count)))
    return {"ROWS": many, "BLOCKS": blocks_each, "num_warps": warps(many * blocks_each * width)}


def _block_grid(r: int, count: int, tile: dict[str, int]) -> tuple[int, int]:
    return -(-r // tile["ROWS"]), -(-count // tile["BLOCKS"])


def quantise_nvfp4(
    x: Tensor, tensor_scale: Tensor, quality: Quality = "fast", swizzle: bool = False
) -> tuple[Tensor, Tensor]:
    """x [R, K] -> codes [R, K/2] (even column high), e4m3 scales [R, K/16] or in swizzled tiles."""
    r, k = x.shape
    codes = torch.empty(r, k // 2, dtype=torch.uint8, device=x.device)
    scales, tiles = _block_scales(r, k // 16, swizzle, x.device)
    if codes.numel():
        offsets = NVFP4_OFFSETS if quality == "best" else ()
        tile = _block_tile(r, k // 16, 16)
        blocks.quantise_nvfp4[_block_grid(r, k // 16, tile)](
            bits_of(x),
            codes,
            scales,
            tensor_scale.to(torch.float32).reshape(1),
            torch.tensor([*offsets, 0], dtype=torch.int32, device=x.device),
            r,
            k,
            x.stride(0),
            tiles,
            KIND=kind_of(x),
            SWIZZLE=swizzle,
            COUNT=len(offsets),
            **tile,
            **OPTIONS,
        )
    return codes, scales


def dequantise_nvfp4(
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor,
    *,
    swizzled: bool = False,
    high_first: bool = True,
    out: str = "F32",
) -> Tensor:
    """value * (tensor scale * block scale), [R, K] in stored type `out`."""
    r, k = codes.shape[0], codes.shape[1] * 2
    result = like(out, (r, k), codes.device)
    if result.numel():
        tile = _block_tile(r, k // 16, 16)
        blocks.dequantise_nvfp4[_block_grid(r, k // 16, tile)](
            codes.contiguous(),
            scales.contiguous(),
            tensor_scale.to(torch.float32).reshape(1),
            result,
            r,
            k,
            scales.shape[1] // 4,
            OUT=out,
            SWIZZLE=swizzled,
            HIGH_FIRST=high_first,
            **tile,
            **OPTIONS,
        )
    return answer(result, out)


def quantise_mxfp8(x: Tensor, swizzle: bool = False) -> tuple[Tensor, Tensor]:
    """x [R, K] -> e4m3 [R, K], e8m0 scales [R, K/32] or in swizzled tiles."""
    r, k = x.shape
    q = torch.empty(r, k, dtype=torch.uint8, device=x.device)
    scales, tiles = _block_scales(r, k // 32, swizzle, x.device)
    if q.numel():
        tile = _block_tile(r, k // 32, 32)
        blocks.quantise_mxfp8[_block_grid(r, k // 32, tile)](
            bits_of(x),
            q,
            scales,
            r,
            k,
            x.stride(0),
            tiles,
            KIND=kind_of(x),
            SWIZZLE=swizzle,
            **tile,
            **OPTIONS,
        )
    return q, scales


def dequantise_mxfp8(q: Tensor, scales: Tensor, *, swizzled: bool = False, out: str = "F32") -> Tensor:
    """float32(q) * 2^(e-127), [R, K] in stored type `out`."""
    r, k = q.shape
    result = like(out, (r, k), q.device)
    if result.numel():
        tile = _block_tile(r, k // 32, 32)
        blocks.dequantise_mxfp8[_block_grid(r, k // 32, tile)](
            q.contiguous(),
            scales.contiguous(),
            result,
            r,
            k,
            scales.shape[1] // 4,
            OUT=out,
            SWIZZLE=swizzled,
            **tile,
            **OPTIONS,
        )
    return answer(result, out)
