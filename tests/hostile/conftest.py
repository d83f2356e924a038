"""What hostile tests share: the fuzzer's modules, and the command line in this process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def pytest_configure() -> None:
    # The modules of scripts/fuzz import each other by name.
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))


@pytest.fixture(scope="session")
def fuzz_seeds() -> ModuleType:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    return importlib.import_module("fuzz_seeds")
