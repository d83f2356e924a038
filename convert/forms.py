"""What the user says about the forms of layers, apart from the rules that choose them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Forms:
    """What the user said about layers' forms: a budget or a least SQNR, a plan to follow, where to save one."""

    budget: str | None = None
    min_sqnr: float | None = None
    plan: Path | None = None
    plan_out: Path | None = None

    @property
    def asked(self) -> bool:
        """Whether anything was said."""
        return self != Forms()
