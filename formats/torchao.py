"""torchao's safetensors: tensor subclasses taken apart. FORMATS_OTHER section 12.

Layer `a.b` holds `_weight_<part>` tensors; the header has a JSON record under `a.b.weight` with the class ("_type") and
its attributes, and `tensor_names`, the list of all such tensors. Without the record, types and shapes say as much but
for the layout of block scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from qconvert.formats.base import Codec, Codes, Group, Options, Recognition, Stored, is_row, is_scalar
from qconvert.formats.finding import Finding
from qconvert.formats.float8 import Float8
from qconvert.formats.header import strict_json
from qconvert.formats.int8 import Int8
from qconvert.formats.mx import MxCodec, Mxfp8Dialect
from qconvert.formats.nvfp4_dialect import Names, Nvfp4Dialect, scale_layout
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import Array, np

QDATA, SCALE, ZERO, TOTAL = "_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_per_tensor_scale"
_MX_NAMES = (QDATA, SCALE)
_READ = frozenset({"Float8Tensor", "Int8Tensor", "NVFP4Tensor", "MXTensor"})


def record(group: Group) -> Mapping[str, Any]:
    """What the header says of this layer's weight: {"_type", "_data", ...}, empty when it says nothing."""
    try:
        document = strict_json(group.metadata.get(f"{group.prefix}.weight", "{}"))
    except ValueError:
        return {}
    return document if isinstance(document, dict) and "_type" in document else {}


def _is_type(group: Group, *names: str) -> bool | None:
    """Whether the record names one of these classes; None where there is no record."""
    found = record(group)
    return found["_type"] in names if found else None


def _other(group: Group) -> str:
    return f"its class is torchao's {record(group).get('_type')}"


def _scales(group: Group) -> tuple[str, tuple[Finding, ...]]:
    """How block scales lie, where the shape allows both, and what that rests on."""
    data = record(group).get("_data")
    flag = data.get("is_swizzled_scales") if isinstance(data, Mapping) else None
    if isinstance(flag, bool):
        return "swizzled" if flag else "linear", ()
    message = "block scales are taken as row-major"
    return "linear", (Finding("guess", message, group.prefix, "no is_swizzled_scales in the header"),)


class TorchAoFloat8(Float8):
    """Float8Tensor: qdata e4m3 or e5m2 [N,K], scale F32 [N,1] or [1,1]."""

    name = "torchao_float8"
    marker_formats = ()
    anchors = (QDATA,)
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        data, scale = group.tensors.get(QDATA), group.tensors.get(SCALE)
        if _is_type(group, "Float8Tensor") is False:
            return _other(group)
        if data is None or data.dtype not in ("F8_E4M3", "F8_E5M2") or len(data.shape) != 2:
            return "no fp8 qdata"
        if scale is None or scale.dtype not in ("F32", "BF16", "F16"):
            return "no float scale"
        n, k = data.shape
        got = self._scale(scale, n, k, 0, None)
        if got is None:
            return f"scale {scale} is not one value, one a row or one a block of [{n}, {k}]"
        options: dict[str, Any] = {"kind": data.dtype, "scale": got[0], "shape": data.shape}
        options |= {"full_precision": False, "source": SCALE, "weight": QDATA}
        if got[0] == "block":
            options["block"] = got[1:]
        return Recognition(self.name, n, k, options, frozenset({QDATA, SCALE}))

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        return super().load(_Renamed(stored, {"weight": QDATA}), a, b, backend)


class TorchAoInt8(Int8):
    """Int8Tensor: qdata int8 [N,K], scale F32 [N,1], zero_point int8 of 0."""

    name = "torchao_int8"
    marker_formats = ()
    anchors = (QDATA,)
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        data, scale = group.tensors.get(QDATA), group.tensors.get(SCALE)
        if _is_type(group, "Int8Tensor") is False:
            return _other(group)
        if data is None or data.dtype != "I8" or len(data.shape) != 2 or scale is None:
            return "no int8 qdata with a scale"
        n, k = data.shape
        kind = "scalar" if is_scalar(scale.shape) else "row" if is_row(scale.shape, n) else ""
        if not kind:
            return f"scale {scale} is neither one value nor one a row of [{n}, {k}]"
        zero = group.head(ZERO)
        if zero is not None and zero.any():
            return "zero points that are not 0: not symmetric int8"
        options = {"scale": kind, "rotation": 0, "shape": data.shape, "source": SCALE}
        return Recognition(self.name, n, k, options, frozenset({QDATA, SCALE, ZERO} & set(group.tensors)))

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        return super().load(_Renamed(stored, {"weight": QDATA}), a, b, backend)


