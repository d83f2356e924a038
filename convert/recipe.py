"""`--recipe FILE.toml`: what becomes of each layer, as ordered rules. The first rule that matches decides.

    qconvert_recipe = 1

    [[rule]]
    glob = "double_blocks.0.*"       # or regex = '...'; the layer's whole name, as in the source
    keep = true                      # or to = "comfy_fp8"
    why = "the first block"          # printed with the plan

`keep = true` leaves a layer unquantised. `to` names a target: the layer takes that target's form, be it quantised in
the source or not; of `bf16`, `fp16` and `fp32` it takes the type. `dtype`, `full_precision` and `native_fp4` are the
options of the same names, for these layers. Layers that no rule matches are planned as without a recipe.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from qconvert.formats.errors import UsageError, close_to
from qconvert.formats.patterns import MAX_PATTERNS, Budget, PatternError, compile_pattern, wildcard
from qconvert.runtime.targets import Target, Wishes, get_target

VERSION = 1
MAX_BYTES = 1_000_000
DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
#: A target that means a type, and what a layer of it is.
_PLAIN = "none"


@dataclass(frozen=True)
class Rule:
    """One rule. `number` counts from 1; exactly one of `glob` and `regex` is set."""

    number: int
    glob: str | None = None
    regex: str | None = None
    keep: bool = False
    to: str | None = None
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    full_precision: bool | None = None
    native_fp4: bool | None = None
    why: str | None = None

    @property
    def words(self) -> str:
        """The reason that a plan gives."""
        return f"recipe rule {self.number}" + (f": {self.why}" if self.why else "")

    @property
    def plain(self) -> str | None:
        """The type that `to` asks for, where it names one and no format."""
        return get_target(self.to).dtype if self.to is not None else None

    @property
    def form(self) -> str | None:
        """The target whose form the layer takes; None where `to` is not given or names a type."""
        return None if self.plain else self.to

    @property
    def header_dtype(self) -> str | None:
        return DTYPES[self.dtype] if self.dtype else None

    def wishes(self, common: Wishes) -> Wishes:
        """The command line's wishes, with what this rule says instead."""
        said = {"full_precision": self.full_precision, "native_fp4": self.native_fp4}
        return replace(common, **{key: value for key, value in said.items() if value is not None})

    def document(self) -> dict[str, Any]:
        """The rule as its file says it."""
        said = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "number"}
        return {key: value for key, value in said.items() if value is not None and value is not False}


