"""A plan and an outcome as JSON objects."""

from __future__ import annotations

import math
from typing import Any

from qconvert.convert.actions import LOSSLESS, Plan
from qconvert.convert.job import Outcome
from qconvert.convert.verdicts import verdict_json
from qconvert.formats.remote import Place
from qconvert.runtime.verify import decibels


def plan_json(plan: Plan, path: Place, out_bytes: int) -> dict[str, Any]:
    """Everything that was decided."""
    return {
        "target": plan.target.name,
        "contracts": [contract.name for contract in plan.contracts],
        "families": list(plan.families),
        "output": str(path),
        "output_bytes": out_bytes,
        "layers": [
            {
                "layer": action.prefix,
                "action": action.kind,
                "role": action.role,
                "format": action.method,
                "reason": action.reason,
            }
            for action in plan.actions
        ],
        "dropped": [{"tensor": drop.tensor, "reason": drop.reason} for drop in plan.drops],
        "findings": [
            {"level": f.level, "layer": f.layer, "message": f.message, "evidence": f.evidence}
            for f in plan.findings
        ],
        "notes": list(plan.notes),
    }


def _number(decibels: float) -> float | str:
    """JSON has no infinity."""
    return decibels if math.isfinite(decibels) else "exact" if decibels > 0 else "none"


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The plan, and what came of it."""
    document = plan_json(outcome.plan, outcome.output, outcome.output_bytes)
    for entry, action in zip(document["layers"], outcome.plan.actions, strict=True):
        result = outcome.results.get(action.layer.prefix)
        if action.kind in LOSSLESS or result is None:
            entry["sqnr_db"] = "exact"
        else:
            value = decibels(result.signal, result.noise)
            entry["sqnr_db"] = _number(value)
            if result.lost:
                entry["rows_lost"] = result.lost
        carried = outcome.source_errors.get(action.layer.prefix)
        if carried is not None:
            entry["source_decoded"] = "exact"
            entry["source_sqnr_db_expected"] = "unknown" if carried.sqnr is None else _number(carried.sqnr)
    return document | {
        "source_bytes": outcome.source_bytes,
        "seconds": round(outcome.seconds, 3),
        "pieces_taken_over": outcome.taken_over,
        "verdicts": [verdict_json(verdict) for verdict in outcome.verdicts],
    }
