"""Launching the kernels of asym_w4a8_int8, 4 and 6 bit."""

from __future__ import annotations

import math

import torch
from qconvert.kernels import reference as ref
from qconvert.kernels.api import Quality
from qconvert.kernels.search import (
    ROW_LANES,
    SCALE_FLOOR,
    W4A8_MULTIPLES,
    W4A8_OFFSETS,
    W6A8_MULTIPLES,
    W6A8_OFFSETS,
)
from qconvert.kernels.triton import grid
from qconvert.kernels.triton.launch import OPTIONS, answer, bits_of, kind_of, like, rotate, up2
from torch import Tensor


def quantise_grid(
    x: Tensor, group: int, codebook: Tensor | None, bits: int, quality: Quality, rotation: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x [R, K] -> codes, s_rel e4m3 [R, K/group], s_channel [R]; group a power of two, rotation done inside."""
    r, k = x.shape
    device = x.device
    codes = torch.empty(r, k * bits // 8, dtype=torch.uint8, device=device)
    levels = 31.0 if bits == 6 else 8.0
    largest = levels if codebook is None else float(codebook.abs().max())
    table = torch.zeros(16, device=device) if codebook is None else codebook.to(device)
    given = quality == "best" or bits == 4
    if given:
        x = (rotate(x, rotation) if rotation else x.to(torch.float32)).contiguous()
        rotation = 0
        s_rel, s_channel = _search_grid(x, group, table, codebook is not None, bits, largest, quality)
    else:
        s_rel = torch.empty(r, k // group, dtype=torch.uint8, device=device)
        s_channel = torch.empty(r, device=device)
    if codes.numel():
        size = max(group, rotation, min(2048, up2(k)))
        grid.quantise_grid[(r,)](
            bits_of(x),
            codes,
            s_rel,
            s_channel,
            table,
            k,
            x.stride(0),
            largest,
            KIND=kind_of(x),
            TABLE=codebook is not None,
            BITS=bits,
            GIVEN=given,
            ROT=rotation,
            FACTOR=1.0 / math.sqrt(max(rotation, 1)),
            G=group,
            NG=size // group,
            TILES=-(-k // size),
            **OPTIONS,
        )
    return codes, s_rel, s_channel


def _search_grid(
    x: Tensor, group: int, table: Tensor, has_table: bool, bits: int, largest: float, quality: Quality
) -> tuple[Tensor, Tensor]:
    """`reference_w4a8._search`: the kernel searches groups, the few values a row are compared in torch."""
    r, k = x.shape
    offsets = W4A8_OFFSETS if bits == 4 else W6A8_OFFSETS
    multiples = W4A8_MULTIPLES if bits == 4 else W6A8_MULTIPLES
    steps = torch.tensor(offsets, dtype=torch.int32, device=x.device)
    floor = torch.tensor(SCALE_FLOOR, device=x.device)
    base = torch.maximum(x.abs().amax(dim=1) / 127.0, floor)
    best_channel, least_row = base, torch.full_like(base, math.inf)
    best_code = torch.zeros(r, k // group, dtype=torch.uint8, device=x.device)
    size = max(group, min(1024, up2(x.numel())))
    for m in multiples if quality == "best" else (1.0,):
        multiple = torch.tensor(m, dtype=torch.float32, device=x.device)
        channel = base * multiple
        code = torch.empty_like(best_code)
        least = torch.empty(r, k // group, device=x.device)
        groups = least.numel()
        grid.search_grid[(-(-groups // (size // group)),)](
            x,
            channel,
            code,
            least,
            table,
            steps,
            groups,
            k,
            largest,
            TABLE=has_table,
            BITS=bits,
            COUNT=len(offsets),
            G=group,
            NG=size // group,
            **OPTIONS,
        )
        row = ref.lane_sum(least, ROW_LANES) * (multiple * multiple)
        wins = row < least_row
        least_row = torch.where(wins, row, least_row)
        best_channel = torch.where(wins, channel, best_channel)
        best_code = torch.where(wins[:, None], code, best_code)
    return best_code, best_channel


def dequantise_grid(
    codes: Tensor,
    s_rel: Tensor,
    s_channel: Tensor | None,
    codebook: Tensor | None,
    group: int,
    bits: int,
    *,
    correction: Tensor | None = None,
    signed: bool = False,
    rotation: int = 0,
    out: str = "F32",
) -> Tensor:
    """[R, K] in stored type `out`, rotated back; s_channel None: the int8 grid itself (out I8 or a float).

    s_rel: e4m3 bits as uint8, or float32. correction [R, K/group].
    """
    r, k = codes.shape[0], codes.shape[1] * 8 // bits
    result = like(out, (r, k), codes.device)
    none = torch.zeros(16, device=codes.device)
    if result.numel():
        size = max(rotation, min(2048, up2(k)))
        grid.dequantise_grid[(r, -(-k // size))](
            codes,
            s_rel.contiguous(),
            none if s_channel is None else s_channel.contiguous(),
            none if codebook is None else codebook,
            none if correction is None else correction.contiguous(),
            result,
            k,
            codes.stride(0),
            OUT=out,
            TABLE=codebook is not None,
            BITS=bits,
            FLIP=signed,
            SREL="F8_E4M3" if s_rel.dtype == torch.uint8 else "F32",
            CORRECTED=correction is not None,
            CHANNEL=s_channel is not None,
            ROT=rotation,
            FACTOR=1.0 / math.sqrt(max(rotation, 1)),
            G=group,
            SIZE=size,
            **OPTIONS,
        )
    return answer(result, out)
