"""Written bytes are handed to the device at once: all large ranges, once each, and none that is not there."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from qconvert.convert import writeback
from qconvert.convert.job import Request, run_job
from qconvert.convert.plan import PlanOptions
from qconvert.formats.checkpoint import Checkpoint
from safetensors.numpy import load_file, save_file

N, K = 2048, 1024


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, bytes) of every range that the system was told to begin with."""
    ranges: list[tuple[int, int]] = []

    def note(descriptor: int, offset: int, size: int, flags: int) -> int:
        assert flags == 2
        assert offset + size <= os.fstat(descriptor).st_size
        ranges.append((offset, size))
        # The caller goes on whatever the system says.
        return -1

    monkeypatch.setattr(writeback, "_sync_file_range", lambda: note)
    return ranges


def test_each_large_range_is_handed_over_once(tmp_path: Path, handed: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(0)
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(
        {
            "blocks.0.norm.weight": rng.standard_normal(1 << 20, np.float32),
            "blocks.0.fc.weight": rng.standard_normal((N, K), np.float32),
            "blocks.0.small.weight": rng.standard_normal((16, 16), np.float32),
        },
        source,
    )
    with Checkpoint.open(source) as checkpoint:
        run_job(
            Request(source, "convrot_int8", target, plan=PlanOptions(keep=("small",)), jobs=2), checkpoint
        )
    with Checkpoint.open(target) as written:
        large = [t for t in written.tensors.values() if t.nbytes >= 2 * writeback.LEAST_BYTES]
    assert sorted(t.name for t in large) == ["blocks.0.fc.weight", "blocks.0.norm.weight"]
    ends = [(offset, offset + size) for offset, size in sorted(handed)]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert all(size >= writeback.LEAST_BYTES for _, size in handed)
    for tensor in large:
        inside = sum(
            min(end, tensor.start + tensor.nbytes) - max(begin, tensor.start)
            for begin, end in ends
            if begin < tensor.start + tensor.nbytes and end > tensor.start
        )
        # Apart from what a copy leaves before its first whole page.
        assert inside >= tensor.nbytes - 4096
    assert load_file(target)["blocks.0.fc.weight"].shape == (N, K)


def test_systems_without_the_call_and_descriptors_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345678" * writeback.LEAST_BYTES)
    with path.open("rb+") as file:
        writeback.begin_writeback(file.fileno(), 0, 8 * writeback.LEAST_BYTES)
        writeback.begin_writeback(-1, 0, 8 * writeback.LEAST_BYTES)
        monkeypatch.setattr(writeback, "_sync_file_range", lambda: None)
        writeback.begin_writeback(file.fileno(), 0, 8 * writeback.LEAST_BYTES)
    assert path.read_bytes() == b"12345678" * writeback.LEAST_BYTES
