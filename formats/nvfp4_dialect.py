"""nvfp4 under other names: the same codes, block scales and tensor scale as ComfyUI's, laid out by other tools.

FORMATS_OTHER section 0: every dialect decodes to LUT4[q] * block scale * t with the same t = amax/2688; they differ
in names, in which nibble comes first, in whether block scales are swizzled, and in whether t or its reciprocal is
stored. Converting between them moves bits; only a reciprocal can move, by one unit in its last place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from qconvert.formats import minifloat
from qconvert.formats.base import (
    Codes,
    Group,
    Options,
    Part,
    Recognition,
    Stored,
    cut,
    is_scalar,
    scalar,
    stored_k,
    up,
)
from qconvert.formats.finding import Finding
from qconvert.formats.nvfp4 import Nvfp4
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array, np
from qconvert.kernels.layout import swap_nibbles, swizzle, unpack_nibbles, unswizzle


class Names(NamedTuple):
    """What a dialect calls its tensors. `*_divides`: the file holds the reciprocal of ComfyUI's number."""

    weight: str = "weight"
    scale: str = "weight_scale"
    total: str = "weight_scale_2"
    total_divides: bool = False
    #: Shape of the tensor scale and of the activation scale.
    one: tuple[int, ...] = ()
    activation: str = "input_scale"
    activation_divides: bool = False
    scale_dtype: str = "F8_E4M3"


