"""Without a GPU, Triton's kernels are interpreted by the tests. That is fixed when triton is imported, so: here."""

from __future__ import annotations

import os
from importlib.util import find_spec


def gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


if "TRITON_INTERPRET" not in os.environ and not gpu():
    os.environ["TRITON_INTERPRET"] = "1"
