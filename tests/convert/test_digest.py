"""The digest that every output records: any bit that flips, anywhere, is found."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qconvert.formats import digest
from qconvert.formats.checkpoint import opened
from qconvert.formats.digest import KEY, PENDING, Checksums, file_digest

Write = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def source_file(sample: Any, d: ModuleType, write: Write) -> Path:
    tensors = sample("fp8", 128, 64).named("blocks.0.fc") | sample("fp8", 256, 64).named("embed_tokens")
    return write(tensors | {"blocks.0.norm.weight": d.f32_tensor(np.ones(64))})


OUTPUTS = {
    "safetensors": ("comfy_nvfp4",),
    "gguf": ("gguf:q8_0",),
    "shards": ("fp32", "--shard-size", "40KB"),
}


@pytest.mark.parametrize("what", OUTPUTS)
def test_a_flipped_bit_is_found_in_every_tensor(
    what: str, source_file: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    target, *more = OUTPUTS[what]
    out = tmp_path / "out" / ("model.gguf" if what == "gguf" else "model.safetensors")
    assert run(source_file, "--to", target, "-o", out, *more)[0] == 0
    path = out.parent if what == "shards" else out
    code, text, _ = run("verify", "--digest", path)
    assert code == 0 and "as it was written" in text
    with opened(path) as checkpoint:
        assert all(KEY in header.metadata for header in checkpoint.headers)
        places = [(checkpoint.files[t.file], t.start + t.nbytes // 2) for t in checkpoint.tensors.values()]
        places += [(checkpoint.files[t.file], t.start) for t in checkpoint.tensors.values()]
        places += [(checkpoint.files[t.file], t.start + t.nbytes - 1) for t in checkpoint.tensors.values()]
    chance = np.random.default_rng(5)
    for file, at in places:
        data = bytearray(file.read_bytes())
        data[at] ^= 1 << int(chance.integers(8))
        kept = file.read_bytes()
        file.write_bytes(data)
        code, _, said = run("verify", "--digest", path)
        assert code == 1 and file.name in said and "bits have changed" in said
        assert run("verify", source_file, path, "--digest")[0] == 1
        file.write_bytes(kept)
    assert run("verify", "--digest", path)[0] == 0


def test_bits_of_the_header_count(
    source_file: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    out = tmp_path / "model.safetensors"
    assert run(source_file, "--to", "comfy_nvfp4", "-o", out)[0] == 0
    data = out.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for at in range(0, 8 + size, 37):
        out.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert run("verify", "--digest", out)[0] == 1, at


def test_the_digest_does_not_depend_on_the_threads_and_equal_runs_are_equal(
    source_file: Path,
    tmp_path: Path,
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digest, "BLOCK", 4096)
    monkeypatch.setattr(digest, "_PIECE", 1000)
    files = [tmp_path / f"{jobs}.safetensors" for jobs in (1, 3)]
    for jobs, file in zip((1, 3), files, strict=True):
        assert run(source_file, "--to", "comfy_nvfp4", "-o", file, "--jobs", jobs)[0] == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_file_without_a_digest_says_so(source_file: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, said = run("verify", "--digest", source_file)
    assert code == 1 and "records no digest" in said
    code, _, said = run("verify", source_file)
    assert code == 2 and "two files" in said


def test_json(source_file: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    out = tmp_path / "model.safetensors"
    assert run(source_file, "--to", "bf16", "-o", out)[0] == 0
    assert json.loads(run("verify", "--digest", out, "--json")[1]) == {"ok": True, "digest": True}


def test_the_definition() -> None:
    """By hand: sha256 over the header and each block's CRC-32, little-endian."""
    import hashlib

    payload = np.random.default_rng(1).bytes((16 << 20) + 5)
    prefix = b"header " + PENDING.encode()
    state = hashlib.sha256(prefix)
    for block in (payload[: 16 << 20], payload[16 << 20 :]):
        state.update(zlib.crc32(block).to_bytes(4, "little"))
    found = file_digest(prefix, Checksums(lambda at, size: payload[at : at + size], 0, len(payload)), 2)
    assert found == "crc16m:" + state.hexdigest() and len(found) == len(PENDING)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_checksums_taken_while_writing_are_those_of_the_finished_file(data: st.DataObject) -> None:
    """Pieces in any order, some written twice, some never told of: what is read early is what is there at the end."""
    start = data.draw(st.integers(0, 40))
    size = data.draw(st.sampled_from([0, 1, 99, 100, 101, 350]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "BLOCK", 100)
        patch.setattr(digest, "_PIECE", 7)
        file = bytearray(start + size)
        reads = 0

        def read(at: int, count: int) -> bytes:
            nonlocal reads
            reads += 1
            assert 0 < count <= 7 and start <= at and at + count <= len(file)
            return bytes(file[at : at + count])

        sums = Checksums(read, start, len(file))
        cuts = sorted(data.draw(st.sets(st.integers(0, len(file)), max_size=12)) | {0, len(file)})
        pieces = list(itertools.pairwise(cuts))
        again = data.draw(st.lists(st.sampled_from(pieces), max_size=3)) if pieces else []
        silent = data.draw(st.booleans())
        for number, (a, b) in enumerate(data.draw(st.permutations([*pieces, *again]))):
            file[a:b] = data.draw(st.binary(min_size=b - a, max_size=b - a))
            if not (silent and number == 0):
                sums.wrote(a, b - a)
        early = reads
        wanted = [
            zlib.crc32(file[at : min(at + 100, len(file))]).to_bytes(4, "little")
            for at in range(start, len(file), 100)
        ]
        assert list(sums.values(2)) == wanted
        if not again and not silent:
            # Nothing had to be read at the end.
            assert reads == early


def test_a_quicker_library_s_checksums_are_zlib_s() -> None:
    data = np.random.default_rng(2).bytes(100_001)
    for size in (0, 1, 15, 16, 1000, 65_536, 100_001):
        for value in (0, 1, 0xFFFFFFFF):
            assert digest.crc32(data[:size], value) == zlib.crc32(data[:size], value)


def test_blocks_are_read_while_the_file_is_written(
    source_file: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block once, and none is left for the end."""
    monkeypatch.setattr(digest, "BLOCK", 1 << 12)
    at_the_end: list[int] = []
    real = Checksums.values

    def values(self: Checksums, jobs: int) -> Iterator[bytes]:
        at_the_end.append(len(self._missing) - len(self._known))
        return real(self, jobs)

    monkeypatch.setattr(Checksums, "values", values)
    out = tmp_path / "out.safetensors"
    assert run(source_file, "--to", "comfy_nvfp4", "-o", out)[0] == 0
    assert at_the_end == [0]
    assert run("verify", "--digest", out)[0] == 0
