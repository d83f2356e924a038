"""Which operations run a layer's forward pass: Triton's kernels where they can, the definition in torch elsewhere.

Every choice is written down: `Dispatch.report` says what ran and why something else did not.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from qconvert.kernels.linear import Activation, LinearOps, TorchOps
from qconvert.kernels.select import BackendUnavailable
from qconvert.kernels.weights import Weight
from torch import Tensor

if TYPE_CHECKING:
    from qconvert.kernels.triton.ops import TritonOps


class Dispatch:
    """`linear.LinearOps` that takes the kernel where there is one.

    `forced`: "triton" raises BackendUnavailable instead of computing in torch; "torch" takes no kernel. None: kernels
    for tensors on a GPU, where they run.
    """

    def __init__(self, forced: str | None = None) -> None:
        if forced not in (None, "torch", "triton"):
            raise ValueError(f"unknown operations '{forced}', choose torch or triton")
        self.name = forced or "dispatch"
        self._forced, self._torch = forced, TorchOps()
        self._triton: TritonOps | None = None
        self._reason: str | None = "torch was asked for"
        if forced != "torch":
            self._triton, self._reason = _triton_ops(interpreted=forced == "triton")
        if forced == "triton" and self._triton is None:
            raise BackendUnavailable("triton", str(self._reason))
        self._ran: Counter[tuple[str, str, str | None]] = Counter()

    def report(self) -> list[str]:
        """What ran, how often, and why Triton did not: one line each."""
        lines = []
        for (ops, what, reason), count in self._ran.items():
            lines.append(f"{ops}: {count} x {what}" + (f" (triton: {reason})" if reason else ""))
        return lines

    def _choose(self, what: str, refusal: str | None) -> LinearOps:
        """The operations for one call. Writes the choice down."""
        reason = self._reason if self._triton is None else refusal
        if reason is not None and self._forced == "triton":
            raise BackendUnavailable("triton", f"{what}: {reason}")
        chosen: LinearOps = self._torch if reason is not None or self._triton is None else self._triton
        self._ran[(chosen.name, what, reason)] += 1
        return chosen

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        activation: Activation,
        *,
        bias: Tensor | None,
        rotation: int,
        input_scale: Tensor | None,
    ) -> Tensor:
        """As `linear.linear`. BackendUnavailable: Triton is forced and has no kernel for this."""
        refusal = None if self._triton is None else self._triton.refusal(weight, activation, rotation, x)
        ops = self._choose(f"linear {type(weight).__name__}, activations {activation}", refusal)
        return ops.linear(x, weight, activation, bias=bias, rotation=rotation, input_scale=input_scale)

    def lookup(self, index: Tensor, weight: Weight, *, rotation: int, dtype: torch.dtype) -> Tensor:
        """As `linear.lookup`."""
        refusal = None if self._triton is None else self._triton.lookup_refusal(weight, rotation, index)
        ops = self._choose(f"lookup {type(weight).__name__}", refusal)
        return ops.lookup(index, weight, rotation=rotation, dtype=dtype)


def _triton_ops(*, interpreted: bool) -> tuple[TritonOps | None, str | None]:
    """The kernels, or why there are none. `interpreted`: whether interpreted ones will do."""
    try:
        from qconvert.kernels.triton import chips
        from qconvert.kernels.triton.ops import TritonOps

        if chips.interpreted() and not interpreted:
            return None, "TRITON_INTERPRET is set: kernels are interpreted, and taken only when forced"
        return TritonOps(), None
    except ImportError as error:
        return None, str(error)
