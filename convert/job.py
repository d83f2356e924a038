"""One conversion from paths to a proven file: read, plan, write, gate, load back, rename."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from qconvert.convert.actions import LOSSLESS, Plan, out_spec
from qconvert.convert.execute import DEFAULT_MEMORY, Result
from qconvert.convert.forms import Forms
from qconvert.convert.gate import gate, refuse_plan
from qconvert.convert.identity import plan_digest
from qconvert.convert.place import lay_out
from qconvert.convert.plan import PlanOptions, make_plan
from qconvert.convert.proof import read_back
from qconvert.convert.reading import refuse_senseless, weigh_source
from qconvert.convert.source_error import SourceError, decoded_layers, source_errors
from qconvert.convert.writing import HeadStart, Writing
from qconvert.formats import digest
from qconvert.formats.checkpoint import INDEX_SUFFIX, Checkpoint, dumps
from qconvert.formats.containers import SUFFIXES
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.header import Layout
from qconvert.formats.layers import Assumption, Inventory, take_inventory
from qconvert.formats.remote import Place, Remote
from qconvert.runtime.contracts.base import Contract, Verdict
from qconvert.runtime.contracts.registry import contracts_of, get_contract
from qconvert.runtime.families import detect
from qconvert.runtime.sidecars import LayerForm, OutputForm, folder_file
from qconvert.runtime.targets import Target, get_target
from qconvert.runtime.verify import decibels

import qconvert

#: Noise over signal from which on a layer counts as lost (3 dB). The worst format on the worst weights has 10 dB.
LEFT = 0.5


@dataclass(frozen=True)
class Request:
    """What the user asked for, as the command line or a batch file states it."""

    source: Place
    target: str
    output: Place | None = None
    runtime: str | None = None
    plan: PlanOptions = field(default_factory=PlanOptions)
    assume: tuple[Assumption, ...] = ()
    strict: bool = False
    force: bool = False
    resume: bool = False
    jobs: int | None = None
    memory: int = DEFAULT_MEMORY
    #: Bytes of payload in one file; None for a single file.
    shard_size: int | None = None
    backend: str = "cpu"
    engine: Literal["local", "ray"] = "local"
    #: Where an output for another machine is made before it is uploaded.
    staging: Path | None = None
    calibration: Path | None = None
    forms: Forms = field(default_factory=Forms)


@dataclass(frozen=True)
class Outcome:
    """What came out. `results`: energies per transformed layer; `verdicts`: the contracts on the written header.

    `output`: the file, or the index of several.
    """

    plan: Plan
    output: Place
    source_bytes: int
    output_bytes: int
    results: dict[str, Result]
    verdicts: tuple[Verdict, ...]
    seconds: float
    #: What layers of a quantised source carry already, apart from `results`.
    source_errors: Mapping[str, SourceError] = field(default_factory=dict)
    #: Pieces that an earlier run had finished (`--resume`).
    taken_over: int = 0


def default_output(source: Place, target: Target) -> Path:
    """STEM.TARGET.safetensors beside the source (a remote one: in the current folder), ':' becoming '-'.

    Beside a folder, not in it: there it would be one more of the source's files.
    """
    folder = isinstance(source, Path) and source.is_dir()
    if isinstance(source, Path) and source.name in ("", ".."):
        source = source.resolve()
    stem = source.name
    if not folder:
        stem = stem.removesuffix(INDEX_SUFFIX)
        stem = next((stem.removesuffix(suffix) for suffix in SUFFIXES if stem.endswith(suffix)), stem)
    where = Path() if isinstance(source, Remote) else source.parent
    name = f"{stem}.{target.name.replace(':', '-')}"
    return where / (name if target.sidecars else f"{name}.{target.container}")


def contracts_for(target: Target, runtime: str | None) -> tuple[Contract, ...]:
    """The contracts a target must meet. Raises UsageError when the runtime does not serve the target."""
    if target.runtime == "none":
        if runtime is not None:
            raise UsageError(f"--runtime has no meaning for the target {target.name}")
        return ()
    names = contracts_of(target.config)
    if not names:
        if runtime is not None and runtime != target.family_runtime:
            raise UsageError(f"runtime {runtime!r} does not serve the target {target.name}")
        return ()
    if runtime is None:
        first = names[0]
    elif runtime in names:
        first = runtime
    else:
        raise UsageError(
            f"runtime {runtime!r} does not serve the target {target.name}",
            expected=f"one of {', '.join(names)}",
        )
    return (get_contract(first), *(get_contract(name) for name in names if name != first))


def plan_job(request: Request, checkpoint: Checkpoint, head: HeadStart | None = None) -> tuple[Plan, Layout]:
    """Everything that is decided before an output is made. Raises on a guess under --strict.

    `head`: begins with what markers and headers say, while values are looked at.
    """
    target = get_target(request.target)
    contracts = contracts_for(target, request.runtime)
    inventory = take_inventory(checkpoint, request.assume)
    drafted = None
    if head is not None and _may_begin(request, checkpoint, inventory):
        # What stands against a draft is told below, in its place.
        claimed = inventory.copy()
        with suppress(QConvertError):
            drafted = _planned(request, checkpoint, claimed, target, contracts)
            if all(action.kind in LOSSLESS for action in drafted[0].actions):
                head.begin(*drafted)
    refuse_senseless(checkpoint, weigh_source(checkpoint, inventory))
    if drafted is not None and inventory == claimed:
        return drafted
    return _planned(request, checkpoint, inventory, target, contracts)


def _may_begin(request: Request, checkpoint: Checkpoint, inventory: Inventory) -> bool:
    """Whether values may be looked at beside the work: it is done here, from the beginning, and there are some."""
    here = not isinstance(request.output, Remote) and len(checkpoint.local_files) == len(checkpoint.files)
    plain = not (request.resume or request.forms.asked or request.calibration)
    return (
        here and plain and request.engine == "local" and any(x.quantised for x in inventory.layers.values())
    )


def head_start(request: Request, checkpoint: Checkpoint) -> HeadStart:
    """What `plan_job` may begin and `execute_plan` takes over."""

    def make(plan: Plan, laid: Layout) -> Writing:
        path = final_output(request, checkpoint, plan)
        assert isinstance(path, Path)
        return _writing(request, checkpoint, plan, laid, path, draft=True)

    return HeadStart(make)


def _planned(
    request: Request,
    checkpoint: Checkpoint,
    inventory: Inventory,
    target: Target,
    contracts: tuple[Contract, ...],
) -> tuple[Plan, Layout]:
    try:
        options = request.plan
        notes: tuple[str, ...] = ()
        if request.forms.asked:
            from qconvert.convert.planfile import planned_forms

            options, notes = planned_forms(
                request.forms,
                request.plan,
                checkpoint,
                inventory,
                target,
                contracts,
                request.calibration,
                request.backend,
            )
        plan = make_plan(checkpoint, inventory, target, contracts, options)
    except QConvertError as error:
        error.file = error.file or str(checkpoint.path)
        raise
    plan = replace(plan, notes=(*plan.notes, *notes))
    if request.calibration is not None:
        from qconvert.convert.calibration import note_calibration

        plan = note_calibration(plan, request.calibration)
    if request.strict and plan.guesses:
        guess = plan.guesses[0]
        count = len(plan.guesses)
        raise QConvertError(
            f"--strict refuses a guess: {guess.message}" + (f" (and {count - 1} more)" if count > 1 else ""),
            file=str(request.source),
            layer=guess.layer,
            found=guess.evidence.partition("; ")[0] or None,
            hint="`qconvert inspect` shows what it rests on, --assume 'LAYER_REGEX=FORMAT' settles it",
        )
    metadata = plan.metadata | {
        "qconvert": dumps(provenance(plan, request, checkpoint)),
        digest.KEY: digest.PENDING,
    }
    form = output_form(plan, checkpoint, "model.safetensors")
    if target.header is not None:
        metadata |= target.header(form)
    plan = replace(plan, metadata=metadata)
    refuse_plan(output_path(request, target), plan, form, request.source)
    return plan, lay_out(plan)


def output_form(plan: Plan, checkpoint: Checkpoint, file: str) -> OutputForm:
    """The finished plan as a target's hooks see it."""
    layers = []
    for action in plan.actions:
        tensors = {out.name.removeprefix(action.prefix + "."): out_spec(out) for out in action.outputs}
        layer = action.layer
        form = LayerForm(
            action.prefix, action.role, action.codec.name, action.options, layer.n, layer.k, tensors
        )
        layers.append(form)
    matches = detect(checkpoint.specs)
    families = tuple(dict.fromkeys(match.family.id for match in matches))
    return OutputForm(plan.target.name, tuple(layers), checkpoint.config, file, plan.dtype, families)