class Nvfp4Dialect(Nvfp4):
    """options as Nvfp4's; for writing also `input` (an activation scale is among the codes and written) and
    `activation` (the one that is written where there is none).
    """

    marker_formats = ()
    names: ClassVar[Names] = Names()
    #: Layouts of block scales that this dialect writes, the usual one first.
    layouts: ClassVar[tuple[str, ...]] = ("linear",)

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        raise NotImplementedError

    def claim(
        self, group: Group, scales: str | None = None, findings: tuple[Finding, ...] = ()
    ) -> Recognition | str:
        """The claim, when tensors of this dialect's names fit each other; `scales` where it is known already."""
        names = self.names
        weight, scale = group.tensors.get(names.weight), group.tensors.get(names.scale)
        total = group.tensors.get(names.total)
        if weight is None or weight.dtype not in ("U8", "I8") or len(weight.shape) != 2:
            return f"{names.weight} is not packed 4-bit"
        if scale is None or scale.dtype != names.scale_dtype or len(scale.shape) != 2:
            return f"no {names.scale_dtype} block scales ({names.scale})"
        if total is None or not is_scalar(total.shape):
            return f"no tensor scale ({names.total})"
        n, k = weight.shape[0], weight.shape[1] * 2
        layout = scale_layout(scale.shape, n, k, scales or self.layouts[0])
        if k % 16 or layout is None or (scales is not None and layout != scales):
            return f"{names.scale} {scale} does not fit [{n}, {k}]"
        owned = frozenset({names.weight, names.scale, names.total})
        return Recognition(self.name, n, k, self.options(layout), owned, findings)

    def options(self, scales: str, *, activation: bool = False) -> dict[str, Any]:
        """Options of a layer in this dialect."""
        return {
            "nibbles": "low",
            "scales": scales,
            "rotation": 0,
            "full_precision": False,
            "input": activation,
        }

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        return f"{self.name} needs K to be a multiple of 16, K = {k}" if k % 16 else None

    def marker(self, options: Options) -> dict[str, Any] | None:
        return None

    def remark(self, options: Options) -> str:
        return "its tensor scale by way of a reciprocal, within one ulp" if self.names.total_divides else ""

    def layout(self, options: Options) -> tuple[Any, ...]:
        return (*super().layout(options), self.names.total, self.names.scale_dtype)

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        names, swizzled = self.names, options["scales"] == "swizzled"
        shape = (up(n, 128), up(k // 16, 4)) if swizzled else (n, k // 16)
        parts: tuple[Part, ...] = (
            Part(names.weight, Spec("U8", (n, k // 2))),
            Part(names.scale, Spec(names.scale_dtype, shape), "tiles" if swizzled else "rows"),
            Part(names.total, Spec("F32", names.one), "whole"),
        )
        if options.get("input") or options.get("activation"):
            parts += (Part(names.activation, Spec("F32", names.one), "whole"),)
        return parts

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        names, k = self.names, stored_k(stored.options, stored.k)
        packed = stored.rows(names.weight, a, b).view(np.uint8).reshape(b - a, k // 2)
        if stored.options["scales"] == "swizzled":
            height, width = stored.shape(names.scale)
            tiles = stored.rows(names.scale, a, min(up(b, 128), height)).view(np.uint8)
            scales = unswizzle(tiles.reshape(-1, width), b - a, width)
        else:
            scales = stored.rows(names.scale, a, b).view(np.uint8)
        codes: Codes = {
            "q": packed if stored.options["nibbles"] == "high" else swap_nibbles(packed),
            "block_scale": np.ascontiguousarray(scales[:, : k // 16]),
        }
        codes.update(self.load_scalars(stored, backend))
        return codes

    def load_scalars(self, stored: Stored, backend: Backend) -> Codes:
        """Tensor scale and activation scale in ComfyUI's sense, and the stored reciprocals where they are such."""
        names = self.names
        codes = _either(
            "tensor_scale", "global_scale", one(stored, names.total, backend), names.total_divides
        )
        if stored.has(names.activation) and is_scalar(stored.shape(names.activation)):
            value = one(stored, names.activation, backend)
            codes |= _either("input_scale", "input_global_scale", value, names.activation_divides)
        return codes

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        if "global_scale" not in codes:
            return super().decode(codes, options, backend)
        spread = backend.to_f32(codes["block_scale"], "F8_E4M3") / np.float32(codes["global_scale"])
        values = minifloat.table(2, 1)[unpack_nibbles(codes["q"], high_first=True)]
        rows, k = values.shape
        out = values.reshape(rows, k // 16, 16) * spread[..., None]
        return cut(np.ascontiguousarray(out.reshape(rows, k), np.float32), options)

    def prepare(self, statistic: Any, options: Options, backend: Backend, quality: Quality) -> Codes:
        codes = super().prepare(statistic, options, backend, quality)
        if self.names.total_divides:
            codes |= _either("tensor_scale", "global_scale", reciprocal(codes["tensor_scale"]), True)
        return codes

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        return {**common, **super().encode(x, common, options, backend, quality)}

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        names = self.names
        scales = codes["block_scale"]
        out = {
            names.weight: codes["q"] if options["nibbles"] == "high" else swap_nibbles(codes["q"]),
            names.scale: swizzle(scales) if options["scales"] == "swizzled" else scales,
        }
        out.update(self.store_scalars(codes, options))
        return out

    def store_scalars(self, codes: Codes, options: Options) -> dict[str, Array]:
        """What `load_scalars` reads."""
        names = self.names
        total = _as_stored(codes, "tensor_scale", "global_scale", names.total_divides)
        out = {names.total: total.reshape(names.one)}
        if options.get("activation"):
            codes = {"input_scale": np.asarray(options["activation"], np.float32), **codes}
        if options.get("input") or options.get("activation"):
            value = _as_stored(codes, "input_scale", "input_global_scale", names.activation_divides)
            out[names.activation] = value.reshape(names.one)
        return out


def scale_layout(shape: tuple[int, ...], n: int, k: int, usual: str) -> str | None:
    """How block scales of this shape lie; `usual` where the shape allows both, None where it fits neither."""
    linear, swizzled = shape == (n, k // 16), shape == (up(n, 128), up(k // 16, 4))
    if linear and swizzled:
        return usual
    return "linear" if linear else "swizzled" if swizzled else None


def one(stored: Stored, suffix: str, backend: Backend) -> np.float32:
    """The one value of a small tensor."""
    return scalar(backend.to_f32(stored.whole(suffix), stored.dtype(suffix)))


def reciprocal(x: Any) -> np.float32:
    """1/x in float32; among its neighbours the one whose own reciprocal is x again, where there is one."""
    value = np.float32(x)
    with np.errstate(divide="ignore", over="ignore"):
        nearest = np.float32(1) / value
        for near in (
            nearest,
            np.nextafter(nearest, np.float32(0)),
            np.nextafter(nearest, np.float32(np.inf)),
        ):
            if np.float32(1) / near == value:
                return np.float32(near)
    return nearest


def _either(plain: str, inverse: str, value: np.float32, divides: bool) -> Codes:
    if not divides:
        return {plain: np.asarray(value, np.float32)}
    return {inverse: np.asarray(value, np.float32), plain: np.asarray(reciprocal(value), np.float32)}


def _as_stored(codes: Codes, plain: str, inverse: str, divides: bool) -> Array:
    if not divides:
        return np.asarray(codes[plain], np.float32)
    value = codes.get(inverse)
    return np.asarray(reciprocal(codes[plain]) if value is None else value, np.float32)
