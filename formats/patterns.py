"""Regular expressions from strangers: config.json, recipes, plans, options. They cannot hang and cannot eat memory.

They run on RE2 (the `google-re2` package), whose time is linear in the text and whose memory is bounded. What RE2 does
not know (look-around, back-references) and what it reads otherwise than Python's `re`, which runtimes use, is refused.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from qconvert.formats.errors import QConvertError, UsageError

T = TypeVar("T")

MAX_PATTERN = 1000
#: Patterns of one document.
MAX_PATTERNS = 200
#: Characters of a name that patterns are tried on. Longer ones are no names of layers.
MAX_NAME = 1000
#: Seconds of computing that all patterns of one document, or one option, may take beyond what each match is granted.
SECONDS = 1.0
#: What a match is granted: many times what it takes on any name that is one.
_GRANTED = 1e-4
#: Bytes that one compiled pattern may hold.
_MAX_MEMORY = 1 << 19
_SPECIAL = frozenset(r"\.^$*+?{}[]|()")
_TOKEN = r"(?s)\\.|[^\\]+|\\"
#: Escapes that RE2 has and `re` has not.
_FOREIGN_ESCAPES = frozenset("CQEpPzK")
#: Notation that both accept and read in different ways, and RE2's own.
_AMBIGUOUS = ("{,", "[:", "(?<", "(?U", "\\x{")
#: What means something else on other than plain ASCII: classes, case folding, `$` before a line's end.
_ASCII_ONLY = r"\\[wWdDsSbB]|\(\?[a-z]*i|\$"
_REFERENCE = r"(?s)\\(?:(?P<number>[1-9]\d?)|g<(?P<name>\w+)>|(?P<escape>.?))"


class PatternError(QConvertError):
    """A pattern that is none, that cannot be run safely, or that took too long."""


class Budget:
    """Time that patterns may take together: work in proportion to the names passes, anything slower runs out."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._full = self._left = seconds

    def spend(self, seconds: float) -> None:
        """Raises PatternError when it is used up."""
        self._left = min(self._full, self._left + _GRANTED - seconds)
        if self._left < 0:
            raise PatternError("regular expressions take too long on these names")


class Pattern:
    """A compiled pattern. Methods raise PatternError for names that are too long, or when the time is up."""

    __slots__ = ("_budget", "_compiled", "text")

    def __init__(self, text: str, compiled: Any, budget: Budget) -> None:
        self.text = text
        #: None: the text holds no special character and stands for itself.
        self._compiled = compiled
        self._budget = budget

    def fullmatch(self, name: str) -> bool:
        """Whether it matches the whole name."""
        return self._matches("fullmatch", name, name == self.text)

    def match(self, name: str) -> bool:
        """Whether it matches at the name's beginning."""
        return self._matches("match", name, name.startswith(self.text))

    def search(self, name: str) -> bool:
        """Whether it matches anywhere in the name."""
        return self._matches("search", name, self.text in name)

    def sub(self, replacement: str, name: str) -> str:
        r"""The name with each match replaced. In `replacement`, \1 and \g<name> are groups, \\ is a backslash."""
        if self._compiled is None:
            return name.replace(self.text, _expand(replacement, self._group)) if self.text in name else name
        expanded: str = self._timed(
            lambda: self._compiled.sub(lambda found: _expand(replacement, found.group), name), name
        )
        return expanded

    def _matches(self, how: str, name: str, literally: bool) -> bool:
        if self._compiled is None:
            return literally
        return self._timed(lambda: getattr(self._compiled, how)(name) is not None, name)

    def check(self, replacement: str) -> None:
        """Raises PatternError for a replacement that `sub` could not use, whatever the name."""
        _expand(replacement, self._group)

    def _group(self, which: int | str) -> str:
        """The whole match of a literal, and a stand-in for every group that there is."""
        known = self._compiled is not None and (
            which in self._compiled.groupindex or which in range(1, self._compiled.groups + 1)
        )
        if which != 0 and not known:
            raise IndexError(which)
        return self.text

    def _timed(self, work: Callable[[], T], name: str) -> T:
        if len(name) > MAX_NAME:
            raise PatternError(
                f"regular expression {self.text!r}: a name is too long",
                found=f"{len(name)} characters",
                expected=f"at most {MAX_NAME}",
            )
        if not (name.isascii() and name.isprintable()) and re.search(_ASCII_ONLY, self.text):
            raise PatternError(
                f"regular expression {self.text!r} reads differently from one engine to the next on a name "
                f"that is not plain ASCII: {name[:80]!r}"
            )
        begun = time.thread_time()
        result = work()
        self._budget.spend(time.thread_time() - begun)
        return result


