"""Would the runtime take the output: asked of the planned header before payload is read, and of the written one."""

from __future__ import annotations

import json
from typing import Any

from qconvert.convert.actions import ConstOut, Plan, output_header
from qconvert.formats.checkpoint import MARKER_SUFFIX
from qconvert.formats.errors import QConvertError
from qconvert.formats.remote import Place
from qconvert.formats.tensors import HeaderView
from qconvert.runtime.contracts.base import Verdict
from qconvert.runtime.sidecars import OutputForm


def planned_view(plan: Plan, form: OutputForm, source: str | None = None) -> HeaderView:
    """The output's header as a contract will see it, before anything is written.

    Of a config.json only the output's own: what else may lie beside it is seen once it is written. `source`: what
    commands that mend it begin from.
    """
    config: dict[str, Any] = {}
    if plan.target.sidecars is not None:
        config = json.loads(plan.target.sidecars(form).get("config.json", b"{}"))
    markers = {
        out.name.removesuffix(MARKER_SUFFIX): out.data
        for out in plan.outputs()
        if isinstance(out, ConstOut) and out.name.endswith(MARKER_SUFFIX)
    }
    return HeaderView(dict(output_header(plan)), plan.metadata, markers, (form.file,), config, source)


def refuse_plan(path: Place, plan: Plan, form: OutputForm, source: Place) -> None:
    """Raise QConvertError when the main contract would not take what the plan leads to."""
    if plan.contracts:
        gate(path, plan, (plan.contracts[0].check(planned_view(plan, form, str(source))),))


def gate(path: Place, plan: Plan, verdicts: tuple[Verdict, ...]) -> None:
    """The main contract must accept the header, unless nothing in it is quantised. Raises QConvertError."""
    if not verdicts or all(action.codec.name == "plain" for action in plan.actions):
        return
    main = verdicts[0]
    if not main.accepted:
        violation = next(v for v in main.all_violations() if v.severity in ("refuse", "trap"))
        raise QConvertError(
            f"{main.runtime} would not take the result: {violation.line()}",
            file=str(path),
            hint="nothing was written; --keep 'REGEX' can leave the layer unquantised",
        )
