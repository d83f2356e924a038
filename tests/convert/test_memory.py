"""Peak memory of the whole process, on one tensor that is larger than all that may be held."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROWS, K, MEGABYTE = 16384, 8192, 1 << 20
#: What the interpreter, numpy, numba and its compiled kernels take (MB), as measured by `scripts/bench_convert`.
BASE = 180
#: The peak of this process's own memory: `ru_maxrss` also counts what its parent held when it was forked.
RUN = """
import re, sys
from pathlib import Path
from qconvert.convert.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print("PEAK", re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One bf16 weight of 256 MiB, the same 512 rows over and over."""
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    header = {"a.weight": {"dtype": "BF16", "shape": [ROWS, K], "data_offsets": [0, 2 * ROWS * K]}}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    block = np.random.default_rng(0).standard_normal((512, K), np.float32).view(np.uint32) >> 16
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _ in range(ROWS // 512):
            file.write(block.astype(np.uint16).tobytes())
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's")
@pytest.mark.parametrize("to", ["comfy_nvfp4", "convrot_int8", "kitchen_w4a8", "bf16"])
def test_peak_memory_does_not_grow_with_the_tensor(to: str, large: Path, tmp_path: Path) -> None:
    memory = 64
    words = [str(large), "--to", to, "-o", str(tmp_path / "out.safetensors"), "--memory", f"{memory}MiB"]
    command = [sys.executable, "-c", RUN, *words, "--quality", "fast"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.rpartition("PEAK")[2]) * 1024 / MEGABYTE
    assert 16 < peak < BASE + memory < ROWS * K * 2 / MEGABYTE
