"""numpy as the modules that compute nothing at first take it."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest
from qconvert.kernels.arrays import np

#: Started with what a fresh process does; the last line of the output is what counts.
FRESH = "import sys\nfrom qconvert.kernels.arrays import np\nassert 'numpy' not in sys.modules\n"


def fresh(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", FRESH + code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_the_names_are_numpys_own_objects() -> None:
    for name in ("ndarray", "float32", "empty", "linalg", "random", "nan", "newaxis", "__version__"):
        assert getattr(np, name) is getattr(numpy, name), name


def test_a_name_that_was_asked_for_is_there() -> None:
    assert np.float32 is numpy.float32
    assert vars(np)["float32"] is numpy.float32


def test_a_name_that_numpy_lacks_is_numpys_error() -> None:
    with pytest.raises(AttributeError) as theirs:
        _ = numpy.no_such_name  # type: ignore[attr-defined]
    with pytest.raises(AttributeError) as ours:
        _ = np.no_such_name  # type: ignore[attr-defined]
    assert str(ours.value) == str(theirs.value) and "numpy" in str(ours.value)
    assert not hasattr(np, "no_such_name")


def test_other_libraries_see_numpy_and_nothing_else() -> None:
    code = (
        "np.float32\n"
        "import numpy\n"
        "assert sys.modules['numpy'] is numpy and numpy is not np\n"
        "assert type(numpy) is type(sys)\n"
        "print(np.zeros(2, np.int8).dtype)\n"
    )
    assert fresh(code) == "int8"


def test_threads_that_come_first_together_find_the_same() -> None:
    code = (
        "import threading\n"
        "names = ['float32', 'ndarray', 'zeros', 'linalg'] * 4\n"
        "at_once = threading.Barrier(len(names))\n"
        "found = [None] * len(names)\n"
        "def first(i):\n"
        "    at_once.wait()\n"
        "    found[i] = getattr(np, names[i])\n"
        "threads = [threading.Thread(target=first, args=(i,)) for i in range(len(names))]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "import numpy\n"
        "print(sum(one is getattr(numpy, name) for one, name in zip(found, names)))\n"
    )
    assert fresh(code) == "16"
