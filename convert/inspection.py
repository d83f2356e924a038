"""What `inspect` and `check` do and print. Neither torch nor numba is imported here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from qconvert.convert.report import verdict_json
from qconvert.convert.text import grouped, size, table, tally
from qconvert.formats.checkpoint import Checkpoint, dumps, opened
from qconvert.formats.header import strict_json
from qconvert.formats.layers import Inventory, Layer, take_inventory
from qconvert.formats.marker import HEADER_KEY
from qconvert.runtime.contracts.registry import DEFAULT_CONTRACT, contract_names, get_contract
from qconvert.runtime.roles import is_embedding_name
from qconvert.runtime.verify import describe


def run_inspect(path: Path, as_json: bool) -> None:
    """`qconvert inspect FILE`."""
    with opened(path) as checkpoint:
        inventory = take_inventory(checkpoint)
        view = checkpoint.view()
        verdicts = [get_contract(name).check(view) for name in contract_names()]
    if as_json:
        click.echo(
            dumps(
                {
                    "path": str(path),
                    "bytes": checkpoint.nbytes,
                    "tensors": len(checkpoint.tensors),
                    "carriers": _carriers(checkpoint),
                    "layers": [_layer_json(layer) for layer in inventory.layers.values()],
                    "findings": [
                        {"level": f.level, "layer": f.layer, "message": f.message, "evidence": f.evidence}
                        for f in inventory.all_findings()
                    ],
                    "provenance": _provenance(checkpoint),
                    "runtimes": [
                        {"runtime": v.runtime, "accepted": v.accepted, "config": v.config} for v in verdicts
                    ],
                }
            )
        )
        return
    shards = f" in {len(checkpoint.files)} files" if len(checkpoint.files) > 1 else ""
    click.echo(f"file      {path}  {size(checkpoint.nbytes)}, {len(checkpoint.tensors)} tensors{shards}")
    click.echo(f"markers   {', '.join(_carriers(checkpoint)) or 'none'}")
    for line in table(_kinds(inventory), "          "):
        click.echo(line)
    for line in grouped(inventory.all_findings()):
        click.echo(f"found     {line}")
    made = _provenance(checkpoint)
    if made:
        click.echo(
            f"made by   qconvert {made.get('version')}: {made.get('source')} to {made.get('target')}, "
            f"{made.get('actions')}, {len(made.get('guesses', []))} guesses"
        )
    for verdict in verdicts:
        if verdict.accepted:
            click.echo(f"runtime   {verdict.runtime}: takes it as {verdict.config or 'unquantised'}")
        else:
            why = next(v for v in verdict.all_violations() if v.severity in ("refuse", "trap"))
            click.echo(f"runtime   {verdict.runtime}: no, {why.line()}")


def _kinds(inventory: Inventory) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[Layer]] = {}
    for layer in inventory.layers.values():
        kind = "bank" if layer.experts else {1: "norm", 2: "linear"}.get(layer.ndim, "conv")
        if kind == "linear" and is_embedding_name(layer.prefix):
            kind = "embedding"
        groups.setdefault((kind, describe(layer)), []).append(layer)
    rows: list[tuple[str, ...]] = [("kind", "format", "layers", "bytes", "e.g.")]
    for (kind, name), layers in sorted(groups.items()):
        example = f"{layers[0].prefix} [{layers[0].n}, {layers[0].k}]"
        rows.append((kind, name, str(len(layers)), size(sum(layer.nbytes for layer in layers)), example))
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


def _carriers(checkpoint: Checkpoint) -> list[str]:
    tensors = sum(name.endswith(".comfy_quant") for name in checkpoint.tensors)
    carriers = [f"{tensors} comfy_quant tensors"] if tensors else []
    if HEADER_KEY in checkpoint.metadata:
        carriers.append(f"header {HEADER_KEY}")
    if any(name.rpartition(".")[2] == "scaled_fp8" for name in checkpoint.tensors):
        carriers.append("scaled_fp8 sentinel")
    return carriers


def _layer_json(layer: Layer) -> dict[str, Any]:
    return {
        "layer": layer.prefix,
        "format": describe(layer),
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


def run_check(path: Path, runtime: str | None, tp: int, as_json: bool) -> None:
    """`qconvert check FILE`: exits 1 when the runtime would refuse or misread the file."""
    contract = get_contract(runtime or DEFAULT_CONTRACT)
    with opened(path) as checkpoint:
        verdict = contract.check(checkpoint.view(), tp=tp)
    if as_json:
        click.echo(dumps(verdict_json(verdict)))
    else:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for layer in verdict.layers:
            groups.setdefault((layer.kind, str(layer.format), layer.method), []).append(layer.layer)
        rows = [
            (kind, name, f"-> {method}", str(len(layers)), layers[0])
            for (kind, name, method), layers in groups.items()
        ]
        for line in table(rows, ""):
            click.echo(line)
        for violation in verdict.all_violations():
            click.echo(f"{violation.severity:11} {violation.line()}")
        answer = f"accepted as {verdict.config or 'unquantised'}" if verdict.accepted else "not accepted"
        click.echo(f"{verdict.runtime}: {answer}")
    if not verdict.accepted:
        sys.exit(1)
