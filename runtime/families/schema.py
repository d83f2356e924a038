"""What a family file may say, and reading one: every mistake in it is an error that names the file and the place."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

from qconvert.runtime.families.pattern import NamePattern

Component = Literal["diffusion", "text_encoder", "vae"]
Kind = Literal["linear", "embedding", "protected", "other"]
#: keep_unquantised: these layers must be plain. refuse_target: the runtime cannot take this family in this format.
#: strip_prefix: names must be bare. single_file: no shards, no folder. max_layers: blocks from `count` on are not
#: read and must be plain. must_be_present: the loader fails without them. no_full_precision: these layers cannot
#: carry full_precision_matrix_mult. not_served: the format's rules are met, but this model's loader stops; told, and
#: no command that serves the file is given. note: worth telling the user, decides nothing.
Effect = Literal[
    "keep_unquantised",
    "refuse_target",
    "strip_prefix",
    "single_file",
    "max_layers",
    "must_be_present",
    "no_full_precision",
    "not_served",
    "note",
]

_RUNTIMES = ("sglang", "comfyui", "vllm-omni", "diffusers", "fastvideo", "lightx2v", "nunchaku")
_NEEDS_LAYERS = ("keep_unquantised", "max_layers", "must_be_present", "no_full_precision")
#: Our codecs' names -> other names of the same format: markers' and targets'.
_FORMATS = {
    "nvfp4": ("comfy_nvfp4",),
    "w4a8": ("asym_w4a8_int8", "kitchen_w4a8"),
    "w4a4": ("convrot_w4a4", "kitchen_w4a4"),
    "int8": ("int8_tensorwise", "convrot_int8", "kitchen_int8"),
    "float8": ("float8_e4m3fn", "float8_e5m2", "comfy_fp8"),
    "mxfp8": ("comfy_mxfp8",),
    "gptq": ("auto_gptq",),
}
_ALIASES = {alias: name for name, aliases in _FORMATS.items() for alias in aliases}


def canonical_format(name: str) -> str:
    """The codec's name for a marker's or target's name of a format; any other name is returned as it is."""
    return _ALIASES.get(name, name)


class FamilyDataError(ValueError):
    """A family file is wrong."""


class ShapeRule(NamedTuple):
    """Some tensor whose name matches has in dimension `dim` one of these sizes, or (`none_of`) another size."""

    tensor: NamePattern
    dim: int
    one_of: frozenset[int] | None = None
    none_of: frozenset[int] | None = None

    def holds(self, sizes: set[int]) -> bool:
        if self.one_of is not None:
            return not sizes.isdisjoint(self.one_of)
        return bool(sizes - (self.none_of or frozenset()))


class Detection(NamedTuple):
    """All of `required` and `shapes` hold, none of `forbidden` matches a name. Names without the prefix."""

    required: tuple[NamePattern, ...]
    forbidden: tuple[NamePattern, ...] = ()
    shapes: tuple[ShapeRule, ...] = ()
    #: In place of the component's usual prefixes.
    prefixes: tuple[NamePattern, ...] | None = None


class Variant(NamedTuple):
    """A member of a family told apart from its siblings; the first that holds is taken."""

    id: str
    detection: Detection


class RoleRule(NamedTuple):
    """What the layers whose whole name matches are. With `first` or `last`: only in that many outermost blocks."""

    layers: NamePattern
    kind: Kind
    why: str | None = None
    variants: frozenset[str] | None = None
    first: int = 0
    last: int = 0


class FusedRule(NamedTuple):
    """`<stem>.<member>` of one stem become one module when the runtime loads them."""

    runtime: str
    stem: NamePattern
    members: tuple[str, ...]
    variants: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class RuntimeRule:
    """What a runtime does with this family, beyond what it asks of any layer."""

    runtime: str
    effect: Effect
    why: str
    formats: frozenset[str] | None = None
    layers: NamePattern | None = None
    count: int | None = None
    variants: frozenset[str] | None = None


class Head(NamedTuple):
    """What tells whether a file holds a family. The rest of its file is read when one does."""

    id: str
    component: Component
    detections: tuple[Detection, ...]


class Family(NamedTuple):
    """One architecture: how it is recognised, what its layers are, what runtimes do with it."""

    id: str
    title: str
    component: Component
    detections: tuple[Detection, ...]
    variants: tuple[Variant, ...]
    roles: tuple[RoleRule, ...]
    fused: tuple[FusedRule, ...]
    runtime_rules: tuple[RuntimeRule, ...]


# A repeated group is the way to exponential backtracking; look-around and back-references are never needed here.
_REPEATED = r"\)[*+{]"
_FANCY = r"\(\?(?:[=!#]|<[=!])|\(\?P=|\\[1-9]"


