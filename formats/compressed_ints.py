"""compressed-tensors' integers: pack-quantized and int-quantized. FORMATS_OTHER section 3.

Both share their codes with GPTQ and AWQ (formats/affine.py): W = (q - zero) * scale per group along K. What is one
scale a row or a layer without zero points is plain int8 and read as such (formats/int8.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.formats import affine
from qconvert.formats.base import Codec, Codes, Group, Options, Recognition, Stored
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.errors import QConvertError
from qconvert.formats.finding import Finding
from qconvert.formats.quant_config import quant_config, scheme_weights
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, Array, np


class CompressedPacked(Codec):
    """pack-quantized. options: bits, group, symmetric, order, dtype (of scales), dense. Read only.

    weight_packed int32 [N, ceil(K*b/32)], each row one little-endian string of unsigned b-bit codes (`dense`) or, for
    3, 5, 6, 7 bits before 0.17.0, 32//b codes a word; weight_scale [N,K/G]; weight_shape int64 [2] = (N, K);
    weight_zero_point int32 [ceil(N*b/32), K/G] packed along N; weight_g_idx int32 [K].
    """

    name = "compressed_packed"
    anchors = ("weight_packed",)
    family = affine.FAMILY
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        packed, scale = group.tensors.get("weight_packed"), group.tensors.get("weight_scale")
        if packed is None or packed.dtype != "I32" or len(packed.shape) != 2:
            return "no int32 weight_packed [N, K*bits/32]"
        if scale is None or scale.dtype not in FLOATS or len(scale.shape) != 2:
            return "no float weight_scale [N, groups]"
        n, words = packed.shape
        groups = scale.shape[1]
        if scale.shape[0] != n or not groups:
            return f"weight_scale {scale} has not the {n} rows of weight_packed"
        weights = scheme_weights(quant_config(group), group.prefix)
        k = _columns(group, weights, n, words, groups)
        if isinstance(k, str):
            return k
        found = _width(group, k, words, weights.get("num_bits"))
        if found is None:
            return f"weight_packed {packed} holds no whole number of bits for K = {k}"
        bits, dense = found
        zeros, index = group.tensors.get("weight_zero_point"), group.tensors.get("weight_g_idx")
        if zeros is not None and zeros.shape != (_words(n, bits, dense), groups):
            return f"weight_zero_point {zeros} does not fit {bits} bits"
        size = weights.get("group_size")
        if not isinstance(size, int) or not 0 < size <= k or -(-k // size) != groups:
            if k % groups:
                return f"{groups} groups do not divide K = {k}, and no configuration says the group size"
            size = k // groups
        grouped = index is not None and index.shape == (k,) and index.dtype in ("I32", "I64")
        owned = {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"} & set(group.tensors)
        options = {
            "bits": bits,
            "group": size,
            "symmetric": zeros is None,
            "order": "act" if grouped else "natural",
            "dtype": scale.dtype,
            "dense": dense,
        }
        owned |= {"weight_g_idx"} if grouped else set()
        return Recognition(self.name, n, k, options, frozenset(owned))

    def layout(self, options: Options) -> tuple[Any, ...]:
        return ("compressed", options["bits"], options["dense"])

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        options = stored.options
        bits, dense = int(options["bits"]), bool(options["dense"])
        raw = stored.rows("weight_scale", a, b)
        codes: Codes = {
            "q": _unpack(stored.rows("weight_packed", a, b), bits, stored.k, dense),
            "scale": backend.to_f32(raw, stored.dtype("weight_scale")),
            "scale_raw": raw,
        }
        if options["symmetric"]:
            codes["zero"] = np.full(raw.shape, 1 << (bits - 1), np.int16)
        else:
            words = np.ascontiguousarray(stored.whole("weight_zero_point").T)
            zeros = _unpack(words, bits, stored.n, dense)[:, a:b]
            codes["zero"] = np.ascontiguousarray(zeros.T).astype(np.int16)
        if options["order"] == "act":
            index = stored.whole("weight_g_idx").astype(np.int32)
            # -1 stands for "not set" in files of unordered groups.
            if index.size and index.min() >= 0:
                if index.max() >= raw.shape[1]:
                    raise QConvertError(
                        "weight_g_idx names a group that is not there", found=str(index.max())
                    )
                codes["g_idx"] = index
        return codes

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return affine.decode(codes, options)

    def rounding(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return affine.rounding(codes, options)


class CompressedInt(Codec):
    """int-quantized with groups or zero points. options: bits, group, symmetric, order, dtype. Read only.

    weight int8 [N,K], **not packed** also when it holds -8..7 (W4A8, W4AFP8); weight_scale [N,K/G], [N,1] or [1];
    weight_zero_point int8 of the same shape: W = (q - z) * s.
    """

    name = "compressed_int"
    family = affine.FAMILY
    writable = False

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scale = group.tensors.get("weight"), group.tensors.get("weight_scale")
        zeros = group.tensors.get("weight_zero_point")
        if weight is None or weight.dtype != "I8" or len(weight.shape) != 2:
            return "weight is not int8"
        if scale is None or scale.dtype not in FLOATS:
            return "no float weight_scale"
        n, k = weight.shape
        shape = _two_axes(scale, n)
        if shape is None or k % shape[1]:
            return f"weight_scale {scale} is not [{n}, {k}/G]"
        if zeros is None and shape[1] == 1:
            return "one scale a row and no zero points: plain int8"
        if zeros is not None and (zeros.dtype != "I8" or zeros.shape != scale.shape):
            return f"weight_zero_point {zeros} is not int8 of the shape of weight_scale"
        said = quant_config(group)
        weights = scheme_weights(said, group.prefix)
        bits = weights.get("num_bits", 8)
        bits = bits if isinstance(bits, int) and 2 <= bits <= 8 else 8
        options = {
            "bits": bits,
            "group": k // shape[1],
            "symmetric": zeros is None,
            "order": "natural",
            "dtype": scale.dtype,
        }
        owned = {"weight", "weight_scale"} | ({"weight_zero_point"} if zeros is not None else set())
        finding = Finding(
            "note" if weights else "guess",
            f"int8 codes with a scale for {k // shape[1]} columns, as compressed-tensors writes them",
            group.prefix,
            said.words() or f"weight {weight}, weight_scale {scale}",
        )
        return Recognition(self.name, n, k, options, frozenset(owned), (finding,))

    def layout(self, options: Options) -> tuple[Any, ...]:
        return ("int8", options["bits"])

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        bits, n = int(stored.options["bits"]), stored.n
        raw = _spread(stored.whole("weight_scale"), n)[a:b]
        half = 1 << (bits - 1)
        signed = stored.rows("weight", a, b).astype(np.int16)
        if signed.size and (signed.min() < -half or signed.max() >= half):
            raise QConvertError(
                f"codes do not fit the {bits} bits that the configuration states",
                found=f"{signed.min()} to {signed.max()}",
            )
        zero = np.zeros(raw.shape, np.int16)
        if not stored.options["symmetric"]:
            zero = _spread(stored.whole("weight_zero_point"), n)[a:b].astype(np.int16)
        raw = np.ascontiguousarray(raw)
        return {
            "q": (signed + half).astype(np.uint8),
            "zero": zero + np.int16(half),
            "scale": backend.to_f32(raw, stored.dtype("weight_scale")),
            "scale_raw": raw,
        }

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return affine.decode(codes, options)

    def rounding(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return affine.rounding(codes, options)


def _columns(group: Group, weights: Mapping[str, Any], n: int, words: int, groups: int) -> int | str:
    """K: from weight_shape, else from the configuration's group size or number of bits."""
    shape = group.peek("weight_shape")
    if shape is not None and shape.size == 2:
        rows, k = (int(value) for value in shape.reshape(-1))
        return k if rows == n and k > 0 else f"weight_shape says [{rows}, {k}], weight_packed has {n} rows"
    size, bits = weights.get("group_size"), weights.get("num_bits")
    if isinstance(size, int) and size > 0:
        return size * groups
    if isinstance(bits, int) and bits in (1, 2, 4, 8):
        return words * 32 // bits
    return "no weight_shape and no configuration: K is not known"


