"""What the tests of formats share: independent definitions (`dialects.py`), files of layers, a backend."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent


pytest.importorskip("torch")
pytest.importorskip("safetensors")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`source`, `bank`, `convolution`, `odd`: every way in which a weight of that kind is stored. `label`: written."""
    tables = {"source": "SOURCES", "bank": "BANKS", "convolution": "CONVOLUTIONS", "odd": "ODD"}
    for name, table in tables.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, list(getattr(importlib.import_module("dialects"), table)))
    if "label" in metafunc.fixturenames:
        metafunc.parametrize("label", list(importlib.import_module("writing").WRITTEN))


@pytest.fixture(scope="session")
def d() -> ModuleType:
    """The independent definitions."""
    return importlib.import_module("dialects")


@pytest.fixture(scope="session")
def writing() -> ModuleType:
    """What codecs write."""
    return importlib.import_module("writing")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261201)


@pytest.fixture(scope="session")
def backend() -> Any:
    from qconvert.kernels.select import get_backend

    return get_backend("cpu")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of goldens and cases beside the repository, which not every checkout has."""
    path = Path(os.environ.get("QCONVERT_SHARED", HERE.parents[2] / "shared"))
    if not (path / "golden").is_dir():
        pytest.skip("no shared folder with goldens (QCONVERT_SHARED names one)")
    return path


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """opened(tensors, metadata) or opened(path) -> Checkpoint, closed at the end of the test."""
    from qconvert.formats.checkpoint import Checkpoint

    made: list[Checkpoint] = []

    def make(what: Path | Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> Checkpoint:
        if not isinstance(what, Path):
            what = importlib.import_module("dialects").write(
                tmp_path / f"file{len(made)}.safetensors", what, metadata
            )
        made.append(Checkpoint.open(what))
        return made[-1]

    yield make
    for checkpoint in made:
        checkpoint.close()
