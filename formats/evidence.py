"""What values say where headers cannot: weighed over a whole file, applied to its layers, reported with numbers.

Markers and shapes leave a few questions open that make a file load and compute noise: how nvfp4's and mxfp8's
block scales lie, which nibble comes first, whether int8 codes are rotated, whether fp8 codes lost their scale.
`weigh` answers them from a bounded sample. Strong evidence against a marker changes how its layers are read and is
a guess; what the user states with --assume is never changed; without evidence markers and priors hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from qconvert.formats.base import stored_k
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.evidence_float8 import weight_range
from qconvert.formats.evidence_nibbles import nibble_order
from qconvert.formats.evidence_rotation import RotationScore, rotation
from qconvert.formats.evidence_scales import ambiguous, scale_layout
from qconvert.formats.finding import Finding
from qconvert.formats.layers import Inventory, Layer
from qconvert.formats.rotation import USUAL_GROUPS, choose_group
from qconvert.formats.sample import form

Topic = Literal["block scales", "nibble order", "rotation", "fp8 scale"]
#: What is assumed of layers that nothing in the file speaks of begins with these words.
UNMARKED = "no marker; "


class Judgement(NamedTuple):
    """One question, answered or not, for some layers.

    `contrary`: values say otherwise than the file's markers or the user. `fatal`: no reading makes sense of them.
    """

    topic: Topic
    layers: tuple[str, ...]
    message: str
    evidence: str
    contrary: bool = False
    fatal: bool = False


class _Answer(NamedTuple):
    """What a question came to: the option it settles, whether values or only the claim say so, and in words."""

    topic: Topic
    key: str
    value: str | int
    known: bool
    words: str
    reading: str


def weigh(
    checkpoint: Checkpoint, inventory: Inventory, is_table: Callable[[str], bool] = lambda prefix: False
) -> list[Judgement]:
    """Look at values, correct the options of layers that they contradict, and add findings.

    `is_table` tells embeddings from linear layers by name: tables are not rotated by any quantiser known.
    """
    layers = [
        layer
        for layer in inventory.layers.values()
        if layer.quantised and layer.n and layer.k == stored_k(layer.options, layer.k) > 0
    ]
    out: list[Judgement] = []
    for name in ("nvfp4", "mxfp8"):
        for pool in _by_carrier(layer for layer in layers if form(layer) == name):
            out += _block_scales(checkpoint, inventory, pool)
    packed = [layer for layer in layers if form(layer) == "nvfp4"]
    if packed:
        out += _nibbles(checkpoint, inventory, packed)
    linear = [x for x in layers if x.codec.name == "int8" and x.ndim == 2 and not is_table(x.prefix)]
    for pool in _by_carrier(linear):
        out += _rotations(checkpoint, inventory, pool)
    for pool in _by_carrier(layer for layer in layers if layer.codec.name == "float8"):
        out += _float8(checkpoint, pool)
    return out


def _by_carrier(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Layers that the user speaks of, that a marker or a configuration speaks of, and others: each pool was made in
    one way.
    """
    pools: dict[str, list[Layer]] = {}
    for layer in layers:
        pools.setdefault(_carrier(layer), []).append(layer)
    return list(pools.values())


def _carrier(layer: Layer) -> str:
    if layer.assumed:
        return "assumed"
    return "unmarked" if layer.marker is None and "stated" not in layer.options else "marked"


def _block_scales(checkpoint: Checkpoint, inventory: Inventory, pool: list[Layer]) -> list[Judgement]:
    open_ones = [layer for layer in pool if ambiguous(layer)]
    score = scale_layout(checkpoint, open_ones)
    if score is None:
        return []
    said, words = score.verdict, score.words()
    if said is None and _carrier(pool[0]) == "unmarked" and _cut_siblings(pool):
        said, words = "linear", "the scales of the file's other layers are not padded to tiles"
    value = said or str(open_ones[0].options["scales"])
    answer = _Answer("block scales", "scales", value, said is not None, words, f"{value} block scales")
    return [_apply(inventory, open_ones, answer)]


def _cut_siblings(pool: Sequence[Layer]) -> bool:
    """Whether layers of the pool show by their shape that scales are linear, and none that they are swizzled."""
    shapes = {layer.options["scales"] for layer in pool if _tells(layer)}
    return shapes == {"linear"}


def _tells(layer: Layer) -> bool:
    block = 16 if form(layer) == "nvfp4" else 32
    return bool(layer.n % 128 or layer.k % (4 * block))


def _nibbles(checkpoint: Checkpoint, inventory: Inventory, layers: list[Layer]) -> list[Judgement]:
    score = nibble_order(checkpoint, inventory, layers)
    said, words = score.verdict, score.words()
    out: list[Judgement] = []
    for pool in _by_carrier(layers):
        if said is None and _carrier(pool[0]) == "unmarked":
            # ModelOpt writes linear scales and the low nibble first, ComfyUI the other of both.
            for layer in pool:
                layer.options["nibbles"] = "low" if layer.options["scales"] == "linear" else "high"
        claims: dict[str, list[Layer]] = {}
        for layer in pool:
            claims.setdefault(str(layer.options["nibbles"]), []).append(layer)
        for claimed, part in claims.items():
            value = said or claimed
            reading = f"{value} nibble first"
            answer = _Answer("nibble order", "nibbles", value, said is not None, words, reading)
            out.append(_apply(inventory, part, answer))
    return out