def _words(count: int, bits: int, dense: bool) -> int:
    return -(-count * bits // 32) if dense else -(-count // (32 // bits))


def _width(group: Group, k: int, words: int, stated: Any) -> tuple[int, bool] | None:
    """(bits, dense) of rows of `words` int32 that hold K codes.

    Where both ways of packing fit, bits that the older one leaves unused tell: they are 0 in every word.
    """
    fits = [(b, dense) for dense in (True, False) for b in range(1, 9) if _words(k, b, dense) == words]
    fits = [fit for fit in fits if fit[1] or 32 % fit[0]]
    if isinstance(stated, int):
        fits = [fit for fit in fits if fit[0] == stated]
    if len(fits) > 1:
        head = group.head("weight_packed")
        for bits, _ in (fit for fit in fits if not fit[1]):
            used = np.uint32(32 // bits * bits)
            if head is not None and head.size and not (head.reshape(-1).view(np.uint32) >> used).any():
                return bits, False
    return fits[0] if fits else None


def _unpack(words: Array, bits: int, count: int, dense: bool) -> Array:
    """int32 [R, W] -> codes uint8 [R, count]."""
    if dense:
        return affine.unpack_stream(words, bits, count)
    per = 32 // bits
    shifts = (np.arange(per, dtype=np.uint32) * np.uint32(bits)).astype(np.uint32)
    spread = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return np.ascontiguousarray(spread.astype(np.uint8).reshape(words.shape[0], -1)[:, :count])


def _two_axes(scale: Spec, n: int) -> tuple[int, int] | None:
    """A scale's shape as [N, groups]; one value of a whole layer counts as one a row."""
    if scale.shape in ((), (1,), (1, 1)):
        return n, 1
    if len(scale.shape) == 2 and scale.shape[0] == n and scale.shape[1]:
        return n, scale.shape[1]
    return None


def _spread(values: Array, n: int) -> Array:
    return np.broadcast_to(values.reshape(1, 1), (n, 1)) if values.size == 1 else values
