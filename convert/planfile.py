"""`--plan-out FILE` and `--plan FILE`: which form each layer takes, as JSON that people can edit.

    {"qconvert_plan": 1, "target": "comfy_nvfp4", "layers": {"blocks.0.attn.q": {"form": "keep"}, ...}}

`form` is `keep` (not quantised) or a target's name, whose linear form the layer takes. Everything else in the file
is there to be read: what each form would cost and lose. Layers that are left out are planned as without the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from qconvert.convert.budget import KEEP, Measured, measure, parse_budget
from qconvert.convert.calibration import opened_calibration
from qconvert.convert.forms import Forms
from qconvert.convert.plan import PlanOptions
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError, UsageError, close_to
from qconvert.formats.header import strict_json
from qconvert.formats.layers import Inventory
from qconvert.kernels.select import get_backend
from qconvert.runtime.contracts.base import Contract
from qconvert.runtime.targets import Target, get_target

VERSION = 1
_MAX_BYTES = 32_000_000


def planned_forms(
    forms: Forms,
    options: PlanOptions,
    checkpoint: Checkpoint,
    inventory: Inventory,
    target: Target,
    contracts: tuple[Contract, ...],
    calibration: Path | None,
    backend: str,
) -> tuple[PlanOptions, tuple[str, ...]]:
    """The planner's options with a form for each layer where one was asked for, and what to say about it."""
    budget = parse_budget(forms.budget, forms.min_sqnr)
    if options.recipe is not None and (budget is not None or forms.plan is not None):
        raise UsageError("--recipe says what each layer becomes: leave --budget, --min-sqnr and --plan away")
    if forms.plan is not None:
        if budget is not None or forms.plan_out is not None:
            raise UsageError("--plan follows a finished plan: leave --budget, --min-sqnr and --plan-out away")
        read = read_plan(forms.plan, target, inventory)
        return replace(options, forms=read), (f"plan: forms of {len(read)} layers from {forms.plan.name}",)
    if budget is None:
        if forms.plan_out is not None:
            raise UsageError("--plan-out saves what --budget or --min-sqnr chose: give one of them")
        return options, ()
    if target.runtime == "none":
        raise UsageError(f"{target.name} quantises nothing: there is no form to choose")
    with opened_calibration(calibration) as known:
        measured = measure(
            checkpoint, inventory, target, contracts, options, budget, get_backend(backend), known
        )
    if forms.plan_out is not None:
        write_plan(forms.plan_out, target, measured)
    return replace(options, forms=measured.forms), (measured.line(),)


def write_plan(path: Path, target: Target, measured: Measured) -> None:
    """Save what was chosen and what it was chosen from."""
    layers: dict[str, Any] = {}
    for group, chosen in zip(measured.groups, measured.chosen, strict=True):
        offers = {
            c.form: {"bits": round(c.bits / group.parameters, 4), "sqnr_db": _db(c.error / group.parameters)}
            for c in group.choices
        }
        for layer in group.layers:
            layers[layer] = {"form": chosen.form, "forms": offers}
            if len(group.layers) > 1:
                layers[layer]["together_with"] = [name for name in group.layers if name != layer]
    document = {
        "qconvert_plan": VERSION,
        "target": target.name,
        "bits_per_weight": round(measured.bits_per_weight, 4),
        "layers": layers,
    }
    try:
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise QConvertError(f"cannot be written: {error.strerror or error}", file=str(path)) from None


def _db(error: float) -> float | str:
    return round(-10 * math.log10(error), 2) if error > 0 else "exact"


def read_plan(path: Path, target: Target, inventory: Inventory) -> dict[str, str]:
    """Layer -> form. Raises UsageError when the file is no plan for this target and these layers."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError("is too large to be a plan", file=str(path))
        document = strict_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"is no plan that can be read: {error}", file=str(path)) from None
    if not isinstance(document, dict) or document.get("qconvert_plan") != VERSION:
        raise UsageError("is no plan", file=str(path), expected=f'"qconvert_plan": {VERSION}')
    if document.get("target") != target.name:
        raise UsageError(
            "was made for another target",
            file=str(path),
            found=str(document.get("target")),
            expected=target.name,
        )
    layers = document.get("layers")
    if not isinstance(layers, dict):
        raise UsageError('has no "layers"', file=str(path))
    return {name: _form(path, name, entry, target, inventory.layers) for name, entry in layers.items()}


def _form(path: Path, name: str, entry: Any, target: Target, known: Iterable[str]) -> str:
    if name not in set(known):
        hint = close_to(name, known, "layers are named as in the source")
        raise UsageError("the source has no such layer", file=str(path), layer=name, hint=hint)
    form = entry.get("form") if isinstance(entry, dict) else entry
    if not isinstance(form, str):
        raise UsageError('has no "form"', file=str(path), layer=name)
    if form != KEEP and get_target(form).runtime != target.runtime:
        raise UsageError(
            f"{form} is for another runtime than {target.name}",
            file=str(path),
            layer=name,
            expected=f"{KEEP} or a target of {target.runtime}",
        )
    return form
