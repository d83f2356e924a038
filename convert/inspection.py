"""What `inspect` does and prints: one screen. Neither torch nor numba is imported here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from qconvert.convert.checking import judge, named_view, weighed_source
from qconvert.convert.screen import say_line
from qconvert.convert.text import grouped, size, table, tally
from qconvert.convert.verdicts import verdict_json
from qconvert.formats.checkpoint import Checkpoint, dumps, opened
from qconvert.formats.errors import QConvertError
from qconvert.formats.header import strict_json
from qconvert.formats.layers import SENTINEL, Inventory, Layer
from qconvert.formats.marker import HEADER_KEY
from qconvert.formats.tensors import HeaderView
from qconvert.runtime.contracts.base import Verdict
from qconvert.runtime.contracts.common import suffixes
from qconvert.runtime.contracts.registry import contract_names, get_contract
from qconvert.runtime.families import detect
from qconvert.runtime.roles import is_embedding_name

#: By the axes of their weights.
_KINDS = {1: "norm", 2: "linear"}
#: Kinds of finding that fit on a screen beside the rest.
FINDINGS = 10


def run_inspect(path: Path, as_json: bool) -> None:
    """`qconvert inspect FILE`: exits 1 when a layer is in no known format, after showing the rest."""
    with opened(path) as checkpoint:
        weighed = weighed_source(checkpoint)
        view = named_view(checkpoint)
        verdicts = [
            judge(checkpoint, get_contract(name), weighed=weighed, view=view) for name in contract_names()
        ]
    unread = weighed if isinstance(weighed, QConvertError) else None
    inventory = Inventory({}, [], [], []) if isinstance(weighed, QConvertError) else weighed[0]
    if as_json:
        click.echo(dumps(_json(path, checkpoint, view, inventory, verdicts, unread)))
    else:
        for line in _screen(path, checkpoint, view, inventory, verdicts, unread):
            say_line(line)
    if unread:
        sys.exit(1)


def _json(
    path: Path,
    checkpoint: Checkpoint,
    view: HeaderView,
    inventory: Inventory,
    verdicts: Sequence[Verdict],
    unread: QConvertError | None,
) -> dict[str, Any]:
    return {
        "path": str(path),
        "bytes": checkpoint.nbytes,
        "tensors": len(checkpoint.tensors),
        "carriers": _carriers(view),
        "families": _families(checkpoint),
        "layers": [_layer_json(layer) for layer in inventory.layers.values()],
        "findings": [
            {"level": f.level, "layer": f.layer, "message": f.message, "evidence": f.evidence}
            for f in inventory.all_findings()
        ],
        "error": unread.line() if unread else None,
        "provenance": _provenance(checkpoint),
        "runtimes": [verdict_json(verdict) for verdict in verdicts],
    }


def _screen(
    path: Path,
    checkpoint: Checkpoint,
    view: HeaderView,
    inventory: Inventory,
    verdicts: Sequence[Verdict],
    unread: QConvertError | None,
) -> Iterator[str]:
    shards = f" in {len(checkpoint.files)} files" if len(checkpoint.files) > 1 else ""
    yield f"file      {path}  {size(checkpoint.nbytes)}, {len(checkpoint.tensors)} tensors{shards}"
    yield f"family    {', '.join(_families(checkpoint)) or 'unknown'}"
    yield f"markers   {', '.join(_carriers(view)) or 'none'}"
    if unread:
        yield f"holds     {tally(tensor.dtype for tensor in checkpoint.tensors.values())}"
        yield f"unread    {unread.line()}"
    else:
        yield from table(_kinds(inventory), "          ")
    lines = grouped(inventory.all_findings())
    for line in lines[:FINDINGS]:
        yield f"found     {line}"
    if len(lines) > FINDINGS:
        yield f"found     ... and {len(lines) - FINDINGS} more kinds of finding (--json lists all)"
    made = _provenance(checkpoint)
    if made:
        guesses = made.get("guesses")
        count = len(guesses) if isinstance(guesses, list) else 0
        yield (
            f"made by   qconvert {made.get('version')}: {made.get('source')} to {made.get('target')}, "
            f"{_actions(made.get('actions'))}, {count} guesses"
        )
    for verdict in verdicts:
        if verdict.accepted:
            yield f"runtime   {verdict.runtime}: takes it as {verdict.config or 'unquantised'}"
        else:
            why = next(v for v in verdict.all_violations() if v.severity in ("refuse", "trap"))
            # The facts behind it are what `check` is for.
            yield f"runtime   {verdict.runtime}: no, {why._replace(found=None, expected=None).line()}"


def _actions(value: Any) -> str:
    """ "repack 37, keep 16" out of a file's own provenance, which may be anything."""
    return ", ".join(f"{kind} {count}" for kind, count in value.items()) if isinstance(value, dict) else "?"


def _families(checkpoint: Checkpoint) -> list[str]:
    found = detect(checkpoint.specs)
    return list(dict.fromkeys(match.title for match in found))


def _kinds(inventory: Inventory) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[Layer]] = {}
    for layer in inventory.layers.values():
        kind = "bank" if layer.experts else _KINDS.get(layer.ndim, "conv")
        if kind == "linear" and is_embedding_name(layer.prefix):
            kind = "embedding"
        groups.setdefault((kind, layer.word), []).append(layer)
    rows: list[tuple[str, ...]] = [("kind", "format", "layers", "bytes", "e.g.")]
    for (kind, name), layers in sorted(groups.items()):
        first = layers[0]
        shape = (first.n, first.k) if first.quantised else first.tensors["weight"].shape
        example = f"{first.prefix} {list(shape)}"
        total = sum(tensor.nbytes for layer in layers for tensor in layer.tensors.values())
        rows.append((kind, name, str(len(layers)), size(total), example))
    if inventory.loose:
        total = sum(tensor.nbytes for tensor in inventory.loose)
        rows.append(
            (
                "other",
                tally(t.dtype for t in inventory.loose),
                str(len(inventory.loose)),
                size(total),
                inventory.loose[0].name,
            )
        )
    return rows


def _carriers(view: HeaderView) -> list[str]:
    carriers = [f"{len(view.markers)} comfy_quant tensors"] if view.markers else []
    if HEADER_KEY in view.metadata:
        carriers.append(f"header {HEADER_KEY}")
    if SENTINEL in suffixes(view):
        carriers.append("scaled_fp8 sentinel")
    return carriers


def _layer_json(layer: Layer) -> dict[str, Any]:
    return {
        "layer": layer.prefix,
        "format": layer.word,
        "n": layer.n,
        "k": layer.k,
        "options": {key: value for key, value in layer.options.items() if key != "shape"},
        "tensors": {suffix: str(tensor.spec) for suffix, tensor in layer.tensors.items()},
        "leftovers": layer.leftovers if layer.quantised else [],
    }


def _provenance(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        document = strict_json(checkpoint.metadata.get("qconvert", "{}"))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
