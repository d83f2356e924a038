"""`--calibration FILE`: what a model's layers are given, and encoding with it. The file: docs/calibration.md."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from qconvert.convert.actions import LOSSLESS, Action, ConstOut, Plan
from qconvert.formats.base import Codes
from qconvert.formats.calibrated import Moments, calibrates, encode_calibrated
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, np
from qconvert.kernels.gptq import MomentsError, check_diagonal

MOMENT, INPUTS, AMAX = ".second_moment", ".inputs", ".input_amax"
_FLOATS = ("F32", "F16", "BF16", "F64")
_HASH_BYTES = 1 << 24


class Calibration:
    """A calibration file: per layer E[x^2] [K] or E[x x^T] [K, K], or sampled inputs [S, K], and largest magnitudes.

    `layers`: layer -> its tensor of moments or inputs. `maxima`: layer -> its input_amax. Read layer by layer. Raises
    QConvertError for a tensor whose type or rank cannot be read, UsageError where there is none to read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = Checkpoint.open(path)
        self.layers: dict[str, str] = {}
        self.maxima: dict[str, str] = {}
        for name, tensor in self.file.tensors.items():
            if name.endswith(AMAX):
                if tensor.dtype != "F32" or tensor.shape not in ((), (1,)):
                    raise QConvertError(
                        "input_amax cannot be read",
                        file=str(path),
                        layer=name,
                        found=f"{tensor.dtype} {list(tensor.shape)}",
                        expected="F32 []",
                    )
                self.maxima[name.removesuffix(AMAX)] = name
            for suffix in (INPUTS, MOMENT):
                if not name.endswith(suffix):
                    continue
                if tensor.dtype not in _FLOATS or len(tensor.shape) not in (1, 2):
                    raise QConvertError(
                        "calibration has to be floating, 1-D or 2-D",
                        file=str(path),
                        layer=name,
                        found=f"{tensor.dtype} {list(tensor.shape)}",
                    )
                # Moments win over inputs where a layer has both.
                if suffix == MOMENT or name.removesuffix(suffix) not in self.layers:
                    self.layers[name.removesuffix(suffix)] = name
        if not self.layers and not self.maxima:
            raise UsageError(
                f"holds no *{MOMENT}, *{INPUTS} or *{AMAX}", file=str(path), hint="see docs/calibration.md"
            )

    def close(self) -> None:
        self.file.close()

    def digest(self) -> str:
        """sha256 of the file's bytes: equal sources and equal calibrations give equal outputs."""
        state = hashlib.sha256()
        for index, header in enumerate(self.file.headers):
            for start in range(0, header.file_size, _HASH_BYTES):
                size = min(_HASH_BYTES, header.file_size - start)
                state.update(self.file.pread(index, start, size).data)
        return state.hexdigest()

    def check_shape(self, layer: str, k: int) -> None:
        """Raises QConvertError when a layer's tensor does not fit K in features."""
        name = self.layers[layer]
        shape, inputs = self.file.tensors[name].shape, name.endswith(INPUTS)
        fits = shape[-1] == k and (inputs or len(shape) == 1 or shape[0] == k)
        if not fits or (inputs and (len(shape) != 2 or not shape[0])):
            raise QConvertError(
                "calibration does not fit the layer",
                file=str(self.path),
                layer=name,
                found=str(list(shape)),
                expected=f"[S, {k}]" if inputs else f"[{k}] or [{k}, {k}]",
            )

    def full(self, layer: str) -> bool:
        """Whether more than the diagonal of a layer's moments is known."""
        return len(self.file.tensors[self.layers[layer]].shape) == 2

    def moments(self, layer: str, k: int, backend: Backend) -> F32:
        """[K] or [K, K] in float32. Raises QConvertError when the tensor does not fit, is not finite, or holds no
        mean squares: negative ones, or none above zero.
        """
        self.check_shape(layer, k)
        name = self.layers[layer]
        values = backend.to_f32(self.file.read(name), self.file.tensors[name].dtype)
        self._finite(name, values)
        if name.endswith(INPUTS):
            with np.errstate(over="ignore", invalid="ignore"):
                values = (values.T @ values) / np.float32(len(values))
            self._finite(name, values)
        try:
            check_diagonal(values if values.ndim == 1 else np.diag(values))
        except MomentsError as error:
            raise self.unusable(name, error) from None
        return values

    def _finite(self, name: str, values: F32) -> None:
        bad = values.size - int(np.count_nonzero(np.isfinite(values)))
        if bad:
            raise QConvertError(
                "calibration holds NaN or Inf, or overflows float32",
                file=str(self.path),
                layer=name,
                found=f"{bad} of {values.size} values",
                expected="finite numbers",
            )

    def unusable(self, name: str, error: MomentsError) -> QConvertError:
        """What a tensor's moments lack, as a refusal of the file."""
        return QConvertError(
            f"calibration cannot be used: {error.problem}",
            file=str(self.path),
            layer=name,
            found=error.found,
            expected=error.expected,
        )

    def input_scale(self, layer: str, span: float) -> np.float32 | None:
        """input_amax over the largest magnitude that activations are quantised to; None where none is recorded.

        Raises QConvertError unless that is a positive, finite, normal float32: a scale that a runtime can divide by.
        """
        name = self.maxima.get(layer)
        if name is None:
            return None
        amax = float(self.file.read(name).reshape(-1)[0])
        least = float(np.finfo(np.float32).tiny) * span
        # Not `amax < least`: NaN has to fail too.
        if not least <= amax < np.inf:
            raise QConvertError(
                "input_amax gives no input_scale",
                file=str(self.path),
                layer=name,
                found=f"{amax:.4g}",
                expected=f"a finite number from {least:.3g}",
            )
        return np.float32(amax / span)


