"""No command loads a library that it does not need; what the check of pins says for each answer."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Everything that some command may load.
LIBRARIES = (
    "numpy", "numba", "torch", "triton", "safetensors", "re2", "tqdm", "rich", "jinja2", "fsspec", "aiohttp", "s3fs",
    "huggingface_hub", "ray", "gguf", "matplotlib", "comfy_kitchen",
)  # fmt: skip
PROBE = """
import sys
try:
    from qconvert.convert.cli import main
    main()
except SystemExit as stop:
    code = stop.code or 0
print("PROBE", code, *sorted(set(LIBRARIES) & set(sys.modules)), file=sys.stderr)
"""
#: command -> what it may load.
NEEDS: dict[tuple[str, ...], set[str]] = {
    ("--help",): set(),
    # It names the backends.
    ("--version",): {"numpy"},
    ("convert", "--help"): set(),
    ("targets",): {"numpy"},
    ("inspect", "FILE"): {"numpy"},
    ("check", "FILE"): {"numpy"},
    ("verify", "--digest", "SEALED"): {"numpy"},
    # Codes that are taken over or moved, and proven by themselves.
    ("NVFP4", "--to", "comfy_nvfp4", "-o", "OUT"): {"numpy", "tqdm"},
    ("NVFP4", "--to", "modelopt_nvfp4", "-o", "OUT"): {"numpy", "tqdm"},
    ("verify", "NVFP4", "NVFP4"): {"numpy", "numba", "tqdm"},
    ("FILE", "--to", "bf16", "--dry-run"): {"numpy"},
    ("FILE", "--to", "comfy_nvfp4", "-o", "OUT"): {"numpy", "numba", "tqdm"},
    ("FILE", "--to", "comfy_nvfp4", "-o", "OUT", "--keep", "proj$"): {"numpy", "numba", "tqdm", "re2"},
}


@pytest.mark.parametrize("words", NEEDS, ids=" ".join)
def test_a_command_loads_what_it_needs(words: tuple[str, ...], tmp_path: Path) -> None:
    import numpy as np

    seeds: Any = pytest.importorskip("fuzz_seeds")
    source = tmp_path / "in.safetensors"
    source.write_bytes(seeds.plain(np.random.default_rng(0)).bytes())
    places = {"FILE": str(source), "OUT": str(tmp_path / "out.safetensors")}
    for name, target in (("SEALED", "bf16"), ("NVFP4", "comfyui:nvfp4")):
        if name in words:
            places[name] = str(tmp_path / f"{name}.safetensors")
            assert seeds.quietly(source, "--to", target, "-o", places[name]) == 0
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"LIBRARIES = {LIBRARIES!r}\n{PROBE}",
            *(places.get(word, word) for word in words),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    mark, code, *loaded = ran.stderr.strip().splitlines()[-1].split()
    assert (mark, code) == ("PROBE", "0"), ran.stderr
    assert set(loaded) <= NEEDS[words], loaded


@pytest.fixture(scope="module")
def check_pins() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("check_pins", str(ROOT / "scripts" / "check_pins"))
    spec = importlib.util.spec_from_loader("check_pins", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


CLEAN: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
BAD: dict[str, Any] = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
SKIPPED: dict[str, Any] = {"name": "c", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        ([CLEAN], 0, "1 pins checked, 0 known"),
        ([CLEAN, SKIPPED], 0, "not checked: c"),
        ([CLEAN, BAD], 1, "b 2: PYSEC-1, fixed in 3"),
        ([SKIPPED], 3, "not checked for vulnerabilities"),
        ("no network", 3, "not checked for vulnerabilities: no network"),
    ],
)
def test_what_the_check_of_pins_says(check_pins: ModuleType, found: Any, code: int, words: str) -> None:
    got, lines = check_pins.told(found)
    assert got == code and any(words in line for line in lines)