class TorchAoNvfp4(Nvfp4Dialect):
    """NVFP4Tensor: qdata U8 [N,K/2] low first, scale e4m3, per_tensor_scale F32 ().

    Swizzled scales are stored as [32*up(N,128)/128, 16*up(K/16,4)/4], whose flat bytes are the 128 x 4 order.
    """

    name = "torchao_nvfp4"
    anchors = (QDATA,)
    activation_scales = ("_weight_act_per_tensor_scale",)
    names: ClassVar[Names] = Names(
        weight=QDATA, scale=SCALE, total=TOTAL, activation="_weight_act_per_tensor_scale"
    )
    layouts: ClassVar[tuple[str, ...]] = ("linear",)

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        data, scale = group.tensors.get(QDATA), group.tensors.get(SCALE)
        if _is_type(group, "NVFP4Tensor") is False:
            return _other(group)
        if data is None or data.dtype != "U8" or len(data.shape) != 2:
            return "no packed 4-bit qdata"
        if scale is None or scale.dtype != "F8_E4M3" or len(scale.shape) != 2:
            return "no e4m3 scale"
        total = group.tensors.get(TOTAL)
        if total is not None and not is_scalar(total.shape):
            return f"per_tensor_scale {total} is not one value"
        n, k = data.shape[0], data.shape[1] * 2
        tiles = (32 * -(-n // 128), 16 * -(-k // 64))
        stated, findings = _scales(group)
        layout = scale_layout(scale.shape, n, k, stated)
        if k % 16 or (layout is None and scale.shape != tiles):
            return f"scale {scale} does not fit [{n}, {k}]"
        if layout is None or (scale.shape == tiles and stated == "swizzled"):
            layout = "swizzled"
        options = self.options(layout)
        owned = {QDATA, SCALE} | ({TOTAL} if total is not None else set())
        ambiguous = scale.shape == (n, k // 16) and not n % 128 and not k % 64
        return Recognition(self.name, n, k, options, frozenset(owned), findings if ambiguous else ())

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        if stored.options["scales"] == "swizzled":
            stored = _Tiles(stored, -(-stored.k // 64) * 4)
        return super().load(stored, a, b, backend)

    def load_scalars(self, stored: Stored, backend: Backend) -> Codes:
        if stored.has(TOTAL):
            return super().load_scalars(stored, backend)
        return {"tensor_scale": np.ones((), np.float32)}


class TorchAoMx(MxCodec):
    """MXTensor of float4: qdata U8 [N,K/2] low first, scale e8m0 [N,K/32]."""

    name = "torchao_mx"
    family = "mx"
    anchors = (QDATA,)

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        if _is_type(group, "MXTensor") is False:
            return _other(group)
        if QDATA not in group.tensors or group.tensors[QDATA].dtype != "U8":
            return "no packed 4-bit qdata"
        stated, findings = _scales(group)
        return self.claim(group, _MX_NAMES, "e2m1", stated, findings)


class TorchAoMxfp8(Mxfp8Dialect):
    """MXTensor of e4m3: qdata e4m3 [N,K], scale e8m0 [N,K/32]."""

    name = "torchao_mxfp8"
    anchors = (QDATA,)

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        if _is_type(group, "MXTensor") is False:
            return _other(group)
        if QDATA not in group.tensors or group.tensors[QDATA].dtype != "F8_E4M3":
            return "no e4m3 qdata"
        stated, findings = _scales(group)
        return self.claim(group, _MX_NAMES, stated, findings)


class TorchAoOther(Codec):
    """Classes whose storage is a kernel's own (Int4Tensor and the like): named, not read."""

    name = "torchao_other"
    family = "torchao_other"
    anchors = (QDATA,)
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        found = record(group).get("_type")
        if found is None or found in _READ:
            return "no class that is stored for one kernel"
        return f"torchao's {found} is stored for its kernel; only torchao reads it"

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        raise NotImplementedError

    def decode(self, codes: Codes, options: Options, backend: Backend) -> Any:
        raise NotImplementedError


class _Renamed:
    """A stored layer under other suffixes."""

    def __init__(self, stored: Stored, names: Mapping[str, str]) -> None:
        self._stored, self._names = stored, names
        self.n, self.k, self.options = stored.n, stored.k, stored.options

    def has(self, suffix: str) -> bool:
        return self._stored.has(self._names.get(suffix, suffix))

    def dtype(self, suffix: str) -> str:
        return self._stored.dtype(self._names.get(suffix, suffix))

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self._stored.shape(self._names.get(suffix, suffix))

    def rows(self, suffix: str, a: int, b: int) -> Array:
        return self._stored.rows(self._names.get(suffix, suffix), a, b)

    def columns(self, suffix: str, a: int, b: int) -> Array:
        return self._stored.columns(self._names.get(suffix, suffix), a, b)

    def whole(self, suffix: str) -> Array:
        return self._stored.whole(self._names.get(suffix, suffix))


class _Tiles(_Renamed):
    """Swizzled scales of torchao's shape in the shape that tiles of 128 rows have: the same flat bytes."""

    def __init__(self, stored: Stored, width: int) -> None:
        super().__init__(stored, {})
        self._width = width

    def shape(self, suffix: str) -> tuple[int, ...]:
        shape = self._stored.shape(suffix)
        return (shape[0] * shape[1] // self._width, self._width) if suffix == SCALE else shape

    def rows(self, suffix: str, a: int, b: int) -> Array:
        if suffix != SCALE:
            return self._stored.rows(suffix, a, b)
        flat = self._stored.shape(suffix)
        if flat[1] == self._width:
            return self._stored.rows(suffix, a, b)
        # A tile of 128 rows takes 32 rows of the stored shape.
        return self._stored.rows(suffix, a // 4, b // 4).reshape(b - a, self._width)
