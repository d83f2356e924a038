"""Name patterns that are compiled when first needed: of the hundreds in the family files, a run uses a few dozen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class NamePattern:
    """A regular expression that names are matched with as a whole. Equal texts are equal patterns."""

    pattern: str

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """Raises re.error where the text is no regular expression."""
        return re.compile(self.pattern)

    def fullmatch(self, name: str) -> re.Match[str] | None:
        return self.compiled.fullmatch(name)
