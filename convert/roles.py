"""What each layer is in its model: from the family where it is known, else from its name and shape."""

from __future__ import annotations

from collections.abc import Iterable

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import Layer
from qconvert.formats.registry import codec
from qconvert.runtime.contracts.base import Contract
from qconvert.runtime.families import FamilyMatch, detect, owner
from qconvert.runtime.families.match import RuntimeRules
from qconvert.runtime.roles import is_embedding_name
from qconvert.runtime.targets import Target


class RoleBook:
    """Answers for one checkpoint, one target and the contract it is planned for."""

    def __init__(self, checkpoint: Checkpoint, target: Target, contracts: tuple[Contract, ...]) -> None:
        self.matches = detect(checkpoint.specs)
        self.family_ids = tuple(dict.fromkeys(match.title for match in self.matches))
        self._runtime = contracts[0].name if contracts else target.family_runtime
        self._format = codec(target.linear).name
        self._rules: dict[str, RuntimeRules | None] = {}
        #: Whether layers will carry ComfyUI's markers: folders and headers are read by loaders of other kinds.
        self._marked = target.sidecars is None and target.header is None
        #: Why loaders of the chosen layers' models stop at such files (filled by `refuse_or_note`).
        self.not_served: list[str] = []

    def _match(self, layer: Layer) -> FamilyMatch | None:
        return owner(self.matches, layer.prefix)

    def _answers(self, match: FamilyMatch | None) -> RuntimeRules | None:
        if match is None or self._runtime is None:
            return None
        key = match.prefix + match.family.id
        if key not in self._rules:
            self._rules[key] = match.runtime_rules(self._runtime, self._format)
        return self._rules[key]

    def refuse_or_note(self, prefixes: Iterable[str]) -> list[str]:
        """What the runtime's loaders for the families of these layers say. Raises when they take no such file."""
        chosen = set(prefixes)
        notes: list[str] = []
        for match in self.matches:
            rules = self._answers(match)
            if rules is None or not any(match.owns(prefix) for prefix in chosen):
                continue
            why = rules.refuse_target()
            if why:
                raise QConvertError(
                    f"{self._runtime} takes no {self._format} file of {match.title}: {why}",
                    hint="`qconvert targets` lists the others",
                )
            stops = rules.not_served() if self._marked else None
            if stops:
                self.not_served.append(stops)
                notes.append(stops)
            notes += [*rules.missing(), *rules.notes()]
            count = rules.max_layers()
            beyond = sum(1 for layer in match.layers if rules.beyond(layer))
            if count is not None and beyond:
                notes.append(
                    f"{beyond} layers lie in blocks that {self._runtime} does not read; "
                    f"--keep-layers {count} leaves them out"
                )
        return notes

    def role(self, layer: Layer) -> str:
        """linear, embedding, or other (norms, convolutions, what the family's rules leave out)."""
        if layer.ndim != 2 and not layer.experts:
            return "other"
        match = self._match(layer)
        if match is not None:
            kind = match.role(layer.prefix).kind
            if kind in ("linear", "embedding"):
                return kind
            if not layer.quantised:
                return "other"
        return "embedding" if is_embedding_name(layer.prefix) and not layer.experts else "linear"

    def protected(self, layer: Layer) -> str | None:
        """Why a fresh quantisation should leave this layer alone."""
        match = self._match(layer)
        if match is None:
            return None
        role = match.role(layer.prefix)
        return role.why or "no linear layer" if role.kind not in ("linear", "embedding") else None

    def runtime_keeps(self, layer: Layer) -> str | None:
        """Why the runtime's loader for this model cannot take this layer quantised."""
        rules = self._answers(self._match(layer))
        return rules.keep_unquantised(layer.prefix) if rules else None

    def no_full_precision(self, layer: Layer) -> str | None:
        """Why this layer's marker cannot ask for full-precision matmul."""
        rules = self._answers(self._match(layer))
        return rules.no_full_precision(layer.prefix) if rules else None

    def fused_groups(self, layers: Iterable[str]) -> list[tuple[str, ...]]:
        """Layers that the runtime makes one module of."""
        if self._runtime is None:
            return []
        names = list(layers)
        return [
            group
            for match in self.matches
            for group in match.fused_groups([n for n in names if match.owns(n)], self._runtime)
        ]
