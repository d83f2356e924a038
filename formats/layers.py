"""From headers to layers: which tensors belong together, in which format, and how sure that is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from qconvert.formats.base import Codec, Group, Recognition
from qconvert.formats.checkpoint import MARKER_SUFFIX, MAX_MARKER_BYTES, Checkpoint
from qconvert.formats.dtypes import BLOCKS, FLOATS, numpy_dtype
from qconvert.formats.errors import QConvertError, UsageError, close_to
from qconvert.formats.finding import Finding, Level
from qconvert.formats.marker import Markers, collect
from qconvert.formats.padding import unpad
from qconvert.formats.patterns import Pattern, option_pattern
from qconvert.formats.plain import plain_form
from qconvert.formats.quant_config import header_config
from qconvert.formats.registry import CODECS, codec, codec_for_marker, known_formats
from qconvert.formats.tensors import TensorSpec
from qconvert.kernels.arrays import Array

#: Tensors of a layer that no codec owns but that belong to it by right.
COMPANIONS = frozenset({"bias", "input_scale", "scale_input", "pre_quant_scale"})
SENTINEL = "scaled_fp8"
_WEIGHT = frozenset({"weight"})
#: How the bits of a format may lie where its marker does not say: keys of --assume, and their values.
LAYOUT_KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "nvfp4": {"scales": ("swizzled", "linear"), "nibbles": ("high", "low")},
    "mxfp8": {"scales": ("swizzled", "linear")},
}
#: Formats by which a list of layers (format_version 1.1) names those that are not quantised.
PLAIN_MARKERS = frozenset({"bf16", "fp16", "fp32"})
#: Weights of these types cannot be plain values.
QUANTISED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8", "F4"}) | frozenset(BLOCKS)

#: Types that no format keeps scales in, and what the tensors are called that hold such numbers.
NO_SCALES = frozenset({"BOOL", "C64", "I16", "U16", "I32", "U32", "I64", "U64"})
_SCALE_NAMES = (
    "scale", "_s_rel", "_s_channel", "correction", "codebook", "absmax", "quant_map", "proj", "smooth", "SCB",
)  # fmt: skip


@dataclass(slots=True)
class Layer:
    """One weight with all that belongs to it.

    n, k: out and in features (k is the product of all axes but the first for convolutions). `codec` and `options`
    say how it is stored. `tensors`: every tensor under the prefix, by suffix; `owned`: those the codec reads.
    """

    prefix: str
    n: int
    k: int
    codec: Codec
    options: dict[str, Any]
    tensors: dict[str, TensorSpec]
    owned: frozenset[str]
    marker: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)
    experts: int = 0
    #: The user said what it is (--assume): values do not overrule that.
    assumed: bool = False

    @property
    def quantised(self) -> bool:
        return self.codec.name != "plain"

    @property
    def ndim(self) -> int:
        """Axes of the logical weight: 2 for a linear or an embedding, more for convolutions, 1 for a norm."""
        if self.experts:
            return 3
        weight = self.tensors.get("weight")
        if weight is None or self.codec.name in ("svdquant_w4a4",):
            return 2
        return len(weight.shape)

    @property
    def bare(self) -> bool:
        """Whether the prefix is the name of a tensor itself: a quantised parameter that is no module's weight."""
        weight = self.tensors.get("weight")
        return weight is not None and weight.name == self.prefix

    @property
    def word(self) -> str:
        """The format in a word: the marker's, else the codec's or the dtype."""
        return str(self.marker["format"]) if self.marker else self.codec.word(self.options)

    @property
    def first(self) -> TensorSpec:
        return self.tensors.get("weight") or next(iter(self.tensors.values()))

    @property
    def nbytes(self) -> int:
        total = 0
        for tensor in self.tensors.values():
            total += tensor.nbytes
        return total

    @property
    def params(self) -> int:
        return self.n * self.k * max(self.experts, 1)

    @property
    def leftovers(self) -> list[str]:
        """Suffixes that neither the codec nor any runtime reads beside this weight."""
        return [
            suffix
            for suffix in self.tensors
            if suffix not in self.owned and suffix not in COMPANIONS and suffix != "comfy_quant"
        ]