@dataclass
class _Kept:
    lock: threading.Lock = field(default_factory=threading.Lock)
    moments: Moments | None = None


class Calibrator:
    """Encodes layers with their calibration. Safe to use from several threads; a layer's moments are made once."""

    def __init__(self, calibration: Calibration, plan: Plan, backend: Backend) -> None:
        self.calibration, self.backend = calibration, backend
        self.names = calibrated_layers(calibration, plan)
        self._kept = {prefix: _Kept() for prefix in self.names}

    def knows(self, action: Action) -> bool:
        return action.layer.prefix in self.names

    def encode(
        self, action: Action, x: F32, common: Codes, quality: Quality, input_factor: F32 | None
    ) -> Codes:
        """Codes of rows x. `input_factor`: the pre_quant_scale that stays beside the weight, if it does."""
        moments = self._moments(action, input_factor)
        return encode_calibrated(action.codec, x, common, action.options, self.backend, quality, moments)

    def release(self, action: Action) -> None:
        """Forget a layer's moments: it is done."""
        kept = self._kept.get(action.layer.prefix)
        if kept is not None:
            with kept.lock:
                kept.moments = None

    def _moments(self, action: Action, factor: F32 | None) -> Moments:
        layer = action.layer
        kept = self._kept[layer.prefix]
        with kept.lock:
            if kept.moments is None:
                name = self.names[layer.prefix]
                raw = self.calibration.moments(name, layer.k, self.backend)
                if factor is not None:
                    raw = raw * (factor * factor if raw.ndim == 1 else np.outer(factor, factor))
                try:
                    rotation = action.codec.rotation(action.options)
                    kept.moments = Moments.of(raw, rotation, self.backend)
                except MomentsError as error:
                    raise self.calibration.unusable(self.calibration.layers[name], error) from None
            return kept.moments


