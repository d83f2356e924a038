"""NVIDIA ModelOpt: nvfp4 with its variants, mxfp4, int4 AWQ. FORMATS_OTHER section 4.

Its FP8 layers (one scale, one a row, 128 x 128 blocks under a 4-D shape), INT8 layers and MXFP8 layers are read by the
codecs of those numbers. `pre_quant_scale` is a companion as in ComfyUI: W = stored * pre_quant_scale along K.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from qconvert.formats.base import Codec, Codes, Group, Options, Part, Recognition, Stored, is_scalar, up
from qconvert.formats.finding import Finding
from qconvert.formats.mx import MxCodec
from qconvert.formats.nvfp4_dialect import Names, Nvfp4Dialect, one
from qconvert.formats.quant_config import QuantConfig, quant_config
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, Array, np
from qconvert.kernels.layout import swap_nibbles

_NVFP4 = frozenset({"weight", "weight_scale", "weight_scale_2"})
#: Low-rank factors a [R,K] and b [N,R], as the diffusers export and as the text export name them.
_SVD = (
    ("svdquant_lora_a", "svdquant_lora_b"),
    ("weight_quantizer._svdquant_lora_a", "weight_quantizer._svdquant_lora_b"),
)
#: quant_method of writers that share this layout; "bfl" is what diffusers calls Black Forest Labs' files.
_METHODS = frozenset({"modelopt", "bfl"})


class ModelOptNvfp4(Nvfp4Dialect):
    """NVFP4, W4A16_NVFP4, NVFP4_AWQ: weight U8 [N,K/2] low first, weight_scale e4m3 [N,K/16] row-major,
    weight_scale_2 F32 (), input_scale F32 ().

    Names, types and shapes are ComfyUI's: only a configuration tells the two apart. The export may swizzle scales
    (rows up to 128, columns of scales up to 4 or 16); sglang's keys swap_weight_nibbles, checkpoint_uses_packed_qkv,
    checkpoint_weight_scale_layout state the bits' order.
    """

    name = "modelopt_nvfp4"
    activation_scales = ("input_scale",)
    names: ClassVar[Names] = Names()
    layouts: ClassVar[tuple[str, ...]] = ("linear", "swizzled")

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        said = quant_config(group)
        if said.method not in _METHODS:
            return "no configuration says that ModelOpt wrote it"
        return self.recognise_stated(group, said)

    def recognise_stated(self, group: Group, said: QuantConfig) -> Recognition | str:
        """The claim where the file is known to be ModelOpt's."""
        scale, weight = group.tensors.get("weight_scale"), group.tensors.get("weight")
        if scale is None or weight is None or len(weight.shape) != 2 or len(scale.shape) != 2:
            return "weight and weight_scale are not 2-D"
        if weight.dtype != "U8" or scale.dtype != "F8_E4M3" or "weight_scale_2" not in group.tensors:
            return "no U8 weight with e4m3 weight_scale and weight_scale_2"
        if not is_scalar(group.tensors["weight_scale_2"].shape):
            return "weight_scale_2 is not one value"
        n, k = weight.shape[0], weight.shape[1] * 2
        layout = _layout(scale.shape, n, k, str(said.document.get("checkpoint_weight_scale_layout", "")))
        if layout is None or k % 16:
            return f"weight_scale {scale} does not fit [{n}, {k}]"
        high = any(
            said.document.get(key) is True for key in ("swap_weight_nibbles", "checkpoint_uses_packed_qkv")
        )
        options = self.options(layout) | {"nibbles": "high" if high else "low", "stated": said.method}
        reading = f"nvfp4 with {layout} scales, {options['nibbles']} nibble first"
        note = Finding("note", reading, group.prefix, said.words())
        return Recognition(self.name, n, k, options, _NVFP4, (note,))


