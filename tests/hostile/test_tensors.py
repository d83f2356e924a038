"""Every tensor of every format, missing, of another shape, of another type: read rightly, or refused in one line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
from qconvert.formats.dtypes import BITS, FLOATS
from qconvert.formats.layers import NO_SCALES

pytest.importorskip("torch")
pytest.importorskip("safetensors")
if not sys.platform.startswith("linux"):
    pytest.skip("measured by /proc", allow_module_level=True)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))
seeds: Any = importlib.import_module("fuzz_seeds")
Case: Any = importlib.import_module("fuzz_case").Case
harness: Any = importlib.import_module("fuzz_harness")

LAYERS = ("blocks.0.fc", "model.layers.0.self_attn.q_proj")
FORMATS = (
    "bf16", "fp8", "fp8_row", "fp8_block", "fp8_legacy_full", "fp8_input_scale", "nvfp4", "nvfp4_pre", "mxfp8",
    "int8_row", "int8_convrot64", "w4a4", "w4a8", "w4a8_correction", "w4a8_6bit", "sym_g32", "awq", "svdquant",
    "bank_fp8", "bank_nvfp4", "bank_int8", "bank_w4a8_codebooks", "conv_int8_row",
)  # fmt: skip


def spoiled(tensor: list[Any]) -> Iterator[tuple[str, list[Any] | None]]:
    """(what was done, the tensor or None where it is gone)."""
    dtype, shape, data = tensor
    yield "missing", None
    yield "one value", [dtype, [], data[: BITS[dtype] // 8]]
    yield "flat", [dtype, [prod(shape)], data]
    yield "5-D", [dtype, [1, 1, 1, *shape], data]
    yield "a last axis of 1", [dtype, [*shape, 1], data]
    for axis, size in enumerate(shape):
        for keep in {0, 1, size - 1, 2 * size} - {size, -1} if size else ():
            row = len(data) // size
            yield (
                f"axis {axis} of {keep}",
                [dtype, [*shape[:axis], keep, *shape[axis + 1 :]], (data * 2)[: row * keep]],
            )
    for other in ("F32", "I32", "F16", "BOOL", "F8_E8M0"):
        if other != dtype:
            yield f"{dtype} to {other}", [other, shape, (data * 8)[: prod(shape) * BITS[other] // 8]]


def all_seeds() -> list[Any]:
    return [*seeds.encoded(FORMATS), *seeds.foreign()]


@pytest.mark.parametrize("seed", all_seeds(), ids=lambda seed: seed.name)
def test_a_tensor_that_does_not_fit(seed: Any, tmp_path: Path) -> None:
    box = seeds.Box.of(seed.files["model.safetensors"])
    path = "{}/" + seed.main if seed.main else "{}"
    looked = 0
    for name in [n for n in box.tensors if n.startswith(LAYERS) and not n.endswith(".comfy_quant")]:
        for what, tensor in spoiled(box.tensors[name]):
            other = seeds.Box(dict(box.tensors), box.metadata)
            if tensor is None:
                del other.tensors[name]
            else:
                other.tensors[name] = tensor
            files = seed.files | {"model.safetensors": other.bytes()}
            arguments = ["convert", path, "--to", "bf16", "-o", "{}/made/out", "--jobs", "1"]
            report = harness.run_case(Case("tensors", files, arguments), tmp_path / "case")
            assert not report.faults, (name, what, report)
            scale = box.tensors[name][0] in FLOATS and not name.endswith(
                (".weight", ".input_scale", ".scale_input")
            )
            if scale and tensor is not None and tensor[0] in NO_SCALES:
                assert report.code == 1, (name, what, report)
            looked += 1
    assert looked > 15
