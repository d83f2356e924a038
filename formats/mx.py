"""MX floats (power-of-two scales for blocks of 32 along K) as other tools than ComfyUI store them.

FORMATS_OTHER sections 3, 4, 5, 12: value * 2^(e-127), no tensor scale. Here: what compressed-tensors, ModelOpt,
LightX2V and torchao share; the codes of mxfp4 are nibbles with the even column low, of mxfp6 one byte a value.
mxfp8 shares its codes with ComfyUI's (formats/mxfp8.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from qconvert.formats import minifloat
from qconvert.formats.base import Codec, Codes, Group, Options, Part, Recognition, Stored, up
from qconvert.formats.finding import Finding
from qconvert.formats.mxfp8 import Mxfp8
from qconvert.formats.quant_config import quant_config
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, Array, np
from qconvert.kernels.layout import unpack_nibbles, unswizzle

BLOCK = 32
Element = Literal["e2m1", "e2m3", "e3m2", "e4m3"]
Names = tuple[str, str]
#: Bytes a column takes, as a fraction.
PACKED: Mapping[str, tuple[int, int]] = {"e2m1": (1, 2), "e2m3": (3, 4), "e3m2": (3, 4), "e4m3": (1, 1)}
#: Bits of exponent and mantissa.
_FIELDS = {"e2m1": (2, 1), "e2m3": (2, 3), "e3m2": (3, 2)}
E8M0 = ("U8", "F8_E8M0")


def columns(width: int, element: Element) -> int | None:
    """In features of a row of `width` bytes, None where it holds no whole number of blocks."""
    num, den = PACKED[element]
    k = width * den // num
    return k if width * den % num == 0 and k % BLOCK == 0 else None


def scale_layout(shape: tuple[int, ...], n: int, k: int, usual: str) -> str | None:
    """linear [N, K/32] or swizzled and padded to tiles of 128 x 4; `usual` where both fit, None where neither does."""
    linear, swizzled = shape == (n, k // BLOCK), shape == (up(n, 128), up(k // BLOCK, 4))
    if linear and swizzled:
        return usual
    return "linear" if linear else "swizzled" if swizzled else None


def unpack_fp6(packed: Array) -> Array:
    """Four codes c0 | c1<<6 | c2<<12 | c3<<18 in 3 bytes, little endian -> one code a byte."""
    rows = packed.shape[0]
    triples = packed.reshape(rows, -1, 3).astype(np.uint32)
    word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    codes = np.stack([word >> shift & 63 for shift in (0, 6, 12, 18)], axis=-1)
    return codes.astype(np.uint8).reshape(rows, -1)


def load_scales(stored: Stored, suffix: str, a: int, b: int) -> Array:
    """e8m0 bytes of rows [a, b), one a block."""
    blocks = stored.k // BLOCK
    if stored.options["scales"] == "swizzled":
        height = stored.shape(suffix)[0]
        tiles = stored.rows(suffix, a, min(up(b, 128), height)).view(np.uint8)
        return unswizzle(tiles, b - a, blocks)
    return np.ascontiguousarray(stored.rows(suffix, a, b).view(np.uint8))


def powers(scales: Array) -> F32:
    """2^(e-127) of e8m0 bytes: 0 is 2^-127, 255 is NaN (OCP MX specification)."""
    out = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return np.where(scales == 255, np.float32(np.nan), out).astype(np.float32)


class MxCodec(Codec):
    """options: element (e2m1 | e2m3 | e3m2), scales (linear | swizzled), weight and source (suffixes). Read only."""

    writable = False

    def claim(
        self,
        group: Group,
        names: Names,
        element: Element,
        usual: str,
        findings: tuple[Finding, ...] = (),
    ) -> Recognition | str:
        """The claim on tensors (weight, scale) of these names, when they fit each other."""
        weight, scale = group.tensors.get(names[0]), group.tensors.get(names[1])
        got = fit(weight, scale, element, usual)
        if isinstance(got, str):
            return f"{names[0]}, {names[1]}: {got}"
        n, k, layout = got
        options = {"element": element, "scales": layout, "weight": names[0], "source": names[1]}
        return Recognition(self.name, n, k, options, frozenset(names), findings)

    def row_step(self, options: Options) -> int:
        return 128 if options["scales"] == "swizzled" else 1

    def layout(self, options: Options) -> tuple[Any, ...]:
        return (options["element"], options["scales"])

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        options = stored.options
        raw = stored.rows(options["weight"], a, b).view(np.uint8).reshape(b - a, -1)
        q = unpack_fp6(raw) if options["element"] in ("e2m3", "e3m2") else raw
        return {"q": q, "block_scale": load_scales(stored, options["source"], a, b)}

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        q = codes["q"]
        if options["element"] == "e2m1":
            q = unpack_nibbles(q, high_first=False)
        values = minifloat.table(*_FIELDS[options["element"]])[q]
        rows, k = values.shape
        out = values.reshape(rows, k // BLOCK, BLOCK) * powers(codes["block_scale"])[..., None]
        return np.ascontiguousarray(out.reshape(rows, k), np.float32)


def fit(weight: Spec | None, scale: Spec | None, element: Element, usual: str) -> tuple[int, int, str] | str:
    """(N, K, layout of the scales), or why these tensors are no MX weight of this element."""
    if weight is None or len(weight.shape) != 2 or weight.dtype not in ("U8", "I8", "F8_E4M3"):
        return "no packed weight"
    if scale is None or len(scale.shape) != 2 or scale.dtype not in E8M0:
        return "no e8m0 scales"
    n, k = weight.shape[0], columns(weight.shape[1], element)
    if k is None:
        return f"rows of {weight.shape[1]} bytes are no blocks of {BLOCK} {element} values"
    layout = scale_layout(scale.shape, n, k, usual)
    return f"scales {scale} do not fit [{n}, {k}] of {element}" if layout is None else (n, k, layout)


class Mxfp8Dialect(Mxfp8):
    """ComfyUI's mxfp8 codes under other names or with row-major scales. Read only.

    options: scales (linear | swizzled), weight and source (suffixes), full_precision.
    """

    marker_formats = ()
    writable = False

    def claim(
        self, group: Group, names: Names, usual: str, findings: tuple[Finding, ...] = ()
    ) -> Recognition | str:
        got = fit(group.tensors.get(names[0]), group.tensors.get(names[1]), "e4m3", usual)
        if isinstance(got, str):
            return f"{names[0]}, {names[1]}: {got}"
        n, k, layout = got
        options = {"scales": layout, "weight": names[0], "source": names[1], "full_precision": False}
        return Recognition(self.name, n, k, options, frozenset(names), findings)

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        raise NotImplementedError(f"{self.name} is not written")

    def marker(self, options: Options) -> dict[str, Any] | None:
        return None

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        options = stored.options
        q = stored.rows(options["weight"], a, b).view(np.uint8)
        return {"q": q, "block_scale": load_scales(stored, options["source"], a, b)}


class RowMajorMxfp8(Mxfp8Dialect):
    """compressed-tensors' mxfp8-quantized, ModelOpt's MXFP8, transformers' and sglang's own mxfp8 checkpoints:
    weight e4m3 [N,K], weight_scale or weight_scale_inv U8 e8m0 [N,K/32] row-major.

    Only on the word of a configuration: the header of a ComfyUI file can look the same.
    """

    name = "mxfp8_row_major"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        said = quant_config(group)
        if said.method not in ("compressed-tensors", "modelopt", "fp8", "mxfp8"):
            return "no configuration names a writer of row-major mxfp8 scales"
        if "weight" not in group.tensors or group.tensors["weight"].dtype != "F8_E4M3":
            return "weight is not e4m3"
        source = "weight_scale_inv" if "weight_scale_inv" in group.tensors else "weight_scale"
        note = Finding("note", "mxfp8 with row-major scales", group.prefix, said.words())
        got = self.claim(group, ("weight", source), "linear", (note,))
        if isinstance(got, str):
            return got
        if got.options["scales"] != "linear":
            return "scales are padded to tiles"
        return got._replace(options=got.options | {"stated": said.method})
