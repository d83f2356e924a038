"""`--budget` and `--min-sqnr`: per layer the cheapest form of those that one runtime config serves side by side.

Every form that could be taken is planned as if all layers took it, so that what the formats and the contract refuse
drops out by the planner's own rules. A layer's error under a form is measured on a sample of its rows: noise over
signal, of the weight, or of the outputs where a calibration knows the inputs. What is minimised is the sum of those
errors times the layers' parameters, under the budget of bits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qconvert.convert.actions import Action, PartOut, Plan
from qconvert.convert.calibration import Calibration
from qconvert.convert.plan import PlanOptions, make_plan
from qconvert.convert.roles import RoleBook
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.layers import Inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.values import change_basis, decode_rows, input_factor
from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import np
from qconvert.runtime.contracts.base import Contract
from qconvert.runtime.targets import TARGETS, Target, get_target

if TYPE_CHECKING:
    from qconvert.kernels.arrays import F32

#: The form of a layer that stays as it is (or is decoded): no target's name.
KEEP = "keep"
#: Elements and runs of rows that a layer's error is measured on.
SAMPLE_ELEMENTS, RUNS = 1 << 19, 4


@dataclass(frozen=True)
class Choice:
    """A form that a group of layers can take: its bits, and its error (noise over signal, times parameters)."""

    form: str
    bits: int
    error: float


@dataclass(frozen=True)
class Group:
    """Layers that take one form together: mostly one, more where the runtime fuses them."""

    layers: tuple[str, ...]
    parameters: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Budget:
    """What was asked for: bits per weight, or a least SQNR for every layer."""

    bits_per_weight: float | None = None
    min_sqnr: float | None = None


@dataclass(frozen=True)
class Measured:
    """Groups, and the form chosen for each."""

    groups: tuple[Group, ...]
    chosen: tuple[Choice, ...]

    @property
    def forms(self) -> dict[str, str]:
        pairs = zip(self.groups, self.chosen, strict=True)
        return {layer: choice.form for group, choice in pairs for layer in group.layers}

    @property
    def bits_per_weight(self) -> float:
        return sum(c.bits for c in self.chosen) / max(1, sum(g.parameters for g in self.groups))

    def line(self) -> str:
        counts: dict[str, int] = {}
        for form in self.forms.values():
            counts[form] = counts.get(form, 0) + 1
        error = sum(c.error for c in self.chosen) / max(1, sum(g.parameters for g in self.groups))
        shown = f"{-10 * math.log10(error):.2f} dB" if error > 0 else "no error"
        mix = ", ".join(f"{count} {form}" for form, count in sorted(counts.items()))
        return f"budget: {self.bits_per_weight:.3f} bits a weight in layers that can be quantised ({mix}), {shown}"


def parse_budget(text: str | None, min_sqnr: float | None) -> Budget | None:
    """`--budget 4.8bpw` (or 4.8), `--min-sqnr 30`; None when neither was given. Raises UsageError."""
    if text is None:
        return None if min_sqnr is None else Budget(min_sqnr=min_sqnr)
    if min_sqnr is not None:
        raise UsageError("--budget and --min-sqnr are two ways to plan: give one")
    try:
        value = float(text.strip().lower().removesuffix("bpw"))
    except ValueError:
        value = math.nan
    if not 0 < value <= 64:
        raise UsageError(f"--budget {text!r}", expected="bits per weight, such as 4.8bpw")
    return Budget(bits_per_weight=value)


def choose(groups: Sequence[Group], budget: Budget) -> tuple[Choice, ...]:
    """A choice for each group. Raises UsageError when even the cheapest choices are beyond the budget.

    For a budget: from the cheapest choice of each group, the step along the lower convex hull of (bits, error) that
    saves most error a bit is taken while it fits. What is left of the budget is less than one step.
    """
    if budget.min_sqnr is not None:
        return tuple(_cheapest_above(group, budget.min_sqnr) for group in groups)
    assert budget.bits_per_weight is not None
    limit = budget.bits_per_weight * sum(group.parameters for group in groups)
    hulls = [_hull(group.choices) for group in groups]
    at = [0] * len(groups)
    used = sum(hull[0].bits for hull in hulls)
    if used > limit:
        least = used / max(1, sum(group.parameters for group in groups))
        raise UsageError(
            f"--budget {budget.bits_per_weight:g}bpw is less than the smallest forms take",
            expected=f"at least {math.ceil(least * 1000) / 1000:g}bpw for this target",
        )
    steps = [(-_gain(hull, 0), i) for i, hull in enumerate(hulls) if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, i = heapq.heappop(steps)
        more = hulls[i][at[i] + 1].bits - hulls[i][at[i]].bits
        if used + more > limit:
            continue
        used, at[i] = used + more, at[i] + 1
        if at[i] + 1 < len(hulls[i]):
            heapq.heappush(steps, (-_gain(hulls[i], at[i]), i))
    return tuple(hull[j] for hull, j in zip(hulls, at, strict=True))


def _cheapest_above(group: Group, decibels: float) -> Choice:
    fitting = [c for c in group.choices if c.error <= group.parameters * 10 ** (-decibels / 10)]
    # Where nothing is that close, the closest.
    return min(fitting, key=lambda c: c.bits) if fitting else min(group.choices, key=lambda c: c.error)


def _gain(hull: Sequence[Choice], i: int) -> float:
    return (hull[i].error - hull[i + 1].error) / (hull[i + 1].bits - hull[i].bits)


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull, cheapest first: more bits always for less error, each bit saving less than the last."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.bits, c.error)):
        if hull and choice.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain([hull[-1], choice], 0) >= _gain(hull[-2:], 0):
            hull.pop()
        hull.append(choice)
    return hull


# ---- measuring


def candidates(target: Target, contracts: tuple[Contract, ...]) -> list[Target]:
    """Targets whose linear form a file of this target may hold too, the target itself first."""
    out = [target]
    seen = {target.linear}
    for other in TARGETS:
        if other.runtime != target.runtime or other.linear in seen or not contracts:
            continue
        formats = {_format_name(target), _format_name(other)}
        if not contracts[0].format_set_violations(target.config, formats):
            out.append(other)
            seen.add(other.linear)
    return out


def _format_name(target: Target) -> str:
    from qconvert.formats.registry import codec

    names = codec(target.linear).marker_formats
    return names[0] if names else target.linear


def measure(
    checkpoint: Checkpoint,
    inventory: Inventory,
    target: Target,
    contracts: tuple[Contract, ...],
    options: PlanOptions,
    budget: Budget,
    backend: Backend,
    calibration: Calibration | None = None,
) -> Measured:
    """Plan every form, measure every layer under it, choose. Raises UsageError when there is nothing to choose."""
    base = make_plan(checkpoint, inventory, target, contracts, options)
    open_layers = {a.layer.prefix: a for a in base.actions if _is_open(a)}
    if not open_layers:
        raise UsageError("nothing to plan: no layer would be quantised", hint="--budget needs such layers")
    table: dict[str, list[Choice]] = {
        prefix: [Choice(KEEP, 8 * _kept_bytes(action), 0.0)] for prefix, action in open_layers.items()
    }
    for form in candidates(target, contracts):
        asked = replace(options, forms=dict.fromkeys(open_layers, form.name))
        plan = base if form is target else make_plan(checkpoint, inventory, target, contracts, asked)
        for action in plan.actions:
            prefix = action.layer.prefix
            if prefix in open_layers and _is_open(action):
                size = sum(out.part.spec.nbytes for out in action.outputs if isinstance(out, PartOut))
                error = _error(checkpoint, plan, action, backend, calibration)
                table[prefix].append(Choice(form.name, 8 * size, error * _parameters(action)))
    book = RoleBook(checkpoint, target, contracts)
    together = [tuple(n for n in group if n in open_layers) for group in book.fused_groups(open_layers)]
    alone = set(open_layers) - {name for group in together for name in group}
    units = [group for group in together if group] + [(name,) for name in open_layers if name in alone]
    groups = tuple(_group(names, open_layers, table) for names in units)
    measured = Measured(groups, choose(groups, budget))
    _check_config(measured, target, contracts)
    return measured


def _check_config(measured: Measured, target: Target, contracts: tuple[Contract, ...]) -> None:
    """Without any layer in the target's own format the runtime may take the file for another config's."""
    forms = sorted(set(measured.forms.values()) - {KEEP})
    formats = {_format_name(get_target(form)) for form in forms}
    if forms and contracts and contracts[0].format_set_violations(target.config, formats):
        raise UsageError(
            f"every layer that is quantised would be {', '.join(forms)}: no file of {target.name}",
            hint=f"--to {forms[0]} makes such a file",
        )


def _is_open(action: Action) -> bool:
    return action.kind in ("quantise", "requantise") and action.role == "linear" and not action.layer.experts


def _parameters(action: Action) -> int:
    return action.layer.n * action.layer.k


def _kept_bytes(action: Action) -> int:
    """A layer that is not quantised: as it lies in the source, or decoded to two bytes a weight."""
    return 2 * _parameters(action) if action.layer.quantised else action.layer.tensors["weight"].nbytes


def _group(names: tuple[str, ...], actions: Mapping[str, Action], table: Mapping[str, list[Choice]]) -> Group:
    """Forms that all of the layers can take."""
    parameters = sum(_parameters(actions[name]) for name in names)
    forms: dict[str, list[Choice]] = {}
    for name in names:
        for choice in table[name]:
            forms.setdefault(choice.form, []).append(choice)
    choices = tuple(
        Choice(form, sum(c.bits for c in own), sum(c.error for c in own))
        for form, own in forms.items()
        if len(own) == len(names)
    )
    return Group(names, parameters, choices)


def _error(
    checkpoint: Checkpoint, plan: Plan, action: Action, backend: Backend, calibration: Calibration | None
) -> float:
    """Noise over signal of sampled rows; of their outputs where the calibration names the layer."""
    layer, codec, options = action.layer, action.codec, action.options
    reader = LayerReader(checkpoint, layer)
    w = np.concatenate([decode_rows(layer, reader, a, b, backend) for a, b in _runs(action)])
    factor = input_factor(layer, reader, backend)
    if factor is not None and action.fold:
        w = w * factor
    bad = w.size - int(np.count_nonzero(np.isfinite(w)))
    if bad:
        raise QConvertError(
            "weight holds NaN or Inf: nothing can be measured",
            file=str(checkpoint.files[layer.first.file]),
            layer=layer.prefix,
            found=f"{bad} of {w.size} values",
            hint="--keep leaves a layer unquantised; get the file again if it should not hold such values",
        )
    x = change_basis(w, 0, codec.rotation(options), backend)
    statistic: Any = {"none": None, "amax": backend.amax(x), "sample": x}[codec.statistic(options)]
    common = codec.prepare(statistic, options, backend, plan.quality)
    y = codec.decode(codec.encode(x, common, options, backend, plan.quality), options, backend)
    d = w - change_basis(y, codec.rotation(options), 0, backend)
    name = None
    if calibration is not None:
        name = next((n for n in (layer.prefix, action.prefix) if n in calibration.layers), None)
    if calibration is None or name is None:
        signal, noise = backend.error(x, y)
    else:
        moments = calibration.moments(name, layer.k, backend)
        signal, noise = _energy(w, moments), _energy(d, moments)
    return noise / signal if signal > 0 else 0.0


def _energy(w: F32, moments: F32) -> float:
    """Mean square of the outputs w x, over inputs with these moments."""
    weighted = w * moments if moments.ndim == 1 else w @ moments
    return float((weighted.astype(np.float64) * w).sum())


def _runs(action: Action) -> list[tuple[int, int]]:
    """A few runs of rows, evenly through the layer, that begin where its codec may begin."""
    layer = action.layer
    step = math.lcm(16, layer.codec.row_step(layer.options))
    blocks = -(-layer.n // step)
    wanted = min(blocks, max(1, SAMPLE_ELEMENTS // max(layer.k, 1) // step))
    if wanted == blocks:
        return [(0, layer.n)]
    runs = min(RUNS, wanted)
    length = wanted // runs
    starts = [i * blocks // runs for i in range(runs)]
    return [(s * step, min((s + length) * step, layer.n)) for s in starts]