class _Table:
    """One TOML table: typed look-ups, and an error for every key that nobody asked for."""

    def __init__(self, data: object, where: str, trusted: bool = False) -> None:
        if not isinstance(data, dict):
            raise FamilyDataError(f"{where}: expected a table, found {type(data).__name__}")
        self._data: dict[str, Any] = dict(data)
        self.where = where
        self._trusted = trusted

    def fail(self, problem: str) -> FamilyDataError:
        return FamilyDataError(f"{self.where}: {problem}")

    def value(self, key: str, kind: type, *, needed: bool = False) -> Any:
        if key not in self._data:
            if needed:
                raise self.fail(f"{key!r} is missing")
            return None
        found = self._data.pop(key)
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise self.fail(f"{key!r} must be {kind.__name__}, found {type(found).__name__}")
        if found in ("", []):
            raise self.fail(f"{key!r} is empty")
        return found

    def text(self, key: str) -> str:
        return cast(str, self.value(key, str, needed=True))

    def choice(self, key: str, allowed: Iterable[str]) -> str:
        found = self.text(key)
        options = tuple(allowed)
        if found not in options:
            raise self.fail(f"{key!r} is {found!r}, expected one of {', '.join(options)}")
        return found

    def texts(self, key: str, *, needed: bool = False) -> tuple[str, ...]:
        found = self.value(key, list, needed=needed) or []
        if not all(isinstance(item, str) for item in found):
            raise self.fail(f"{key!r} must be a list of strings")
        return tuple(found)

    def number(self, key: str) -> int | None:
        found: int | None = self.value(key, int)
        if found is not None and found < 0:
            raise self.fail(f"{key!r} is negative")
        return found

    def sizes(self, key: str) -> frozenset[int] | None:
        found = self.value(key, list)
        if found and not all(isinstance(size, int) and not isinstance(size, bool) for size in found):
            raise self.fail(f"{key!r} must be a list of integers")
        return frozenset(found) if found else None

    def pattern(self, key: str) -> NamePattern:
        return self.compile(key, self.text(key))

    def patterns(self, key: str, *, needed: bool = False) -> tuple[NamePattern, ...]:
        return tuple(self.compile(key, text) for text in self.texts(key, needed=needed))

    def compile(self, key: str, text: str) -> NamePattern:
        pattern = NamePattern(text)
        if self._trusted:
            return pattern
        try:
            _ = pattern.compiled
        except re.error as error:
            raise self.fail(f"{key!r} is no regular expression: {text!r} ({error})") from error
        bare = re.sub(r"\\.", "x", text)
        if re.search(_REPEATED, bare) or re.search(_FANCY, text):
            raise self.fail(f"{key!r} must be plain (no repeated groups, look-around, references): {text!r}")
        return pattern

    def tables(self, key: str) -> list[_Table]:
        found = self.value(key, list) or []
        return [
            _Table(item, f"{self.where}, [[{key}]] {i + 1}", self._trusted) for i, item in enumerate(found)
        ]

    def done(self) -> None:
        if self._data:
            raise self.fail(f"unknown key {', '.join(repr(key) for key in sorted(self._data))}")


def _detection(table: _Table) -> Detection:
    shapes = []
    for item in table.tables("shape"):
        shapes.append(
            ShapeRule(
                item.pattern("tensor"), item.number("dim") or 0, item.sizes("one_of"), item.sizes("none_of")
            )
        )
        item.done()
        if (shapes[-1].one_of is None) == (shapes[-1].none_of is None):
            raise item.fail("needs either 'one_of' or 'none_of'")
    return Detection(
        required=table.patterns("required"),
        forbidden=table.patterns("forbidden"),
        shapes=tuple(shapes),
        prefixes=table.patterns("prefixes") or None,
    )


def _detect(table: _Table) -> Detection:
    found = _detection(table)
    table.done()
    if not found.required:
        raise table.fail("'required' is missing")
    return found


def _variant(table: _Table) -> Variant:
    found = Variant(table.text("id"), _detection(table))
    table.done()
    rule = found.detection
    if not (rule.required or rule.forbidden or rule.shapes) or rule.prefixes:
        raise table.fail("a variant needs 'required', 'forbidden' or 'shape', and takes no 'prefixes'")
    return found


def _variants_of(table: _Table, known: frozenset[str]) -> frozenset[str] | None:
    named = frozenset(table.texts("variants"))
    if named - known:
        raise table.fail(f"unknown variant {', '.join(sorted(named - known))}")
    return named or None


