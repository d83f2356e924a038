"""Recording what a torch model's linear layers are given, into the file that `--calibration` reads.

The file is described in docs/calibration.md: per layer the second moments of its inputs, E[x x^T] [K, K] or E[x^2]
[K] in float32, and their largest magnitude. torch is imported when a recorder is made, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from qconvert.formats.header import layout
from qconvert.formats.tensors import Spec
from qconvert.kernels.arrays import F32, np

#: Layers with more in features than this get the diagonal only: [K, K] would take a gigabyte and more.
FULL_UP_TO = 16384


class Recorder:
    """Hooks on every linear layer of a model, for the length of a `with` block; `save` afterwards.

    `only` chooses layers by name. `full_up_to`: the largest K whose moments are kept as [K, K]. Moments are summed
    where the inputs are (GPU or CPU), in float32 over rows and float64 over calls on the CPU.
    """

    def __init__(
        self, model: Any, only: Callable[[str], bool] = lambda name: True, full_up_to: int = FULL_UP_TO
    ) -> None:
        import torch

        self._torch = torch
        self._full_up_to = full_up_to
        self.moments: dict[str, Any] = {}
        self.rows: dict[str, int] = {}
        self.amax: dict[str, float] = {}
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and only(name)
        }
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        for name, module in self._layers.items():
            self._handles.append(module.register_forward_pre_hook(self._hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def hook(module: Any, inputs: tuple[Any, ...]) -> None:
            with self._torch.no_grad():
                self._add(name, inputs[0].detach().reshape(-1, inputs[0].shape[-1]))

        return hook

    def _add(self, name: str, x: Any) -> None:
        torch = self._torch
        if not x.shape[0]:
            return
        x = x.to(torch.float32)
        full = x.shape[1] <= self._full_up_to
        total = (x.T @ x if full else (x * x).sum(0)).to(
            torch.float64 if x.device.type == "cpu" else torch.float32
        )
        self.moments[name] = self.moments[name] + total if name in self.moments else total
        self.rows[name] = self.rows.get(name, 0) + x.shape[0]
        self.amax[name] = max(self.amax.get(name, 0.0), float(x.abs().max()))

    def save(self, path: Path) -> None:
        """Write the file. Raises ValueError when no layer was run."""
        if not self.moments:
            raise ValueError("no linear layer of the model was run while recording")
        tensors: dict[str, F32] = {}
        for name, total in self.moments.items():
            mean = (total / self.rows[name]).to(self._torch.float32)
            tensors[f"{name}.second_moment"] = mean.cpu().numpy()
            tensors[f"{name}.input_amax"] = np.asarray(self.amax[name], np.float32)
        write_calibration(path, tensors)


def write_calibration(path: Path, tensors: dict[str, F32]) -> None:
    """A safetensors file of float32 tensors, named as docs/calibration.md says."""
    laid = layout(
        [(name, Spec("F32", array.shape)) for name, array in tensors.items()],
        {"format": "qconvert calibration 1"},
    )
    with path.open("wb") as out:
        out.write(laid.prefix)
        for name, array in tensors.items():
            out.seek(laid.offsets[name])
            out.write(np.ascontiguousarray(array, np.float32).tobytes())


def record(model: Any, calls: Iterable[Any], path: Path, **options: Any) -> None:
    """Run `model` on every item of `calls` (a tensor, a tuple of arguments, or a dict of keywords) and save."""
    import torch

    with Recorder(model, **options) as recorder, torch.no_grad():
        for call in calls:
            if isinstance(call, dict):
                model(**call)
            elif isinstance(call, tuple):
                model(*call)
            else:
                model(call)
    recorder.save(path)