@dataclass
class Inventory:
    """Everything in a checkpoint: layers in payload order, loose tensors, sentinels, file-wide findings."""

    layers: dict[str, Layer]
    loose: list[TensorSpec]
    sentinels: list[TensorSpec]
    findings: list[Finding]

    def all_findings(self) -> list[Finding]:
        return self.findings + [finding for layer in self.layers.values() for finding in layer.findings]

    def copy(self) -> Inventory:
        """Another one that equals this, and stays as it is when values change how this one's layers are read."""
        layers = {
            prefix: replace(layer, options=dict(layer.options), findings=list(layer.findings))
            for prefix, layer in self.layers.items()
        }
        return replace(self, layers=layers, findings=list(self.findings))


class Assumption(NamedTuple):
    """`--assume REGEX=FORMAT[,key=value]`: what the user says of layers; it replaces what the file says."""

    text: str
    pattern: Pattern
    marker: Mapping[str, Any]
    #: What no marker can say: how the bits lie.
    layout: Mapping[str, str]


def parse_assumption(text: str) -> Assumption:
    """Raises UsageError for a bad regular expression, an unknown format, or options that are not key=value."""
    regex, found, rest = text.partition("=")
    name, *pairs = rest.split(",")
    if not found or not regex:
        raise UsageError(f"--assume {text!r}", expected="REGEX=FORMAT[,key=value]")
    if codec_for_marker(name) is None:
        known = known_formats()
        hint = close_to(name, known, f"FORMAT one of {', '.join(known)}")
        raise UsageError(f"--assume {text!r}: unknown format {name!r}", hint=hint)
    marker: dict[str, Any] = {"format": name}
    layout: dict[str, str] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found:
            raise UsageError(f"--assume {text!r}: {pair!r} is not key=value")
        allowed = LAYOUT_KEYS.get(name, {}).get(key)
        if allowed is not None:
            if value not in allowed:
                raise UsageError(f"--assume {text!r}: {key}={value}", expected=f"{key}={'|'.join(allowed)}")
            layout[key] = value
            continue
        try:
            marker[key] = json.loads(value)
        except ValueError:
            marker[key] = value
    return Assumption(text, option_pattern(regex, "--assume"), marker, layout)


def take_inventory(checkpoint: Checkpoint, assume: Sequence[Assumption] = ()) -> Inventory:
    """Recognise every layer of a checkpoint from its headers and markers.

    Raises QConvertError for a quantised weight that no format explains, UsageError for an assumption that fits
    no quantised layer.
    """
    unused = {assumption.text for assumption in assume}
    groups, loose, sentinels = _group(checkpoint)
    raw = {prefix: data for prefix, data in checkpoint.marker_bytes().items() if prefix}
    markers, findings = collect(raw, checkpoint.metadata, groups)
    layers: dict[str, Layer] = {}
    plain = codec("plain")
    for prefix, tensors in groups.items():
        if prefix not in markers and _alone(tensors):
            n, k, options = plain_form(tensors["weight"])
            layers[prefix] = Layer(prefix, n, k, plain, options, tensors, _WEIGHT)
            continue
        state = markers.get(prefix, Markers())
        assumed: Assumption | None = None
        for assumption in assume:
            if _looks_quantised(tensors) and assumption.pattern.search(prefix):
                state = Markers([("command line", dict(assumption.marker))])
                unused.discard(assumption.text)
                assumed = assumption
                break
        legacy, full = _legacy(prefix, sentinels)
        specs = {suffix: checkpoint.specs[tensor.name] for suffix, tensor in tensors.items()}
        peek = _peek(checkpoint, tensors)
        head = _head(checkpoint, tensors)
        group = Group(prefix, specs, legacy, full, checkpoint.config, checkpoint.metadata, peek, head)
        layer = _recognise(checkpoint, group, tensors, state)
        if layer is None:
            loose.extend(tensors.values())
        else:
            if assumed is not None:
                _assume(layer, assumed)
            unpad(checkpoint, layer)
            layers[prefix] = layer
    if unused:
        raise UsageError(f"--assume {min(unused)!r} fits no quantised layer", file=str(checkpoint.path))
    return Inventory(layers, loose, sentinels, findings)


def _assume(layer: Layer, assumed: Assumption) -> None:
    """What the user says of how bits lie, where the shapes allow it; what was only guessed is no guess any more."""
    layer.assumed = True
    scales = assumed.layout.get("scales")
    if scales is not None and scales != layer.options["scales"]:
        block = 16 if layer.codec.name == "nvfp4" else 32
        if layer.n % 128 or layer.k % (4 * block):
            source = layer.options.get("source", "weight_scale")
            raise UsageError(
                f"--assume {assumed.text!r}: the shape of {source} says that scales are {layer.options['scales']}",
                layer=layer.prefix,
                found=str(layer.tensors[source].spec),
            )
    layer.options.update(assumed.layout)
    layer.findings = [f._replace(level="note") if f.level == "guess" else f for f in layer.findings]


