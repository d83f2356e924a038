"""Triton as a backend of the codecs: numpy arrays in and out, kernels on the GPU (or interpreted on the CPU)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from qconvert.kernels import reference as ref
from qconvert.kernels import reference_w4a8 as ref_w4a8
from qconvert.kernels.api import FP8_MAX, Quality
from qconvert.kernels.arrays import F32, I8, U8, Raw
from qconvert.kernels.check import check_group, check_nvfp4, check_w4a8
from qconvert.kernels.codebook import fit_codebook
from qconvert.kernels.triton import launch, launch_blocks, launch_grid, launch_rows
from qconvert.kernels.triton.chips import device
from qconvert.kernels.triton.lanes import Lanes
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

#: Groups that the w4a8 kernels take: powers of two. Others are computed by the definition, on the same device.
GRID_GROUPS = (4, 8, 16, 32, 64, 128, 256)
ROTATIONS = (4, 16, 64, 256, 1024)


def _on_lane(
    method: Callable[Concatenate[TritonBackend, P], T],
) -> Callable[Concatenate[TritonBackend, P], T]:
    """The method on its thread's stream."""

    @wraps(method)
    def run(self: TritonBackend, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lanes.entered():
            return method(self, *args, **kwargs)

    return run


class TritonBackend:
    """Implements `api.Backend`. Raises ImportError, saying why, where no kernel can run.

    Arrays travel through the lanes of `lanes`; several threads may call at the same time.
    """

    name = "triton"

    def __init__(self) -> None:
        self._device = device()
        self.lanes = Lanes(self._device)

    def _to(self, a: NDArray[Any]) -> Tensor:
        return self.lanes.lane().upload(a)

    def _from(self, t: Tensor) -> NDArray[Any]:
        return self.lanes.lane().download(t)

    @_on_lane
    def to_f32(self, raw: Raw, dtype: str) -> F32:
        return self._from(launch.cast(self._to(raw), dtype, "F32"))

    @_on_lane
    def from_f32(self, x: F32, dtype: str) -> Raw:
        out: Raw = self._from(launch.cast(self._to(x), "F32", dtype))
        return out.view(np.uint16) if dtype == "BF16" else out

    @_on_lane
    def amax(self, x: F32) -> float:
        return float(launch.amax(self._to(x)))

    @_on_lane
    def error(self, x: F32, y: F32) -> tuple[float, float]:
        a, b = self._to(x).to(torch.float64), self._to(y).to(torch.float64)
        return float((a * a).sum()), float(((a - b) * (a - b)).sum())

    @_on_lane
    def rotate(self, x: F32, group: int) -> F32:
        check_group(x, group)
        t = self._to(x)
        return self._from(launch.rotate(t, group) if group in ROTATIONS else ref.rotate(t, group))

    def fp8_scale(self, amax: float, dtype: str) -> np.float32:
        return np.float32(ref.scalar_scale(amax, FP8_MAX[dtype]).item())

    @_on_lane
    def fp8_fitted_scale(self, x: F32, scale: F32, dtype: str) -> F32:
        return self._from(launch_rows.fp8_fitted_scale(self._to(x), self._to(scale), dtype))

    @_on_lane
    def fp8_encode(self, x: F32, scale: F32, dtype: str) -> U8:
        return self._from(launch.encode_fp8(self._to(x), self._to(np.asarray(scale)), dtype))

    @_on_lane
    def fp8_decode(self, q: U8, scale: F32, dtype: str) -> F32:
        return self._from(launch.decode_fp8(self._to(q), self._to(np.asarray(scale)), dtype))

    @_on_lane
    def int8_row_scale(self, x: F32, quality: Quality) -> F32:
        return self._from(launch_rows.row_scale(self._to(x), "int8", quality))

    @_on_lane
    def int8_encode(self, x: F32, scale: F32) -> I8:
        rows, spread = self._to(x), self._to(np.broadcast_to(np.asarray(scale), x.shape[:1]))
        return self._from(launch_rows.quantise_rows(rows, "int8", scale=spread)[0])

    @_on_lane
    def int8_decode(self, q: I8, scale: F32) -> F32:
        return self._from(launch_rows.dequantise_rows(self._to(q), self._to(np.asarray(scale)), "I8"))

    def nvfp4_tensor_scale(self, amax: float) -> np.float32:
        return np.float32(ref.nvfp4_tensor_scale(amax).item())

    @_on_lane
    def nvfp4_encode(self, x: F32, tensor_scale: np.float32, quality: Quality) -> tuple[U8, U8]:
        check_nvfp4(x, tensor_scale)
        total = torch.tensor(float(tensor_scale), device=self._device)
        codes, scales = launch_blocks.quantise_nvfp4(self._to(x), total, quality)
        return self._from(codes), self._from(scales)

    @_on_lane
    def nvfp4_decode(self, codes: U8, scales: U8, tensor_scale: np.float32) -> F32:
        total = torch.tensor(float(tensor_scale), device=self._device)
        return self._from(launch_blocks.dequantise_nvfp4(self._to(codes), self._to(scales), total))

    @_on_lane
    def mxfp8_encode(self, x: F32, quality: Quality) -> tuple[U8, U8]:
        check_group(x, 32, power_of_4=False)
        q, scales = launch_blocks.quantise_mxfp8(self._to(x))
        return self._from(q), self._from(scales)

    @_on_lane
    def mxfp8_decode(self, q: U8, scales: U8) -> F32:
        return self._from(launch_blocks.dequantise_mxfp8(self._to(q), self._to(scales)))

    @_on_lane
    def w4a4_encode(self, x: F32, quality: Quality) -> tuple[U8, F32]:
        check_group(x, 2, power_of_4=False)
        rows = self._to(x)
        scale = launch_rows.row_scale(rows, "int4", quality) if quality == "best" else None
        codes, scales = launch_rows.quantise_rows(rows, "int4", scale=scale)
        return self._from(codes), self._from(scales)

    @_on_lane
    def w4a4_decode(self, codes: U8, scale: F32) -> F32:
        return self._from(launch_rows.dequantise_rows(self._to(codes), self._to(scale), "int4"))

    def w4a8_codebook(self, sample: F32, group: int, quality: Quality) -> F32:
        check_w4a8(sample, group)
        return fit_codebook(sample, group, quality)

    @_on_lane
    def w4a8_encode(self, x: F32, group: int, codebook: F32 | None, quality: Quality) -> tuple[U8, U8, F32]:
        check_w4a8(x, group, codebook)
        rows, table = self._to(x), None if codebook is None else self._to(codebook)
        if group not in GRID_GROUPS:
            return self._by_definition(ref_w4a8.w4a8_encode(rows.cpu(), group, _cpu(table), quality))
        return self._by_definition(launch_grid.quantise_grid(rows, group, table, 4, quality))

    def _by_definition(self, found: tuple[Tensor, Tensor, Tensor]) -> tuple[U8, U8, F32]:
        return self._from(found[0]), self._from(found[1]), self._from(found[2])

    @_on_lane
    def w4a8_decode(
        self,
        codes: U8,
        s_rel: F32,
        s_channel: F32,
        codebook: F32 | None,
        group: int,
        bits: int,
        correction: F32 | None,
    ) -> F32:
        return self._from(
            launch_grid.dequantise_grid(
                self._to(codes),
                self._to(s_rel),
                self._to(s_channel),
                None if codebook is None else self._to(codebook),
                group,
                bits,
                correction=None if correction is None else self._to(correction),
            )
        )

    @_on_lane
    def w6a8_encode(self, x: F32, group: int, quality: Quality) -> tuple[U8, U8, F32]:
        check_w4a8(x, group, six_bit=True)
        rows = self._to(x)
        if group not in GRID_GROUPS:
            return self._by_definition(ref_w4a8.w6a8_encode(rows.cpu(), group, quality))
        return self._by_definition(launch_grid.quantise_grid(rows, group, None, 6, quality))


def _cpu(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.cpu()
