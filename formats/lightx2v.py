"""LightX2V: nvfp4 and MX weights under the name `weight`, scales in 128 x 4 tiles. FORMATS_OTHER section 5.

Its int8 and fp8 layers (weight, weight_scale [N,1]) are read by the codecs of those numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from qconvert.formats.base import Codes, Group, Options, Part, Recognition, Stored, is_scalar
from qconvert.formats.finding import Finding
from qconvert.formats.mx import Element, MxCodec, Mxfp8Dialect, fit
from qconvert.formats.nvfp4_dialect import Names, Nvfp4Dialect, one, reciprocal, scale_layout
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import Array, np

_PEAK = 2688


class LightX2VNvfp4(Nvfp4Dialect):
    """weight U8 [N,K/2] low first; weight_scale e4m3 [up(N,128), up(K/16,4)] tiles; and one of

    * `alpha` and `input_global_scale` = 2688/amax(x), F32: t = alpha * input_global_scale (option form "alpha");
    * `weight_global_scale` = 1/t, F32, with `input_absmax` = amax(x) or a calib.pt beside the file (form "global").
    """

    name = "lightx2v_nvfp4"
    activation_scales = ("input_global_scale", "input_absmax")
    names: ClassVar[Names] = Names()
    layouts: ClassVar[tuple[str, ...]] = ("swizzled",)

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scale = group.tensors.get("weight"), group.tensors.get("weight_scale")
        scalars: tuple[str, ...]
        if group.has("alpha", "input_global_scale"):
            form, scalars = "alpha", ("alpha", "input_global_scale")
        elif group.has("weight_global_scale"):
            form, scalars = "global", ("weight_global_scale",)
        else:
            return "neither alpha and input_global_scale nor weight_global_scale"
        if weight is None or weight.dtype not in ("U8", "I8") or len(weight.shape) != 2:
            return "weight is not packed 4-bit"
        if scale is None or scale.dtype not in ("F8_E4M3", "U8") or len(scale.shape) != 2:
            return "no e4m3 block scales (weight_scale)"
        if not all(is_scalar(group.tensors[suffix].shape) for suffix in scalars):
            return f"{', '.join(scalars)} are not one value each"
        n, k = weight.shape[0], weight.shape[1] * 2
        if k % 16 or scale_layout(scale.shape, n, k, "swizzled") != "swizzled":
            return f"weight_scale {scale} does not fit [{n}, {k}] in tiles"
        options = self.options("swizzled") | {"form": form}
        owned = frozenset({"weight", "weight_scale", *scalars})
        return Recognition(self.name, n, k, options, owned)

    def remark(self, options: Options) -> str:
        what = "a product" if options["form"] == "alpha" else "a reciprocal"
        return f"its tensor scale by way of {what}, within one ulp"

    def layout(self, options: Options) -> tuple[Any, ...]:
        return ("low", "swizzled", options["form"])

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        weight, scales, _ = super().parts(n, k, {**options, "input": False})
        scalars = ("alpha", "input_global_scale") if options["form"] == "alpha" else ("weight_global_scale",)
        return (weight, scales, *(Part(suffix, Spec("F32", ()), "whole") for suffix in scalars))

    def load_scalars(self, stored: Stored, backend: Backend) -> Codes:
        codes: Codes = {}
        if stored.options["form"] == "alpha":
            inverse = one(stored, "input_global_scale", backend)
            total = one(stored, "alpha", backend) * inverse
            codes["alpha"] = np.asarray(one(stored, "alpha", backend))
        else:
            codes["global_scale"] = np.asarray(one(stored, "weight_global_scale", backend))
            total = reciprocal(codes["global_scale"])
            if not stored.has("input_absmax") or not is_scalar(stored.shape("input_absmax")):
                return codes | {"tensor_scale": np.asarray(total, np.float32)}
            inverse = np.float32(_PEAK) / one(stored, "input_absmax", backend)
        return codes | {
            "tensor_scale": np.asarray(total, np.float32),
            "input_global_scale": np.asarray(inverse, np.float32),
            "input_scale": np.asarray(reciprocal(inverse), np.float32),
        }

    def store_scalars(self, codes: Codes, options: Options) -> dict[str, Array]:
        total = np.float32(codes["tensor_scale"])
        if options["form"] == "global":
            kept = codes.get("global_scale")
            return {
                "weight_global_scale": np.asarray(reciprocal(total) if kept is None else kept, np.float32)
            }
        kept = codes.get("input_global_scale")
        inverse = np.float32(reciprocal(codes["input_scale"]) if kept is None else kept)
        given = codes.get("alpha")
        alpha = factor(total, inverse) if given is None else np.float32(given)
        if alpha * inverse != total:
            alpha = factor(total, inverse)
        return {"alpha": np.asarray(alpha, np.float32), "input_global_scale": np.asarray(inverse, np.float32)}


def factor(total: np.float32, inverse: np.float32) -> np.float32:
    """alpha with alpha * inverse == total in float32, or the nearest there is."""
    alpha = total / inverse
    for near in (alpha, np.nextafter(alpha, np.float32(0)), np.nextafter(alpha, np.float32(np.inf))):
        if near * inverse == total:
            return np.float32(near)
    return np.float32(alpha)


#: weight_scale tells which MX format it is by its width; for a K below a few hundred two may fit.
_ELEMENTS: tuple[Element, ...] = ("e2m1", "e3m2", "e4m3")
_NAMES = ("weight", "weight_scale")


def _mx(group: Group) -> tuple[list[Element], tuple[Finding, ...]]:
    """The MX elements that the shapes allow, and what to say when there are several."""
    weight, scale = group.tensors.get("weight"), group.tensors.get("weight_scale")
    if weight is None or weight.dtype not in ("U8", "I8") or scale is None or scale.dtype != "F8_E8M0":
        return [], ()
    fits = [e for e in _ELEMENTS if not isinstance(fit(weight, scale, e, "swizzled"), str)]
    if len(fits) < 2:
        return fits, ()
    message = f"the shapes fit MX values of {' and '.join(fits)}; taken as {fits[0]}"
    return fits, (Finding("guess", message, group.prefix, f"weight {weight}, weight_scale {scale}"),)


class LightX2VMx(MxCodec):
    """mxfp4 and mxfp6 (E3M2, four codes in 3 bytes), weight U8, weight_scale e8m0 in tiles of 128 x 4."""

    name = "lightx2v_mx"
    family = "mx"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        fits, findings = _mx(group)
        if not fits or fits[0] == "e4m3":
            return "no packed weight with an e8m0 weight_scale that fits mxfp4 or mxfp6"
        return self.claim(group, _NAMES, fits[0], "swizzled", findings)


class LightX2VMxfp8(Mxfp8Dialect):
    """mxfp8: weight U8 [N,K] of e4m3 bytes, weight_scale e8m0 in tiles of 128 x 4."""

    name = "lightx2v_mxfp8"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        fits, findings = _mx(group)
        if not fits or fits[0] != "e4m3":
            return "no U8 weight with an e8m0 weight_scale that fits mxfp8"
        return self.claim(group, _NAMES, "swizzled", findings)