def _group(
    checkpoint: Checkpoint,
) -> tuple[dict[str, dict[str, TensorSpec]], list[TensorSpec], list[TensorSpec]]:
    """Tensors by layer prefix and suffix; those of no layer; sentinels and markers of no layer."""
    anchors = {anchor for item in CODECS for anchor in item.anchors}
    inner = anchors.union(*(item.submodules for item in CODECS))
    dotted = tuple("." + anchor for anchor in anchors if "." in anchor)
    parts = [name.rpartition(".") for name in checkpoint.tensors]
    prefixes = {prefix for prefix, dot, suffix in parts if suffix in anchors and dot}
    for name in checkpoint.tensors:
        if name.endswith(dotted):
            prefixes.update(name.removesuffix(anchor) for anchor in dotted if name.endswith(anchor))
    groups: dict[str, dict[str, TensorSpec]] = {}
    loose: list[TensorSpec] = []
    sentinels: list[TensorSpec] = []
    for (name, tensor), (prefix, _, suffix) in zip(checkpoint.tensors.items(), parts, strict=True):
        if prefix not in prefixes and suffix != SENTINEL:
            prefix, suffix = _below_anchor(name, prefixes, inner)
        if suffix == SENTINEL:
            sentinels.append(tensor)
        elif prefix in prefixes:
            if prefix in groups:
                groups[prefix][suffix] = tensor
            else:
                groups[prefix] = {suffix: tensor}
        elif name.endswith(MARKER_SUFFIX):
            sentinels.append(tensor)
        elif tensor.dtype in BLOCKS:
            groups[name] = {"weight": tensor}
        else:
            loose.append(tensor)
    return groups, loose, sentinels


def _below_anchor(name: str, prefixes: set[str], anchors: set[str]) -> tuple[str, str]:
    """(layer, suffix) of a tensor named below an anchor: `a.weight.absmax` is `weight.absmax` of layer `a`."""
    for anchor in anchors:
        for mark in (".", ":"):
            cut = name.rfind(f".{anchor}{mark}")
            if cut > 0 and name[:cut] in prefixes:
                return name[:cut], name[cut + 1 :]
    return "", name


def _peek(checkpoint: Checkpoint, tensors: Mapping[str, TensorSpec]) -> Callable[[str], Array | None]:
    """A layer's small descriptive tensors by suffix."""

    def peek(suffix: str) -> Array | None:
        tensor = tensors.get(suffix)
        if tensor is None or tensor.nbytes > MAX_MARKER_BYTES:
            return None
        return checkpoint.read(tensor.name)

    return peek


def _head(checkpoint: Checkpoint, tensors: Mapping[str, TensorSpec]) -> Callable[[str], Array | None]:
    """The beginnings of a layer's tensors by suffix."""

    def head(suffix: str) -> Array | None:
        tensor = tensors.get(suffix)
        if tensor is None:
            return None
        kind = numpy_dtype(tensor.dtype)
        size = min(tensor.nbytes, MAX_MARKER_BYTES) // kind.itemsize * kind.itemsize
        return checkpoint.pread(tensor.file, tensor.start, size).view(kind)

    return head


def _legacy(prefix: str, sentinels: list[TensorSpec]) -> tuple[bool, bool]:
    """Whether a `scaled_fp8` sentinel stands above this layer, and whether it asks for full-precision matmul."""
    for tensor in sentinels:
        above, _, name = tensor.name.rpartition(".")
        if name == SENTINEL and (not above or prefix.startswith(above + ".")):
            return True, tensor.shape == (2,)
    return False, False


def _foreign(group: Group, carrier: str, marker: Mapping[str, Any], plain: bool) -> bool:
    """Entries of a header's list that are no ComfyUI markers: unquantised layers that it names too, and all of a
    list that ModelOpt's export writes (its "nvfp4" has the low nibble first, FORMATS_OTHER section 4).
    """
    if carrier != "header":
        return False
    return (plain and marker["format"] in PLAIN_MARKERS) or header_config(group.metadata).method == "modelopt"


