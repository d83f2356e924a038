"""Which backend computes. Importing this module imports neither numba nor torch."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Literal, NamedTuple, cast

from qconvert.kernels.api import Backend
from qconvert.kernels.arrays import F32, Raw, np

#: Backend name -> module and class. A module is imported when its backend is first asked for.
_BACKENDS = {
    "cpu": ("qconvert.kernels.cpu.backend", "CpuBackend"),
    "reference": ("qconvert.kernels.reference_backend", "ReferenceBackend"),
    "triton": ("qconvert.kernels.triton.backend", "TritonBackend"),
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


#: What became of the backends that were asked for in this process: None when made, else why not.
_asked: dict[str, str | None] = {}


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
        _asked[name] = str(e)
        raise BackendUnavailable(name, str(e)) from e
    _asked[name] = None
    return backend


class BackendState(NamedTuple):
    """`ready`: made in this process, computes what it is asked to. `refused`: cannot run here, `reason` says why."""

    name: str
    state: Literal["ready", "refused", "not asked for"]
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.state}" + (f" ({self.reason})" if self.reason else "")


def backend_report(*, ask: bool = False) -> tuple[BackendState, ...]:
    """Which backends ran (or can run) in this process, and why the others did not.

    `ask`: try every one, which imports numba, torch and triton.
    """
    if ask:
        for name in _BACKENDS:
            try:
                get_backend(name)
            except BackendUnavailable:
                continue
    return tuple(_state(name) for name in _BACKENDS)


def _state(name: str) -> BackendState:
    if name not in _asked:
        return BackendState(name, "not asked for")
    reason = _asked[name]
    return BackendState(name, "ready") if reason is None else BackendState(name, "refused", reason)


class _Deferred:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, operation: str) -> object:
        return getattr(get_backend(self.name), operation)

    def to_f32(self, raw: Raw, dtype: str) -> F32:
        # Scales that are float32 already are no reason to load one.
        return raw.astype(np.float32) if dtype == "F32" else get_backend(self.name).to_f32(raw, dtype)


def deferred_backend(name: str = "cpu") -> Backend:
    """The backend called `name`, made at the first operation: loading numba takes longer than many a re-tag.

    Raises ValueError for an unknown name; an operation raises BackendUnavailable.
    """
    if name not in _BACKENDS:
        raise ValueError(f"unknown backend '{name}', choose from {', '.join(_BACKENDS)}")
    return cast(Backend, _Deferred(name))
