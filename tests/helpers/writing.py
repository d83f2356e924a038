"""Options that codecs write, and layers written with them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from qconvert.formats.base import Codes, Options
from qconvert.formats.dtypes import numpy_dtype
from qconvert.formats.registry import codec
from qconvert.formats.values import change_basis

FP8 = {"full_precision": False, "source": "weight_scale"}
NV = {"nibbles": "high", "scales": "swizzled", "rotation": 0, "full_precision": False}
MX = {"scales": "swizzled", "source": "weight_scale", "full_precision": False}
W4A8 = {
    "group": 16,
    "rotation": 256,
    "bits": 4,
    "codebook": True,
    "correction": False,
    "signed": False,
    "grid": True,
    "srel_dtype": "F8_E4M3",
    "source": "weight_s_rel",
}
#: label -> codec, options, least SQNR in dB on Gaussian weights with strong columns
WRITTEN: dict[str, tuple[str, Options, float]] = {
    "fp8": ("float8", FP8 | {"kind": "F8_E4M3", "scale": "scalar"}, 30),
    "fp8_full": ("float8", FP8 | {"kind": "F8_E4M3", "scale": "scalar", "full_precision": True}, 30),
    "fp8_row": ("float8", FP8 | {"kind": "F8_E4M3", "scale": "row"}, 30),
    "e5m2": ("float8", FP8 | {"kind": "F8_E5M2", "scale": "scalar"}, 24),
    "nvfp4": ("nvfp4", NV, 19),
    "nvfp4_full": ("nvfp4", NV | {"full_precision": True}, 19),
    "nvfp4_convrot": ("nvfp4", NV | {"rotation": 64}, 19),
    "mxfp8": ("mxfp8", MX, 30),
    "int8_row": ("int8", {"scale": "row", "rotation": 0}, 28),
    "int8_scalar": ("int8", {"scale": "scalar", "rotation": 0}, 18),
    "int8_convrot": ("int8", {"scale": "row", "rotation": 256}, 38),
    "int8_convrot16": ("int8", {"scale": "row", "rotation": 16}, 35),
    "w4a4": ("w4a4", {"rotation": 256, "linear_dtype": "int4"}, 16),
    "w4a4_int8": ("w4a4", {"rotation": 16, "linear_dtype": "int8"}, 14),
    "w4a8": ("w4a8", W4A8, 20),
    "w4a8_uniform": ("w4a8", W4A8 | {"codebook": False}, 19),
    "w4a8_g8": ("w4a8", W4A8 | {"group": 8, "rotation": 64}, 20),
    "w4a8_g64": ("w4a8", W4A8 | {"group": 64}, 18),
    "w4a8_6bit": ("w4a8", W4A8 | {"bits": 6, "codebook": False}, 32),
    "awq": ("awq_w4a16", {"group": 64, "dtype": "BF16"}, 14),
    "awq_g32_fp16": ("awq_w4a16", {"group": 32, "dtype": "F16"}, 15),
    "bf16": ("plain", {"dtype": "BF16"}, 48),
    "fp16": ("plain", {"dtype": "F16"}, 60),
    "fp32": ("plain", {"dtype": "F32"}, np.inf),
}


def encode(name: str, options: Options, x: Any, backend: Any, quality: Any = "best") -> Codes:
    """Codes of a whole weight in the plain basis, as the executor makes them."""
    it = codec(name)
    x = change_basis(np.ascontiguousarray(x, np.float32), 0, it.rotation(options), backend)
    statistic = {"none": None, "amax": float(np.abs(x).max(initial=0)), "sample": x}[it.statistic(options)]
    return it.encode(x, it.prepare(statistic, options, backend, quality), options, backend, quality)


def stored(d: ModuleType, name: str, options: Options, codes: Codes, n: int, k: int) -> dict[str, Any]:
    """Tensors as they would lie in a file, by suffix; checks them against `parts`."""
    arrays = codec(name).store(codes, options, k)
    parts = {part.suffix: part.spec for part in codec(name).parts(n, k, options)}
    assert set(arrays) == set(parts)
    out = {}
    for suffix, spec in parts.items():
        array = np.ascontiguousarray(arrays[suffix])
        assert array.nbytes == spec.nbytes, suffix
        out[suffix] = d.T(spec.dtype, array.reshape(-1).view(numpy_dtype(spec.dtype)).reshape(spec.shape))
    return out
