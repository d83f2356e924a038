"""optimum-quanto: qint8 and qfloat8 rows, qint4 and qint2 groups.

Layout (FORMATS_OTHER section 7; checked against files written by optimum-quanto):

* qint8, qfloat8*: `weight._data` int8 or float8 [N, K], `weight._scale` [N, 1] in the model's type; W = q * scale;
* qint4, qint2: the weight as M = N*K/G rows of G columns. `weight._data._data` u8 [M*b/8, G]: code row r lies in byte
  row r mod (M*b/8), at bit b * (r div (M*b/8)); `weight._scale`, `weight._shift` [M, 1]. W = q * scale - shift where
  shift is a float, (q - shift) * scale where it is an integer. Codes are unsigned;
* `input_scale`, `output_scale`: of activations, 1 where those are not quantised.

quanto computes in the scale's type: of q * scale - shift it rounds the product, then the difference. That is followed
here, for it is what the model runs with.

Grouped weights do not say their shape: N is the length of the bias, or has to be said.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from qconvert.formats.base import Codec, Codes, Group, Options, Recognition, Stored
from qconvert.formats.dtypes import FLOATS, FP8
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, np

_PACKED = "weight._data._data"


class Quanto(Codec):
    """options: bits (8, 4, 2), kind (dtype of `weight._data`), group (0 for rows), float_shift."""

    name = "quanto"
    marker_formats = ("quanto",)
    anchors = ("weight._data", _PACKED)
    family = "quanto"
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        scale = group.tensors.get("weight._scale")
        if scale is None or scale.dtype not in FLOATS or len(scale.shape) != 2 or scale.shape[1] != 1:
            return "no float weight._scale [rows, 1]"
        if group.has(_PACKED):
            return self._grouped(group, scale.shape[0], marker)
        data = group.tensors.get("weight._data")
        if data is None or data.dtype not in FP8 | {"I8"} or len(data.shape) < 2:
            return "no int8 or float8 weight._data"
        if data.shape[0] != scale.shape[0]:
            return f"weight._scale {scale} is not one for each row of weight._data {data}"
        options = {"bits": 8, "kind": data.dtype, "group": 0, "float_shift": True, "shape": data.shape}
        return self._claim(group, data.shape[0], prod(data.shape[1:]), options, {"weight._data"})

    def _grouped(self, group: Group, rows: int, marker: Mapping[str, Any] | None) -> Recognition | str:
        data, shift = group.tensors[_PACKED], group.tensors.get("weight._shift")
        if data.dtype != "U8" or len(data.shape) != 2 or not rows:
            return f"{_PACKED} {data} is not packed codes [rows, group]"
        bits, over = divmod(8 * data.shape[0], rows)
        if over or bits not in (2, 4):
            return f"{_PACKED} {data} does not hold {rows} rows of 2 or 4 bits"
        if shift is None or shift.shape != (rows, 1) or shift.dtype not in FLOATS | {"I8", "U8"}:
            return f"no weight._shift [{rows}, 1]"
        size = data.shape[1]
        bias = group.tensors.get("bias")
        n = marker.get("out_features") if marker else None
        if n is None and bias is not None and len(bias.shape) == 1:
            n = bias.shape[0]
        if n is None:
            return (
                f"packed {bits}-bit quanto without a bias: its shape is written nowhere; "
                "--assume 'REGEX=quanto,out_features=N' settles it"
            )
        if not isinstance(n, int) or n <= 0 or rows * size % n or rows * size // n % size:
            return f"{rows} groups of {size} are no weight of {n} rows"
        options = {"bits": bits, "kind": "U8", "group": size, "float_shift": shift.dtype in FLOATS}
        return self._claim(group, n, rows * size // n, options, {_PACKED, "weight._shift"})

    def _claim(
        self, group: Group, n: int, k: int, options: dict[str, Any], owned: set[str]
    ) -> Recognition | str:
        owned |= {"weight._scale"} | ({"input_scale", "output_scale"} & set(group.tensors))
        return Recognition(self.name, n, k, options, frozenset(owned))

    def word(self, options: Options) -> str:
        return f"quanto {options['bits']} bit"

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        options = stored.options
        dtype = stored.dtype("weight._scale")
        if not options["group"]:
            raw = stored.rows("weight._data", a, b).reshape(b - a, stored.k)
            q = backend.to_f32(np.ascontiguousarray(raw), options["kind"])
            return {"q": q, "scale": backend.to_f32(stored.rows("weight._scale", a, b), dtype)}
        per = stored.k // int(options["group"])
        first, last = a * per, b * per
        shift = stored.rows("weight._shift", first, last)
        return {
            "q": self._codes(stored, first, last).astype(np.float32),
            "scale": backend.to_f32(stored.rows("weight._scale", first, last), dtype),
            "shift": backend.to_f32(shift, stored.dtype("weight._shift")),
            "rows": np.array([b - a, stored.k]),
            "dtype": np.array(dtype),
        }

    @staticmethod
    def _codes(stored: Stored, first: int, last: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Code rows [first, last) [.., G]; the planes follow each other along the byte rows."""
        bits, height = int(stored.options["bits"]), stored.shape(_PACKED)[0]
        mask = np.uint8((1 << bits) - 1)
        runs = []
        row = first
        while row < last:
            plane, at = divmod(row, height)
            stop = min(last - row, height - at)
            runs.append((stored.rows(_PACKED, at, at + stop) >> np.uint8(bits * plane)) & mask)
            row += stop
        return np.concatenate(runs)

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        if not options["group"]:
            return np.ascontiguousarray(codes["q"] * codes["scale"], np.float32)
        rows, k = (int(value) for value in codes["rows"])
        if not options["float_shift"]:
            out = (codes["q"] - codes["shift"]) * codes["scale"]
        else:
            dtype = str(codes["dtype"])
            product = np.ascontiguousarray(codes["q"] * codes["scale"], np.float32)
            out = backend.to_f32(backend.from_f32(product, dtype), dtype) - codes["shift"]
            out = backend.to_f32(backend.from_f32(np.ascontiguousarray(out, np.float32), dtype), dtype)
        return np.ascontiguousarray(out.reshape(rows, k), np.float32)
