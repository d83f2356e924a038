"""What all tests share: the command line in this process; and what has to happen before anything is imported.

Without a GPU, Triton's kernels are interpreted by the tests. That is fixed when triton is imported, so: here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from running import Ran


def gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


if "TRITON_INTERPRET" not in os.environ and not gpu():
    os.environ["TRITON_INTERPRET"] = "1"


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
