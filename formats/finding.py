"""What was noticed while reading a file, and how sure it is."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: note: certain and harmless. repair: certain, and changed in the output. guess: likely; refused under --strict.
Level = Literal["note", "repair", "guess"]


class Finding(NamedTuple):
    """`message` says what was found or assumed, `evidence` what that rests on."""

    level: Level
    message: str
    layer: str | None = None
    evidence: str = ""

    def line(self) -> str:
        where = f"{self.layer}: " if self.layer else ""
        return f"{where}{self.message}" + (f" [{self.evidence}]" if self.evidence else "")
