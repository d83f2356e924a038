"""The names in a header as recognition sees them: by component prefix, quantised layers under their plain names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from qconvert.runtime.families.schema import Component, Detection

if TYPE_CHECKING:
    from qconvert.formats.tensors import Spec

#: What files put in front of a component's names, as whole-prefix patterns. "" is always tried.
_PREFIXES: dict[Component, tuple[re.Pattern[str], ...]] = {
    "diffusion": tuple(
        map(
            re.compile,
            (
                r"(?:model\.)?diffusion_model\.",
                r"model\.(?:model\.)?",
                r"net\.",
                r"transformer\.",
                r"unet\.",
                r"module\.",
            ),
        )
    ),
    "text_encoder": tuple(
        map(
            re.compile,
            (
                r"text_encoders\.[^.]+\.(?:transformer\.|model\.)?",
                r"cond_stage_model\.(?:[^.]+\.)?(?:transformer\.|model\.)?",
                r"conditioner\.embedders\.\d+\.(?:transformer\.|model\.)?",
                r"text_encoder(?:_\d)?\.",
                r"transformer\.",
            ),
        )
    ),
    "vae": tuple(map(re.compile, (r"first_stage_model\.", r"(?:video_|audio_)?vae\."))),
}
#: No prefix pattern has more parts than this.
_DEPTH = 4

#: What other layouts call a weight's codes.
_CODES = (".qweight", ".weight_packed", ".weight._data")


def _plain(pattern: str) -> str | None:
    """The one string that a pattern without operators matches, None if it has any."""
    text = pattern.replace(r"\.", "\0")
    return None if re.search(r"[\\.^$*+?{}\[\]|()]", text) else text.replace("\0", ".")


_ONE_STRING: dict[str, str | None] = {}


class Names:
    """Names under one prefix, the prefix taken off; answers about patterns are remembered."""

    def __init__(self, prefix: str, tensors: Mapping[str, Spec]) -> None:
        self.prefix = prefix
        cut = len(prefix)
        self.specs: dict[str, Spec | None] = {
            name[cut:]: spec for name, spec in tensors.items() if name.startswith(prefix)
        }
        for name in list(self.specs):
            for codes in _CODES:
                if name.endswith(codes):
                    # Packed along either axis: its shape says nothing here.
                    self.specs.setdefault(name.removesuffix(codes) + ".weight", None)
        self._known: dict[str, list[str]] = {}

    def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """Names that the pattern matches as a whole."""
        found = self._known.get(pattern.pattern)
        if found is None:
            if pattern.pattern not in _ONE_STRING:
                _ONE_STRING[pattern.pattern] = _plain(pattern.pattern)
            only = _ONE_STRING[pattern.pattern]
            if only is not None:
                found = [only] if only in self.specs else []
            else:
                found = [name for name in self.specs if pattern.fullmatch(name)]
            self._known[pattern.pattern] = found
        return found

    def holds(self, rule: Detection) -> bool:
        """Whether names and shapes are what the rule asks for (its prefixes aside)."""
        if not all(self.matching(pattern) for pattern in rule.required):
            return False
        if any(self.matching(pattern) for pattern in rule.forbidden):
            return False
        for shape in rule.shapes:
            specs = (self.specs[name] for name in self.matching(shape.tensor))
            sizes = {spec.shape[shape.dim] for spec in specs if spec and len(spec.shape) > shape.dim}
            if sizes.isdisjoint(shape.one_of):
                return False
        return True

    def layers(self) -> frozenset[str]:
        """Layer prefixes: names of weights without `.weight`."""
        return frozenset(name.removesuffix(".weight") for name in self.specs if name.endswith(".weight"))


class Groups:
    """A header's names by prefix, made when first asked for."""

    def __init__(self, tensors: Mapping[str, Spec]) -> None:
        self._tensors = tensors
        self._made: dict[str, Names] = {}
        heads: dict[str, None] = {}
        for name in tensors:
            parts = name.split(".", _DEPTH)
            for depth in range(1, len(parts)):
                heads[".".join(parts[:depth]) + "."] = None
        self._heads = tuple(heads)
        self._found: dict[tuple[str, ...], tuple[str, ...]] = {}

    def prefixes(self, component: Component, patterns: Iterable[re.Pattern[str]] | None) -> tuple[str, ...]:
        """Prefixes in this file that the patterns (or the component's usual ones, with "") describe."""
        usual = patterns is None
        asked = tuple(_PREFIXES[component] if patterns is None else patterns)
        key = (component if usual else "", *(pattern.pattern for pattern in asked))
        if key not in self._found:
            found = [head for head in self._heads if any(pattern.fullmatch(head) for pattern in asked)]
            self._found[key] = tuple(["", *found] if usual else found)
        return self._found[key]

    def names(self, prefix: str) -> Names:
        if prefix not in self._made:
            self._made[prefix] = Names(prefix, self._tensors)
        return self._made[prefix]