def _layout(shape: tuple[int, ...], n: int, k: int, stated: str) -> str | None:
    """How block scales lie; swizzled ones may be wider than K/16 (padding_strategy "row_col")."""
    widths = {k // 16, up(k // 16, 16)}
    linear = shape[0] == n and shape[1] in widths
    swizzled = shape[0] == up(n, 128) and shape[1] in {up(width, 4) for width in widths}
    if linear and swizzled:
        if stated:
            return "swizzled" if stated == "swizzled" else "linear"
        # Columns beyond K/16 without need for them: what the export's padding does before it swizzles.
        return "swizzled" if shape[1] > k // 16 else "linear"
    return "linear" if linear else "swizzled" if swizzled else None


class ModelOptNvfp4Svd(ModelOptNvfp4):
    """NVFP4_SVD: a residual in nvfp4 and low-rank factors: stored = nvfp4 + b @ a, then pre_quant_scale as ever."""

    name = "modelopt_nvfp4_svd"
    family = "modelopt_nvfp4_svd"
    submodules = ("weight_quantizer",)
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        names = next((pair for pair in _SVD if group.has(*pair)), None)
        if names is None:
            return "no svdquant_lora_a and svdquant_lora_b"
        got = self.recognise_stated(group, quant_config(group))
        if isinstance(got, str):
            return got
        a, b = (group.tensors[name] for name in names)
        if len(a.shape) != 2 or a.shape[1] != got.k or b.shape != (got.n, a.shape[0]):
            return f"{names[0]} {a} and {names[1]} {b} do not fit [{got.n}, {got.k}]"
        options = got.options | {"factors": names}
        return Recognition(self.name, got.n, got.k, options, _NVFP4.union(names), got.findings)

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        down, lift = stored.options["factors"]
        return super().load(stored, a, b, backend) | {
            "down": backend.to_f32(stored.whole(down), stored.dtype(down)),
            "lift": backend.to_f32(stored.rows(lift, a, b), stored.dtype(lift)),
        }

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        out = np.array(super().decode(codes, options, backend), np.float32)
        # One rank after the other: a matrix product's rounding would depend on how many rows are decoded at once.
        for rank in range(codes["down"].shape[0]):
            out += codes["lift"][:, rank, None] * codes["down"][rank]
        return out


class ModelOptNvfp4Wide(ModelOptNvfp4):
    """W4A8_NVFP4_FP8: as NVFP4, but one scale for 32 columns: weight_scale e4m3 [N,K/32], weight_scale_2 = amax/448.

    Its codes are nvfp4's with every block scale said twice, so it moves into nvfp4 without loss. Read only.
    """

    name = "modelopt_nvfp4_wide"
    # input_scale is amax(x)/448, for fp8 activations.
    activation_moves = False
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scale = group.tensors.get("weight"), group.tensors.get("weight_scale")
        total = group.tensors.get("weight_scale_2")
        if weight is None or weight.dtype != "U8" or len(weight.shape) != 2:
            return "weight is not packed 4-bit"
        if scale is None or scale.dtype != "F8_E4M3" or total is None or not is_scalar(total.shape):
            return "no e4m3 weight_scale and weight_scale_2"
        n, k = weight.shape[0], weight.shape[1] * 2
        if k % 32 or scale.shape != (n, k // 32):
            return f"weight_scale {scale} is not [{n}, {k}/32]"
        return Recognition(self.name, n, k, self.options("linear") | {"block": 32}, _NVFP4)

    def layout(self, options: Options) -> tuple[Any, ...]:
        return ("low", "linear", 32)

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        scales = stored.rows("weight_scale", a, b).view(np.uint8)
        return {
            "q": swap_nibbles(stored.rows("weight", a, b).view(np.uint8)),
            "block_scale": np.repeat(scales, 2, axis=1),
            "tensor_scale": np.asarray(one(stored, "weight_scale_2", backend), np.float32),
        }


class ModelOptMx(MxCodec):
    """mxfp4 and W4A8_MXFP4_FP8: weight U8 [N,K/2] low first, weight_scale U8 e8m0 [N,K/32] row-major."""

    name = "modelopt_mx"
    family = "mx"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        scale = group.tensors.get("weight_scale")
        if scale is None or scale.dtype != "U8":
            return "no U8 weight_scale"
        if "weight" not in group.tensors or group.tensors["weight"].dtype != "U8":
            return "weight is not packed 4-bit"
        got = self.claim(group, ("weight", "weight_scale"), "e2m1", "linear")
        if isinstance(got, Recognition) and got.options["scales"] != "linear":
            return "scales are padded to tiles"
        return got


class ModelOptInt4(Codec):
    """W4A16_AWQ and W4A8_AWQ. options: two_stage (W4A8: values are rounded to e4m3 once more), group. Read only.

    weight U8 **[N/2,K]**: the low nibble of byte (r, k) is row 2r, the high one row 2r+1, two's complement;
    weight_scale F32 [N,K/G]; two_stage: weight_scale_2 F32 (): w = e4m3(q * s / s2) * s2, otherwise w = q * s.
    """

    name = "modelopt_int4"
    family = "modelopt_int4"
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scale = group.tensors.get("weight"), group.tensors.get("weight_scale")
        if weight is None or weight.dtype != "U8" or len(weight.shape) != 2:
            return "weight is not packed 4-bit"
        if scale is None or scale.dtype not in ("F32", "F16", "BF16") or len(scale.shape) != 2:
            return "no 2-D float weight_scale"
        n, k = weight.shape[0] * 2, weight.shape[1]
        if scale.shape[0] != n or not scale.shape[1] or k % scale.shape[1]:
            return f"weight_scale {scale} is not [{n}, {k}/G]"
        total = group.tensors.get("weight_scale_2")
        if total is not None and not is_scalar(total.shape):
            return f"weight_scale_2 {total} is not one value"
        options = {"group": k // scale.shape[1], "two_stage": total is not None}
        owned = {"weight", "weight_scale"} | ({"weight_scale_2"} if total is not None else set())
        return Recognition(self.name, n, k, options, frozenset(owned))

    def row_step(self, options: Options) -> int:
        return 2

    def layout(self, options: Options) -> tuple[Any, ...]:
        return (options["group"], options["two_stage"])

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        packed = stored.rows("weight", a // 2, -(-b // 2)).view(np.uint8)
        q = np.empty((packed.shape[0] * 2, stored.k), np.int8)
        q[0::2], q[1::2] = _signed(packed & np.uint8(15)), _signed(packed >> np.uint8(4))
        codes: Codes = {
            "q": q[: b - a],
            "scale": backend.to_f32(stored.rows("weight_scale", a, b), stored.dtype("weight_scale")),
        }
        if stored.options["two_stage"]:
            codes["tensor_scale"] = np.asarray(one(stored, "weight_scale_2", backend), np.float32)
        return codes

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        rows, k = codes["q"].shape
        values = codes["q"].astype(np.float32).reshape(rows, -1, options["group"])
        out = np.ascontiguousarray((values * codes["scale"][..., None]).reshape(rows, k), np.float32)
        if not options["two_stage"]:
            return out
        total = np.float32(codes["tensor_scale"])
        rounded = backend.from_f32(np.ascontiguousarray(out / total), "F8_E4M3")
        return backend.to_f32(rounded, "F8_E4M3") * total

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        raise NotImplementedError(f"{self.name} is not written")


def _signed(nibbles: Array) -> Array:
    """Two's complement of 4 bits."""
    value = nibbles.astype(np.int8)
    return value - ((value & 8) << 1)
