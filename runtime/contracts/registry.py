"""Every contract by name."""

from __future__ import annotations

from qconvert.formats.errors import UsageError
from qconvert.runtime.contracts.base import Contract
from qconvert.runtime.contracts.comfyui import COMFYUI
from qconvert.runtime.contracts.diffusers import DIFFUSERS
from qconvert.runtime.contracts.fastvideo import FASTVIDEO
from qconvert.runtime.contracts.lightx2v import LIGHTX2V
from qconvert.runtime.contracts.sglang import SGLANG_0_5_23, SGLANG_0132848
from qconvert.runtime.contracts.sglang_autoround import SGLANG_AUTOROUND
from qconvert.runtime.contracts.sglang_modelopt import SGLANG_MODELOPT
from qconvert.runtime.contracts.vllm_omni import VLLM_OMNI

#: The contract that is meant where none is named: the newest sglang.
DEFAULT_CONTRACT = "sglang-0.5.23"

#: The newest of each runtime first; those that judge ComfyUI's formats before the others.
_ALL: tuple[Contract, ...] = (
    SGLANG_0_5_23,
    SGLANG_0132848,
    COMFYUI,
    SGLANG_MODELOPT,
    SGLANG_AUTOROUND,
    VLLM_OMNI,
    DIFFUSERS,
    FASTVIDEO,
    LIGHTX2V,
)
_CONTRACTS: dict[str, Contract] = {contract.name: contract for contract in _ALL}


def contract_names() -> tuple[str, ...]:
    """All known contracts, the default first."""
    return tuple(_CONTRACTS)


def contracts_of(config: str) -> tuple[str, ...]:
    """The contracts that know this config, the default first; none for configs that are not judged."""
    return tuple(name for name, contract in _CONTRACTS.items() if config in contract.configs)


def get_contract(name: str) -> Contract:
    """The contract of that name; UsageError names the known ones."""
    try:
        return _CONTRACTS[name]
    except KeyError:
        known = ", ".join(_CONTRACTS)
        raise UsageError(f"unknown runtime {name!r}", expected=f"one of {known}") from None
