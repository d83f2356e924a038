"""sglang's rules that follow from a marker, a layer's kind and its shape. The two versions differ in a few."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from qconvert.runtime.contracts.base import Kind, Violation
from qconvert.runtime.contracts.common import is_power_of_4, marker_text

INT8 = "int8_tensorwise"
NVFP4 = "nvfp4"
W4A8 = "asym_w4a8_int8"
W4A4 = "convrot_w4a4"
FP8 = "float8_e4m3fn"
MXFP8 = "mxfp8"

#: Config -> (the format of its linear layers, whether int8_tensorwise layers may stand beside them).
#: In the order in which a file of several recipes is pointed to one.
SERVED: dict[str, tuple[str, bool]] = {
    "comfy_nvfp4": (NVFP4, True),
    "kitchen_w4a8": (W4A8, True),
    "kitchen_w4a4": (W4A4, True),
    "convrot_int8": (INT8, False),
    "comfy_fp8": (FP8, False),
    "comfy_mxfp8": (MXFP8, False),
}
ALIASES = {"kitchen_int8": "convrot_int8"}
CONVROT_GROUPS = (16, 64, 256)
#: Keys that ComfyUI also looks for in a nested "params" object, and what sglang assumes when it misses them there.
_NESTED_KEYS: dict[str, dict[str, Any]] = {
    INT8: {"convrot": False, "convrot_groupsize": None},
    W4A8: {"convrot_groupsize": 256, "group_size": 16},
    W4A4: {"convrot_groupsize": 256, "linear_dtype": "int4"},
}


class Dialect(NamedTuple):
    """Where the versions differ."""

    name: str
    int8_class: str
    #: nvfp4 without full_precision_matrix_mult is refused, not only bound to recent GPUs.
    nvfp4_full_precision: bool
    #: Scales an int8 embedding may have beside nvfp4, beside w4a8, and in a file of int8 alone.
    nvfp4_embedding: frozenset[str]
    w4a8_embedding: frozenset[str]
    int8_embedding: frozenset[str]


_ANY = frozenset({"row", "scalar"})
NEWER = Dialect("sglang-0.5.23", "ConvRotInt8Config", False, _ANY, _ANY, _ANY)
OLDER = Dialect(
    "sglang-0132848", "KitchenInt8Config", True, frozenset({"row"}), frozenset({"scalar"}), frozenset()
)


def resolve(formats: Iterable[str]) -> str | None:
    """The config that takes a file with exactly these formats."""
    present = set(formats)
    for config, (main, companion) in SERVED.items():
        if present == {main} or (companion and present == {main, INT8}):
            return config
    return None


def as_int(value: Any) -> int | None:
    """A number as the runtime reads one from a marker (strings of digits pass), None where it would raise."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def is_plain_int8(marker: Mapping[str, Any]) -> bool:
    """int8 that the runtime takes for an embedding's: tensorwise or row-wise codes, not rotated."""
    return marker.get("format") == INT8 and not marker.get("convrot", False)


def method_name(config: str, kind: Kind, marker: Mapping[str, Any]) -> str:
    """The runtime's class for such a layer; "unquantised" where its marker would not be used."""
    plain = is_plain_int8(marker)
    if kind == "embedding":
        served = plain and config in ("comfy_nvfp4", "kitchen_w4a8", "convrot_int8")
        return "ComfyInt8EmbeddingMethod" if served else "unquantised"
    full = bool(marker.get("full_precision_matrix_mult", False))
    match marker.get("format"):
        case "nvfp4":
            return "ComfyFullPrecisionNvfp4LinearMethod" if full else "ComfyNvfp4LinearMethod"
        case "asym_w4a8_int8":
            return "KitchenW4A8LinearMethod"
        case "convrot_w4a4":
            return "KitchenW4A4LinearMethod"
        case "float8_e4m3fn":
            return "ComfyFullPrecisionFp8LinearMethod" if full else "Fp8LinearMethod"
        case "mxfp8":
            return "ComfyMXFP8LinearMethod"
        case "int8_tensorwise" if not plain:
            # Where its JIT kernels run, the newer runtime takes ConvRotInt8JitLinearMethod: the same tensors.
            return "ConvRotInt8ComfyKitchenLinearMethod"
        case _:
            return "unquantised"


