"""NVFP4 in GGUF: the codes and block scales of every other nvfp4 file, in ggml's blocks of 64.

FORMATS_OTHER section 10, type 40: four block scales (e4m3 without a sign; 0x7F stands for 0), then for each block of
16 eight bytes, element j in the low nibble of byte j and j + 8 in the high one. llama.cpp's converter keeps ModelOpt's
values: the tensor's scale lies beside it (`scale`), and `input_scale` where there was one. So a conversion to any
other nvfp4 moves bits and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.formats.base import Codes, Group, Options, Recognition, Stored, is_scalar, scalar
from qconvert.formats.gguf_blocks import nvfp4_nibbles
from qconvert.formats.nvfp4 import Nvfp4
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import np
from qconvert.kernels.layout import pack_nibbles

BLOCK, BYTES = 64, 36
#: Where the tensor's scale may lie.
SCALES = ("scale", "weight.scale")
_NAN_MAGNITUDE = 0x7F


class GgufNvfp4(Nvfp4):
    """options as Nvfp4's, and total: the suffix of the tensor's scale, None where there is none (then 1)."""

    name = "gguf_nvfp4"
    marker_formats = ()
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight = group.tensors.get("weight")
        if weight is None or weight.dtype != "NVFP4" or len(weight.shape) != 2 or weight.shape[1] % BLOCK:
            return "not a matrix of GGUF's type NVFP4"
        n, k = weight.shape
        total = next((s for s in SCALES if s in group.tensors and is_scalar(group.tensors[s].shape)), None)
        options = {
            "nibbles": "high",
            "scales": "blocks",
            "rotation": 0,
            "full_precision": False,
            "total": total,
        }
        owned = frozenset({"weight"} | ({total} if total else set()))
        return Recognition(self.name, n, k, options, owned)

    def row_step(self, options: Options) -> int:
        return 1

    def layout(self, options: Options) -> tuple[Any, ...]:
        return ("gguf",)

    def marker(self, options: Options) -> dict[str, Any] | None:
        return None

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        rows, k, total = b - a, stored.k, stored.options["total"]
        blocks = stored.rows("weight", a, b).reshape(-1, BYTES)
        scales = blocks[:, :4] & np.uint8(_NAN_MAGNITUDE)
        scales = np.where(scales == _NAN_MAGNITUDE, np.uint8(0), scales)
        codes = nvfp4_nibbles(blocks).reshape(rows, k)
        value = scalar(backend.to_f32(stored.whole(total), stored.dtype(total))) if total else np.float32(1)
        out: Codes = {
            "q": pack_nibbles(codes, high_first=True),
            "block_scale": np.ascontiguousarray(scales.reshape(rows, k // 16)),
            "tensor_scale": np.asarray(value, np.float32),
        }
        if stored.has("input_scale") and is_scalar(stored.shape("input_scale")):
            raw = backend.to_f32(stored.whole("input_scale"), stored.dtype("input_scale"))
            out["input_scale"] = np.asarray(scalar(raw), np.float32)
        return out