def _recognise(
    checkpoint: Checkpoint, group: Group, tensors: dict[str, TensorSpec], state: Markers
) -> Layer | None:
    plain = "weight" in group.tensors and group.tensors["weight"].dtype in FLOATS
    findings = list(state.findings)
    claims: list[tuple[str, dict[str, Any], Recognition]] = []
    reasons: list[str] = []
    state.candidates = [item for item in state.candidates if not _foreign(group, *item, plain)]
    for carrier, marker in state.candidates:
        named = codec_for_marker(marker["format"])
        if named is None:
            reasons.append(
                f"format {marker['format']!r} is unknown" if marker["format"] else "no format is named"
            )
            continue
        if plain:
            reasons.append(f"marked {marker['format']} but the weight is {group.tensors['weight'].dtype}")
            continue
        got = _claim(named, group, marker)
        if isinstance(got, str):
            reasons.append(f"marked {marker['format']}, but {got}")
        else:
            claims.append((carrier, marker, got))
    if claims:
        carrier, marker, got = claims[0]
        if len(state.candidates) > 1:
            others = [m for c, m in state.candidates if m is not marker]
            findings.append(
                Finding(
                    "guess",
                    f"header and tensor disagree; the {carrier} marker is believed",
                    group.prefix,
                    reasons[0] if reasons else f"{marker} against {others[0]}",
                )
            )
        findings.extend(got.findings)
        return _layer(group.prefix, got, tensors, findings, marker)
    for candidate in CODECS:
        got = _claim(candidate, group, None)
        if isinstance(got, str):
            if any(anchor in group.tensors for anchor in candidate.anchors) and candidate.name != "plain":
                reasons.append(f"{candidate.name}: {got}")
            continue
        if state.candidates and not reasons:
            reasons.append("marker does not fit")
        if state.candidates:
            level: Level = "repair" if got.codec == "plain" else "guess"
            findings.append(
                Finding(level, f"marker not believed: {reasons[0]}; taken as {got.codec}", group.prefix)
            )
        findings.extend(got.findings)
        return _layer(group.prefix, got, tensors, findings, None)
    if _looks_quantised(tensors):
        spec = next(iter(tensors.values()))
        raise QConvertError(
            "no known format explains this quantised weight",
            file=str(checkpoint.files[spec.file]),
            layer=group.prefix,
            found=", ".join(
                f"{suffix} {t}" for suffix, t in group.tensors.items() if suffix != "comfy_quant"
            ),
            expected=_nearest_reasons(reasons, group),
            hint="name it with --assume 'LAYER_REGEX=FORMAT'",
        )
    return None


def _alone(tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether a weight of floats stands alone: no format keeps codes in floats without scales, so none is asked."""
    weight = tensors.get("weight")
    if weight is None or weight.dtype not in FLOATS:
        return False
    return len(tensors) == 1 or tensors.keys() <= {"weight", "bias"}


def _claim(candidate: Codec, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
    """What a codec makes of a layer; refused where a scale is of a type that holds no scale, or no weight is there."""
    got = candidate.recognise(group, marker)
    if isinstance(got, str) or candidate.name == "plain":
        return got
    if not (got.n and got.k):
        return f"a quantised weight of no elements, [{got.n}, {got.k}]"
    for suffix in sorted(got.owned):
        spec = group.tensors.get(suffix)
        if spec is not None and spec.dtype in NO_SCALES and any(word in suffix for word in _SCALE_NAMES):
            return f"{suffix} {spec} holds no scales"
    return got


def _nearest_reasons(reasons: list[str], group: Group) -> str:
    """Why the formats that came nearest do not fit: the marked one, and those that looked at a tensor that is there."""
    marked = [r for r in reasons if r.startswith(("marked ", "format ", "no format "))]
    beside = [f"{suffix} {spec}" for suffix, spec in group.tensors.items() if suffix != "weight"]
    # Under other names than `weight` few formats are meant at all.
    fitting = [r for r in reasons if "weight" not in group.tensors or any(text in r for text in beside)]
    near = list(dict.fromkeys(marked + fitting))[: 2 if "weight" in group.tensors else 6]
    return "; ".join(near) or "scales beside it that say how to read its codes"


def _looks_quantised(tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether a weight cannot be plain values: packed under another name, or of a type that needs a scale."""
    return "weight" not in tensors or tensors["weight"].dtype in QUANTISED_DTYPES


def _layer(
    prefix: str,
    got: Recognition,
    tensors: dict[str, TensorSpec],
    findings: list[Finding],
    marker: dict[str, Any] | None,
) -> Layer:
    return Layer(
        prefix, got.n, got.k, codec(got.codec), got.options, tensors, got.owned, marker, findings, got.experts
    )
