"""What `diff A B` does and prints: what changed in each layer, from its marker to its values.

Both files are read as their values show, so that a repaired file differs from the broken one in layout and not in
values. Exit codes as diff(1)'s: 0 the same, 1 different, 2 trouble.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from qconvert.convert.reading import read_source
from qconvert.convert.screen import say_line
from qconvert.convert.text import db
from qconvert.formats.checkpoint import Checkpoint, dumps, opened
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import Inventory, Layer
from qconvert.formats.tensors import TensorSpec
from qconvert.kernels.arrays import np
from qconvert.kernels.select import get_backend
from qconvert.runtime.verify import Side, compare_layer, pair_layers

CHUNK = 4 << 20
#: Options that say how a layer is to be read and that no header shows.
_READING = ("scales", "nibbles", "rotation", "group", "codebook", "signed")
#: Metadata that is expected to differ: where the file comes from.
_OWN = frozenset({"qconvert"})
PREFIX = "model.diffusion_model."


@dataclass(frozen=True, slots=True)
class Change:
    """One thing of a layer that differs: `what`, and how it is in each file."""

    what: str
    a: str
    b: str

    def line(self) -> str:
        return f"{self.what} {self.a} -> {self.b}"


@dataclass
class LayerDiff:
    """A layer's changes. `sqnr` in dB, inf when values are the same; None where values cannot be compared."""

    layer: str
    changes: list[Change] = field(default_factory=list)
    sqnr: float | None = math.inf

    @property
    def same(self) -> bool:
        return not self.changes


@dataclass
class FileDiff:
    """All differences of two files; `same` counts the layers without any."""

    layers: list[LayerDiff]
    same: int
    only_a: list[str]
    only_b: list[str]
    metadata: list[Change]

    @property
    def empty(self) -> bool:
        return not (self.layers or self.only_a or self.only_b or self.metadata)


def diff_files(a: Checkpoint, b: Checkpoint, sample: int | None = None) -> FileDiff:
    """Compare two checkpoints layer by layer. `sample`: rows of each layer whose values are compared (all)."""
    left, right = read_source(a)[0], read_source(b)[0]
    pairs, only_a, only_b = pair_layers(left, right)
    layers = [_layer((a, x), (b, y), sample) for x, y in pairs]
    layers += list(_loose((a, left), (b, right), only_a, only_b))
    metadata = [
        Change(f"metadata {key}", _short(a.metadata.get(key)), _short(b.metadata.get(key)))
        for key in sorted({*a.metadata, *b.metadata} - _OWN)
        if a.metadata.get(key) != b.metadata.get(key)
    ]
    changed = [layer for layer in layers if not layer.same]
    return FileDiff(changed, len(layers) - len(changed), sorted(only_a), sorted(only_b), metadata)


def _layer(a: tuple[Checkpoint, Layer], b: tuple[Checkpoint, Layer], sample: int | None) -> LayerDiff:
    x, y = a[1], b[1]
    found = LayerDiff(x.prefix)
    if x.word != y.word:
        found.changes.append(Change("format", x.word, y.word))
    if x.marker != y.marker:
        found.changes.append(Change("marker", _marker(x), _marker(y)))
    for key in _READING:
        if x.codec.name == y.codec.name and x.options.get(key) != y.options.get(key):
            found.changes.append(Change(key, str(x.options.get(key)), str(y.options.get(key))))
    for suffix in dict.fromkeys((*x.tensors, *y.tensors)):
        if suffix != "comfy_quant":
            found.changes += _tensor(a[0], x.tensors.get(suffix), b[0], y.tensors.get(suffix), suffix)
    if found.changes:
        found.sqnr = _values(a, b, sample)
    return found


def _values(a: tuple[Checkpoint, Layer], b: tuple[Checkpoint, Layer], sample: int | None) -> float | None:
    x, y = a[1], b[1]
    if (x.n, x.k, x.experts) != (y.n, y.k, y.experts):
        return None
    match = compare_layer(Side(a[0], x), Side(b[0], y), get_backend(), max_rows=sample)
    # Going through float32 in another basis and back leaves about 1e-13 of the energy.
    return math.inf if match.noise <= 1e-12 * match.signal else match.sqnr