def calibrated_layers(calibration: Calibration, plan: Plan) -> dict[str, str]:
    """Source layer -> its name in the calibration, for every layer that is encoded with it.

    A layer is found under its name in the source or in the output. Raises UsageError when no layer is, be it for its
    moments or its largest input.
    """
    found: dict[str, str] = {}
    any_named = False
    for action in plan.actions:
        layer = action.layer
        any_named = any_named or _maximum(calibration, action) is not None
        name = next((n for n in (layer.prefix, action.prefix) if n in calibration.layers), None)
        if name is None:
            continue
        any_named = True
        encoded = action.kind in ("quantise", "requantise") and not layer.experts
        if encoded and calibrates(action.codec, calibration.full(name)):
            found[layer.prefix] = name
    if not any_named:
        raise UsageError(
            "--calibration names none of the source's layers",
            file=str(calibration.path),
            found=next(iter(calibration.layers | calibration.maxima)),
            hint="it is recorded with the model's own layer names",
        )
    return found


@contextmanager
def opened_calibration(path: Path | None) -> Iterator[Calibration | None]:
    """The calibration for the length of a block; None when there is no file."""
    if path is None:
        yield None
        return
    calibration = Calibration(path)
    try:
        yield calibration
    finally:
        calibration.close()


def note_calibration(plan: Plan, path: Path) -> Plan:
    """The plan with what a calibration changes: its digest (in the metadata), and how many layers (a note).

    Raises when the file fits none of the layers, or one of them only by name.
    """
    with closing(Calibration(path)) as calibration:
        names = calibrated_layers(calibration, plan)
        for action in plan.actions:
            if action.layer.prefix in names:
                calibration.check_shape(names[action.layer.prefix], action.layer.k)
        said = []
        if calibration.layers:
            said.append(
                f"calibration: {len(names)} layers are encoded for the least output error on recorded inputs"
            )
        elif plan.target.static_range is None:
            said.append(f"calibration: only input_amax is recorded, and {plan.target.name} has no use for it")
        metadata = plan.metadata | {"qconvert_calibration": calibration.digest()}
        plan = replace(plan, notes=(*plan.notes, *said), metadata=metadata)
        return _with_input_scales(plan, calibration)


def _maximum(calibration: Calibration, action: Action) -> str | None:
    """The name under which the largest input of a layer is recorded."""
    return next((n for n in (action.layer.prefix, action.prefix) if n in calibration.maxima), None)


def _with_input_scales(plan: Plan, calibration: Calibration) -> Plan:
    """Static activation scales from recorded maxima, where the runtime would take 1.0 for a missing one.

    A scale belongs to the inputs, not to the codes: layers whose codes are taken over get theirs too. One that brings
    an input_scale of its own keeps it, and is named.
    """
    span = plan.target.static_range
    if span is None:
        return plan
    actions, count, taken_over, own = [], 0, 0, []
    for action in plan.actions:
        name, output = _maximum(calibration, action), f"{action.prefix}.input_scale"
        if name is not None and _takes_scale(plan, action):
            scale = calibration.input_scale(name, span)
            if any(out.name == output for out in action.outputs):
                own.append(action.prefix)
            elif scale is not None:
                spec = Spec("F32", tuple(action.options.get("one", ())))
                out = ConstOut(output, spec, scale.tobytes())
                action, count = _given(action, out), count + 1
                taken_over += action.kind in LOSSLESS
        actions.append(action)
    note = f"calibration: {count} layers get an input_scale from the largest input recorded"
    if taken_over:
        note += f", {taken_over} of them beside codes taken over from the source"
    notes = [note]
    if own:
        names = ", ".join(own)
        notes.append(f"calibration: {len(own)} layers keep the input_scale that the source has: {names}")
    return replace(plan, actions=tuple(actions), notes=(*plan.notes, *notes))


def _takes_scale(plan: Plan, action: Action) -> bool:
    """Whether a layer is, in the output, a linear one in the target's own format."""
    return action.role == "linear" and action.kind != "keep" and action.codec.name == plan.target.linear


def _given(action: Action, scale: ConstOut) -> Action:
    """The action with an input_scale. A copy that gains a tensor is no copy of the source any more."""
    outputs = (*action.outputs, scale)
    if action.kind != "copy":
        return replace(action, outputs=outputs)
    reason = f"{action.reason}; input_scale from the calibration"
    return replace(action, kind="retag", reason=reason, outputs=outputs)
