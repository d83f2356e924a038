"""Which backend computes a conversion: what --backend and --device say, and what can run here."""

from __future__ import annotations

import os

import click
from qconvert.formats.checkpoint import dumps
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.kernels.api import Backend
from qconvert.kernels.select import BackendUnavailable, backend_report, get_backend

import qconvert

#: Packages that a backend needs.
PACKAGES = ("numpy", "numba", "torch", "triton")


def chosen_backend(backend: str | None, device: str | None) -> str:
    """The name of the backend that the two options ask for; what was asked for by name has to run here.

    Without either: the CPU's. Raises UsageError when they contradict each other, QConvertError when it cannot run.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cuda":
        if backend not in (None, "triton"):
            raise UsageError(
                f"--device cuda: the {backend} backend computes on the CPU",
                hint="--backend triton, or no --backend",
            )
        if interpreted:
            raise UsageError(
                "--device cuda: TRITON_INTERPRET is set, kernels would be interpreted on the CPU"
            )
        backend = "triton"
    elif device == "cpu" and backend == "triton" and not interpreted:
        raise UsageError(
            "--device cpu: the triton backend computes on a GPU",
            hint="--device cuda, or TRITON_INTERPRET=1 to interpret its kernels, slowly",
        )
    if backend is None:
        return "cpu"
    required_backend(backend, "--device cuda" if device == "cuda" else f"--backend {backend}")
    return backend


def required_backend(name: str, asked: str) -> Backend:
    """The backend called `name`; QConvertError, naming the option `asked`, where it cannot run."""
    try:
        return get_backend(name)
    except BackendUnavailable as error:
        raise QConvertError(
            f"{asked} cannot run here: {error.reason}",
            hint="`qconvert backends` shows what can; without the option the CPU converts, to the same bytes",
        ) from None


def versions() -> dict[str, str | None]:
    """Versions of qconvert and of what backends need, None for what is not installed. Imports none of it."""
    # Not needed by conversions, and as slow to import as a fifth of numpy.
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"qconvert": qconvert.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def print_version() -> None:
    """`qconvert --version`."""
    click.echo(f"qconvert, version {qconvert.__version__}")
    known = versions()
    click.echo(", ".join(f"{name} {known[name] or 'not installed'}" for name in PACKAGES))
    names = ", ".join(state.name for state in backend_report())
    click.echo(f"backends {names}; `qconvert backends` tries them")


def run_backends(as_json: bool) -> None:
    """`qconvert backends`: which backends can run here, and why others cannot."""
    states = backend_report(ask=True)
    if as_json:
        rows = [{"name": s.name, "state": s.state, "reason": s.reason} for s in states]
        click.echo(dumps({"versions": versions(), "backends": rows}))
        return
    for state in states:
        click.echo(f"{state.name:10} {state.state}" + (f": {state.reason}" if state.reason else ""))
