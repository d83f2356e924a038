"""What `check` does and prints. Neither torch nor numba is imported here."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click
from qconvert.convert.reading import read_source
from qconvert.convert.screen import say_rows
from qconvert.convert.verdicts import verdict_json
from qconvert.formats.checkpoint import Checkpoint, dumps, opened
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import Inventory
from qconvert.formats.tensors import HeaderView
from qconvert.runtime.contracts.base import Contract, Verdict, Violation
from qconvert.runtime.contracts.common import remedy
from qconvert.runtime.contracts.registry import DEFAULT_CONTRACT, get_contract
from qconvert.runtime.model_names import model_name_violations, name_options, read_model
from qconvert.runtime.model_rules import config_name, model_violations

if TYPE_CHECKING:
    from qconvert.formats.evidence import Judgement

#: What reading a source gave, or why it could not be read.
Weighed: TypeAlias = "tuple[Inventory, list[Judgement]] | QConvertError"
#: Violations of one rule that are printed; --json lists all.
SHOWN = 3
#: What a file is converted to when a runtime is to take this format.
_TARGETS = {
    "sglang-modelopt": {"nvfp4": "modelopt_nvfp4", "float8": "modelopt_fp8"},
    "vllm-omni": {"int8": "vllm_omni_int8"},
    "diffusers": {"nvfp4": "diffusers_bfl_nvfp4", "float8": "diffusers_bfl_fp8"},
    "lightx2v": {"nvfp4": "lightx2v_nvfp4", "float8": "lightx2v_fp8", "int8": "lightx2v_int8"},
    "sglang": {
        "nvfp4": "comfy_nvfp4",
        "mxfp8": "comfy_mxfp8",
        "int8": "convrot_int8",
        "float8": "comfy_fp8",
    },
    "comfyui": {
        "nvfp4": "comfyui:nvfp4",
        "mxfp8": "comfyui:mxfp8",
        "int8": "comfyui:int8_tensorwise",
        "float8": "comfyui:float8_e4m3fn",
    },
}


def named_view(checkpoint: Checkpoint) -> HeaderView:
    """The checkpoint's headers under the names that the user gave: commands that are printed use them."""
    return replace(checkpoint.view(), files=tuple(str(file) for file in checkpoint.files))


def judge(
    checkpoint: Checkpoint,
    contract: Contract,
    *,
    tp: int = 1,
    model: Path | None = None,
    weighed: Weighed | None = None,
    view: HeaderView | None = None,
) -> Verdict:
    """The contract's verdict, with what is known of the model, of the values, and of the names in `model`."""
    view = view or named_view(checkpoint)
    verdict = contract.check(view, tp=tp)
    extra = [_mended(v, view, contract, verdict) for v in model_violations(view, contract, verdict)]
    extra += value_traps(weighed or weighed_source(checkpoint), view, contract)
    if model is not None:
        names = read_model(model)
        options = name_options(view, names)
        command = remedy(view, _target(contract, verdict), *options) if options else None
        extra += [v._replace(remedy=command) for v in model_name_violations(view, names)]
    return verdict._replace(violations=(*verdict.violations, *extra))


def _mended(violation: Violation, view: HeaderView, contract: Contract, verdict: Verdict) -> Violation:
    if violation.severity == "note" or violation.rule in ("model-missing", "model-format"):
        return violation
    return violation._replace(remedy=remedy(view, _target(contract, verdict)))


def _target(contract: Contract, verdict: Verdict) -> str:
    """What to convert to so that the same runtime takes the file in the format it is in."""
    if contract.name.startswith("comfyui"):
        formats = Counter(layer.format for layer in verdict.layers if layer.format)
        return f"comfyui:{formats.most_common(1)[0][0]}" if formats else "bf16"
    return config_name(contract, verdict) or "bf16"


def weighed_source(checkpoint: Checkpoint) -> Weighed:
    """Layers as values show them; the error where a layer has no format at all."""
    try:
        return read_source(checkpoint)
    except QConvertError as error:
        return error


def value_traps(weighed: Weighed, view: HeaderView, contract: Contract) -> list[Violation]:
    """Layers that a runtime would take as marked, and whose values say otherwise."""
    if isinstance(weighed, QConvertError):
        # The contract has said what it thinks of such a file; values cannot be weighed without a format.
        message = f"values were not weighed: {weighed.problem}"
        return [Violation("note", "values-unread", message, weighed.layer)]
    inventory, judgements = weighed
    return [_trap(inventory, judgement, view, contract) for judgement in judgements if judgement.contrary]


def _trap(inventory: Inventory, judgement: Judgement, view: HeaderView, contract: Contract) -> Violation:
    count = len(judgement.layers)
    message = f"{judgement.message} ({count} layers)" if count > 1 else judgement.message
    names = next((names for name, names in _TARGETS.items() if contract.name.startswith(name)), {})
    target = names.get(inventory.layers[judgement.layers[0]].codec.name, "bf16")
    return Violation(
        "trap",
        "values-" + judgement.topic.replace(" ", "-"),
        message,
        judgement.layers[0],
        judgement.evidence,
        None,
        None if judgement.fatal else remedy(view, target),
    )


def run_check(path: Path, runtime: str | None, tp: int, model: Path | None, as_json: bool) -> None:
    """`qconvert check FILE`: exits 1 when the runtime would refuse or misread the file."""
    contract = get_contract(runtime or DEFAULT_CONTRACT)
    with opened(path) as checkpoint:
        verdict = judge(checkpoint, contract, tp=tp, model=model)
    if as_json:
        click.echo(dumps(verdict_json(verdict)))
    else:
        _print(verdict)
    if not verdict.accepted:
        sys.exit(1)


def _print(verdict: Verdict) -> None:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for layer in verdict.layers:
        groups.setdefault((layer.kind, str(layer.format), layer.method), []).append(layer.layer)
    rows: list[tuple[str, ...]] = [
        (kind, name, f"-> {method}", str(len(layers)), layers[0])
        for (kind, name, method), layers in groups.items()
    ]
    say_rows(rows)
    for line in violation_lines(verdict.all_violations()):
        click.echo(line)
    answer = f"accepted as {verdict.config or 'unquantised'}" if verdict.accepted else "not accepted"
    click.echo(f"{verdict.runtime}: {answer}")


def violation_lines(violations: Iterable[Violation]) -> list[str]:
    """One line a violation, a few of each rule, and the command that mends them once after the last."""
    rules: dict[tuple[str, str], list[Violation]] = {}
    for violation in violations:
        rules.setdefault((violation.severity, violation.rule), []).append(violation)
    lines = []
    commands: dict[str, None] = {}
    for (severity, rule), members in rules.items():
        for violation in members[:SHOWN]:
            lines.append(f"{severity:11} {violation._replace(remedy=None).line()}")
        if len(members) > SHOWN:
            lines.append(
                f"{severity:11} ... and {len(members) - SHOWN} more of the rule {rule} (--json lists them)"
            )
        commands.update(dict.fromkeys(v.remedy for v in members if v.remedy))
    return [*lines, *(f"{'mend it':11} {command}" for command in commands)]
