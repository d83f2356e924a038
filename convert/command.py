"""What `convert` and `verify` do and print."""

from __future__ import annotations

import os
import shlex
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from qconvert.convert.actions import LOSSLESS, Plan
from qconvert.convert.backends import chosen_backend
from qconvert.convert.classes import layer_class
from qconvert.convert.cli import parse_pairs
from qconvert.convert.forms import Forms
from qconvert.convert.job import Outcome, Request, execute_plan, head_start, output_path, plan_job
from qconvert.convert.plan import PlanOptions
from qconvert.convert.progress import progress_bar
from qconvert.convert.recipe import DTYPES, read_recipe
from qconvert.convert.report import outcome_json, plan_json
from qconvert.convert.screen import LABEL, say, say_rows, speaking, verbose, volume_of
from qconvert.convert.serving import component_of, serving
from qconvert.convert.shards import ShardWriter
from qconvert.convert.source_error import source_lines
from qconvert.convert.text import db, grouped, parse_size, size, tally
from qconvert.formats.checkpoint import Checkpoint, dumps, opened
from qconvert.formats.header import Layout
from qconvert.formats.layers import Layer, parse_assumption
from qconvert.formats.remote import Place
from qconvert.kernels.select import backend_report, get_backend
from qconvert.runtime.families import detect
from qconvert.runtime.targets import Wishes
from qconvert.runtime.verify import decibels


def make_request(source: Place, target: str, output: Place | None, options: dict[str, Any]) -> Request:
    """The command line's options as a Request."""
    return Request(
        source=source,
        target=target,
        output=output,
        runtime=options["runtime"],
        plan=PlanOptions(
            keep=tuple(options["keep"]),
            dtype=DTYPES[options["dtype"]],
            wishes=Wishes(
                native_fp4=options["native_fp4"],
                full_precision=options["full_precision"],
                scalar_embedding=options["runtime"] == "sglang-0132848",
            ),
            quantise_embedding=options["embedding"] == "int8",
            quality=options["quality"],
            component=options["component"],
            keep_layers=options["keep_layers"],
            keep_prefix=options["keep_prefix"],
            rename=parse_pairs(tuple(options["rename"]), "--rename"),
            recipe=read_recipe(options["recipe"]) if options["recipe"] else None,
        ),
        assume=tuple(parse_assumption(text) for text in options["assume"]),
        strict=options["strict"],
        force=options["force"],
        resume=options["resume"],
        jobs=options["jobs"],
        memory=parse_size(options["memory"]),
        shard_size=parse_size(options["shard_size"]) if options["shard_size"] else None,
        backend=chosen_backend(options.get("backend"), options.get("device")),
        engine=options.get("engine", "local"),
        staging=options.get("staging"),
        calibration=options.get("calibration"),
        forms=Forms(
            options.get("budget"), options.get("min_sqnr"), options.get("plan"), options.get("plan_out")
        ),
    )


def run_convert(
    source: Place, target: str, output: Place | None, as_json: bool, dry_run: bool, options: dict[str, Any]
) -> None:
    """`qconvert SRC --to TARGET`."""
    with speaking(volume_of(options.get("quiet", False), options.get("verbose", False))):
        _run_convert(source, target, output, as_json, dry_run, options)


