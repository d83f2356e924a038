"""What the tests of conversions share: files as others write them (from tests/formats), one conversion in a call."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

#: sglang's configs for files with ComfyUI's markers
SGLANG = ("comfy_nvfp4", "kitchen_w4a8", "kitchen_w4a4", "convrot_int8", "comfy_fp8", "comfy_mxfp8")
ROOT = Path(__file__).resolve().parents[2]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """For the matrix: every stored state (`source`, `bank`, `convolution`) and every target of these formats."""
    if not metafunc.module.__name__.endswith("test_matrix"):
        return
    tables = {"source": "SOURCES", "bank": "BANKS", "convolution": "CONVOLUTIONS"}
    for name, table in tables.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, list(getattr(importlib.import_module("dialects"), table)))
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "target" in metafunc.fixturenames and "target" not in named:
        from qconvert.runtime.targets import TARGETS

        comfy = [t.name for t in TARGETS if t.runtime == "comfyui"]
        metafunc.parametrize("target", [*SGLANG, *comfy, "bf16", "fp16", "fp32"])


@pytest.fixture(scope="session")
def d() -> ModuleType:
    """Independent definitions of what is stored."""
    return importlib.import_module("dialects")


@pytest.fixture(scope="session")
def writing() -> ModuleType:
    return importlib.import_module("writing")


@functools.cache
def _sample(name: str, shape: tuple[int, ...], seed: int) -> Any:
    tables = importlib.import_module("dialects")
    rng = np.random.default_rng((seed, *shape))
    writer = (tables.SOURCES | tables.BANKS | tables.CONVOLUTIONS)[name]
    return writer(rng, tables.weights(rng, *shape))


@pytest.fixture(scope="session")
def sample() -> Callable[..., Any]:
    """sample(name, *shape, seed=0): a weight in that stored state, made once; not to be changed."""

    def make(name: str, *shape: int, seed: int = 0) -> Any:
        return _sample(name, shape, seed)

    return make


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261202)


@pytest.fixture(scope="session")
def backend() -> Any:
    from qconvert.kernels.select import get_backend

    return get_backend("cpu")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of goldens and cases beside the repository, which not every checkout has."""
    path = Path(os.environ.get("QCONVERT_SHARED", ROOT.parent / "shared"))
    if not (path / "cases").is_dir():
        pytest.skip("no shared folder with cases (QCONVERT_SHARED names one)")
    return path


@pytest.fixture
def write(d: ModuleType, tmp_path: Path) -> Callable[..., Path]:
    """write(tensors, metadata, name) -> path of a file by the safetensors library."""

    def make(
        tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None, name: str = "in.safetensors"
    ) -> Path:
        path: Path = d.write(tmp_path / name, tensors, metadata)
        return path

    return make


@pytest.fixture
def convert() -> Callable[..., Any]:
    """convert(source, target, output=None, **options of Request or PlanOptions) -> Outcome"""
    from dataclasses import fields

    from qconvert.convert.job import Request, run_job
    from qconvert.convert.plan import PlanOptions
    from qconvert.formats.checkpoint import opened

    of_plan = {field.name for field in fields(PlanOptions)}

    def make(source: Path, target: str, output: Path | None = None, **options: Any) -> Any:
        plan = PlanOptions(**{key: value for key, value in options.items() if key in of_plan})
        rest = {key: value for key, value in options.items() if key not in of_plan}
        request = Request(source, target, output, plan=plan, **({"jobs": 1} | rest))
        with opened(source) as checkpoint:
            return run_job(request, checkpoint)

    return make
