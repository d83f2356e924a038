"""The CPU backend."""

from __future__ import annotations

from qconvert.kernels.reference_backend import ReferenceBackend


class CpuBackend(ReferenceBackend):
    """Implements `api.Backend`."""

    name = "cpu"