#: Key -> the type that TOML must give it.
_KEYS: dict[str, type] = {
    "glob": str, "regex": str, "keep": bool, "to": str, "dtype": str, "full_precision": bool, "native_fp4": bool,
    "why": str,
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A recipe as read. `digest`: sha256 of the file."""

    path: Path
    digest: str
    rules: tuple[Rule, ...]

    def provenance(self) -> dict[str, Any]:
        """What an output says of the recipe it was made by."""
        return {
            "file": self.path.name,
            "sha256": self.digest,
            "rules": [rule.document() for rule in self.rules],
        }

    def for_target(self, target: Target) -> None:
        """Raises UsageError for a rule whose form belongs to another runtime than the target's."""
        for rule in self.rules:
            if rule.to is None:
                continue
            runtime = get_target(rule.to).runtime
            if runtime not in (target.runtime, _PLAIN):
                raise UsageError(
                    f"rule {rule.number}: {rule.to} is for {runtime}, the output is for "
                    + (target.runtime if target.runtime != _PLAIN else f"no runtime ({target.name})"),
                    file=str(self.path),
                    expected=f"a target of {target.runtime}"
                    if target.runtime != _PLAIN
                    else "bf16, fp16 or fp32",
                )

    def bind(self, layers: Iterable[str]) -> dict[str, Rule]:
        """Layer -> its rule. Raises UsageError for a rule that decides nothing: it says what nobody asked for."""
        budget = Budget()
        tests: list[Callable[[str], bool]] = []
        for rule in self.rules:
            if rule.glob is not None:
                tests.append(partial(wildcard, rule.glob))
            else:
                tests.append(compile_pattern(rule.regex or "", budget).fullmatch)
        taken: dict[str, Rule] = {}
        reached: set[int] = set()
        shadowed: dict[int, dict[int, int]] = {}
        for name in layers:
            for rule, test in zip(self.rules, tests, strict=True):
                # A rule that has decided something needs no look at what earlier rules take from it.
                if (name in taken and rule.number in reached) or not test(name):
                    continue
                if name not in taken:
                    taken[name] = rule
                    reached.add(rule.number)
                else:
                    counts = shadowed.setdefault(rule.number, {})
                    counts[taken[name].number] = counts.get(taken[name].number, 0) + 1
        for rule in self.rules:
            if rule.number not in reached:
                raise self._idle(rule, shadowed.get(rule.number, {}))
        return taken

    def _idle(self, rule: Rule, by: Mapping[int, int]) -> UsageError:
        name = f"rule {rule.number} ({rule.glob or rule.regex})"
        if not by:
            return UsageError(f"{name} matches no layer", file=str(self.path),
                              hint="layers are named as `qconvert inspect --json` lists them")  # fmt: skip
        earlier = " and ".join(f"rule {number}" for number in sorted(by))
        return UsageError(
            f"{name} is never reached: {earlier} decides all {sum(by.values())} layers that it matches",
            file=str(self.path),
            hint="the first rule that matches decides: move it up, or remove it",
        )


def read_recipe(path: Path) -> Recipe:
    """Raises UsageError for anything in the file that is no recipe: the mistake, and the rule it is in."""
    file = str(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError("is too large to be a recipe", file=file, expected=f"at most {MAX_BYTES} bytes")
        data = path.read_bytes()
        document = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", file=file) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"is not valid TOML: {error}", file=file) from None
    for key in document:
        if key not in ("qconvert_recipe", "rule"):
            hint = close_to(key, ("qconvert_recipe", "rule"), "`[[rule]]` begins a rule")
            raise UsageError(f"unknown key {key!r}", file=file, hint=hint)
    if document.get("qconvert_recipe") != VERSION or document["qconvert_recipe"] is True:
        raise UsageError("is no recipe", file=file, expected=f"qconvert_recipe = {VERSION}")
    entries = document.get("rule", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError("rule is no list of tables", file=file, expected="[[rule]] above each")
    if len(entries) > MAX_PATTERNS:
        raise UsageError(f"{len(entries)} rules", file=file, expected=f"at most {MAX_PATTERNS}")
    rules = tuple(_rule(file, number, entry) for number, entry in enumerate(entries, 1))
    return Recipe(path, hashlib.sha256(data).hexdigest(), rules)


def _rule(file: str, number: int, entry: Mapping[str, Any]) -> Rule:
    where = f"rule {number}"
    for key, value in entry.items():
        if key not in _KEYS:
            hint = close_to(key, _KEYS, f"one of {', '.join(_KEYS)}")
            raise UsageError(f"{where}: unknown key {key!r}", file=file, hint=hint)
        if type(value) is not _KEYS[key]:
            expected = "true or false" if _KEYS[key] is bool else "a string"
            raise UsageError(f"{where}: {key} is {value!r}", file=file, expected=expected)
    if ("glob" in entry) == ("regex" in entry):
        raise UsageError(
            f"{where}: which layers is not said", file=file, expected="glob or regex, one of them"
        )
    if entry.get("dtype", "bf16") not in DTYPES:
        raise UsageError(f"{where}: dtype is {entry['dtype']!r}", file=file, expected=", ".join(DTYPES))
    rule = Rule(number, **entry)
    if rule.keep and rule.to is not None:
        raise UsageError(f"{where}: keep and to exclude each other", file=file)
    if not set(rule.document()) - {"glob", "regex", "why"}:
        raise UsageError(f"{where}: says nothing of its layers", file=file, expected="keep, to or an option")
    try:
        if rule.to is not None:
            get_target(rule.to)
        if rule.regex is not None:
            compile_pattern(rule.regex)
        elif set(rule.glob or "") & set("?[]"):
            raise UsageError("only * is special in a glob", hint="regex = '...' knows more")
    except PatternError as error:
        raise UsageError(f"{where}: regex {rule.regex!r}: {error}", file=file) from None
    except UsageError as error:
        raise UsageError(f"{where}: {error.problem}", file=file, hint=error.hint) from None
    if rule.plain is not None and (rule.dtype or rule.full_precision or rule.native_fp4):
        raise UsageError(f"{where}: {rule.to} is a type, which takes no options", file=file)
    return rule
