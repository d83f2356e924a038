"""A contract's answer as a JSON object."""

from __future__ import annotations

from typing import Any

from qconvert.runtime.contracts.base import Verdict


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """A contract's answer."""
    return {
        "runtime": verdict.runtime,
        "config": verdict.config,
        "accepted": verdict.accepted,
        "layers": [
            {"layer": layer.layer, "kind": layer.kind, "format": layer.format, "method": layer.method}
            for layer in verdict.layers
        ],
        "violations": [
            {
                "severity": v.severity,
                "rule": v.rule,
                "layer": v.layer,
                "message": v.message,
                "found": v.found,
                "expected": v.expected,
                "remedy": v.remedy,
            }
            for v in verdict.all_violations()
        ],
    }
