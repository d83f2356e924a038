"""Would it be served, and what comes out: contracts, families, loadable layers, verification.

Exporters and loaders find what they need here, loaded when first used: `validate_markers`, `check_names` and the
predicates on markers (see `markers_api`), `get_contract` and `contract_names`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qconvert.runtime.contracts.registry import contract_names, get_contract
    from qconvert.runtime.markers_api import (
        check_names,
        is_asym_w4a8_marker,
        is_comfy_fp8_marker,
        is_comfy_mxfp8_marker,
        is_comfy_nvfp4_marker,
        is_comfy_rowwise_int8_marker,
        is_comfy_scalar_int8_marker,
        is_convrot_int8_marker,
        is_convrot_w4a4_marker,
        validate_markers,
    )

__all__ = [
    "check_names",
    "contract_names",
    "get_contract",
    "is_asym_w4a8_marker",
    "is_comfy_fp8_marker",
    "is_comfy_mxfp8_marker",
    "is_comfy_nvfp4_marker",
    "is_comfy_rowwise_int8_marker",
    "is_comfy_scalar_int8_marker",
    "is_convrot_int8_marker",
    "is_convrot_w4a4_marker",
    "validate_markers",
]

_IN_REGISTRY = frozenset({"contract_names", "get_contract"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "contracts.registry" if name in _IN_REGISTRY else "markers_api"
    return getattr(import_module(f"{__name__}.{module}"), name)
