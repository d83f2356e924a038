"""Written bytes are handed to the device at once: all large ranges, once each, and none that is not there."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading
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
        large = [t for t in written.tensors.values() if t.nbytes >= 2 * writeback._LEAST_BYTES]
    assert sorted(t.name for t in large) == ["blocks.0.fc.weight", "blocks.0.norm.weight"]
    ends = [(offset, offset + size) for offset, size in sorted(handed)]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert all(size >= writeback._LEAST_BYTES for _, size in handed)
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
    path.write_bytes(b"12345678" * writeback._LEAST_BYTES)
    with path.open("rb+") as file:
        writeback.Writer(file.fileno()).wrote(0, 8 * writeback._LEAST_BYTES)
        writeback.Writer(-1).wrote(0, 8 * writeback._LEAST_BYTES)
        monkeypatch.setattr(writeback, "_sync_file_range", lambda: None)
        writer = writeback.Writer(file.fileno())
        with writer.flushing(tmp_path):
            writer.wrote(0, 8 * writeback._LEAST_BYTES)
    assert path.read_bytes() == b"12345678" * writeback._LEAST_BYTES


def test_no_call_is_larger_than_what_is_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = os.pwrite, []

    def counted(descriptor: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        # A system may take less than it is given.
        return real(descriptor, data[:700_001], offset)

    monkeypatch.setattr(os, "pwrite", counted)
    data = np.random.default_rng(0).bytes((3 << 20) + 5)
    with (tmp_path / "a").open("wb+") as file:
        writeback.Writer(file.fileno()).write(data, 3)
    assert (tmp_path / "a").read_bytes() == b"\0\0\0" + data
    assert max(sizes) == 1 << 20


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only there is a device handed anything early"
)
def test_the_device_is_flushed_beside_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the folder, whenever enough was written, and no more once the work is done."""
    flushed, again = threading.Event(), threading.Event()
    folders: list[os.stat_result] = []

    def flush(descriptor: int) -> None:
        folders.append(os.fstat(descriptor))
        (again if flushed.is_set() else flushed).set()

    monkeypatch.setattr(os, "fdatasync", flush)
    monkeypatch.setattr(writeback, "_PAUSE", 0.001)
    with (tmp_path / "a").open("wb+") as file:
        file.truncate(32 << 20)
        writer = writeback.Writer(file.fileno())
        with writer.flushing(tmp_path):
            writer.wrote(0, writeback._WORTH_BYTES - 1)
            assert not flushed.wait(0.05)
            writer.wrote(0, 1 << 20)
            assert flushed.wait(10)
            assert not again.wait(0.05)
            writer.wrote(0, writeback._WORTH_BYTES)
            assert again.wait(10)
    assert all(os.path.samestat(found, tmp_path.stat()) for found in folders)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only there is a device handed anything early"
)
@pytest.mark.parametrize("where", ["open", "fdatasync"])
def test_folders_that_cannot_be_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    asked = threading.Event()

    def refuse(*_: object) -> int:
        asked.set()
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with (tmp_path / "a").open("wb+") as file:
        writer = writeback.Writer(file.fileno())
        monkeypatch.setattr(os, where, refuse)
        with writer.flushing(tmp_path):
            writer.wrote(0, writeback._WORTH_BYTES)
            assert asked.wait(10)
        monkeypatch.undo()
        writer.write(b"still", 0)
    assert (tmp_path / "a").read_bytes() == b"still"
