"""The names in a header as recognition sees them: by component prefix, quantised layers under their plain names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from qconvert.runtime.families.pattern import NamePattern
from qconvert.runtime.families.schema import Component, Detection

if TYPE_CHECKING:
    from qconvert.formats.tensors import Spec

#: What files put in front of a component's names, as whole-prefix patterns. "" is always tried.
_PREFIXES: dict[Component, NamePattern] = {
    "diffusion": NamePattern(
        r"(?:model\.)?diffusion_model\.|model\.(?:model\.)?|net\.|transformer\.|unet\.|module\."
    ),
    "text_encoder": NamePattern(
        r"text_encoders\.[^.]+\.(?:(?:transformer|model)\.)?"
        r"|cond_stage_model\.(?:[^.]+\.)?(?:(?:transformer|model)\.)?"
        r"|conditioner\.embedders\.\d+\.(?:(?:transformer|model)\.)?"
        r"|text_encoder(?:_\d)?\.|transformer\."
    ),
    "vae": NamePattern(r"first_stage_model\.|(?:video_|audio_)?vae\."),
}
#: No prefix pattern has more parts than this.
_DEPTH = 4

#: What other layouts call a weight's codes.
_CODES = (".qweight", ".weight_packed", ".weight._data", "._weight_qdata")


_TOKEN = re.compile(r"\(\?:|\\\.|[)|]|\?|[A-Za-z0-9_]")
_MANY = 64


@cache
def strings(pattern: str) -> tuple[str, ...] | None:
    """All that a pattern of letters, groups, alternatives and options can match; None if it has more in it.

    Most rules are of that kind, and a look-up each is far cheaper than a regular expression on every name.
    """
    tokens = _TOKEN.findall(pattern)
    if "".join(tokens) != pattern:
        return None
    #: One entry a group that is open: alternatives that are done, and the texts of the one being read.
    open_groups: list[tuple[list[str], list[str]]] = [([], [""])]
    last: list[str] | None = None
    before: list[str] = []
    for token in tokens:
        done, texts = open_groups[-1]
        if token == "(?:":
            open_groups.append(([], [""]))
            last = None
        elif token == "|":
            done += texts
            texts[:] = [""]
            last = None
        elif token == "?":
            if last is None:
                return None
            texts[:] = before + [text + end for text in before for end in last]
            last = None
        else:
            if token == ")":
                open_groups.pop()
                last = done + texts
                texts = open_groups[-1][1]
            else:
                last = [token[-1]]
            before = list(texts)
            texts[:] = [text + end for text in texts for end in last]
        if len(texts) > _MANY:
            return None
    done, texts = open_groups[-1]
    return tuple(dict.fromkeys(done + texts))


class Names:
    """Names under one prefix, the prefix taken off; answers about patterns are remembered."""

    def __init__(self, prefix: str, tensors: Mapping[str, Spec]) -> None:
        self.prefix = prefix
        cut = len(prefix)
        self.specs: dict[str, Spec | None] = dict(tensors)
        if prefix:
            self.specs = {name[cut:]: spec for name, spec in tensors.items() if name.startswith(prefix)}
        for name in [name for name in self.specs if name.endswith(_CODES)]:
            layer = next(name.removesuffix(codes) for codes in _CODES if name.endswith(codes))
            # Packed along either axis: its shape says nothing here.
            self.specs.setdefault(layer + ".weight", None)
        self._known: dict[str, list[str]] = {}

    def matching(self, pattern: NamePattern) -> list[str]:
        """Names that the pattern matches as a whole."""
        found = self._known.get(pattern.pattern)
        if found is None:
            few = strings(pattern.pattern)
            if few is not None:
                found = [name for name in few if name in self.specs]
            else:
                found = list(filter(pattern.compiled.fullmatch, self.specs))
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
            if not shape.holds(sizes):
                return False
        return True

    def layers(self) -> frozenset[str]:
        """Layer prefixes: names of weights without `.weight`."""
        return frozenset(name.removesuffix(".weight") for name in self.specs if name.endswith(".weight"))


def _heads(name: str) -> Iterator[str]:
    """What it begins with, up to one of its first dots."""
    end = name.find(".")
    for _ in range(_DEPTH):
        if end < 0:
            return
        yield name[: end + 1]
        end = name.find(".", end + 1)


class Groups:
    """A header's names by prefix, made when first asked for."""

    def __init__(self, tensors: Mapping[str, Spec]) -> None:
        self._tensors = tensors
        self._made: dict[str, Names] = {}
        self._firsts = {name[: name.find(".") + 1] for name in tensors}
        self._found: dict[str, tuple[str, ...]] = {}

    def prefixes(self, component: Component, own: tuple[NamePattern, ...] | None) -> tuple[str, ...]:
        """Prefixes in this file that a family's own patterns describe, or the component's usual ones and ""."""
        asked = own or (_PREFIXES[component],)
        found: list[str] = [] if own else [""]
        for pattern in asked:
            if pattern.pattern not in self._found:
                self._found[pattern.pattern] = tuple(self._matching(pattern))
            found += self._found[pattern.pattern]
        return tuple(found)

    def _matching(self, pattern: NamePattern) -> Iterator[str]:
        """What the pattern matches of that names begin with, up to a dot."""
        few = strings(pattern.pattern)
        if few is not None:
            for text in few:
                first = text[: text.find(".") + 1]
                if first in self._firsts and any(name.startswith(text) for name in self._tensors):
                    yield text
            return
        heads = (head for name in filter(pattern.compiled.match, self._tensors) for head in _heads(name))
        yield from filter(pattern.compiled.fullmatch, dict.fromkeys(heads))

    def names(self, prefix: str) -> Names:
        if prefix not in self._made:
            self._made[prefix] = Names(prefix, self._tensors)
        return self._made[prefix]
