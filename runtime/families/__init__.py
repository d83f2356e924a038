"""Model families: which model a file holds, what its layers are, what runtimes do with it. All facts are data.

One TOML file a family in `data/`; `schema` says what may stand in it. Only headers are looked at, and nothing
heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.runtime.families.match import FamilyMatch, Role, RuntimeRules
from qconvert.runtime.families.names import Groups, Names
from qconvert.runtime.families.schema import (
    Family,
    FamilyDataError,
    Head,
    RuntimeRule,
    canonical_format,
    parse_common,
    parse_family,
    parse_head,
)
from qconvert.runtime.roles import is_embedding_name

if TYPE_CHECKING:
    from qconvert.formats.tensors import Spec

__all__ = [
    "Family",
    "FamilyDataError",
    "FamilyMatch",
    "Role",
    "RuntimeRules",
    "canonical_format",
    "detect",
    "generic_role",
    "load_families",
    "owner",
]

_COMMON = "common.toml"


@cache
def _texts() -> dict[str, str]:
    """The data files by name, sorted."""
    files = sorted(Path(__file__).with_name("data").glob("*.toml"))
    return {item.name: item.read_text("utf-8") for item in files}


@cache
def load_heads() -> tuple[Head, ...]:
    """What recognises each family that ships, sorted by id."""
    return tuple(parse_head(text, name) for name, text in _texts().items() if name != _COMMON)


@cache
def _shared(trusted: bool) -> dict[str, tuple[RuntimeRule, ...]]:
    components = {head.id: head.component for head in load_heads()}
    return parse_common(_texts()[_COMMON], _COMMON, components, trusted=trusted)


@cache
def load_family(family_id: str, *, trusted: bool = True) -> Family:
    """A family that ships. Its patterns cannot change, so only the tests look at all of them."""
    name = f"{family_id}.toml"
    family = parse_family(_texts()[name], name, trusted=trusted)
    if family.id != family_id:
        raise FamilyDataError(f"{name}: 'id' is {family.id!r}, expected the file's name")
    return family._replace(runtime_rules=family.runtime_rules + _shared(trusted)[family_id])


@cache
def load_families(*, trusted: bool = True) -> tuple[Family, ...]:
    """Every family that ships, sorted by id."""
    return tuple(load_family(head.id, trusted=trusted) for head in load_heads())


#: The last header looked at and what was found in it: contracts and planning ask of one file several times.
_last: tuple[Mapping[str, Spec], tuple[FamilyMatch, ...]] | None = None


def detect(tensors: Mapping[str, Spec]) -> tuple[FamilyMatch, ...]:
    """The families in a file, one match a component and prefix; empty when none is known.

    Files of one model have one match, all-in-one files several. Quantised layers are seen through: packed
    weights, side tensors and missing markers make no difference. `tensors` must not change afterwards: asked again
    about the same object, the answer is the one given before.
    """
    global _last
    if _last is None or _last[0] is not tensors:
        _last = tensors, _detect(tensors)
    return _last[1]


def _detect(tensors: Mapping[str, Spec]) -> tuple[FamilyMatch, ...]:
    groups = Groups(tensors)
    found: dict[tuple[str, str], FamilyMatch] = {}
    for head in load_heads():
        for rule in head.detections:
            for prefix in groups.prefixes(head.component, rule.prefixes):
                names = groups.names(prefix)
                if (prefix, head.component) not in found and names.holds(rule):
                    found[prefix, head.component] = _match(load_family(head.id), prefix, names)
    return tuple(found[key] for key in sorted(found) if not _inside(found[key], found.values()))


def owner(matches: tuple[FamilyMatch, ...], layer: str) -> FamilyMatch | None:
    """The match that a layer belongs to: of those that hold it, the one with the longest prefix that knows it."""
    holding = [match for match in matches if match.owns(layer)]
    if len(holding) < 2:
        return holding[0] if holding else None
    return max(holding, key=lambda match: (len(match.prefix), match.role(layer).kind != "other"))


def generic_role(layer: str, spec: Spec) -> Role:
    """What a layer of an unknown family is, from the name and shape of its weight alone."""
    if len(spec.shape) != 2:
        return Role("other", "not a matrix")
    if is_embedding_name(layer):
        return Role("embedding", "its name is that of a table")
    return Role("linear")


def _inside(match: FamilyMatch, others: Iterable[FamilyMatch]) -> bool:
    """Whether the same names were also found under a shorter prefix ("x." when `model.` may belong to the name)."""
    return any(
        other.family is match.family and other is not match and match.prefix.startswith(other.prefix)
        for other in others
    )


def _match(family: Family, prefix: str, names: Names) -> FamilyMatch:
    variant = next((item.id for item in family.variants if names.holds(item.detection)), None)
    layers = names.layers()
    blocks = {}
    for rule in family.roles:
        if rule.first or rule.last:
            hits = (rule.layers.fullmatch(layer) for layer in layers)
            blocks[rule.layers] = 1 + max((int(hit["block"]) for hit in hits if hit), default=-1)
    return FamilyMatch(family, prefix, variant, layers, blocks)