def _tensor(
    a: Checkpoint, x: TensorSpec | None, b: Checkpoint, y: TensorSpec | None, what: str
) -> list[Change]:
    if x is None or y is None:
        return [Change(what, "absent" if x is None else str(x.spec), "absent" if y is None else str(y.spec))]
    if x.nbytes != y.nbytes:
        return [Change(what, str(x.spec), str(y.spec))]
    share = _differing(a, x, b, y)
    bits = f"bits differ in {share:.3g} % of its bytes" if share else "bits the same"
    if x.spec != y.spec:
        return [Change(what, str(x.spec), f"{y.spec}, {bits}")]
    return [Change(what, str(x.spec), f"same type and shape, {bits}")] if share else []


def _differing(a: Checkpoint, x: TensorSpec, b: Checkpoint, y: TensorSpec) -> float:
    """Percent of bytes that differ between two tensors of one size."""
    count = 0
    for begin in range(0, x.nbytes, CHUNK):
        size = min(CHUNK, x.nbytes - begin)
        left = a.pread(x.file, x.start + begin, size)
        count += int(np.count_nonzero(left != b.pread(y.file, y.start + begin, size)))
    return 100 * count / max(x.nbytes, 1)


def _loose(
    a: tuple[Checkpoint, Inventory], b: tuple[Checkpoint, Inventory], only_a: list[str], only_b: list[str]
) -> Iterator[LayerDiff]:
    """Tensors that belong to no layer; names that one file lacks are added to the lists."""
    there = {tensor.name: tensor for tensor in (*b[1].loose, *b[1].sentinels)}
    for tensor in (*a[1].loose, *a[1].sentinels):
        other = there.pop(tensor.name, None) or there.pop(tensor.name.removeprefix(PREFIX), None)
        if other is None:
            only_a.append(tensor.name)
            continue
        changes = _tensor(a[0], tensor, b[0], other, "tensor")
        yield LayerDiff(tensor.name, changes, None if changes else math.inf)
    only_b.extend(there)


def _marker(layer: Layer) -> str:
    return dumps(layer.marker) if layer.marker is not None else "none"


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= 60 else f"{value[:57]}..."


def run_diff(path_a: Path, path_b: Path, sample: int | None, as_json: bool) -> None:
    """`qconvert diff A B`."""
    try:
        with opened(path_a) as a, opened(path_b) as b:
            found = diff_files(a, b, sample)
    except QConvertError as error:
        # As diff(1): 1 says that the files differ, so trouble needs another code.
        error.exit_code = 2
        raise
    if as_json:
        click.echo(dumps(_json(found)))
    else:
        for line in screen(found):
            say_line(line)
    if not found.empty:
        sys.exit(1)


def screen(found: FileDiff) -> Iterator[str]:
    """Layers that changed in the same way share their lines."""
    groups: dict[tuple[str, ...], list[LayerDiff]] = {}
    for layer in found.layers:
        groups.setdefault(tuple(_alike(change) for change in layer.changes), []).append(layer)
    for members in groups.values():
        first = members[0]
        more = f" and {len(members) - 1} layers like it" if len(members) > 1 else ""
        yield f"{first.layer}{more}"
        for change in first.changes:
            yield f"  {change.line()}"
        words = _sqnr([layer.sqnr for layer in members])
        if words:
            yield f"  values {words}"
    for name in found.only_a:
        yield f"only in the first: {name}"
    for name in found.only_b:
        yield f"only in the second: {name}"
    for change in found.metadata:
        yield change.line()
    yield f"{len(found.layers)} layers and tensors differ, {found.same} are the same"


def _alike(change: Change) -> str:
    """What makes two changes the same kind: everything but sizes and shares."""
    a, b = (re.sub(r"\[[\d, ]*\]|in [\d.e+-]+ %", "", text) for text in (change.a, change.b))
    return f"{change.what} {a} {b}"


def _sqnr(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    if low == math.inf:
        return "exactly the same"
    return f"SQNR {db(low)}" if low == high else f"SQNR {db(low)} to {db(high)}"


def _json(found: FileDiff) -> dict[str, Any]:
    def number(value: float | None) -> float | str | None:
        return value if value is None or math.isfinite(value) else "exact" if value > 0 else "none"

    def change(item: Change) -> dict[str, str]:
        return {"what": item.what, "a": item.a, "b": item.b}

    return {
        "same": found.empty,
        "layers_same": found.same,
        "layers": [
            {"layer": x.layer, "changes": [change(c) for c in x.changes], "sqnr_db": number(x.sqnr)}
            for x in found.layers
        ],
        "only_a": found.only_a,
        "only_b": found.only_b,
        "metadata": [change(item) for item in found.metadata],
    }
