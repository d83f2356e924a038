"""Where kernels can run: the device, its compute capability, and what a chip lacks.

A chip is named by its compute capability as one number: 90 is sm_90. Chips that the kernels are compiled for ahead of
time are in `CHIPS`, what some of them lack in `NEEDS`: the launchers ask `can`, documentation and tests read the
table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from triton.runtime.interpreter import InterpretedFunction

#: Ampere (A100), Ada, Hopper, Blackwell in servers and in workstations.
CHIPS = (80, 89, 90, 100, 120)
#: Largest shared memory of one block, bytes (CUDA C++ Programming Guide, technical specifications).
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@dataclass(frozen=True)
class Need:
    """Something that kernels use where the chip has it. `least`: the first chip that has it.

    `refused`: what happens if it is asked for below that. `instead`: what runs there; None when nothing does.
    `instruction`: a regular expression that finds it in PTX.
    """

    name: str
    least: int
    what: str
    refused: str
    instead: str | None
    instruction: str


#: What is refused below which chip. Everything else runs from `OLDEST` on.
NEEDS = (
    Need(
        "int8 dot",
        80,
        "int8 times int8 into int32 in the matrix units",
        "the compiler refuses it",
        None,
        r"mma\S*\.s32\.s8\.s8|mma\S*kind::i8",
    ),
    Need(
        "bf16 dot",
        80,
        "bf16 times bf16 into float32 in the matrix units",
        "it compiles to float32 arithmetic without matrix units",
        None,
        r"mma\S*\.f32\.bf16\.bf16|mma\S*kind::f16",
    ),
    Need(
        "fp8 dot",
        89,
        "e4m3 times e4m3 (triton's fp8e4nv) into float32 in the matrix units",
        "the compiler refuses the type",
        "codes become fp16 by integer arithmetic, exactly, and are multiplied as fp16",
        r"mma\S*\.f32\.e4m3\.e4m3|mma\S*kind::f8f6f4",
    ),
    Need(
        "block-scaled dot",
        100,
        "nvfp4 and mxfp8 as stored, scales included, in the matrix units (`tl.dot_scaled`)",
        "the compiler refuses the type (below sm_89) or emulates it in bf16 (sm_89, sm_90)",
        "both sides are decoded in registers, exactly: nvfp4 to fp16, mxfp8 to bf16",
        r"mma\S*block_scale",
    ),
)
#: The oldest chip that any kernel runs on.
OLDEST = min(CHIPS)

_pretended: int | None = None
_forced: frozenset[str] = frozenset()


@contextmanager
def pretended(chip: int, forced: Iterable[str] = ()) -> Iterator[None]:
    """Inside, launchers choose as they would on `chip`. For compiling ahead of time; nothing can be launched.

    `forced`: entries of `NEEDS` that are used whatever the chip has.
    """
    global _pretended, _forced
    before = _pretended, _forced
    _pretended, _forced = chip, frozenset(forced)
    try:
        yield
    finally:
        _pretended, _forced = before


@cache
def interpreted() -> bool:
    """Whether this process interprets kernels (TRITON_INTERPRET was set when they were defined)."""
    from qconvert.kernels.triton import elementwise

    return isinstance(elementwise.cast, InterpretedFunction)


@cache
def _capability_here() -> int:
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def capability() -> int:
    """Compute capability of the current GPU (or of the pretended one), 0 without one."""
    return _capability_here() if _pretended is None else _pretended


def can(name: str) -> bool:
    """Whether the chip at hand has what the entry `name` of `NEEDS` says; never under the interpreter."""
    need = next(need for need in NEEDS if need.name == name)
    return name in _forced or (capability() >= need.least and not interpreted())


def refusal() -> str | None:
    """Why no kernel can run here; None when they can."""
    if interpreted():
        return None
    if _pretended is None and not torch.cuda.is_available():
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
    return torch.device("cpu" if interpreted() or _pretended is not None else "cuda")