def _rotations(checkpoint: Checkpoint, inventory: Inventory, pool: list[Layer]) -> list[Judgement]:
    kinds: dict[tuple[int, int], list[Layer]] = {}
    for layer in pool:
        kinds.setdefault((int(layer.options["rotation"]), layer.k), []).append(layer)
    scores = {key: rotation(checkpoint, layers) for key, layers in kinds.items()}
    habits = {
        claimed: _habit([score for key, score in scores.items() if score and key[0] == claimed])
        for claimed, _ in scores
    }
    out: list[Judgement] = []
    for (claimed, k), layers in kinds.items():
        score = scores[claimed, k]
        if score is None:
            continue
        said, words = score.verdict, score.words()
        habit = habits[claimed]
        if said is None and habit is not None:
            # Too few or too plain to tell alone; what is wrong in the others is wrong here.
            said = choose_group(k, USUAL_GROUPS) if habit else 0
            words = f"as in the file's other int8 layers; here {words}"
        group = claimed if said is None else said
        answer = _Answer("rotation", "rotation", group, said is not None, words, _rotated(group))
        out.append(_apply(inventory, layers, answer))
    return out


def _habit(scores: Sequence[RotationScore]) -> int | None:
    """1 where layers that contradict their claim are all rotated by the largest usual group, 0 where none is."""
    contrary = [score for score in scores if score.verdict is not None and score.verdict != score.claimed]
    if not contrary or any(score.verdict == score.claimed for score in scores):
        return None
    if all(score.verdict == 0 for score in contrary):
        return 0
    usual = all(
        score.verdict == max(group for group in USUAL_GROUPS if group in score.kurtosis)
        for score in contrary
        if any(group in score.kurtosis for group in USUAL_GROUPS)
    )
    return 1 if usual else None


def _rotated(group: int) -> str:
    return f"rotated by ConvRot {group}" if group else "not rotated"


def _float8(checkpoint: Checkpoint, pool: list[Layer]) -> list[Judgement]:
    out = []
    for scaled in (True, False):
        layers = [layer for layer in pool if (layer.options["scale"] != "none") == scaled]
        score = weight_range(checkpoint, layers)
        if score is None or score.plausible:
            continue
        message = (
            "weights are far too large with their scale: it may be a reciprocal"
            if scaled
            else "fp8 codes fill their range as scaled ones do, but there is no scale: it was lost"
        )
        assumed = layers[0].assumed
        for layer in layers:
            layer.findings.append(
                Finding("note" if assumed else "guess", message, layer.prefix, score.words())
            )
        names = tuple(layer.prefix for layer in layers)
        out.append(Judgement("fp8 scale", names, message, score.words(), not assumed, not assumed))
    return out


def _apply(inventory: Inventory, layers: list[Layer], answer: _Answer) -> Judgement:
    """Record an answer for layers of one pool that claim the same; change them where it contradicts the claim."""
    topic, words, reading = answer.topic, answer.words, answer.reading
    contrary = answer.known and any(layer.options[answer.key] != answer.value for layer in layers)
    carrier, name = _carrier(layers[0]), layers[0].codec.name
    names = tuple(layer.prefix for layer in layers)
    if carrier == "assumed":
        if contrary:
            message = f"values speak against --assume: {name} looks like {reading}"
            inventory.findings.append(Finding("note", message, names[0], words))
        return Judgement(topic, names, f"{name} as the command line says", words)
    for layer in layers:
        layer.options[answer.key] = answer.value
        if carrier == "unmarked":
            _restate(layer, words if answer.known else f"values do not tell: {words}")
        elif contrary:
            message = f"marked {_marked(layer)}, but its values show {reading}; read so"
            layer.findings.append(Finding("guess", message, layer.prefix, words))
    if carrier == "unmarked":
        return Judgement(topic, names, f"{name} without a marker: {reading}", words)
    if contrary:
        message = f"marked {_marked(layers[0])}, but its values show {reading}"
        return Judgement(topic, names, message, words, contrary=True)
    if answer.known:
        message = f"values agree with {name}'s markers: {reading}"
    else:
        message = f"values give no evidence of {name}'s {topic}; its markers are believed: {reading}"
    inventory.findings.append(Finding("note", message, None, words))
    return Judgement(topic, names, message, words)


def _marked(layer: Layer) -> str:
    marker = layer.marker or {}
    name = str(marker.get("format", f"{layer.codec.name} by its configuration"))
    if layer.codec.name != "int8":
        return name
    group = marker.get("convrot_groupsize", 256)
    return f"{name} with ConvRot {group}" if marker.get("convrot") else f"{name} without convrot"


def _restate(layer: Layer, words: str) -> None:
    """The finding that says what an unmarked layer is taken for, with its present options and this evidence."""
    for i, finding in enumerate(layer.findings):
        if finding.level == "guess" and finding.message.startswith(UNMARKED):
            known = [part for part in (finding.evidence, words) if part]
            evidence = "; ".join(dict.fromkeys(known))
            layer.findings[i] = Finding("guess", UNMARKED + _reading(layer), layer.prefix, evidence)
            return


def _reading(layer: Layer) -> str:
    options = layer.options
    if layer.codec.name == "nvfp4":
        return f"taken as nvfp4 with {options['scales']} scales, {options['nibbles']} nibble first"
    if layer.codec.name == "mxfp8":
        return f"taken as mxfp8 with {options['scales']} scales"
    return f"int8 taken as {_rotated(int(options['rotation']))}"
