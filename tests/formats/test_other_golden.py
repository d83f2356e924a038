"""Layers written by the other ecosystems' own libraries decode to what those libraries say of them.

`exact`: bit-equal once rounded to the reference's type. The others' references are the library's fake quantiser, which
rounds a few weights to the other neighbour than the bytes beside it: there all but a few elements agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qconvert.formats.layers import take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.values import decode_rows

#: file -> (codec with its configuration, without, findings above a note without a configuration)
GOLDEN: dict[str, tuple[str, str, int]] = {
    "ao_float8_wo": ("torchao_float8", "torchao_float8", 0),
    "ao_int8_dyn": ("torchao_int8", "torchao_int8", 0),
    "ao_int8_wo": ("torchao_int8", "torchao_int8", 0),
    "ao_mxfp4": ("torchao_mx", "torchao_mx", 0),
    "ao_mxfp8": ("torchao_mxfp8", "torchao_mxfp8", 0),
    "ao_nvfp4": ("torchao_nvfp4", "torchao_nvfp4", 0),
    "ao_nvfp4_wo": ("torchao_nvfp4", "torchao_nvfp4", 0),
    "ct_fp8": ("float8", "float8", 1),
    "ct_fp8_dynamic": ("float8", "float8", 1),
    "ct_mxfp4": ("compressed_mx", "compressed_mx", 0),
    "ct_mxfp6": ("compressed_mx", "compressed_mx", 0),
    "ct_naive_fp8_channel": ("float8", "float8", 1),
    "ct_nvfp4": ("compressed_nvfp4", "compressed_nvfp4", 0),
    "ct_w2a16_g128": ("compressed_packed", "compressed_packed", 0),
    "ct_w3a16_g128": ("compressed_packed", "compressed_packed", 0),
    "ct_w4a16_asym_g128": ("compressed_packed", "compressed_packed", 0),
    "ct_w4a16_channel": ("compressed_packed", "compressed_packed", 0),
    "ct_w4a16_g128": ("compressed_packed", "compressed_packed", 0),
    "ct_w4a8_int": ("compressed_int", "compressed_int", 1),
    "ct_w4afp8": ("compressed_int", "compressed_int", 1),
    "ct_w8a16_g128": ("compressed_packed", "compressed_packed", 0),
    "ct_w8a8_int": ("int8", "int8", 1),
    "fastvideo_nvfp4": ("fastvideo_nvfp4", "fastvideo_nvfp4", 0),
    "fp8_block_float": ("float8", "float8", 1),
    "fp8_block_ue8m0": ("float8", "float8", 1),
    "lightx2v_fp8": ("float8", "float8", 1),
    "mo_diffusers_nvfp4_swizzled": ("modelopt_nvfp4", "modelopt_nvfp4", 0),
    "mo_fp8": ("float8", "float8", 1),
    "mo_fp8_pb_wo": ("float8", "float8", 1),
    "mo_int4_awq": ("modelopt_int4", "modelopt_int4", 0),
    "mo_int8_sq": ("int8", "int8", 1),
    "mo_mxfp4": ("modelopt_mx", "modelopt_mx", 0),
    "mo_nvfp4": ("modelopt_nvfp4", "nvfp4", 2),
    "mo_w4a8_awq": ("modelopt_int4", "modelopt_int4", 0),
    "mo_w4a8_mxfp4_fp8": ("modelopt_mx", "modelopt_mx", 0),
    "mo_w4a8_nvfp4_fp8": ("modelopt_nvfp4_wide", "modelopt_nvfp4_wide", 0),
    "rowwise_fp8": ("float8", "float8", 0),
}
#: Share of elements that may differ from a fake quantiser.
CLOSE = {"mo_int4_awq": 0.007, "mo_w4a8_awq": 0.007, "mo_int8_sq": 0.007}
#: lightx2v_fp8 comes without a configuration, torchao's and FastVideo's need none.
UNSTATED = {"lightx2v_fp8"}


def configuration(metadata: dict[str, str]) -> dict[str, Any]:
    """config.json as the library writes it, from what the golden's header keeps of it."""
    kept = json.loads(metadata.get("config", "{}"))
    if "config.json:quantization_config" in kept:
        return {"quantization_config": kept["config.json:quantization_config"]}
    return kept if "quantization_config" in kept else {"quantization_config": kept} if kept else {}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("configured", [True, False])
def test_golden(
    name: str, configured: bool, shared: Path, opened: Callable[..., Any], backend: Any, d: Any
) -> None:
    checkpoint = opened(shared / "golden-other" / f"{name}.safetensors")
    if configured:
        checkpoint.config = configuration(checkpoint.metadata)
    spec = json.loads(checkpoint.metadata["spec"])
    layer = take_inventory(checkpoint).layers[spec["prefix"]]
    assert layer.codec.name == GOLDEN[name][0 if configured else 1]
    assert (layer.n, layer.k) == (spec["N"], spec["K"])
    guesses = [finding for finding in layer.findings if finding.level == "guess"]
    expected = 0 if configured and name not in UNSTATED else GOLDEN[name][2]
    assert len(guesses) == expected, guesses
    values = decode_rows(layer, LayerReader(checkpoint, layer), 0, layer.n, backend)
    # ModelOpt stores zeros that were negative with their sign; its references are without.
    reference = checkpoint.read("ref.dequant")
    reference = np.where(reference == 0x8000, 0, reference)
    got = d.narrow(values.astype(np.float64), "BF16").bits
    got = np.where(got == 0x8000, 0, got)
    if name in CLOSE:
        assert (got != reference).mean() <= CLOSE[name]
    else:
        assert np.array_equal(got, reference)


def test_every_file_is_accounted_for(shared: Path) -> None:
    mine = ("ao_", "ct_", "mo_", "fp8_", "lightx2v_", "fastvideo_", "rowwise_")
    names = {path.stem for path in (shared / "golden-other").glob("*.safetensors")}
    assert {name for name in names if name.startswith(mine)} == set(GOLDEN)
