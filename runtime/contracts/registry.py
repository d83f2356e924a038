"""Every contract by name."""

from __future__ import annotations

from qconvert.formats.errors import UsageError
from qconvert.runtime.contracts.base import Contract
from qconvert.runtime.contracts.comfyui import COMFYUI
from qconvert.runtime.contracts.sglang import SGLANG_0_5_23, SGLANG_0132848

#: The contract that is meant where none is named: the newest sglang.
DEFAULT_CONTRACT = "sglang-0.5.23"

_CONTRACTS: dict[str, Contract] = {c.name: c for c in (SGLANG_0_5_23, SGLANG_0132848, COMFYUI)}


def contract_names() -> tuple[str, ...]:
    """All known contracts, the default first."""
    return tuple(_CONTRACTS)


def get_contract(name: str) -> Contract:
    """The contract of that name; UsageError names the known ones."""
    try:
        return _CONTRACTS[name]
    except KeyError:
        known = ", ".join(_CONTRACTS)
        raise UsageError(f"unknown runtime {name!r}", expected=f"one of {known}") from None
