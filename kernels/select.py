"""Which backend computes. Importing this module imports neither numba nor torch."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import cast

from qconvert.kernels.api import Backend

#: Backend name -> module and class. A module is imported when its backend is first asked for.
_BACKENDS = {
    "cpu": ("qconvert.kernels.cpu.backend", "CpuBackend"),
    "reference": ("qconvert.kernels.reference_backend", "ReferenceBackend"),
}


class BackendUnavailable(RuntimeError):
    """The backend exists but cannot run here. `backend` names it, `reason` says why."""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"backend '{backend}' cannot run here: {reason}")
        self.backend = backend
        self.reason = reason


def backend_names() -> tuple[str, ...]:
    """Every name that `get_backend` knows, usable here or not."""
    return tuple(_BACKENDS)


@cache
def get_backend(name: str = "cpu") -> Backend:
    """The backend called `name`, made once. Never replaced by another one.

    Raises ValueError for an unknown name, BackendUnavailable when it cannot run here.
    """
    if name not in _BACKENDS:
        raise ValueError(f"unknown backend '{name}', choose from {', '.join(_BACKENDS)}")
    module, cls = _BACKENDS[name]
    try:
        backend: Backend = getattr(import_module(module), cls)()
    except ImportError as e:
        raise BackendUnavailable(name, str(e)) from e
    return backend


class _Deferred:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, operation: str) -> object:
        return getattr(get_backend(self.name), operation)


def deferred_backend(name: str = "cpu") -> Backend:
    """The backend called `name`, made at the first operation: loading numba takes longer than many a re-tag.

    Raises ValueError for an unknown name; an operation raises BackendUnavailable.
    """
    if name not in _BACKENDS:
        raise ValueError(f"unknown backend '{name}', choose from {', '.join(_BACKENDS)}")
    return cast(Backend, _Deferred(name))
