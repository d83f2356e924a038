"""svdquant_w4a4 as comfy-kitchen stores it: 4-bit residual in groups of 64, a low-rank branch, input smoothing.

Layout and arithmetic: FORMATS "svdquant_w4a4": W = (q * scale) / smooth + proj_up @ proj_down^T. Plain storage is
2-D; tile-packed storage is 4-D (128 rows x 64 columns a tile). Read only: no runtime served here loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.formats.base import Codec, Codes, Group, Options, Recognition, Stored
from qconvert.formats.finding import Finding
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, np
from qconvert.kernels.layout import unpack_nibbles

_OWNED = ("weight", "weight_scale", "weight_proj_down", "weight_proj_up", "weight_smooth_factor")
GROUP = 64
#: Rows of a packed tile, and of the products that make the low-rank part.
TILE = 128


class SvdQuant(Codec):
    """options: tiled."""

    name = "svdquant_w4a4"
    marker_formats = ("svdquant_w4a4",)
    family = "svdquant_w4a4"
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        if not group.has(*_OWNED):
            return "not all of " + ", ".join(_OWNED)
        weight, scale = group.tensors["weight"], group.tensors["weight_scale"]
        up, down = group.tensors["weight_proj_up"], group.tensors["weight_proj_down"]
        if weight.dtype not in ("I8", "U8"):
            return "weight is not packed 4-bit"
        tiled = len(weight.shape) == 4
        if not tiled and len(weight.shape) != 2:
            return f"weight {weight} is neither 2-D nor in tiles"
        if tiled:
            n, k = weight.shape[0] * 128, weight.shape[1] * GROUP
            fits = weight.shape[2:] == (32, 128) and scale.shape == (n // 128, k // GROUP, 128)
            fits = fits and up.shape[:1] == (n // 128,) and up.shape[2:] == (128,)
        else:
            n, k = weight.shape[0], weight.shape[-1] * 2
            fits = scale.shape == (k // GROUP, n) and up.shape[:1] == (n,)
        rank = up.shape[1:2]
        fits = fits and rank != (0,) and down.shape == (k, *rank) and len(up.shape) == (3 if tiled else 2)
        if not fits or group.tensors["weight_smooth_factor"].shape != (k,):
            return (
                f"weight {weight}, weight_scale {scale}, proj_up {up}, proj_down {down} do not fit each other"
            )
        findings = (
            ()
            if marker
            else (Finding("guess", "no marker; taken as svdquant_w4a4", group.prefix, f"{weight}"),)
        )
        return Recognition(self.name, n, k, {"tiled": tiled}, frozenset(_OWNED), findings)

    def row_step(self, options: Options) -> int:
        return TILE

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        def floats(suffix: str) -> F32:
            return backend.to_f32(stored.whole(suffix), stored.dtype(suffix))

        if stored.options["tiled"]:
            first, last = a // 128, -(-b // 128)
            tiles = stored.rows("weight", first, last).view(np.uint8)
            # A 128-byte line holds 4 consecutive rows of 32 bytes (64 columns).
            packed = (
                tiles.reshape(last - first, -1, 32, 4, 32)
                .transpose(0, 2, 3, 1, 4)
                .reshape((last - first) * 128, -1)
            )
            scale = floats("weight_scale")[first:last].transpose(0, 2, 1).reshape((last - first) * 128, -1)
            lift = floats("weight_proj_up")[first:last].transpose(0, 2, 1).reshape((last - first) * 128, -1)
        else:
            packed = stored.rows("weight", a, b).view(np.uint8)
            scale = backend.to_f32(stored.columns("weight_scale", a, b), stored.dtype("weight_scale")).T
            lift = backend.to_f32(stored.rows("weight_proj_up", a, b), stored.dtype("weight_proj_up"))
        return {
            "q": np.ascontiguousarray(packed),
            "scale": np.ascontiguousarray(scale),
            "up": np.ascontiguousarray(lift),
            "down": floats("weight_proj_down"),
            "smooth": floats("weight_smooth_factor"),
        }

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        nibbles = unpack_nibbles(codes["q"], high_first=False).astype(np.int8)
        q = (nibbles - ((nibbles & 8) << 1)).astype(np.float32)
        residual = q * np.repeat(codes["scale"], GROUP, axis=1) / codes["smooth"]
        return np.ascontiguousarray(residual + _low_rank(codes["up"], codes["down"]), np.float32)


def _low_rank(lift: F32, down: F32) -> F32:
    """lift @ down^T, in whole tiles of rows: a product's rounding may depend on how many rows it has."""
    out = np.empty((len(lift), len(down)), np.float32)
    for start in range(0, len(lift), TILE):
        rows = lift[start : start + TILE]
        tile = np.zeros((TILE, lift.shape[1]), np.float32)
        tile[: len(rows)] = rows
        out[start : start + TILE] = (tile @ down.T)[: len(rows)]
    return out
