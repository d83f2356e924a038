"""Launching kernels on torch tensors, and those of single values. Results lie where the input lies.

Sources are float32, float16, bfloat16 or float64 tensors [R, K]; fp8 travels as uint8. Nothing is checked here that
`kernels.check` has checked before.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from qconvert.kernels.triton import elementwise
from torch import Tensor

#: No product and sum may become one operation: half-even rounding and equal bits depend on it.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
#: Values handled by one launch of a flat kernel, so that offsets stay below 2^31.
FLAT_LIMIT = 1 << 30
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_OUT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.int16, "I8": torch.int8}
_ANSWER = {"BF16": torch.bfloat16}


def kind_of(x: Tensor) -> str:
    """The stored type that kernels are told for a tensor."""
    return _KINDS[x.dtype]


def bits_of(x: Tensor) -> Tensor:
    """bf16 as int16, which is how kernels take it; all else as it is."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def up2(x: int) -> int:
    """The least power of two that is not below x."""
    return 1 << max(x - 1, 0).bit_length()


def like(out: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Room for values of a stored type, bf16 as int16."""
    return torch.empty(shape, dtype=_OUT.get(out, torch.uint8), device=device)


def answer(raw: Tensor, out: str) -> Tensor:
    """int16 bits of bf16 under their own type; all else as it is."""
    return raw.view(_ANSWER[out]) if out in _ANSWER else raw


def warps(tile: int) -> int:
    """Warps for a tile of that many values."""
    return min(max(tile // 1024, 1), 16)


def cast(x: Tensor, kind: str, out: str) -> Tensor:
    """Values of stored type `kind` (bf16 as int16, fp8 as uint8) in stored type `out`, bf16 as int16."""
    flat = x.contiguous().reshape(-1)
    result = like(out, (flat.numel(),), x.device)
    block = min(4096, up2(flat.numel()))
    for a in range(0, flat.numel(), FLAT_LIMIT):
        part = flat[a : a + FLAT_LIMIT]
        elementwise.cast[(-(-part.numel() // block),)](
            part, result[a:], part.numel(), KIND=kind, OUT=out, BLOCK=block, **OPTIONS
        )
    return result.reshape(x.shape)


def amax(x: Tensor) -> Tensor:
    """[] float32: the largest magnitude, 0 of nothing; NaN when there is one."""
    flat = bits_of(x).contiguous().reshape(-1)
    if not flat.numel():
        return torch.zeros((), device=x.device)
    block = min(8192, up2(flat.numel()))
    found = []
    for a in range(0, flat.numel(), FLAT_LIMIT):
        part = flat[a : a + FLAT_LIMIT]
        partial = torch.empty(-(-part.numel() // block), dtype=torch.int32, device=x.device)
        elementwise.largest_bits[(partial.numel(),)](
            part, partial, part.numel(), KIND=kind_of(x), BLOCK=block, **OPTIONS
        )
        found.append(partial.amax())
    bits: Tensor = torch.stack(found).amax()
    return bits.view(torch.float32)


def rotate(x: Tensor, group: int, out: str = "F32") -> Tensor:
    """`reference.rotate` of [..., K]; any power of 4 up to 1024."""
    if group not in (4, 16, 64, 256, 1024):
        raise ValueError(f"no kernel rotates groups of {group}")
    flat = bits_of(x).contiguous().reshape(-1)
    result = like(out, (flat.numel(),), x.device)
    block = max(group, min(2048, up2(flat.numel())))
    for a in range(0, flat.numel(), FLAT_LIMIT):
        part = flat[a : a + FLAT_LIMIT]
        elementwise.rotate[(-(-part.numel() // block),)](
            part,
            result[a:],
            part.numel(),
            KIND=kind_of(x),
            OUT=out,
            GROUP=group,
            FACTOR=1.0 / math.sqrt(group),
            BLOCK=block,
            **OPTIONS,
        )
    return answer(result, out).reshape(x.shape)


def _scaled(x: Tensor, scale: Tensor, kind: str, out: str, divide: bool) -> Tensor:
    r, k = x.shape[0], x[0].numel() if x.shape[0] else 0
    result = like(out, tuple(x.shape), x.device)
    if result.numel():
        block = min(4096, up2(k))
        elementwise.scale_fp8[(r, -(-k // block))](
            x.contiguous(),
            scale.contiguous(),
            result,
            k,
            0 if scale.numel() == 1 else 1,
            k,
            KIND=kind,
            OUT=out,
            DIVIDE=divide,
            BLOCK=block,
            **OPTIONS,
        )
    return answer(result, out)


def encode_fp8(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """`reference.fp8_encode` with a scale [] or [R]."""
    return _scaled(bits_of(x), scale, kind_of(x), dtype, True)


def decode_fp8(q: Tensor, scale: Tensor, dtype: str, out: str = "F32") -> Tensor:
    """float32(q) * scale in stored type `out`."""
    return _scaled(q, scale, dtype, out, False)