def _need_block(table: _Table, layers: NamePattern | None) -> None:
    if layers is None or "(?P<block>" not in layers.pattern:
        raise table.fail("'layers' needs a group named 'block' that holds the block's number")


def _role(table: _Table, known: frozenset[str]) -> RoleRule:
    kind = cast(Kind, table.choice("kind", ("linear", "embedding", "protected")))
    rule = RoleRule(
        layers=table.pattern("layers"),
        kind=kind,
        why=table.value("why", str),
        variants=_variants_of(table, known),
        first=table.number("first") or 0,
        last=table.number("last") or 0,
    )
    table.done()
    if kind == "protected" and rule.why is None:
        raise table.fail("a protected layer needs a 'why'")
    if rule.first or rule.last:
        _need_block(table, rule.layers)
    return rule


def _fused(table: _Table, known: frozenset[str]) -> FusedRule:
    rule = FusedRule(
        runtime=table.choice("runtime", _RUNTIMES),
        stem=table.pattern("stem"),
        members=table.texts("members", needed=True),
        variants=_variants_of(table, known),
    )
    table.done()
    if len(rule.members) < 2:
        raise table.fail("'members' needs at least two names")
    return rule


def _runtime(table: _Table, known: frozenset[str]) -> RuntimeRule:
    effect = cast(Effect, table.choice("effect", get_args(Effect)))
    formats = frozenset(table.texts("formats"))
    if formats - set(_FORMATS):
        raise table.fail(
            f"unknown format {', '.join(sorted(formats - set(_FORMATS)))}; known: {', '.join(_FORMATS)}"
        )
    rule = RuntimeRule(
        runtime=table.choice("runtime", _RUNTIMES),
        effect=effect,
        why=table.text("why"),
        formats=formats or None,
        layers=table.pattern("layers") if effect in _NEEDS_LAYERS else None,
        count=table.number("count") if effect == "max_layers" else None,
        variants=_variants_of(table, known),
    )
    table.done()
    if effect == "max_layers":
        _need_block(table, rule.layers)
        if not rule.count:
            raise table.fail("'max_layers' needs a 'count'")
    return rule


def _toml(text: str, name: str, trusted: bool) -> _Table:
    try:
        return _Table(tomllib.loads(text), name, trusted)
    except tomllib.TOMLDecodeError as error:
        raise FamilyDataError(f"{name}: {error}") from error


def parse_common(
    text: str, name: str, families: Mapping[str, Component], *, trusted: bool = False
) -> dict[str, tuple[RuntimeRule, ...]]:
    """Rules that hold for every family of a component but those named in `except`, by family."""
    top = _toml(text, name, trusted)
    rules: dict[str, list[RuntimeRule]] = {family: [] for family in families}
    for table in top.tables("runtime"):
        component = table.choice("component", get_args(Component))
        spared = table.texts("except")
        if set(spared) - set(families):
            raise table.fail(f"unknown family {', '.join(sorted(set(spared) - set(families)))}")
        rule = _runtime(table, frozenset())
        for family, its in families.items():
            if its == component and family not in spared:
                rules[family].append(rule)
    top.done()
    return {family: tuple(found) for family, found in rules.items()}


#: Where the part of a family file ends that tells families apart; it comes first.
_REST = r"(?m)^\[\[(?!detect(\.shape)?\]\])"


def parse_head(text: str, name: str) -> Head:
    """The beginning of a family file that ships: reading TOML takes longer than most headers do."""
    top = _toml(re.split(_REST, text, maxsplit=1)[0], name, trusted=True)
    return Head(
        top.text("id"),
        cast(Component, top.choice("component", get_args(Component))),
        tuple(_detect(table) for table in top.tables("detect")),
    )


def parse_family(text: str, name: str, *, trusted: bool = False) -> Family:
    """Read one family file; `name` is what errors call it. `trusted`: its patterns are known to be good."""
    top = _toml(text, name, trusted)
    variants = tuple(_variant(table) for table in top.tables("variant"))
    known = frozenset(variant.id for variant in variants)
    family = Family(
        id=top.text("id"),
        title=top.text("title"),
        component=cast(Component, top.choice("component", get_args(Component))),
        detections=tuple(_detect(table) for table in top.tables("detect")),
        variants=variants,
        roles=tuple(_role(table, known) for table in top.tables("role")),
        fused=tuple(_fused(table, known) for table in top.tables("fused")),
        runtime_rules=tuple(_runtime(table, known) for table in top.tables("runtime")),
    )
    top.done()
    if not family.detections:
        raise top.fail("no [[detect]]")
    if not family.roles:
        raise top.fail("no [[role]]")
    return family
