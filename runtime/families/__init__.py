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
    canonical_format,
    parse_common,
    parse_family,
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
def load_families(*, trusted: bool = True) -> tuple[Family, ...]:
    """Every family that ships, sorted by id. Their patterns cannot change, so only the tests look at all of them."""
    texts = {item.name: item.read_text("utf-8") for item in Path(__file__).with_name("data").glob("*.toml")}
    common = texts.pop(_COMMON)
    families: dict[str, Family] = {}
    for name in sorted(texts):
        family = parse_family(texts[name], name, trusted=trusted)
        if f"{family.id}.toml" != name:
            raise FamilyDataError(f"{name}: 'id' is {family.id!r}, expected the file's name")
        families[family.id] = family
    components = {family.id: family.component for family in families.values()}
    shared = parse_common(common, _COMMON, components, trusted=trusted)
    return tuple(
        family._replace(runtime_rules=family.runtime_rules + shared[family.id])
        for family in families.values()
    )


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
    for family in load_families():
        for rule in family.detections:
            for prefix in groups.prefixes(family.component, rule.prefixes):
                names = groups.names(prefix)
                if (prefix, family.component) not in found and names.holds(rule):
                    found[prefix, family.component] = _match(family, prefix, names)
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
