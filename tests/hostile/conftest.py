"""What hostile tests share: the fuzzer's modules, and the command line in this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def pytest_configure() -> None:
    # The modules of scripts/fuzz import each other by name.
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """run(*arguments) -> exit code and output of `qconvert ARGUMENTS`; whatever else it raises is not caught."""
    from qconvert.convert.cli import main

    def make(*arguments: object) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in arguments])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Ran(caught.value.code, captured.out, captured.err)

    return make


@pytest.fixture(scope="session")
def fuzz_seeds() -> ModuleType:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    return importlib.import_module("fuzz_seeds")
