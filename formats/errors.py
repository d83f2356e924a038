"""One kind of failure for everything a user can meet: a line that names file, layer, found, expected, remedy."""

from __future__ import annotations

from collections.abc import Iterable


class QConvertError(Exception):
    """A job that is refused or failed (exit code 1). Fields carry the facts, `str()` is the one line."""

    exit_code = 1

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        layer: str | None = None,
        found: str | None = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = file
        self.layer = layer
        self.found = found
        self.expected = expected
        self.hint = hint
        super().__init__(self.line())

    def line(self) -> str:
        where = ": ".join(part for part in (self.file, self.layer) if part)
        text = f"{where}: {self.problem}" if where else self.problem
        facts = []
        if self.found is not None:
            facts.append(f"found {self.found}")
        if self.expected is not None:
            facts.append(f"expected {self.expected}")
        if facts:
            text += f" ({', '.join(facts)})"
        if self.hint:
            text += f"; {self.hint}"
        return " ".join(text.split())


def close_to(word: str, known: Iterable[str], otherwise: str, likeness: float = 0.6) -> str:
    """ "did you mean X?" for a word that is nearly one of the known ones, else `otherwise`."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), 1, likeness)
    return f"did you mean {close[0]}?" if close else otherwise


class UsageError(QConvertError):
    """What was asked for makes no sense (exit code 2)."""

    exit_code = 2


class HeaderError(QConvertError):
    """The file is not a safetensors file that can be trusted."""


class MarkerError(QConvertError):
    """A quantisation marker cannot be read."""


class TransferError(QConvertError):
    """Bytes did not come or go for a reason that may pass: what was done so far is kept for --resume."""
