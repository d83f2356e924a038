"""Compiling kernels for chips that are not here: `samples`, launched on a driver that stops before the launch.

The launchers themselves run, so what is compiled is what a GPU would be given: arguments, tiles and options included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from qconvert.kernels.triton.chips import interpreted, pretended
from qconvert.kernels.triton.samples import Sample
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Compiled:
    """One kernel of one sample. `kernel` is triton's (`asm`, `metadata`), `tile` what the tuner would try."""

    sample: str
    name: str
    tile: str
    kernel: Any

    @property
    def shared(self) -> int:
        """Shared memory of a block, bytes."""
        found: int = self.kernel.metadata.shared
        return found


class _Absent:
    """A driver for a chip that is not here: enough for compiling."""

    def __init__(self, chip: int) -> None:
        self._chip = chip

    def get_current_device(self) -> int:
        # Compiled kernels are kept by device: chips must not be mistaken for each other.
        return self._chip

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._chip, 32)


@contextmanager
def _compiling(
    chip: int, tiles: int | None, forced: Iterable[str], found: list[tuple[str, str, Any]]
) -> Iterator[None]:
    """Inside, launches compile and stop; tuned kernels are compiled with (the first `tiles` of) their tiles."""
    launch, tune = JITFunction.run, Autotuner.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        keys = ("BM", "BN", "BK", "FLIP") if "BM" in kwargs else ()
        tile = ", ".join(f"{key} {kwargs[key]}" for key in keys if key in kwargs)
        found.append((self.__name__, tile, kernel))
        return kernel

    def every_tile(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs)[:tiles]:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    driver = triton.runtime.driver
    before = driver._active
    JITFunction.run, Autotuner.run = compile_only, every_tile
    driver.set_active(_Absent(chip))
    try:
        with pretended(chip, forced):
            yield
    finally:
        JITFunction.run, Autotuner.run = launch, tune
        driver._active = before


def compile_samples(
    chosen: Iterable[Sample], chip: int, tiles: int | None = None, forced: Iterable[str] = ()
) -> Iterator[Compiled]:
    """Compile for a chip, ptxas included. `tiles`: how many of the tuner's tiles, None for all.

    `forced`: entries of `chips.NEEDS` to use although the chip lacks them.

    Raises RuntimeError in a process that interprets kernels, and whatever triton raises for a kernel that the chip
    refuses, with the sample's name in front.
    """
    if interpreted():
        raise RuntimeError("TRITON_INTERPRET is set: this process cannot compile kernels")
    for sample in chosen:
        found: list[tuple[str, str, Any]] = []
        with _compiling(chip, tiles, forced, found):
            try:
                sample.run()
            except Exception as error:
                error.add_note(f"while compiling {sample.name} for sm_{chip}")
                raise
        for name, tile, kernel in found:
            yield Compiled(sample.name, name, tile, kernel)