def compile_pattern(text: str, budget: Budget | None = None) -> Pattern:
    """A pattern in the notation of Python's `re`; patterns of one document share a `budget`. Raises PatternError."""
    budget = budget or Budget()
    if len(text) > MAX_PATTERN:
        raise PatternError(f"a pattern of {len(text)} characters, at most {MAX_PATTERN} are taken")
    if not _SPECIAL & set(text):
        return Pattern(text, None, budget)
    bare = ""
    for token in re.findall(_TOKEN, text):
        if token[0] == "\\" and token[1:] in _FOREIGN_ESCAPES:
            raise PatternError(f"{token} is not known")
        bare += "\\x" if token == "\\x" else "_" if token[0] == "\\" else token
    for odd in _AMBIGUOUS:
        if odd in bare:
            raise PatternError(f"{odd} is not taken: its meaning differs between readers")
    re2 = _engine()
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_MEMORY
    try:
        return Pattern(text, re2.compile(text, options), budget)
    except (re2.error, UnicodeError) as error:
        reason = error.args[0] if error.args else error
        words = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise PatternError(words) from None


@lru_cache(maxsize=16)
def compile_all(texts: tuple[str, ...]) -> tuple[Pattern, ...]:
    """The patterns of one document, in their order. Raises PatternError, also for too many of them."""
    if len(texts) > MAX_PATTERNS:
        raise PatternError(f"{len(texts)} regular expressions, at most {MAX_PATTERNS} are taken")
    budget = Budget()
    return tuple(compile_pattern(text, budget) for text in texts)


def is_broken(text: str) -> bool:
    """Whether Python's `re` takes it for no pattern at all, so that a runtime that forgives this ignores it."""
    # Flags may make compiling it slow.
    if "(?" in text or len(text) > MAX_PATTERN:
        return False
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return True
    return False


def option_pattern(text: str, option: str) -> Pattern:
    """The pattern that an option was given. Raises UsageError naming both."""
    try:
        return compile_pattern(text)
    except PatternError as error:
        raise UsageError(f"{option} {text!r} is not a regular expression: {error}") from None


def option_rule(text: str, replacement: str, option: str) -> tuple[Pattern, str]:
    """A pattern and what replaces it, as an option was given them. Raises UsageError naming both."""
    pattern = option_pattern(text, option)
    try:
        pattern.check(replacement)
    except PatternError as error:
        raise UsageError(f"{option} {text!r}: replacement {replacement!r}: {error}") from None
    return pattern, replacement


def wildcard(text: str, name: str) -> bool:
    """Whether `text`, in which only `*` is special and stands for anything, describes the whole name."""
    first, *rest = text.split("*")
    if not rest:
        return name == text
    *middle, last = rest
    if len(name) < len(first) + len(last) or not (name.startswith(first) and name.endswith(last)):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _engine() -> Any:
    try:
        import re2
    except ImportError:
        raise QConvertError(
            "regular expressions need the package google-re2", hint="pip install google-re2"
        ) from None
    return re2


def _expand(replacement: str, group: Callable[[Any], str | None]) -> str:
    def piece(found: re.Match[str]) -> str:
        escape = found["escape"]
        if escape is not None:
            if escape != "\\":
                raise PatternError(f"\\{escape} in a replacement is not known")
            return "\\"
        which = found["number"] or found["name"]
        try:
            return group(int(which) if which.isdigit() else which) or ""
        except IndexError:
            raise PatternError(f"the pattern has no group {which}") from None

    return re.sub(_REFERENCE, piece, replacement)
