"""The reference as a backend: numpy arrays in and out, torch inside. Slow, and right by definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from qconvert.kernels import reference as ref
from qconvert.kernels import reference_w4a8 as ref_w4a8
from qconvert.kernels.api import FP8_MAX, Quality
from qconvert.kernels.arrays import F32, I8, U8, Raw
from qconvert.kernels.check import check_group, check_nvfp4, check_w4a8
from qconvert.kernels.codebook import fit_codebook


def _tensor(a: NDArray[Any]) -> torch.Tensor:
    """A torch tensor of the same bits; uint16 as int16. Copied when read-only, which torch cannot express."""
    a = np.ascontiguousarray(a).reshape(a.shape)
    if a.dtype == np.uint16:
        a = a.view(np.int16)
    return torch.from_numpy(a if a.flags.writeable else a.copy())


def _optional(a: F32 | None) -> torch.Tensor | None:
    return None if a is None else _tensor(a)


class ReferenceBackend:
    """Implements `api.Backend` with `reference`."""

    name = "reference"

    def to_f32(self, raw: Raw, dtype: str) -> F32:
        return ref.to_f32(_tensor(raw), dtype).numpy()

    def from_f32(self, x: F32, dtype: str) -> Raw:
        out: Raw = ref.from_f32(_tensor(x), dtype).numpy()
        return out.view(np.uint16) if dtype == "BF16" else out

    def amax(self, x: F32) -> float:
        return float(_tensor(x).abs().max()) if x.size else 0.0

    def error(self, x: F32, y: F32) -> tuple[float, float]:
        a, b = _tensor(x).to(torch.float64), _tensor(y).to(torch.float64)
        return float((a * a).sum()), float(((a - b) * (a - b)).sum())

    def rotate(self, x: F32, group: int) -> F32:
        check_group(x, group)
        return ref.rotate(_tensor(x), group).numpy()

    def fp8_scale(self, amax: float, dtype: str) -> np.float32:
        return np.float32(ref.scalar_scale(amax, FP8_MAX[dtype]).item())

    def fp8_fitted_scale(self, x: F32, scale: F32, dtype: str) -> F32:
        return ref.fp8_fitted_scale(_tensor(x), _tensor(scale), dtype).numpy()

    def fp8_encode(self, x: F32, scale: F32, dtype: str) -> U8:
        return ref.fp8_encode(_tensor(x), _tensor(np.asarray(scale)), dtype).numpy()

    def fp8_decode(self, q: U8, scale: F32, dtype: str) -> F32:
        return ref.fp8_decode(_tensor(q), _tensor(np.asarray(scale)), dtype).numpy()

    def int8_row_scale(self, x: F32, quality: Quality) -> F32:
        return ref.int8_row_scale(_tensor(x), quality).numpy()

    def int8_encode(self, x: F32, scale: F32) -> I8:
        return ref.int8_encode(_tensor(x), _tensor(np.asarray(scale))).numpy()

    def int8_decode(self, q: I8, scale: F32) -> F32:
        return ref.int8_decode(_tensor(q), _tensor(np.asarray(scale))).numpy()

    def nvfp4_tensor_scale(self, amax: float) -> np.float32:
        return np.float32(ref.nvfp4_tensor_scale(amax).item())

    def nvfp4_encode(self, x: F32, tensor_scale: np.float32, quality: Quality) -> tuple[U8, U8]:
        check_nvfp4(x, tensor_scale)
        codes, scales = ref.nvfp4_encode(_tensor(x), torch.tensor(float(tensor_scale)), quality)
        return codes.numpy(), scales.numpy()

    def nvfp4_decode(self, codes: U8, scales: U8, tensor_scale: np.float32) -> F32:
        return ref.nvfp4_decode(_tensor(codes), _tensor(scales), torch.tensor(float(tensor_scale))).numpy()

    def mxfp8_encode(self, x: F32, quality: Quality) -> tuple[U8, U8]:
        check_group(x, 32, power_of_4=False)
        q, scales = ref.mxfp8_encode(_tensor(x))
        return q.numpy(), scales.numpy()

    def mxfp8_decode(self, q: U8, scales: U8) -> F32:
        return ref.mxfp8_decode(_tensor(q), _tensor(scales)).numpy()

    def w4a4_encode(self, x: F32, quality: Quality) -> tuple[U8, F32]:
        check_group(x, 2, power_of_4=False)
        codes, scale = ref.w4a4_encode(_tensor(x), quality)
        return codes.numpy(), scale.numpy()

    def w4a4_decode(self, codes: U8, scale: F32) -> F32:
        return ref.w4a4_decode(_tensor(codes), _tensor(scale)).numpy()

    def w4a8_codebook(self, sample: F32, group: int, quality: Quality) -> F32:
        check_w4a8(sample, group)
        return fit_codebook(sample, group, quality)

    def w4a8_encode(self, x: F32, group: int, codebook: F32 | None, quality: Quality) -> tuple[U8, U8, F32]:
        check_w4a8(x, group, codebook)
        codes, s_rel, s_channel = ref_w4a8.w4a8_encode(_tensor(x), group, _optional(codebook), quality)
        return codes.numpy(), s_rel.numpy(), s_channel.numpy()

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
        return ref_w4a8.w4a8_decode(
            _tensor(codes),
            _tensor(s_rel),
            _tensor(s_channel),
            _optional(codebook),
            group,
            bits,
            _optional(correction),
        ).numpy()

    def w6a8_encode(self, x: F32, group: int, quality: Quality) -> tuple[U8, U8, F32]:
        check_w4a8(x, group, six_bit=True)
        codes, s_rel, s_channel = ref_w4a8.w6a8_encode(_tensor(x), group, quality)
        return codes.numpy(), s_rel.numpy(), s_channel.numpy()