def marker_violations(
    dialect: Dialect, config: str, kind: Kind, layer: str, marker: Mapping[str, Any], scale: str | None
) -> list[Violation]:
    """What `config` refuses or misreads in this marker, whatever the layer's tensors are."""
    main, companion = SERVED[config]
    name = marker.get("format")
    if name != main and not (companion and name == INT8):
        message = f"Unsupported Comfy quantization format(s): {name}"
        wanted = f"{main} or {INT8}" if companion else main
        return [Violation("refuse", "format-set", message, layer, found=str(name), expected=wanted)]
    if is_plain_int8(marker):
        found = list(_plain_int8(dialect, config, kind, layer, marker, scale))
    elif kind == "embedding":
        found = [_embedding(config, layer, marker)]
    elif name in _LINEAR:
        found = list(_LINEAR[name](dialect, config, layer, marker))
    else:
        found = []
    found += _nested(layer, marker)
    if "full_precision_matrix_mult" in marker and name in (W4A8, W4A4, INT8, MXFP8):
        message = "full_precision_matrix_mult is not read for this format"
        found.append(Violation("note", "full-precision-unread", message, layer, found=str(name)))
    return found


def _plain_int8(
    dialect: Dialect, config: str, kind: Kind, layer: str, marker: Mapping[str, Any], scale: str | None
) -> Iterator[Violation]:
    """int8 without rotation: right for some embeddings, never for a linear layer."""
    if dialect is OLDER and config == "convrot_int8":
        # Refused while the file is read, before the runtime knows what kind of layer it is.
        yield _must_be_rotated(layer, marker)
    elif kind == "linear" and config in ("convrot_int8", "kitchen_w4a4"):
        yield Violation(
            "trap",
            "int8-linear-unrotated",
            "an int8 linear layer without convrot is built as an unquantised linear layer: "
            "its int8 codes are used as weights",
            layer,
            found=marker_text(marker),
            expected='"convrot": true, "convrot_groupsize": 16, 64 or 256, and rotated weights',
        )
    elif kind == "linear":
        message = "an int8 linear layer beside another format is not served: only an embedding may be int8"
        yield Violation("refuse", "companion-linear", message, layer, marker_text(marker), SERVED[config][0])
    elif config == "kitchen_w4a4":
        yield _embedding(config, layer, marker)
    else:
        allowed = dialect.nvfp4_embedding if config == "comfy_nvfp4" else dialect.w4a8_embedding
        if config == "convrot_int8":
            allowed = dialect.int8_embedding
        if scale is not None and scale not in allowed:
            message = "Unsupported quantized embedding marker"
            shapes = {"row": "one scale a row [V,1]", "scalar": "one scale ()"}
            wanted = " or ".join(shapes[form] for form in sorted(allowed))
            yield Violation("refuse", "embedding-scale", message, layer, shapes.get(scale, scale), wanted)


def _embedding(config: str, layer: str, marker: Mapping[str, Any]) -> Violation:
    if config in ("comfy_nvfp4", "kitchen_w4a8"):
        message = "Unsupported quantized embedding marker"
        wanted = "int8_tensorwise without convrot, or an unquantised embedding"
    elif config == "convrot_int8":
        message = "the embedding's marker is not consumed: an int8 embedding is served unrotated only"
        wanted = "int8_tensorwise without convrot, or an unquantised embedding"
    else:
        message = f"the embedding's marker is not consumed: {config} serves no quantised embedding"
        wanted = "an unquantised embedding"
    return Violation("refuse", "embedding-format", message, layer, marker_text(marker), wanted)


def _nvfp4(dialect: Dialect, config: str, layer: str, marker: Mapping[str, Any]) -> Iterator[Violation]:
    if marker.get("convrot", False):
        message = "rotated nvfp4 weights are not served"
        yield Violation("refuse", "nvfp4-convrot", message, layer, marker_text(marker), "no convrot key")
    if not marker.get("full_precision_matrix_mult", False):
        if dialect.nvfp4_full_precision:
            message = "this version serves nvfp4 with full-precision matmul only"
        else:
            message = "native nvfp4 matmul needs NVIDIA compute capability 10.0 or newer"
        yield Violation(
            "refuse" if dialect.nvfp4_full_precision else "environment",
            "nvfp4-native",
            message,
            layer,
            marker_text(marker),
            '"full_precision_matrix_mult": true',
        )


def _w4a8(dialect: Dialect, config: str, layer: str, marker: Mapping[str, Any]) -> Iterator[Violation]:
    if marker.get("convrot") is not True:
        message = "a w4a8 layer must say that it is rotated"
        yield Violation("refuse", "w4a8-convrot", message, layer, marker_text(marker), '"convrot": true')
    group = as_int(marker.get("group_size", 16))
    if group is None or group < 4 or (16 % group and group % 16):
        message = "group_size must be 4, 8, 16 or a multiple of 16"
        yield Violation("refuse", "w4a8-group", message, layer, marker_text(marker), "4, 8, 16, 32, 48, ...")
    rotation = as_int(marker.get("convrot_groupsize", 256))
    if rotation is None or not is_power_of_4(rotation):
        # sglang lets any divisor of K pass; the kernel then has no rotation of that size at the first forward.
        message = "there is no ConvRot rotation of this size"
        yield Violation(
            "refuse", "w4a8-rotation", message, layer, marker_text(marker), "a power of 4, such as 64 or 256"
        )


