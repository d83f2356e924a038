"""bitsandbytes: nf4 and fp4 (absmax plain or quantised once more), and row-wise int8.

Layout (FORMATS_OTHER section 9; checked against files written by bitsandbytes). 4 bit:

* `weight`: N*K codes, flat over the row-major weight, high nibble first, in u8 [N*K/2, 1] or in the bytes of another
  type (`quant_storage`, fewer rows);
* `weight.absmax` f32, one for every `blocksize` codes; blocks run over the ends of rows, the last may be short;
* nested: `weight.absmax` are u8 codes c, and absmax = weight.nested_quant_map[c] * weight.nested_absmax[block //
  nested_blocksize] + nested_offset;
* `weight.quant_map` f32 [16]: the value of each code, as the file has it (fp4's are not ascending);
* `weight.quant_state.bitsandbytes__nf4` (or __fp4): JSON bytes; the only place where the shape is stated.

W = quant_map[code] * absmax. int8: `weight` [N, K], `SCB` f32 [N] (absmax of the row), `weight_format` 0 (rows);
W = q * SCB[n] * (1/127).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from qconvert.formats.base import Codec, Codes, Group, Options, Recognition, Stored, is_row
from qconvert.formats.dtypes import nbytes
from qconvert.formats.header import strict_json
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, Array, np
from qconvert.kernels.layout import unpack_nibbles

_STATE = "weight.quant_state.bitsandbytes__"


class Bnb4(Codec):
    """options: kind ("nf4" | "fp4"), block, nested (its block, 0 where absmax is float), offset, shape, dtype."""

    name = "bnb4"
    family = "bnb4"
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        states = [suffix for suffix in group.tensors if suffix.startswith(_STATE)]
        if len(states) != 1 or not group.has("weight", "weight.absmax", "weight.quant_map"):
            if group.has("weight.absmax"):
                there = f"weight.absmax {group.tensors['weight.absmax']}"
                return f"{there} without quant_state.bitsandbytes__*: only that states the weight's shape"
            return "no quant_state.bitsandbytes__*"
        state = _state(group, states[0])
        if isinstance(state, str):
            return state
        shape, block = tuple(state["shape"]), int(state["blocksize"])
        n, k = shape[0], prod(shape[1:])
        # Blocks are repeated to their length: one that is longer than the weight ends with it.
        block = min(block, n * k)
        blocks = -(-n * k // block)
        weight, absmax = group.tensors["weight"], group.tensors["weight.absmax"]
        if weight.nbytes != _padded(weight.dtype, n * k):
            return f"weight {weight}, weight.absmax {absmax}: the weight does not hold {n * k} codes of {list(shape)}"
        if prod(absmax.shape) != blocks or group.tensors["weight.quant_map"].shape != (16,):
            return f"weight.absmax {absmax} is not one for each of {blocks} blocks"
        owned = {"weight", "weight.absmax", "weight.quant_map", states[0]}
        nested, offset = 0, 0.0
        if "nested_blocksize" in state or absmax.dtype == "U8":
            if not {"nested_blocksize", "nested_offset"} <= set(state):
                return f"absmax is {absmax}, and {states[0]} does not say how it is nested"
            nested, offset = int(state["nested_blocksize"]), float(state["nested_offset"])
            nests = group.tensors.get("weight.nested_absmax")
            if nests is None or not group.has("weight.nested_quant_map"):
                return "absmax is quantised, and nested_absmax or nested_quant_map is missing"
            if prod(nests.shape) != -(-blocks // nested):
                return f"weight.nested_absmax {nests} does not fit {blocks} blocks"
            owned |= {"weight.nested_absmax", "weight.nested_quant_map"}
        options = {
            "kind": str(state.get("quant_type", states[0].removeprefix(_STATE))),
            "block": block,
            "nested": nested,
            "offset": offset,
            "shape": shape,
            "dtype": str(state.get("dtype", "")),
        }
        return Recognition(self.name, n, k, options, frozenset(owned))

    def word(self, options: Options) -> str:
        return f"bitsandbytes {options['kind']}"

    def row_step(self, options: Options) -> int:
        # Rows of an odd number of codes start in the middle of a byte every other time.
        return 1 + int(prod(options["shape"][1:])) % 2

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        options, k = stored.options, stored.k
        first, last = a * k, b * k
        data = flat_bytes(stored, "weight", first // 2, -(-last // 2))
        q = unpack_nibbles(data[None], high_first=True)[0, : last - first]
        block = int(options["block"])
        begin, end = first // block, -(-last // block)
        absmax = self._absmax(stored, begin, end, backend)
        spread = np.repeat(absmax, block)[first - begin * block : last - begin * block]
        table = backend.to_f32(stored.whole("weight.quant_map"), stored.dtype("weight.quant_map"))
        return {"q": q.reshape(b - a, k), "absmax": spread.reshape(b - a, k), "table": table}

    @staticmethod
    def _absmax(stored: Stored, begin: int, end: int, backend: Backend) -> F32:
        options = stored.options
        raw = flat(stored, "weight.absmax", begin, end)
        if not options["nested"]:
            return backend.to_f32(np.ascontiguousarray(raw), stored.dtype("weight.absmax"))
        table = backend.to_f32(
            stored.whole("weight.nested_quant_map"), stored.dtype("weight.nested_quant_map")
        )
        outer = backend.to_f32(
            stored.whole("weight.nested_absmax"), stored.dtype("weight.nested_absmax")
        ).reshape(-1)
        which = np.arange(begin, end) // int(options["nested"])
        out: F32 = table.reshape(-1)[raw] * outer[which] + np.float32(options["offset"])
        return out

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        out: F32 = codes["table"][codes["q"]] * codes["absmax"]
        return np.ascontiguousarray(out, np.float32)


class Bnb8(Codec):
    """Row-wise int8; no options."""

    name = "bnb8"
    family = "bnb8"
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scale = group.tensors.get("weight"), group.tensors.get("SCB")
        if weight is None or weight.dtype != "I8" or len(weight.shape) != 2:
            return "weight is not int8 [N, K]"
        n, k = weight.shape
        if scale is None or scale.dtype != "F32" or not is_row(scale.shape, n):
            return "no row absmax (SCB)"
        owned = {"weight", "SCB"}
        if group.has("weight_format"):
            layout = group.peek("weight_format")
            if layout is not None and layout.reshape(-1)[0] != 0:
                kind = group.tensors["weight_format"]
                return f"weight_format {kind} {int(layout.reshape(-1)[0])} is a layout of old GPU kernels"
            owned.add("weight_format")
        return Recognition(self.name, n, k, {}, frozenset(owned))

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        scale = stored.rows("SCB", a, b).reshape(-1)
        return {"q": stored.rows("weight", a, b), "scale": scale.astype(np.float32)}

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        out = codes["q"].astype(np.float32)
        out *= codes["scale"][:, None]
        # bitsandbytes multiplies by this, it does not divide by 127.
        out *= np.float32(1) / np.float32(127)
        return out


def flat(stored: Stored, suffix: str, begin: int, end: int) -> Array:
    """Elements [begin, end) of a tensor that is one long vector, whichever axis is the long one."""
    shape = stored.shape(suffix)
    if shape and shape[0] == prod(shape):
        return stored.rows(suffix, begin, end).reshape(-1)
    return stored.whole(suffix).reshape(-1)[begin:end]


def flat_bytes(stored: Stored, suffix: str, begin: int, end: int) -> Array:
    """Bytes [begin, end) of a tensor of any type."""
    size = nbytes(stored.dtype(suffix), (1,)) or 1
    data = np.ascontiguousarray(flat(stored, suffix, begin // size, -(-end // size))).view(np.uint8)
    skip = begin % size
    return data[skip : skip + end - begin]


def _padded(dtype: str, codes: int) -> int:
    """Bytes of packed codes, in whole elements of their storage type."""
    size = nbytes(dtype, (1,)) or 1
    return -(-codes // (2 * size)) * size


def _state(group: Group, suffix: str) -> dict[str, Any] | str:
    """The layer's quant_state, or what is wrong with it."""
    name = f"{suffix} {group.tensors[suffix]}"
    raw = group.peek(suffix)
    try:
        state = strict_json(raw.tobytes().decode("utf-8")) if raw is not None else None
    except ValueError as error:
        return f"{name} is not JSON: {error}"
    if not isinstance(state, dict):
        return f"{name} is no JSON object"
    shape, block = state.get("shape"), state.get("blocksize")
    if not isinstance(shape, list) or not shape or not all(isinstance(d, int) and d > 0 for d in shape):
        return f"{name} states no shape"
    if not isinstance(block, int) or block <= 0:
        return f"{name} states no blocksize"
    inner = state.get("nested_blocksize", 1)
    if (
        not isinstance(inner, int)
        or inner <= 0
        or not isinstance(state.get("nested_offset", 0.0), float | int)
    ):
        return f"{name}: nested_blocksize {inner!r} makes no sense"
    return state