def provenance(plan: Plan, request: Request, checkpoint: Checkpoint) -> dict[str, object]:
    """What the output says of its own making. Nothing here depends on time or machine: equal runs, equal bytes."""
    kinds: dict[str, int] = {}
    for action in plan.actions:
        kinds[action.kind] = kinds.get(action.kind, 0) + 1
    return {
        "version": qconvert.__version__,
        "source": request.source.name,
        "source_header_sha256": checkpoint.digest(),
        "target": plan.target.name,
        "contracts": [contract.name for contract in plan.contracts],
        "quality": plan.quality,
        "plan_sha256": plan_digest(plan),
        "actions": kinds,
        "guesses": [finding.line() for finding in plan.guesses],
        "assumed": [assumption.text for assumption in request.assume],
        # What these had lost before is the source's; measured errors are against its values.
        "decoded_exactly": len(decoded_layers(plan)),
    } | ({"recipe": request.plan.recipe.provenance()} if request.plan.recipe else {})


def run_job(
    request: Request, checkpoint: Checkpoint, progress: Callable[[int], object] = lambda done: None
) -> Outcome:
    """Convert one checkpoint. Raises QConvertError and leaves nothing under the final name when anything fails."""
    begun = time.monotonic()
    with head_start(request, checkpoint) as head:
        plan, laid = plan_job(request, checkpoint, head)
        return execute_plan(request, checkpoint, plan, laid, progress, begun, head)


