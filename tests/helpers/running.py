"""How a command line that was run in this process ended."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Ran(NamedTuple):
    """The exit code, and what was written."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)
