"""Launching the row kernels: int8, int4 and fp8 with one scale a row, the rotation inside."""

from __future__ import annotations

import math
from typing import Any

import torch
from qconvert.kernels.api import FP8_MAX, Quality
from qconvert.kernels.search import (
    CLIP_MARGIN,
    FP8_FACTORS,
    INT4_FACTORS,
    INT4_STEPS,
    INT8_FACTORS,
    INT8_STEPS,
    LEAST_NORMAL,
    ROW_LANES,
    SCALE_FLOOR,
)
from qconvert.kernels.triton import rows, search, search_fp8
from qconvert.kernels.triton.launch import OPTIONS, answer, bits_of, kind_of, like, up2, warps
from qconvert.kernels.triton.rotate import SPLITS
from torch import Tensor

#: Columns of the longest row that is kept in registers.
ROW_TILE = 8192


def row_layout(k: int, rotation: int) -> dict[str, Any]:
    """Tile of a row of k columns: HI, LO, FACTOR, GROUPS, TILES of `rows.quantise_rows`."""
    hi, lo = SPLITS[rotation]
    group = hi * lo
    tile = max(min(ROW_TILE, up2(k)), group, 2)
    return {
        "HI": hi,
        "LO": lo,
        "FACTOR": 1.0 / math.sqrt(group),
        "GROUPS": tile // group,
        "TILES": -(-k // tile),
    }


#: Code -> (levels, least scale, whether a row of zeros has scale 1).
_CODES = {
    "int8": (127.0, SCALE_FLOOR, False),
    "int7": (7.0, SCALE_FLOOR, False),
    "int4": (7.0, SCALE_FLOOR, False),
    "e4m3": (FP8_MAX["F8_E4M3"], LEAST_NORMAL, True),
    "e5m2": (FP8_MAX["F8_E5M2"], LEAST_NORMAL, True),
}


def quantise_rows(
    x: Tensor, code: str, rotation: int = 0, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [R, K] -> codes and scale [R]. code: int8, int7 (-7..7 as int8), int4 (packed), e4m3, e5m2.

    `scale` [R]: given instead of made. The rotation (0, 4, 16, 64, 256) is done inside.
    """
    r, k = x.shape
    levels, floor, zero_is_one = _CODES[code]
    dtype = torch.int8 if code in ("int8", "int7") else torch.uint8
    q = torch.empty(r, k // 2 if code == "int4" else k, dtype=dtype, device=x.device)
    given = scale is not None
    scales = torch.empty(r, device=x.device) if scale is None else scale.contiguous()
    if q.numel():
        layout = row_layout(k, rotation)
        rows.quantise_rows[(r,)](
            bits_of(x),
            q,
            scales,
            k,
            x.stride(0),
            q.stride(0),
            KIND=kind_of(x),
            CODE=code,
            LEVELS=levels,
            FLOOR=floor,
            ZERO_IS_ONE=zero_is_one,
            GIVEN=given,
            **layout,
            num_warps=warps(layout["GROUPS"] * layout["HI"] * layout["LO"]),
            **OPTIONS,
        )
    return q, scales


def dequantise_rows(
    q: Tensor, scale: Tensor, kind: str, rotation: int = 0, out: str = "F32", index: Tensor | None = None
) -> Tensor:
    """Codes times scale [] or [R], rotated back, [R, K] in stored type `out`.

    kind: I8 [R, K], int4 [R, K/2], F8_E4M3, F8_E5M2, or a plain F32, F16, BF16 (no scale). `index` [L]: only these
    rows, in this order.
    """
    k = q.shape[1] * (2 if kind == "int4" else 1)
    r = q.shape[0] if index is None else index.numel()
    result = like(out, (r, k), q.device)
    if result.numel():
        layout = row_layout(min(k, 2048), rotation)
        tile = layout["GROUPS"] * layout["HI"] * layout["LO"]
        del layout["TILES"]
        rows.dequantise_rows[(r, -(-k // tile))](
            bits_of(q),
            scale.contiguous(),
            scale if index is None else index.contiguous(),
            result,
            k,
            0 if scale.numel() == 1 else 1,
            q.stride(0),
            OUT=out,
            KIND=kind,
            GATHER=index is not None,
            **layout,
            num_warps=warps(tile),
            **OPTIONS,
        )
    return answer(result, out)


def row_scale(x: Tensor, code: str, quality: Quality) -> Tensor:
    """[R] of x [R, K] float32, already rotated; int8 or int4."""
    levels, eight = (127.0, True) if code == "int8" else (7.0, False)
    if quality == "fast":
        return torch.maximum(x.abs().amax(dim=1) / levels, torch.tensor(SCALE_FLOOR, device=x.device))
    factors, steps = (INT8_FACTORS, INT8_STEPS) if eight else (INT4_FACTORS, INT4_STEPS)
    count = up2(1 + len(factors))
    tried = torch.tensor([1.0, *factors, *[1.0] * (count - 1 - len(factors))], device=x.device)
    scales = torch.empty(x.shape[0], device=x.device)
    search.search_row_scale[(x.shape[0],)](
        x.contiguous(),
        scales,
        tried,
        torch.tensor([*steps, 0.0], device=x.device),
        x.shape[1],
        1 + len(factors),
        len(steps),
        LEVELS=levels,
        FLOOR=SCALE_FLOOR,
        MARGIN=CLIP_MARGIN,
        COUNT=count,
        LANES=ROW_LANES,
        **OPTIONS,
    )
    return scales


def fp8_fitted_scale(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """[R] of x [R, K] float32 and the absmax scales [R]."""
    out = torch.empty_like(scale)
    tried = torch.tensor([1.0, *FP8_FACTORS], device=x.device)
    search_fp8.search_fp8_scale[(x.shape[0],)](
        x.contiguous(),
        scale.contiguous(),
        tried,
        out,
        x.shape[1],
        tried.numel(),
        E4M3=dtype == "F8_E4M3",
        MARGIN=CLIP_MARGIN,
        LANES=ROW_LANES,
        **OPTIONS,
    )
    return out