def _run_convert(
    source: Place, target: str, output: Place | None, as_json: bool, dry_run: bool, options: dict[str, Any]
) -> None:
    request = make_request(source, target, output, options)
    report: Path | None = options.get("report")
    if report is not None:
        from qconvert.convert.report_write import check_report

        check_report(report, force=request.force)
    begun = time.monotonic()
    with opened(source) as checkpoint, head_start(request, checkpoint) as head:
        plan, laid = plan_job(request, checkpoint, None if dry_run else head)
        path = named_output(request, plan, laid)
        if not as_json:
            print_plan(checkpoint, plan, laid.file_size, path)
        if dry_run:
            if as_json:
                click.echo(dumps(plan_json(plan, path, laid.file_size)))
            if report is not None:
                _report(report, checkpoint, plan, path, laid.file_size, None, as_json)
            return
        if request.resume and not request.force:
            from qconvert.convert.finished import finished_before

            made = finished_before(request, checkpoint, plan, laid)
            if made is not None:
                print_finished(checkpoint, plan, made, laid.file_size, as_json)
                if report is not None:
                    _report(report, checkpoint, plan, made, laid.file_size, None, as_json)
                return
        if not as_json and any(action.transforms for action in plan.actions) and _first_run():
            say("note", "the first conversion after an install compiles its kernels: ten seconds or so, once")
        with progress_bar(sum(action.layer.nbytes for action in plan.actions), as_json) as advance:
            outcome = execute_plan(request, checkpoint, plan, laid, advance, begun, head)
        if as_json:
            click.echo(
                dumps(outcome_json(outcome) | {"backends": [str(state) for state in backend_report()]})
            )
        else:
            print_outcome(outcome)
            if verbose() or request.backend != "cpu":
                say("backend", "; ".join(str(state) for state in backend_report()))
            for line in _serving(checkpoint, plan, outcome.output):
                say("serve", line)
        if report is not None:
            _report(report, checkpoint, plan, outcome.output, outcome.output_bytes, outcome, as_json)


def named_output(request: Request, plan: Plan, laid: Layout) -> Place:
    """What is printed as the output: a file, the index of shards, or the folder of a target that makes folders."""
    path = output_path(request, plan.target)
    if plan.target.sidecars is not None:
        return path
    return path.parent / ShardWriter(plan, laid, Path(path.name), request.shard_size).path.name


def print_finished(checkpoint: Checkpoint, plan: Plan, path: Path, out_bytes: int, as_json: bool) -> None:
    """That an earlier run had finished: nothing was measured now, so that nothing is said of closeness."""
    if as_json:
        click.echo(dumps(plan_json(plan, path, out_bytes) | {"finished_before": True}))
        return
    check = shlex.join(["qconvert", "verify", "--digest", str(path)])
    say("done", f"{path}  was finished by an earlier run; `{check}` compares every bit")
    for line in _serving(checkpoint, plan, path):
        say("serve", line)


def _first_run() -> bool:
    """Whether no kernel has been compiled where numba keeps them, as far as a look can tell."""
    spec = find_spec("qconvert.kernels.cpu")
    folders = spec.submodule_search_locations if spec else None
    if not folders or "NUMBA_CACHE_DIR" in os.environ:
        return False
    cache = Path(folders[0]) / "__pycache__"
    return os.access(cache.parent, os.W_OK) and next(cache.glob("*.nbi"), None) is None


def _serving(checkpoint: Checkpoint, plan: Plan, path: Place) -> list[str]:
    prefixes = {action.layer.prefix for action in plan.actions}
    return serving(plan, path, component_of(detect(checkpoint.specs), prefixes))


def _report(
    report: Path,
    checkpoint: Checkpoint,
    plan: Plan,
    path: Place,
    out_bytes: int,
    outcome: Outcome | None,
    as_json: bool,
) -> None:
    from qconvert.convert.report_model import build_report
    from qconvert.convert.report_samples import worst_histograms
    from qconvert.convert.report_write import write_report

    histograms = worst_histograms(checkpoint, outcome, get_backend()) if outcome else []
    findings = [(line.partition(": ")[0], line.partition(": ")[2]) for line in grouped(plan.findings)]
    lines = _serving(checkpoint, plan, path)
    write_report(
        report, build_report(checkpoint, plan, path, out_bytes, outcome, histograms, findings, lines)
    )
    if not as_json:
        say("report", str(report))


