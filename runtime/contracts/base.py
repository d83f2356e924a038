"""What every contract speaks: verdicts with structured violations. No tensors, no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from qconvert.formats.tensors import HeaderView

#: refuse: the runtime raises. trap: it loads and computes something else than the file says.
#: environment: right on some machines only (compute capability, version). note: harmless, worth saying.
Severity = Literal["refuse", "trap", "environment", "note"]
Kind = Literal["linear", "embedding"]


class Violation(NamedTuple):
    """One broken rule. `rule` is a stable id; `message` is the runtime's own wording where it has one."""

    severity: Severity
    rule: str
    message: str
    layer: str | None = None
    found: str | None = None
    expected: str | None = None
    remedy: str | None = None

    def line(self) -> str:
        where = f"{self.layer}: " if self.layer else ""
        facts = ", ".join(
            f"{word} {value}"
            for word, value in (("found", self.found), ("expected", self.expected))
            if value is not None
        )
        text = f"{where}{self.message}" + (f" ({facts})" if facts else "")
        return text + (f"; {self.remedy}" if self.remedy else "")


class LayerVerdict(NamedTuple):
    """What the runtime would do with one layer; `method` is the runtime's name for it (or "unquantised")."""

    layer: str
    kind: Kind
    format: str | None
    method: str
    violations: tuple[Violation, ...] = ()


class Verdict(NamedTuple):
    """A contract's answer for a whole file. `config` is the runtime's config class, None if none resolves."""

    runtime: str
    config: str | None
    layers: tuple[LayerVerdict, ...] = ()
    violations: tuple[Violation, ...] = ()

    def all_violations(self) -> tuple[Violation, ...]:
        return self.violations + tuple(v for layer in self.layers for v in layer.violations)

    @property
    def accepted(self) -> bool:
        """Neither refused nor misread."""
        return not any(v.severity in ("refuse", "trap") for v in self.all_violations())


class Contract(Protocol):
    """One runtime at one version."""

    name: str
    #: What a user calls its configs -> the runtime's config class.
    configs: Mapping[str, str]

    def check(self, view: HeaderView, *, tp: int = 1) -> Verdict:
        """What the runtime would do with this header, layer by layer."""
        ...

    def layer_refusal(
        self, config: str, kind: Kind, format_name: str, n: int, k: int, options: Mapping[str, Any]
    ) -> str | None:
        """Why a layer [n, k] of this format and options cannot be served under `config`; None if it can.

        Only what follows from kind, shape and options: asked by the planner before anything is written.
        Options are the marker's keys as they would be written (`convrot`, `convrot_groupsize`, `group_size`,
        `linear_dtype`, `full_precision_matrix_mult`) and, because no marker carries them,

        * `scale`: "row" or "scalar", of an int8 layer or table (not judged when absent);
        * `tensors`: suffixes that would be written beside `weight` and its scales, e.g. `{"input_scale"}`;
        * `partitions`: how many stored layers the model fuses into this one (1 when absent);
        * `bits`: 6 for the 6-bit variant of asym_w4a8_int8 (4 when absent).

        Unquantised formats (`bf16`, `fp16`, `fp32`) are served everywhere. Unknown configs raise UsageError.
        """
        ...

    def marker_violations(
        self, config: str, kind: Kind, layer: str, marker: Mapping[str, Any], scale: str | None
    ) -> list[Violation]:
        """What is wrong with this marker alone under `config`, before any tensor is looked at.

        `scale` is "row", "scalar", or None when it is not known what the layer's scale looks like.
        """
        ...

    def format_set_violations(self, config: str, formats: Collection[str]) -> list[Violation]:
        """Why a file with exactly these formats would not be taken by `config`; empty when it would."""
        ...
