"""How kernels are compiled: on first call, for one signature, cached on disk.

Inputs are declared read-only, so that arrays over read-only buffers and writable ones share one specialisation.
Nothing is ever compiled with `parallel` (threads are the caller's) or `fastmath` (bits must not depend on the CPU).

Writing kernels that LLVM vectorises: index slices and rows with loop counters that start at 0 (an index that may be
negative costs a comparison and the vector code), keep inner loops free of branches, scratch in local arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import numba
from numba import types


def _in(dtype: Any, ndim: int) -> Any:
    return types.Array(dtype, ndim, "C", readonly=True)


def _out(dtype: Any, ndim: int) -> Any:
    return types.Array(dtype, ndim, "C")


F32_1, F32_2 = _in(types.float32, 1), _in(types.float32, 2)
U8_1, U8_2, I8_2 = _in(types.uint8, 1), _in(types.uint8, 2), _in(types.int8, 2)
U16_1, I32_1, F64_1 = _in(types.uint16, 1), _in(types.int32, 1), _in(types.float64, 1)
OUT_F32_1, OUT_F32_2 = _out(types.float32, 1), _out(types.float32, 2)
OUT_U8_1, OUT_U8_2, OUT_I8_2 = _out(types.uint8, 1), _out(types.uint8, 2), _out(types.int8, 2)
OUT_U16_1, OUT_F64_1 = _out(types.uint16, 1), _out(types.float64, 1)
F32, I64, I32 = types.float32, types.int64, types.int32


#: Division follows IEEE instead of raising, which would also keep loops from being vectorised.
_njit: Callable[..., Any] = partial(numba.njit, nogil=True, error_model="numpy")


def helper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kernels call; LLVM inlines it."""
    compiled: Callable[..., Any] = _njit(fn)
    return compiled


def _stamp() -> str:
    """Digest of everything that kernels are compiled from."""
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), here.parent / "search.py"]
    return hashlib.sha256(b"\0".join(p.read_bytes() for p in sources)).hexdigest()


_STAMP = _stamp()


class Kernel:
    """A function compiled for `signature` when first called."""

    def __init__(self, fn: FunctionType, signature: tuple[Any, ...]) -> None:
        self._fn = fn
        self._signature = types.void(*signature)
        self._compiled: Callable[..., None] | None = None

    def __call__(self, *args: Any) -> None:
        self.compiled()(*args)

    def compiled(self) -> Callable[..., None]:
        """The machine code, made or read from the cache now if it was not."""
        if self._compiled is None:
            self._compiled = self._compile()
        return self._compiled

    def _compile(self) -> Callable[..., None]:
        # numba's cache notices a change of the kernel's own file only, not of helpers and constants from others;
        # what a function closes over is part of the key, so the digest of all sources rides along unused.
        code = self._fn.__code__
        keyed = FunctionType(
            code.replace(co_freevars=("_stamp",)),
            self._fn.__globals__,
            self._fn.__name__,
            None,
            (CellType(_STAMP),),
        )
        keyed.__qualname__, keyed.__module__ = self._fn.__qualname__, self._fn.__module__
        try:
            compiled: Callable[..., None] = _njit(self._signature, cache=True)(keyed)
        except RuntimeError:  # No folder can hold a cache: neither the package's nor the user's is writable.
            compiled = _njit(self._signature)(keyed)
        return compiled


def kernel(*signature: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Decorator: compile the function for these argument types when it is first called."""

    def wrap(fn: Callable[..., None]) -> Kernel:
        assert isinstance(fn, FunctionType) and not fn.__code__.co_freevars
        return Kernel(fn, signature)

    return wrap