def execute_plan(
    request: Request,
    checkpoint: Checkpoint,
    plan: Plan,
    laid: Layout,
    progress: Callable[[int], object],
    begun: float,
    head: HeadStart | None = None,
) -> Outcome:
    """Write, gate and read back what `plan_job` decided; `head` may have begun with it."""
    path = final_output(request, checkpoint, plan)
    if isinstance(path, Remote):
        from qconvert.convert.upload import execute_staged

        return execute_staged(request, checkpoint, plan, laid, progress, begun)
    with ExitStack() as stack:
        writing = head.taken(laid) if head is not None else None
        if writing is None:
            writing = stack.enter_context(_writing(request, checkpoint, plan, laid, path))
        else:
            stack.push(writing)
        writer, outs = writing.writer, writing.outs
        results = writing.results(progress)
        for out in outs:
            out.journal.begin_flush()
        checkpoint.check_unchanged()
        refuse_nothing_left(plan, results, str(checkpoint.path))
        with writer.written(outs) as written:
            if plan.target.sidecars is not None:
                written.config = writing.beside.config()
            # The temporary names are gone when the verdicts are read; what mends an output begins from its source.
            view = replace(
                written.view(), files=tuple(name for name, _, _ in writer.parts), source=str(request.source)
            )
            verdicts = tuple(contract.check(view) for contract in plan.contracts)
            gate(path, plan, verdicts)
            read_back(checkpoint, written, plan, results, path, writing.backend, writing.jobs)
            writer.seal(outs, writing.jobs)
        writing.commit()
    carried = source_errors(checkpoint, plan, writing.backend)
    return Outcome(
        plan,
        writer.path,
        checkpoint.nbytes,
        writer.nbytes,
        results,
        verdicts,
        time.monotonic() - begun,
        carried,
        writing.taken_over,
    )


def _writing(
    request: Request, checkpoint: Checkpoint, plan: Plan, laid: Layout, path: Path, draft: bool = False
) -> Writing:
    sidecars: dict[str, bytes] = {}
    if plan.target.sidecars is not None:
        sidecars = plan.target.sidecars(output_form(plan, checkpoint, path.name))
        if path.parent.resolve() == checkpoint.files[0].parent.resolve():
            raise UsageError("the source's own folder", file=str(path.parent), hint="name another one")
    return Writing(request, checkpoint, plan, laid, path, sidecars, draft)


def refuse_nothing_left(plan: Plan, results: dict[str, Result], file: str) -> None:
    """Raise for a layer whose values the format could not hold: too small for its scales, or too large."""
    for action in plan.actions:
        result = results.get(action.layer.prefix)
        if result is not None and result.signal > 0 and result.noise >= LEFT * result.signal:
            raise QConvertError(
                f"{action.method} cannot hold these values: nothing would be left of them",
                file=file,
                layer=action.layer.prefix,
                found=f"SQNR {decibels(result.signal, result.noise):.1f} dB",
                hint=f"--keep '{action.layer.prefix}' leaves the layer as it is",
            )


def final_output(request: Request, checkpoint: Checkpoint, plan: Plan) -> Place:
    """The file that a conversion writes; of targets with files beside the tensors, the one that holds them."""
    path = output_path(request, plan.target)
    if plan.target.sidecars is not None:
        path = path / folder_file(checkpoint.config, checkpoint.files[0].name)
    return path


def output_path(request: Request, target: Target) -> Place:
    """Where the output goes; a folder (existing, or named with a trailing slash) gets the default name.

    Targets with files beside the tensors are folders: the output named is that folder.
    """
    if request.output is None:
        return default_output(request.source, target)
    if isinstance(request.output, Remote):
        folder = request.output.url.endswith("/")
    else:
        folder = request.output.is_dir() or str(request.output).endswith(("/", os.sep))
    if target.sidecars is None and folder:
        return request.output / default_output(request.source, target).name
    return request.output
