"""A family found in a file: what each layer is, and what runtimes do with it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from qconvert.runtime.families.pattern import NamePattern
from qconvert.runtime.families.schema import (
    Component,
    Effect,
    Family,
    Kind,
    RoleRule,
    RuntimeRule,
    canonical_format,
)


class Role(NamedTuple):
    """What a layer is. "other" is what no rule speaks of: neither quantised nor known to be delicate."""

    kind: Kind
    why: str | None = None

    @property
    def quantise(self) -> bool:
        """Whether the layer is quantised when nobody says otherwise."""
        return self.kind == "linear"


@dataclass(frozen=True)
class FamilyMatch:
    """One component of a file. Layers are named in full, as in the file, everywhere."""

    family: Family
    prefix: str
    variant: str | None
    #: Layer prefixes of the component, without `prefix`.
    _layers: frozenset[str] = field(repr=False, compare=False)
    #: For role rules about the first or last blocks: how many blocks there are.
    _blocks: dict[NamePattern, int] = field(repr=False, compare=False)

    @property
    def component(self) -> Component:
        return self.family.component

    @property
    def title(self) -> str:
        return self.family.title + (f" ({self.variant})" if self.variant else "")

    @property
    def layers(self) -> tuple[str, ...]:
        """The component's layers in full: everything that has a weight, norms and convolutions included."""
        return tuple(sorted(self.prefix + layer for layer in self._layers))

    def owns(self, layer: str) -> bool:
        return layer.startswith(self.prefix) and layer[len(self.prefix) :] in self._layers

    def role(self, layer: str) -> Role:
        """What the layer is: the first rule that matches its whole name decides."""
        bare = self._bare(layer)
        if bare is None:
            return Role("other", f"not under {self.prefix}")
        for rule in self.family.roles:
            found = rule.layers.fullmatch(bare)
            if found and self._applies(rule.variants) and self._outermost(rule, found):
                return Role(rule.kind, rule.why)
        return Role("other", f"no rule of {self.family.title} names it")

    def fused_groups(self, layers: Iterable[str], runtime: str = "sglang") -> list[tuple[str, ...]]:
        """Those of `layers` that `runtime` makes one module of, in the order in which it stacks them."""
        present = [bare for bare in (self._bare(layer) for layer in layers) if bare is not None]
        groups: dict[tuple[int, str], list[str]] = {}
        for rule_number, rule in enumerate(self.family.fused):
            if not (self._applies(rule.variants) and _same_runtime(rule.runtime, runtime)):
                continue
            for bare in present:
                for member in rule.members:
                    stem = bare.removesuffix("." + member)
                    if stem != bare and rule.stem.fullmatch(stem):
                        groups.setdefault((rule_number, stem), []).append(member)
        found = []
        for (rule_number, stem), members in groups.items():
            order = [member for member in self.family.fused[rule_number].members if member in members]
            if len(order) > 1:
                found.append(tuple(f"{self.prefix}{stem}.{member}" for member in order))
        return found

    def runtime_rules(self, runtime: str, format_name: str) -> RuntimeRules:
        """What `runtime` (a contract's name, with or without version) does with this family in that format."""
        name = canonical_format(format_name)
        rules = (
            rule
            for rule in self.family.runtime_rules
            if _same_runtime(rule.runtime, runtime)
            and self._applies(rule.variants)
            and (rule.formats is None or name in rule.formats)
        )
        return RuntimeRules(self, tuple(rules))

    def _bare(self, layer: str) -> str | None:
        return layer[len(self.prefix) :] if layer.startswith(self.prefix) else None

    def _applies(self, variants: frozenset[str] | None) -> bool:
        return variants is None or self.variant in variants

    def _outermost(self, rule: RoleRule, found: re.Match[str]) -> bool:
        if not (rule.first or rule.last):
            return True
        block = int(found["block"])
        return block < rule.first or block >= self._blocks[rule.layers] - rule.last


class RuntimeRules(NamedTuple):
    """The answers of one runtime for one family in one format; a text is the reason, None means no objection."""

    match: FamilyMatch
    rules: tuple[RuntimeRule, ...]

    def keep_unquantised(self, layer: str) -> str | None:
        """Why the layer must be plain in a file for this runtime (blocks it never reads included)."""
        return self._layer(layer, "keep_unquantised") or self.beyond(layer)

    def beyond(self, layer: str) -> str | None:
        """Why the layer is in a block that the runtime does not build."""
        bare = self._strip(layer)
        for rule in self._of("max_layers"):
            found = rule.layers.fullmatch(bare) if rule.layers else None
            if found and rule.count is not None and int(found["block"]) >= rule.count:
                return rule.why
        return None

    def no_full_precision(self, layer: str) -> str | None:
        """Why a marker of this layer cannot ask for full-precision matmul."""
        return self._layer(layer, "no_full_precision")

    def max_layers(self) -> int | None:
        """How many blocks the runtime reads."""
        counts = [rule.count for rule in self._of("max_layers") if rule.count is not None]
        return min(counts, default=None)

    def missing(self) -> tuple[str, ...]:
        """For each part that the runtime needs and the file lacks, what it is."""
        return tuple(
            rule.why
            for rule in self._of("must_be_present")
            if rule.layers and not any(rule.layers.fullmatch(layer) for layer in self.match._layers)
        )

    def refuse_target(self) -> str | None:
        """Why the runtime takes no file of this family in this format."""
        return self._first("refuse_target")

    def strip_prefix(self) -> str | None:
        """Why the prefix must go; None when it may stay or there is none."""
        return self._first("strip_prefix") if self.match.prefix else None

    def single_file(self) -> str | None:
        """Why the output must be one file, named itself."""
        return self._first("single_file")

    def not_served(self) -> str | None:
        """Why the runtime's loader for this model stops at such a file, although nothing in it breaks a rule."""
        return self._first("not_served")

    def notes(self) -> tuple[str, ...]:
        """What a user should know before trying."""
        return tuple(rule.why for rule in self._of("note"))

    def _of(self, effect: Effect) -> tuple[RuntimeRule, ...]:
        return tuple(rule for rule in self.rules if rule.effect == effect)

    def _first(self, effect: Effect) -> str | None:
        return next((rule.why for rule in self._of(effect)), None)

    def _layer(self, layer: str, effect: Effect) -> str | None:
        bare = self._strip(layer)
        return next(
            (rule.why for rule in self._of(effect) if rule.layers and rule.layers.fullmatch(bare)), None
        )

    def _strip(self, layer: str) -> str:
        return layer.removeprefix(self.match.prefix)


def _same_runtime(rule: str, asked: str) -> bool:
    """Rules name a runtime; contracts add a version to it ("sglang-0.5.23")."""
    return asked == rule or asked.startswith(rule + "-")
