"""What the contracts of runtimes without per-layer markers share: one configuration speaks for a whole file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from qconvert.formats.errors import UsageError
from qconvert.formats.quant_config import QuantConfig, checkpoint_config
from qconvert.formats.tensors import HeaderView, Spec
from qconvert.runtime.contracts.base import Kind, LayerVerdict, Severity, Verdict, Violation
from qconvert.runtime.contracts.common import (
    PLAIN_FORMATS,
    container_violations,
    dtypes,
    remedy,
    suffixes,
    tensors_by_layer,
)
from qconvert.runtime.contracts.once import once_a_view
from qconvert.runtime.roles import is_embedding_name

#: Types of weights that mean nothing without the runtime's knowledge of their scales.
PACKED = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8", "I32", "F4"})
_PACKED_NAMES = frozenset({"weight_packed", "qweight"})
Specs = Mapping[str, Spec]


class OtherContract:
    """A contract (see base.Contract) for a runtime that knows no ComfyUI markers.

    Subclasses say what they read (`judge`), and in `planned` what a layer of a config must be.
    """

    name: str
    configs: Mapping[str, str]
    #: config -> the target whose command mends a file.
    targets: Mapping[str, str] = {}

    def judge(self, view: HeaderView) -> Verdict:
        raise NotImplementedError

    def planned(self, config: str, kind: Kind, n: int, k: int) -> Iterator[Violation]:
        """What is wrong with an [n, k] layer in this config, whatever its tensors are."""
        yield from ()

    def check(self, view: HeaderView, *, tp: int = 1) -> Verdict:
        """See base.Contract. `tp` is not judged here: shards are cut by the runtime's own rules."""
        problems = container_violations(view)
        verdict = self.verdict(None, (), problems) if problems else self.judge(view)
        target = self.mending(verdict)
        if target is None:
            return verdict
        command = remedy(view, target)

        def mended(violations: Iterable[Violation]) -> tuple[Violation, ...]:
            return tuple(
                v._replace(remedy=command) if v.severity in ("refuse", "trap") else v for v in violations
            )

        layers = tuple(layer._replace(violations=mended(layer.violations)) for layer in verdict.layers)
        return verdict._replace(layers=layers, violations=mended(verdict.violations))

    def mending(self, verdict: Verdict) -> str | None:
        """The target that mends such a file: the one of its config, else the runtime's first."""
        named = (target for config, target in self.targets.items() if self.configs[config] == verdict.config)
        return next(named, None) or next(iter(self.targets.values()), None)

    def layer_refusal(
        self, config: str, kind: Kind, format_name: str, n: int, k: int, options: Mapping[str, Any]
    ) -> str | None:
        """See base.Contract."""
        self.known(config)
        if format_name in PLAIN_FORMATS:
            return None
        for violation in self.planned(config, kind, n, k):
            if violation.severity in ("refuse", "trap"):
                return violation.line()
        return None

    def marker_violations(
        self, config: str, kind: Kind, layer: str, marker: Mapping[str, Any], scale: str | None = None
    ) -> list[Violation]:
        """See base.Contract: markers are not read, so a layer that needs one is misread."""
        self.known(config)
        message = "markers are not read; the configuration decides"
        severity: Severity = "trap" if marker.get("convrot") else "note"
        return [Violation(severity, "marker-unread", message, layer)]

    def format_set_violations(self, config: str, formats: Collection[str]) -> list[Violation]:
        """See base.Contract: one configuration is one format."""
        self.known(config)
        return []

    def known(self, config: str) -> None:
        if config not in self.configs:
            raise UsageError(f"{self.name} has no config {config!r}", expected=", ".join(self.configs))

    # ---- what subclasses are written with

    @staticmethod
    def config(view: HeaderView) -> QuantConfig:
        """config.json's quantization_config, else the header's."""
        beside = checkpoint_config({}, view.config)
        return beside if beside.method else checkpoint_config(view.metadata, {})

    def verdict(
        self, config: str | None, layers: Iterable[LayerVerdict] = (), violations: Iterable[Violation] = ()
    ) -> Verdict:
        return Verdict(self.name, self.configs[config] if config else None, tuple(layers), tuple(violations))

    def plain(self, view: HeaderView, why: str) -> Verdict:
        """A file that nothing declares quantised: fine when it is not, misread when it is."""
        packed = quantised_weights(view)
        if not packed:
            return self.verdict(None, (), [Violation("note", "unquantised", f"{why}: loaded as unquantised")])
        message = f"{why}: codes are loaded as plain weights, their scales are left over"
        found = f"{len(packed)} packed weights, such as {packed[0]}"
        return self.verdict(None, (), [Violation("trap", "not-declared", message, None, found)])


@once_a_view
def quantised_weights(view: HeaderView) -> list[str]:
    """Layers whose weight is of a packed type."""
    if not _any_packed(view):
        return []
    layers = tensors_by_layer(view)
    return sorted(prefix for prefix, specs in layers.items() if is_packed(specs))


def _any_packed(view: HeaderView) -> bool:
    """Whether any layer may be `is_packed`: most files hold nothing of the kind."""
    return not (PACKED.isdisjoint(dtypes(view)) and _PACKED_NAMES.isdisjoint(suffixes(view)))


def is_packed(specs: Specs) -> bool:
    weight = specs.get("weight")
    return (weight is not None and weight.dtype in PACKED) or not _PACKED_NAMES.isdisjoint(specs)


def scaled_layers(view: HeaderView, *scales: str) -> dict[str, dict[str, Spec]]:
    """Layers that have one of these tensors, or a packed weight."""
    if not _any_packed(view) and suffixes(view).isdisjoint(scales):
        return {}
    layers = tensors_by_layer(view)
    return {
        prefix: specs
        for prefix, specs in sorted(layers.items())
        if is_packed(specs) or any(scale in specs for scale in scales)
    }


def kind_of(prefix: str) -> Kind:
    return "embedding" if is_embedding_name(prefix) else "linear"


def wants(
    specs: Specs, suffix: str, dtypes: Collection[str], shapes: Collection[tuple[int, ...]], layer: str
) -> Iterator[Violation]:
    """A refusal where the tensor is there and of another type or shape."""
    spec = specs.get(suffix)
    if spec is None:
        return
    kinds = " or ".join(dtypes)
    if dtypes and spec.dtype not in dtypes:
        yield Violation("refuse", f"{suffix}-dtype", f"{suffix} has another type", layer, spec.dtype, kinds)
    elif shapes and spec.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        message = f"{suffix} has another shape"
        yield Violation("refuse", f"{suffix}-shape", message, layer, str(list(spec.shape)), expected)


def missing(severity: Severity, suffix: str, message: str, layer: str) -> Violation:
    return Violation(severity, f"{suffix}-missing", message, layer, "none", suffix)
