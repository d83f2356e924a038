"""Stored weights as torch tensors, and what they stand for: the operands of `linear.linear`.

Every weight is `values * outer`: `values` [N, K] are what a matmul multiplies (integers, or small floats that fit
fp16 and bf16 without rounding), `outer` [] or [N] is applied to the product. Both are float32, computed by
`reference`. `slice(a, b)` is rows [a, b) of the same kind (`a` a multiple of `step`), by which large weights are
cut into pieces. fp8 and e8m0 travel as uint8; nothing here is copied until `values` is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from qconvert.kernels import reference as ref
from qconvert.kernels import reference_w4a8 as ref_w4a8
from torch import Tensor

TILE_ROWS = 128


def unswizzle(stored: Tensor, rows: int, cols: int) -> Tensor:
    """Stored scale tiles [up(R,128), up(C,4)] -> logical [rows, cols]; see `layout.unswizzle`."""
    padded_rows, padded_cols = stored.shape
    tiles = stored.reshape(padded_rows // TILE_ROWS, padded_cols // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_cols)[:rows, :cols]


class Weight(ABC):
    """A stored [n, k] weight."""

    #: Slices begin at multiples of this many rows.
    step: int = 1

    @property
    @abstractmethod
    def n(self) -> int: ...

    @property
    @abstractmethod
    def k(self) -> int: ...

    @abstractmethod
    def slice(self, a: int, b: int) -> Weight:
        """Rows [a, b)."""

    @abstractmethod
    def values(self) -> Tensor:
        """[n, k] float32."""

    def outer(self) -> Tensor | None:
        """[] or [n] float32; None for 1."""
        return None

    @abstractmethod
    def take(self, rows: Tensor) -> Weight:
        """The rows listed in `rows` (int64 [L]), in that order."""

    def decode(self) -> Tensor:
        """[n, k] float32: values times outer, in the stored basis."""
        values, outer = self.values(), self.outer()
        if outer is None:
            return values
        return values * (outer if outer.ndim == 0 else outer[:, None])


def _rows(scale: Tensor, a: int, b: int) -> Tensor:
    return scale if scale.ndim == 0 else scale[a:b]


@dataclass(frozen=True)
class PlainWeight(Weight):
    """weight [n, k] float32, float16 or bfloat16."""

    q: Tensor

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def k(self) -> int:
        return self.q.shape[1]

    def slice(self, a: int, b: int) -> PlainWeight:
        return PlainWeight(self.q[a:b])

    def take(self, rows: Tensor) -> PlainWeight:
        return PlainWeight(self.q[rows])

    def values(self) -> Tensor:
        return self.q.to(torch.float32)


@dataclass(frozen=True)
class Int8Weight(Weight):
    """q int8 [n, k], scale float32 [] or [n]."""

    q: Tensor
    scale: Tensor

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def k(self) -> int:
        return self.q.shape[1]

    def slice(self, a: int, b: int) -> Int8Weight:
        return Int8Weight(self.q[a:b], _rows(self.scale, a, b))

    def take(self, rows: Tensor) -> Int8Weight:
        return Int8Weight(self.q[rows], self.scale if self.scale.ndim == 0 else self.scale[rows])

    def values(self) -> Tensor:
        return self.q.to(torch.float32)

    def outer(self) -> Tensor:
        return self.scale


@dataclass(frozen=True)
class Int4Weight(Weight):
    """q uint8 [n, k/2], signed nibbles (even column low); scale float32 [n]."""

    q: Tensor
    scale: Tensor

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def k(self) -> int:
        return self.q.shape[1] * 2

    def slice(self, a: int, b: int) -> Int4Weight:
        return Int4Weight(self.q[a:b], self.scale[a:b])

    def take(self, rows: Tensor) -> Int4Weight:
        return Int4Weight(self.q[rows], self.scale[rows])

    def values(self) -> Tensor:
        return ref.w4a4_decode(self.q, torch.ones_like(self.scale))

    def outer(self) -> Tensor:
        return self.scale


@dataclass(frozen=True)
class GridWeight(Weight):
    """asym_w4a8_int8. q uint8 [n, k/2] or [n, 3k/4]; s_rel e4m3 bits (uint8) or float32 [n, k/group].

    s_channel float32 [n]; None for the symmetric relatives whose weight is code * s_rel, without an int8 grid.
    codebook float32 [16] or None; correction float32 [n, k/group] or None. `signed`: nibbles are two's complement.
    """

    q: Tensor
    s_rel: Tensor
    s_channel: Tensor | None
    codebook: Tensor | None
    correction: Tensor | None
    group: int
    bits: int = 4
    signed: bool = False

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def k(self) -> int:
        return self.s_rel.shape[1] * self.group

    def slice(self, a: int, b: int) -> GridWeight:
        return replace(
            self,
            q=self.q[a:b],
            s_rel=self.s_rel[a:b],
            s_channel=None if self.s_channel is None else self.s_channel[a:b],
            correction=None if self.correction is None else self.correction[a:b],
        )

    def take(self, rows: Tensor) -> GridWeight:
        return replace(
            self,
            q=self.q[rows],
            s_rel=self.s_rel[rows],
            s_channel=None if self.s_channel is None else self.s_channel[rows],
            correction=None if self.correction is None else self.correction[rows],
        )

    @property
    def integral(self) -> bool:
        """Whether `values` are integers of at most 127."""
        return self.s_channel is not None and self.correction is None

    def relative(self) -> Tensor:
        """s_rel in float32."""
        return ref.decode_e4m3(self.s_rel) if self.s_rel.dtype == torch.uint8 else self.s_rel

    def values(self) -> Tensor:
        q = self.q ^ 0x88 if self.signed else self.q
        levels = self.codebook
        if levels is None and self.bits == 4:
            levels = ref_w4a8.UNIFORM.to(q.device)
        if self.s_channel is None:
            index = ref.unpack_nibbles(q, high_first=False).to(torch.int64)
            assert levels is not None
            return (ref.split(levels[index], self.group) * self.relative()[..., None]).flatten(1)
        channel = torch.ones_like(self.s_channel) if self.integral else self.s_channel
        return ref_w4a8.w4a8_decode(
            q, self.relative(), channel, levels, self.group, self.bits, self.correction
        )

    def outer(self) -> Tensor | None:
        return self.s_channel if self.integral else None


@dataclass(frozen=True)
class Fp8Weight(Weight):
    """q uint8 [n, k], e4m3 or e5m2 bits (`kind` F8_E4M3 | F8_E5M2).

    scale float32 [] or [n], or [ceil(n/128), ceil(k/128)] for blocks of 128 x 128.
    """

    q: Tensor
    scale: Tensor
    kind: str = "F8_E4M3"

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def k(self) -> int:
        return self.q.shape[1]

    @property
    def step(self) -> int:  # type: ignore[override]
        return 128 if self.blocked else 1

    @property
    def blocked(self) -> bool:
        return self.scale.ndim == 2

    def slice(self, a: int, b: int) -> Fp8Weight:
        scale = self.scale[a // 128 : -(-b // 128)] if self.blocked else _rows(self.scale, a, b)
        return replace(self, q=self.q[a:b], scale=scale)

    def take(self, rows: Tensor) -> Fp8Weight:
        if self.blocked:
            raise ValueError("rows cannot be taken out of 128 x 128 blocks")
        return replace(self, q=self.q[rows], scale=self.scale if self.scale.ndim == 0 else self.scale[rows])

    def values(self) -> Tensor:
        values = ref.to_f32(self.q, self.kind)
        if not self.blocked:
            return values
        spread = self.scale.repeat_interleave(128, 0)[: self.n].repeat_interleave(128, 1)[:, : self.k]
        return values * spread

    def outer(self) -> Tensor | None:
        return None if self.blocked else self.scale


@dataclass(frozen=True)
class Nvfp4Weight(Weight):
    """q uint8 [n, k/2]; block scales e4m3 bits, swizzled [up(n,128), up(k/16,4)] or linear [n, k/16].

    tensor_scale float32 []. `high_first`: even columns in the high nibble.
    """

    q: Tensor
    block_scale: Tensor
    tensor_scale: Tensor
    swizzled: bool = True
    high_first: bool = True

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def k(self) -> int:
        return self.q.shape[1] * 2

    @property
    def step(self) -> int:  # type: ignore[override]
        return TILE_ROWS if self.swizzled else 1

    def slice(self, a: int, b: int) -> Nvfp4Weight:
        last = -(-b // TILE_ROWS) * TILE_ROWS if self.swizzled else b
        return replace(self, q=self.q[a:b], block_scale=self.block_scale[a:last])

    def take(self, rows: Tensor) -> Nvfp4Weight:
        return replace(self, q=self.q[rows], block_scale=self.scales()[rows], swizzled=False)

    def scales(self) -> Tensor:
        """Logical block scales, e4m3 bits [n, k/16]."""
        if not self.swizzled:
            return self.block_scale
        return unswizzle(self.block_scale, self.n, self.k // 16)

    def values(self) -> Tensor:
        codes = ref.unpack_nibbles(self.q, high_first=self.high_first).to(torch.int64)
        blocks = ref.split(ref.E2M1.to(self.q.device)[codes], 16)
        # Two significant bits times four: exact, in fp16 and bf16 too.
        return (blocks * ref.decode_e4m3(self.scales().contiguous())[..., None]).flatten(1)

    def outer(self) -> Tensor:
        return self.tensor_scale

    def decode(self) -> Tensor:
        # The format's order: code * (tensor scale * block scale), which differs in the last bit.
        codes = ref.unpack_nibbles(self.q, high_first=self.high_first).to(torch.int64)
        total = self.tensor_scale * ref.decode_e4m3(self.scales().contiguous())
        return (ref.split(ref.E2M1.to(self.q.device)[codes], 16) * total[..., None]).flatten(1)


@dataclass(frozen=True)
class Mxfp8Weight(Weight):
    """q uint8 [n, k] e4m3 bits; block scales e8m0 bits, swizzled [up(n,128), up(k/32,4)] or linear [n, k/32]."""

    q: Tensor
    block_scale: Tensor
    swizzled: bool = True

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def k(self) -> int:
        return self.q.shape[1]

    @property
    def step(self) -> int:  # type: ignore[override]
        return TILE_ROWS if self.swizzled else 1

    def slice(self, a: int, b: int) -> Mxfp8Weight:
        last = -(-b // TILE_ROWS) * TILE_ROWS if self.swizzled else b
        return replace(self, q=self.q[a:b], block_scale=self.block_scale[a:last])

    def take(self, rows: Tensor) -> Mxfp8Weight:
        return Mxfp8Weight(self.q[rows], self.scales()[rows], swizzled=False)

    def scales(self) -> Tensor:
        """Logical block scales, e8m0 bits [n, k/32]."""
        if not self.swizzled:
            return self.block_scale
        return unswizzle(self.block_scale, self.n, self.k // 32)

    def values(self) -> Tensor:
        return ref.mxfp8_decode(self.q, self.scales())


@dataclass(frozen=True)
class AwqWeight(Weight):
    """q uint8 [n, k/2], codes 0..15 (even column low); scale and zeros float32 [n, k/group]: (q - 8)*scale + zeros."""

    q: Tensor
    scale: Tensor
    zeros: Tensor
    group: int

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def k(self) -> int:
        return self.q.shape[1] * 2

    def slice(self, a: int, b: int) -> AwqWeight:
        return replace(self, q=self.q[a:b], scale=self.scale[a:b], zeros=self.zeros[a:b])

    def take(self, rows: Tensor) -> AwqWeight:
        return replace(self, q=self.q[rows], scale=self.scale[rows], zeros=self.zeros[rows])

    def values(self) -> Tensor:
        q = ref.unpack_nibbles(self.q, high_first=False).to(torch.float32) - 8.0
        return (ref.split(q, self.group) * self.scale[..., None] + self.zeros[..., None]).flatten(1)
