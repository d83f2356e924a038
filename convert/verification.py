"""What `verify` does and prints."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from qconvert.convert.backends import chosen_backend
from qconvert.convert.classes import layer_class
from qconvert.convert.cli import parse_pairs
from qconvert.convert.progress import progress_bar
from qconvert.convert.reading import read_source
from qconvert.convert.screen import say, say_rows, verbose
from qconvert.convert.text import db, parse_size
from qconvert.formats.checkpoint import Checkpoint, dumps, opened
from qconvert.formats.digest import check_digests
from qconvert.formats.errors import UsageError
from qconvert.formats.layers import Layer, take_inventory
from qconvert.formats.patterns import option_rule
from qconvert.kernels.arrays import F32
from qconvert.kernels.select import get_backend
from qconvert.runtime.recorded import recorded_inputs
from qconvert.runtime.roles import is_embedding_name
from qconvert.runtime.verify import CHUNK_ELEMENTS, LayerMatch, compare_files, decibels, default_threshold

#: Layers listed one by one, worst first.
WORST = 8
#: Bytes that comparing a chunk takes at its peak for each of its elements: both sides stored, decoded and rotated.
BYTES_PER_ELEMENT = 40
#: Elements of the smallest chunks that are worth their overhead.
LEAST_ELEMENTS = 1 << 16


def run_verify(
    source: Path,
    target: Path | None,
    as_json: bool,
    *,
    digest: bool,
    min_sqnr: float | None,
    sample: int | None,
    rename: tuple[str, ...],
    activations: Path | None,
    jobs: int | None,
    memory: str,
    backend: str | None = None,
    device: str | None = None,
) -> None:
    """`qconvert verify SRC DST`: exits 1 when a layer is missing or too far from the source.

    `digest`: bits are compared with what was recorded, first of all; of a file alone, nothing else is.
    """
    if digest:
        with opened(target or source) as checkpoint:
            check_digests(checkpoint, jobs or os.cpu_count() or 1)
        if target is None:
            if as_json:
                click.echo(dumps({"ok": True, "digest": True}))
            else:
                say("verdict", f"right: every bit of {source} is as it was written")
            return
    if target is None:
        raise UsageError("verify compares two files", hint="verify SOURCE TARGET, or verify --digest FILE")
    rules = [option_rule(a, b, "--rename") for a, b in parse_pairs(rename, "--rename")]

    def renamed(name: str) -> str:
        for pattern, replacement in rules:
            name = pattern.sub(replacement, f"{name}.weight").removesuffix(".weight")
        return name

    def at_random(layer: Layer) -> F32 | None:
        return None

    computes = get_backend(chosen_backend(backend, device))
    budget = parse_size(memory)
    with ExitStack() as stack:
        a, b = stack.enter_context(opened(source)), stack.enter_context(opened(target))
        recorded = stack.enter_context(opened(activations)) if activations else None
        # The target is read as its markers say, for so will the runtime.
        left, right = read_source(a)[0], take_inventory(b)
        threads, elements = shares(budget, jobs or os.cpu_count() or 1, left.layers.values(), recorded)
        advance = stack.enter_context(
            progress_bar(sum(layer.nbytes for layer in left.layers.values()), as_json)
        )
        found = compare_files(
            (a, left),
            (b, right),
            computes,
            rename=renamed if rules else None,
            max_rows=sample,
            activations=recorded_inputs(recorded, computes) if recorded else at_random,
            jobs=threads,
            elements=elements,
            progress=advance,
        )
    bad = [
        m
        for m in found.matches
        if m.sqnr < (min_sqnr if min_sqnr is not None else default_threshold(m.format))
    ]
    problems = [f"{name} is missing in {target}" for name in found.missing] + found.mismatched
    problems += [f"{m.layer}: {db(m.sqnr)} is too far from the source" for m in bad]
    if not found.matches:
        problems.append("the two files have no layer in common")
    if as_json:
        click.echo(
            dumps(
                {
                    "ok": not problems,
                    "sqnr_db": _number(found.total()),
                    "problems": problems,
                    "layers": [_match_json(m) for m in sorted(found.matches, key=lambda m: m.sqnr)],
                }
            )
        )
    else:
        _print_matches(found.matches)
        for name in found.extra:
            say("note", f"{name} is only in {target}")
        for problem in problems:
            say("wrong", problem)
        say(
            "verdict",
            f"{'wrong' if problems else 'right'}: {len(found.matches)} layers, SQNR {db(found.total())}",
        )
    if problems:
        sys.exit(1)


def shares(memory: int, jobs: int, layers: Iterable[Layer], recorded: Checkpoint | None) -> tuple[int, int]:
    """Threads, and elements that each decodes at a time, so that all of them stay within `memory` bytes.

    A chunk holds 128 rows at least; where that takes more than the memory there is, one thread does it.
    """
    widest = 128 * max((layer.k for layer in layers), default=0)
    inputs = max((tensor.nbytes for tensor in recorded.tensors.values()), default=0) if recorded else 0
    # Recorded inputs are held as they are stored and, at most twice, in float32.
    fixed = inputs * 5
    least = max(LEAST_ELEMENTS, widest) * BYTES_PER_ELEMENT + fixed
    threads = max(1, min(jobs, memory // least))
    elements = (memory // threads - fixed) // BYTES_PER_ELEMENT
    return threads, max(LEAST_ELEMENTS, min(CHUNK_ELEMENTS, elements))


def _print_matches(matches: list[LayerMatch]) -> None:
    sums: dict[tuple[str, str], list[float]] = {}
    for m in matches:
        role = "embedding" if is_embedding_name(m.layer) else "linear"
        entry = sums.setdefault((layer_class(m.layer, role), m.format), [0, 0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((1, m.signal, m.noise, m.out_signal, m.out_noise)):
            entry[i] += value
    rows = [("class", "format", "layers", "weights", "outputs")]
    for (cls, name), (count, s, n, out_s, out_n) in sorted(sums.items()):
        rows.append(
            (cls, name, str(int(count)), db(decibels(s, n)), db(decibels(out_s, out_n)) if out_s else "-")
        )
    say_rows(rows, head=True)
    worst = sorted((m for m in matches if m.noise), key=lambda m: m.sqnr)
    for m in worst if verbose() else worst[:WORST]:
        out = f", outputs {db(m.out_sqnr)}" if m.out_signal else ""
        say("worst", f"{m.layer}: {m.source_format} -> {m.format}, weights {db(m.sqnr)}{out}")


def _match_json(m: LayerMatch) -> dict[str, Any]:
    return {
        "layer": m.layer,
        "from": m.source_format,
        "to": m.format,
        "rows": m.rows,
        "sqnr_db": _number(m.sqnr),
        "output_sqnr_db": _number(m.out_sqnr) if m.out_signal else None,
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else "exact" if value > 0 else "none"
