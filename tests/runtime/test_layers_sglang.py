"""Forward passes against the real sglang's layers, where QCONVERT_SGLANG_PYTHON names a Python that has sglang.

sglang resolves one config a file, so each config is a file of its own. What needs a GPU there (fp8 and nvfp4 with
quantised activations, mxfp8) has no answer on a CPU; test_layers_kitchen compares those with comfy-kitchen.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("comfy_kitchen")
pytest.importorskip("safetensors")

from qconvert.formats.checkpoint import opened  # noqa: E402
from qconvert.runtime.loader import LazyLayers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

PYTHON = os.environ.get("QCONVERT_SGLANG_PYTHON")
SCRIPTS = Path(__file__).parents[2] / "scripts"

#: Config -> (layer, bound of |ours - theirs| / |theirs|: float32 inputs, bfloat16 inputs).
FILES: dict[str, dict[str, tuple[float, float]]] = {
    "fp8": {"fp8_weight_only": (2e-6, 5e-3)},
    "nvfp4": {
        "nvfp4_weight_only": (2e-6, 5e-3),
        "nvfp4_prescaled": (2e-6, 5e-3),
        "rows.embed_tokens": (0.0, 0.0),
        "scalar.embed_tokens": (0.0, 0.0),
    },
    "int8": {
        "int8_convrot16": (2e-6, 1.5e-2),
        "int8_convrot64": (2e-6, 1.5e-2),
        "int8_convrot256": (2e-6, 1.5e-2),
    },
    "w4a8": {
        "w4a8": (2e-6, 1.5e-2),
        "w4a8_no_codebook": (2e-6, 1.5e-2),
        "w4a8_corrected": (2e-6, 1e-2),
    },
    "w4a4": {"w4a4_int4": (2e-6, 5e-2)},
}


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write(path: Path, make: ModuleType, config: str, dtype: Any) -> None:
    """The layers of one config, and their inputs."""
    tensors, inputs = {}, {}
    made = make.layers()
    for name in FILES[config]:
        marker, parts = made[name]
        tensors |= {f"{name}.{suffix}": part.clone().contiguous() for suffix, part in parts.items()}
        text = bytearray(json.dumps(marker).encode())
        tensors[f"{name}.comfy_quant"] = torch.frombuffer(text, dtype=torch.uint8)
        rows = torch.tensor([0, 5, make.VOCABULARY - 1])
        inputs[name] = rows if "embed" in name else make.input_rows(1, 19, dtype)
    save_file(tensors, path)
    save_file(inputs, path.with_suffix(".in.safetensors"))


@pytest.mark.skipif(PYTHON is None, reason="QCONVERT_SGLANG_PYTHON names no Python that has sglang")
def test_forward(tmp_path: Path) -> None:
    assert PYTHON is not None
    make = importlib.import_module("layer_files")
    files = {
        (config, dtype): tmp_path / f"{config}-{dtype}.safetensors" for config in FILES for dtype in DTYPES
    }
    for (config, dtype), path in files.items():
        write(path, make, config, DTYPES[dtype])
    stubs = os.environ.get("QCONVERT_SGLANG_PYTHONPATH", str(SCRIPTS / "interop_stubs"))
    ran = subprocess.run(
        [PYTHON, str(SCRIPTS / "interop_layers.py"), *map(str, files.values())],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": stubs},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    wrong = []
    for (config, dtype), path in files.items():
        theirs, inputs = (
            load_file(path.with_suffix(".out.safetensors")),
            load_file(path.with_suffix(".in.safetensors")),
        )
        assert set(theirs) == set(FILES[config]), ran.stdout
        with opened(path) as checkpoint:
            lazy = LazyLayers(checkpoint, dtype=torch.float32)
            for name, (exact, loose) in FILES[config].items():
                want = theirs[name].double()
                error = float((lazy[name](inputs[name]).double() - want).norm() / want.norm())
                print(f"{name} {dtype}: {error:.3g}")
                if error > (exact if dtype == "float32" else loose):
                    wrong.append(f"{name} {dtype}: {error:.3g}")
    assert not wrong
