"""GPTQ files (AutoGPTQ, GPTQModel, AutoRound's auto_gptq): codes packed along K, one scale row per group.

Layout (FORMATS_OTHER section 1; checked against files written by those tools). Stream(b) is a row of int32 words
read as one little-endian bit string of b-bit codes.

* `qweight` int32 [K*b/32, N]: column n is Stream(b) of K codes;  `scales` fp16 (or bf16) [groups, N];
* `qzeros` int32 [groups, N*b/32]: each row is Stream(b) of N zero points. v1 stores zero - 1, v2 stores zero;
* `g_idx` int32 [K]: group of column k; absent: k // G. Codes are never permuted on disk;
* W[n, k] = scales[g, n] * (q - zero).

v1's "- 1" is a subtraction from whole words (GPTQModel), so it is undone by adding to whole words; a zero of 0 had
borrowed from its neighbour. 3-bit fields wrap one by one. No tensor says which version it is: the configuration
does, or zeros that are all 2^(b-1) (symmetric), or, failing both, the mean of the weights, which is near 0 under
one reading and one whole step off under the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from qconvert.formats import affine
from qconvert.formats.base import Codec, Codes, Group, Options, Part, Recognition, Stored
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.errors import QConvertError
from qconvert.formats.finding import Finding
from qconvert.formats.quant_config import QuantConfig, quant_config
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array, np

Version = Literal["v1", "v2"]
#: Whole-word addend that turns a v1 word into a v2 word.
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
#: Columns of a chunk are a multiple of this, so that zero points fill whole words at every width.
STEP = 32
#: A mean this near to zero, in steps of the code, tells v1 from v2: the other reading is one whole step off.
CLEAR = 0.25
#: What sglang's kernel asks of a layer (FORMATS_OTHER section 1).
MARLIN_N, MARLIN_K = 64, 128


class Gptq(Codec):
    """options: bits, group (K when there is one), zeros ("v1" | "v2"), symmetric, order ("natural" | "act"), dtype.

    When written: marlin (the layer must suit sglang's kernel).
    """

    name = "gptq"
    anchors = ("qweight",)
    family = affine.FAMILY

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, scales = group.tensors.get("qweight"), group.tensors.get("scales")
        zeros, index = group.tensors.get("qzeros"), group.tensors.get("g_idx")
        if weight is None or weight.dtype != "I32" or len(weight.shape) != 2:
            return "no int32 qweight [K*bits/32, N]"
        if scales is None or scales.dtype not in FLOATS or len(scales.shape) != 2 or not scales.shape[0]:
            return "no float scales [groups, N]"
        n, groups = scales.shape[1], scales.shape[0]
        if weight.shape[1] != n:
            return f"qweight {weight} has not the {n} columns of scales {scales}"
        if zeros is None or zeros.dtype != "I32" or len(zeros.shape) != 2 or zeros.shape[0] != groups:
            return f"no qzeros [{groups}, N*bits/32]"
        bits, over = divmod(32 * zeros.shape[1], n or 1)
        if over or not 2 <= bits <= 8 or (32 * weight.shape[0]) % bits:
            return f"qweight {weight} and qzeros {zeros} agree on no number of bits"
        k = 32 * weight.shape[0] // bits
        if index is not None and (index.dtype not in ("I32", "I64") or index.shape != (k,)):
            return f"g_idx {index} is not one group for each of {k} columns"
        config = quant_config(group)
        if bits in (5, 6, 7) and config.document.get("checkpoint_format") == "gptq_p":
            return f"{bits}-bit planes (checkpoint_format gptq_p) are another layout"
        size = _group_size(k, groups, config)
        if size is None:
            return f"{groups} groups do not divide K = {k}, and no configuration says the group size"
        order = _order(group, size)
        version, symmetric, findings = _zeros(group, config, bits, size)
        owned = {"qweight", "qzeros", "scales"} | ({"g_idx"} if index is not None else set())
        options = {
            "bits": bits,
            "group": size,
            "zeros": version,
            "symmetric": symmetric,
            "order": order,
            "dtype": scales.dtype,
        }
        return Recognition(self.name, n, k, options, frozenset(owned), findings)

    def word(self, options: Options) -> str:
        return f"gptq {options['bits']} bit"

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        bits, size = options["bits"], options["group"]
        if k % size:
            return f"gptq needs K to be a multiple of the group, K = {k}, group {size}"
        if n * bits % 32 or k * bits % 32:
            return f"{bits}-bit gptq packs whole words: N = {n} and K = {k} must be multiples of {32 // bits}"
        if options.get("marlin") and (n % MARLIN_N or k % MARLIN_K):
            return f"sglang's Marlin kernel needs N % {MARLIN_N} = 0 and K % {MARLIN_K} = 0, N = {n}, K = {k}"
        return None

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        bits, groups = options["bits"], -(-k // options["group"])
        return (
            Part("qweight", Spec("I32", (k * bits // 32, n)), "columns"),
            Part("qzeros", Spec("I32", (groups, n * bits // 32)), "columns"),
            Part("scales", Spec(options["dtype"], (groups, n)), "columns"),
            Part("g_idx", Spec("I32", (k,)), "whole"),
        )

    def layout(self, options: Options) -> tuple[Any, ...]:
        return ("gptq", options["bits"], options["group"], options["zeros"])

    def row_step(self, options: Options) -> int:
        return STEP

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        options = stored.options
        bits = int(options["bits"])
        words = np.ascontiguousarray(stored.columns("qweight", a, b).T)
        # Zero points of [a, b) lie in whole words because a is a multiple of STEP.
        first, last = a * bits // 32, -(-b * bits // 32)
        zeros = unpack_zeros(stored.columns("qzeros", first, last), bits, options["zeros"], b - a)
        raw = np.ascontiguousarray(stored.columns("scales", a, b).T)
        codes: Codes = {
            "q": affine.unpack_stream(words, bits, stored.k),
            "zero": np.ascontiguousarray(zeros.T),
            "scale": backend.to_f32(raw, stored.dtype("scales")),
            "scale_raw": raw,
        }
        if stored.has("g_idx"):
            index = _checked_index(stored, codes["scale"].shape[1])
            if options["order"] == "act":
                codes["g_idx"] = index
            elif not np.array_equal(index, np.arange(stored.k) // options["group"]):
                raise QConvertError("g_idx leaves the natural order after its first 16384 columns")
        return codes

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return affine.decode(codes, options)

    def rounding(self, codes: Codes, options: Options, backend: Backend) -> F32:
        return affine.rounding(codes, options)

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        bits, size = options["bits"], options["group"]
        return affine.encode_symmetric(x, bits, size, options["dtype"], backend, quality == "best")

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        bits, q, zeros = int(options["bits"]), codes["q"], codes["zero"]
        if options["symmetric"] and (zeros != 1 << (bits - 1)).any():
            q, zeros = affine.centred(codes, options)
        index = codes.get("g_idx")
        if index is None:
            index = (np.arange(k) // options["group"]).astype(np.int32)
        return {
            "qweight": np.ascontiguousarray(affine.pack_stream(q, bits).T),
            "qzeros": pack_zeros(zeros.T.astype(np.uint8), bits, options["zeros"]),
            "scales": np.ascontiguousarray(codes["scale_raw"].T),
            "g_idx": index,
        }

    def carries(self, source: Options, target: Options) -> bool:
        """Groups and scales as they are; codes too, or about one zero point where the target has room for that."""
        same = all(source.get(key) == target[key] for key in ("group", "dtype"))
        order = source.get("order", "natural") == "natural" or target["order"] == "act"
        if not target["symmetric"]:
            return same and order and source["bits"] == target["bits"]
        # q - zero is below 2^bits in magnitude, or in [-2^(bits-1), 2^(bits-1)) where zeros are symmetric.
        room = source["bits"] if source["symmetric"] else source["bits"] + 1
        return same and order and room <= target["bits"]


def unpack_zeros(words: Array, bits: int, version: Version, count: int) -> Array:
    """int32 [groups, W] -> zero points int16 [groups, count]."""
    if version == "v1" and bits in _ONES:
        words = (words.view(np.uint32) + np.uint32(_ONES[bits])).view(np.int32)
    zeros = affine.unpack_stream(words, bits, count)
    if version == "v1" and bits not in _ONES:
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    return zeros.astype(np.int16)


def pack_zeros(zeros: Array, bits: int, version: Version) -> Array:
    """The inverse of `unpack_zeros`."""
    if version == "v1" and bits not in _ONES:
        zeros = (zeros - np.uint8(1)) & np.uint8((1 << bits) - 1)
    words = affine.pack_stream(np.ascontiguousarray(zeros), bits)
    if version == "v1" and bits in _ONES:
        words = (words.view(np.uint32) - np.uint32(_ONES[bits])).view(np.int32)
    return words


def _group_size(k: int, groups: int, config: QuantConfig) -> int | None:
    stated = config.document.get("group_size")
    if isinstance(stated, int) and 0 < stated < k and -(-k // stated) == groups:
        return stated
    return k // groups if k % groups == 0 else None


def _checked_index(stored: Stored, groups: int) -> Array:
    index = stored.whole("g_idx").astype(np.int32)
    if index.size and (index.min() < 0 or index.max() >= groups):
        raise QConvertError(
            "g_idx names a group that is not there",
            found=f"{index.min()} to {index.max()}",
            expected=f"0 to {groups - 1}",
        )
    return index


def _order(group: Group, size: int) -> Literal["natural", "act"]:
    """Natural where g_idx is k // G as far as its head shows; `load` compares the rest."""
    index = group.head("g_idx") if group.has("g_idx") else None
    natural = index is None or np.array_equal(index, np.arange(index.size) // size)
    return "natural" if natural else "act"


def _zeros(
    group: Group, config: QuantConfig, bits: int, size: int
) -> tuple[Version, bool, tuple[Finding, ...]]:
    """Which version the zero points are stored in, whether they are symmetric, and what that rests on."""
    stated = _stated_version(config)
    head = group.head("qzeros")
    constant = None
    if head is not None and head.size and config.document.get("sym") is not False:
        fields = affine.unpack_stream(head.reshape(1, -1), bits, head.size * 32 // bits)
        middle = 1 << (bits - 1)
        constant = {middle - 1: "v1", middle: "v2"}.get(int(fields[0, 0])) if np.ptp(fields) == 0 else None
    evidence = f"qzeros {group.tensors['qzeros']}"
    if constant is not None and constant != stated:
        words = f"symmetric zero points as {constant} stores them"
        if stated is None:
            return _version(constant), True, (Finding("note", words, group.prefix, evidence),)
        words += f", although the configuration says {stated}"
        return _version(constant), True, (Finding("guess", words, group.prefix, config.words()),)
    if stated is not None:
        return _version(stated), constant is not None, ()
    leaning = _mean_says(group, bits, size)
    words = "nothing says whether zero points are GPTQ v1 (stored minus 1) or v2; "
    words += f"taken as {leaning[0]} (checkpoint_format in a config.json beside the file would settle it)"
    return leaning[0], False, (Finding("guess", words, group.prefix, leaning[1]),)


def _version(text: str) -> Version:
    return "v2" if text == "v2" else "v1"


def _stated_version(config: QuantConfig) -> Version | None:
    """From the configuration: GPTQModel's checkpoint_format, AutoRound's packing_format."""
    document = config.document
    if config.method not in (
        "gptq",
        "gptqmodel",
        "auto-round",
        "autoround",
        "auto_round",
        "intel/auto-round",
    ):
        return None
    stated = str(document.get("checkpoint_format") or document.get("packing_format") or "")
    if stated in ("gptq_v2", "auto_round:gptqmodel", "auto_round"):
        return "v2"
    return "v1" if stated in ("", "gptq", "auto_gptq", "auto_round:auto_gptq", "auto_round:gptq") else None


def _mean_says(group: Group, bits: int, size: int) -> tuple[Version, str]:
    """Mean of (q - zero) over the first columns, in steps: near 0 for weights read as they were written."""
    usual: Version = "v1"
    words, zeros, n = group.head("qweight"), group.head("qzeros"), group.tensors["scales"].shape[1]
    width = n * bits // 32
    rows = words.size // n // bits * bits if words is not None else 0
    if words is None or zeros is None or not rows or zeros.size < width:
        return usual, "the usual one"
    count = rows * 32 // bits
    index = group.head("g_idx") if group.has("g_idx") else None
    groups = np.arange(count) // size if index is None else index[:count]
    seen = zeros[: zeros.size // width * width].reshape(-1, width)
    known = (groups >= 0) & (groups < len(seen))
    q = affine.unpack_stream(np.ascontiguousarray(words[: rows * n].reshape(rows, n).T), bits, count)
    if len(groups) < count or not known.any():
        return usual, "the usual one"
    means: dict[Version, float] = {}
    for version in ("v1", "v2"):
        zero = unpack_zeros(seen, bits, _version(version), n).mean(axis=1)
        means[_version(version)] = float((q.mean(axis=0) - zero[np.where(known, groups, 0)])[known].mean())
    text = f"mean of the first codes less their zero point: v1 {means['v1']:+.2f}, v2 {means['v2']:+.2f}"
    for version, mean in means.items():
        if abs(mean) < CLEAR:
            return version, text
    return usual, f"the usual one; {text} does not tell"