def print_plan(checkpoint: Checkpoint, plan: Plan, out_bytes: int, path: Place) -> None:
    """What was found and what will be done."""
    layers = [action.layer for action in plan.actions]
    found = tally(_source_word(action.layer) for action in plan.actions)
    say("source", f"{checkpoint.path}  {size(checkpoint.nbytes)}, {len(layers)} layers: {found}")
    if plan.families:
        say("family", ", ".join(plan.families))
    else:
        say("family", "unknown: generic rules (2-D weights that are not embeddings)")
    for line in grouped(plan.findings):
        say("found", line)
    for note in plan.notes:
        say("note", note)
    contract = f" for {plan.contracts[0].name}" if plan.contracts else ""
    say("plan", f"{plan.target.name}{contract}, {size(checkpoint.nbytes)} -> {size(out_bytes)}")
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for action in plan.actions:
        key = (action.kind, action.role, action.method, action.reason)
        groups.setdefault(key, []).append(action.layer.nbytes)
    say_rows(
        [
            (kind, str(len(sizes)), role, f"-> {method}", size(sum(sizes)), reason)
            for (kind, role, method, reason), sizes in groups.items()
        ],
        LABEL,
    )
    if verbose():
        for action in plan.actions:
            say(
                "layer",
                f"{action.layer.prefix}: {action.layer.word} -> {action.method}, {action.kind}, {action.reason}",
            )
    reasons: dict[tuple[str, str], list[str]] = {}
    for drop in plan.drops:
        reasons.setdefault((drop.tensor.rpartition(".")[2], drop.reason), []).append(drop.tensor)
    for (suffix, reason), names in reasons.items():
        say("dropped", f"{len(names)} {suffix} (e.g. {names[0]}): {reason}")
    say("output", str(path))


def _source_word(layer: Layer) -> str:
    # Formats of other ecosystems have no markers to miss.
    missing = layer.marker is None and layer.codec.marker(layer.options) is not None
    return layer.word + (" (unmarked)" if missing else "")


def print_outcome(outcome: Outcome) -> None:
    """What came out, who takes it, and how close it is."""
    plan = outcome.plan
    ratio = outcome.output_bytes / max(outcome.source_bytes, 1)
    rate = outcome.source_bytes / max(outcome.seconds, 1e-9)
    say(
        "done",
        f"{outcome.output}  {size(outcome.source_bytes)} -> {size(outcome.output_bytes)} "
        f"(x{ratio:.2f}) in {outcome.seconds:.1f} s, {size(rate)}/s",
    )
    if outcome.taken_over:
        say("resumed", f"{outcome.taken_over} pieces that an earlier run had finished were taken over")
    for verdict in outcome.verdicts:
        if verdict.accepted:
            methods = tally(layer.method for layer in verdict.layers)
            say(
                "accepted",
                f"{verdict.runtime}: "
                + (f"{verdict.config} ({methods})" if verdict.config else "unquantised"),
            )
        else:
            why = next(v for v in verdict.all_violations() if v.severity in ("refuse", "trap"))
            say("refused", f"{verdict.runtime}: {why.line()}")
    for cls, count, sqnr in class_errors(outcome):
        say("closeness", f"{cls}: {count} layers, SQNR {db(sqnr)}")
    for line in source_lines(plan, outcome.source_errors.items()):
        say("carried", line)
    for action in plan.actions:
        result = outcome.results.get(action.layer.prefix)
        if result is not None and result.lost:
            rows = f"{result.lost} of {action.layer.n} rows are smaller than {action.method} can scale, and are zero"
            say("note", f"{action.prefix}: {rows}")
    if verbose():
        for action in plan.actions:
            result = outcome.results.get(action.layer.prefix)
            if result is not None and action.kind not in LOSSLESS:
                say("layer", f"{action.prefix}: SQNR {db(decibels(result.signal, result.noise))}")
    if all(action.kind in ("keep", "copy") for action in plan.actions):
        say("", "the source was already right: copied as it is")
    say("proof", "the written file was read back: markers, shapes and values as planned")


def class_errors(outcome: Outcome) -> list[tuple[str, int, float]]:
    """(class, layers, SQNR in dB) over the quantised or changed layers."""
    sums: dict[str, list[float]] = {}
    for action in outcome.plan.actions:
        if action.kind == "keep":
            continue
        entry = sums.setdefault(layer_class(action.prefix, action.role), [0, 0.0, 0.0])
        entry[0] += 1
        result = outcome.results.get(action.layer.prefix)
        if result is not None and action.kind not in LOSSLESS:
            entry[1] += result.signal
            entry[2] += result.noise
    return [(cls, int(n), decibels(signal, noise)) for cls, (n, signal, noise) in sorted(sums.items())]
