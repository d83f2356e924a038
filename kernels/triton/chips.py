"""Where kernels can run: the device, its compute capability, and what a chip lacks."""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime.interpreter import InterpretedFunction

#: Least compute capability (90 for sm_90) of what some kernels need; all else runs from OLDEST on.
OLDEST = 80
NATIVE_FP8 = 89
NATIVE_FP4 = 100


@cache
def interpreted() -> bool:
    """Whether this process interprets kernels (TRITON_INTERPRET was set when they were defined)."""
    from qconvert.kernels.triton import elementwise

    return isinstance(elementwise.cast, InterpretedFunction)


@cache
def capability() -> int:
    """Compute capability of the current GPU, 0 without one."""
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def refusal() -> str | None:
    """Why no kernel can run here; None when they can."""
    if interpreted():
        return None
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (this torch was built without CUDA)"
        return f"no GPU{built}; TRITON_INTERPRET=1 would interpret the kernels on the CPU, slowly"
    if torch.version.hip is not None:
        return "only NVIDIA chips were tried"
    if capability() < OLDEST:
        return f"the GPU is sm_{capability()}, the kernels need sm_{OLDEST}"
    return None


def device() -> torch.device:
    """The device that kernels run on. Raises ImportError, saying why, where there is none."""
    reason = refusal()
    if reason is not None:
        raise ImportError(reason)
    return torch.device("cpu" if interpreted() else "cuda")
