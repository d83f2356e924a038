"""A configuration is believed like a marker: values confirm it, or overrule it with a guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structured
from qconvert.formats.checkpoint import opened
from qconvert.formats.evidence import weigh
from qconvert.formats.layers import take_inventory


@pytest.fixture(scope="module")
def s() -> Any:
    """`structured.py`: networks with the structure of trained ones."""
    return structured


MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
MXFP8 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}


def look(path: Path, config: Any) -> tuple[list[Any], list[Any]]:
    with opened(path) as checkpoint:
        checkpoint.config = config
        inventory = take_inventory(checkpoint)
        judged = weigh(checkpoint, inventory)
        return [layer for layer in inventory.layers.values() if layer.quantised], judged


@pytest.mark.parametrize("right", [True, False])
def test_modelopt_nvfp4(right: bool, s: Any, tmp_path: Path) -> None:
    """A ComfyUI file that lost its markers beside somebody else's config.json is still read as it is."""
    tensors = s.nvfp4_file(s.network(), linear=right, low=right, mark=None)
    layers, judged = look(s.write(tmp_path / "x.safetensors", tensors), MODELOPT)
    assert {layer.codec.name for layer in layers} == {"modelopt_nvfp4"}
    assert {layer.options["scales"] for layer in layers} == {"linear" if right else "swizzled"}
    assert {layer.options["nibbles"] for layer in layers} == {"low" if right else "high"}
    assert any(judgement.contrary for judgement in judged) != right
    guesses = [finding.message for layer in layers for finding in layer.findings if finding.level == "guess"]
    assert bool(guesses) != right
    assert all("by its configuration, but its values show" in message for message in guesses)


@pytest.mark.parametrize("right", [True, False])
def test_row_major_mxfp8(right: bool, s: Any, tmp_path: Path) -> None:
    tensors = s.mxfp8_file(s.network(), linear=right, mark=None)
    layers, judged = look(s.write(tmp_path / "x.safetensors", tensors), MXFP8)
    assert {layer.options["scales"] for layer in layers} == {"linear" if right else "swizzled"}
    assert any(judgement.contrary for judgement in judged) != right