def _w4a4(dialect: Dialect, config: str, layer: str, marker: Mapping[str, Any]) -> Iterator[Violation]:
    if as_int(marker.get("convrot_groupsize", 256)) not in CONVROT_GROUPS:
        message = "convrot_groupsize of a w4a4 layer must be 16, 64 or 256"
        yield Violation("refuse", "w4a4-rotation", message, layer, marker_text(marker), "16, 64 or 256")
    if str(marker.get("linear_dtype", "int4")) not in ("int4", "int8"):
        message = "linear_dtype of a w4a4 layer must be int4 or int8"
        yield Violation("refuse", "w4a4-linear-dtype", message, layer, marker_text(marker), "int4 or int8")


def _int8(dialect: Dialect, config: str, layer: str, marker: Mapping[str, Any]) -> Iterator[Violation]:
    if config in ("comfy_nvfp4", "kitchen_w4a8"):
        message = "a rotated int8 layer is no companion of this format: only an int8 embedding is"
        yield Violation("refuse", "companion-rotated", message, layer, marker_text(marker), SERVED[config][0])
        return
    if marker.get("convrot") is not True:
        yield _must_be_rotated(layer, marker)
    group = marker.get("convrot_groupsize")
    if not any(group == size for size in CONVROT_GROUPS):
        message = "an int8 ConvRot layer must name its convrot_groupsize: there is no default here"
        yield Violation("refuse", "int8-rotation", message, layer, marker_text(marker), "16, 64 or 256")


def _must_be_rotated(layer: str, marker: Mapping[str, Any]) -> Violation:
    message = "every int8 marker must have convrot true, as a JSON true"
    return Violation("refuse", "int8-convrot", message, layer, marker_text(marker), '"convrot": true')


_LINEAR = {NVFP4: _nvfp4, W4A8: _w4a8, W4A4: _w4a4, INT8: _int8}


def _nested(layer: str, marker: Mapping[str, Any]) -> Iterator[Violation]:
    """Keys in "params" are not read: a trap where they say something else than what is then assumed."""
    nested = marker.get("params")
    if not isinstance(nested, Mapping):
        return
    for key, default in _NESTED_KEYS.get(str(marker.get("format")), {}).items():
        if key in nested and nested[key] != marker.get(key, default):
            message = f"{key} inside params is not read"
            found, wanted = f"{nested[key]!r} in params", f"{key} at the top level"
            yield Violation("trap", "nested-params", message, layer, found, wanted)


def shape_violations(
    layer: str, kind: Kind, marker: Mapping[str, Any], k: int, *, share: int = 1
) -> Iterator[Violation]:
    """Multiples that K must be of. `share`: over how many ranks K is split (then `k` is a rank's share)."""
    if kind == "embedding":
        return
    whose = f"each of {share} ranks' share of K" if share > 1 else "K"
    rule = "tp-input" if share > 1 else "shape-multiple"

    def multiple(of: int, why: str) -> Iterator[Violation]:
        if of > 0 and k % of:
            message = f"{whose} must be a multiple of {of} ({why})"
            yield Violation("refuse", rule, message, layer, str(k), f"a multiple of {of}")

    match marker.get("format"):
        case "nvfp4":
            yield from multiple(16, "one block of nvfp4")
        case "asym_w4a8_int8":
            yield from multiple(16, "w4a8 rows")
            yield from multiple(as_int(marker.get("group_size", 16)) or 0, "group_size")
            yield from multiple(as_int(marker.get("convrot_groupsize", 256)) or 0, "the ConvRot group")
        case "convrot_w4a4":
            yield from multiple(64, "w4a4 rows")
            yield from multiple(as_int(marker.get("convrot_groupsize", 256)) or 0, "the ConvRot group")
        case "int8_tensorwise" if marker.get("convrot") is True:
            yield from multiple(as_int(marker.get("convrot_groupsize")) or 0, "the ConvRot group")
        case "mxfp8":
            yield from multiple(32, "one block of mxfp8")
        case _:
            pass


def swizzle_violations(layer: str, marker: Mapping[str, Any], n: int, k: int) -> Iterator[Violation]:
    """Swizzled scales come in tiles of 128 rows by 4 blocks; the runtime takes them unpadded only."""
    block = {NVFP4: 16, MXFP8: 32}.get(str(marker.get("format")))
    if block is None or (n % 128 == 0 and k % (4 * block) == 0):
        return
    yield Violation(
        "trap",
        "swizzle-tiles",
        "swizzled block scales fill whole tiles of 128 rows by 4 blocks, and padded ones are refused: "
        "scales cut to the layer's own size compute noise",
        layer,
        found=f"N={n}, K={k}",
        expected=f"N a multiple of 128 and K of {4 * block}",
    )
