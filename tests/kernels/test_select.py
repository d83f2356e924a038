from __future__ import annotations

import os
import subprocess
import sys

import pytest
from qconvert.kernels.api import Backend
from qconvert.kernels.select import BackendUnavailable, backend_names, get_backend


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names() -> None:
    for name in ("cpu", "reference"):
        assert name in backend_names()
        backend: Backend = get_backend(name)
        assert backend.name == name
        assert get_backend(name) is backend
    with pytest.raises(ValueError, match="unknown backend 'abacus'"):
        get_backend("abacus")


def test_imports_stay_small() -> None:
    code = """
import sys
import qconvert.kernels.select, qconvert.kernels.layout, qconvert.kernels.api
assert not {"numba", "torch"} & set(sys.modules)
backend = qconvert.kernels.select.get_backend("cpu")
assert "torch" not in sys.modules
"""
    run(code)


def test_unavailable_says_why() -> None:
    code = """
import sys
sys.modules["torch"] = None
from qconvert.kernels.select import BackendUnavailable, get_backend
try:
    get_backend("reference")
except BackendUnavailable as e:
    print(e.backend, "|", e.reason)
"""
    assert run(code).startswith("reference | ") and "torch" in run(code)
    assert issubclass(BackendUnavailable, RuntimeError)


KERNEL_CACHE = """
import numpy as np
from qconvert.kernels.cpu import casts
casts.amax(np.ones(3, np.float32), np.empty(1, np.float32))
stats = casts.amax._compiled.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def test_kernels_are_cached_and_the_cache_knows_its_sources(tmp_path: object) -> None:
    env = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert run(KERNEL_CACHE, **env).split() == ["0", "1"]
    assert run(KERNEL_CACHE, **env).split() == ["1", "0"]
    # numba looks at a kernel's own file only; a change of any other source must count as well.
    changed = "from qconvert.kernels.cpu import jit\njit._STAMP = 'other sources'\n" + KERNEL_CACHE
    assert run(changed, **env).split() == ["0", "1"]


def test_kernels_work_without_any_cache() -> None:
    code = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
import numpy as np
from qconvert.kernels.select import get_backend
assert get_backend("cpu").amax(np.full(5, -2.0, np.float32)) == 2.0
from qconvert.kernels.cpu import casts
assert casts.amax._compiled._cache.cache_path is None
"""
    run(code)
