"""Where output tensors lie: in the source's order, and where pages can be shared, on their pages."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors
from qconvert.convert.copying import copy_in_kernel, copy_run
from qconvert.convert.job import Request, plan_job, run_job
from qconvert.convert.place import page_offset
from qconvert.convert.units import COPY_BYTES, CopyUnit, make_units
from qconvert.convert.writeback import Writer
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.header import PAGE

MARKER = b'{"format":"float8_e4m3fn"}'
N, K = 1024, 4096


def write(path: Path, tensors: list[tuple[str, str, tuple[int, ...], bytes]], pad: int = 0) -> Path:
    header, at = {}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8 + pad)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(data for *_, data in tensors))
    return path


def fp8(i: int) -> bytes:
    """Codes of ordinary magnitudes."""
    return np.random.default_rng(i).integers(0x20, 0x60, N * K, np.uint8).tobytes()


def layer(i: int, marker: bytes | None) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    out = [
        (f"blocks.{i}.fc.weight", "F8_E4M3", (N, K), fp8(i)),
        (f"blocks.{i}.fc.weight_scale", "F32", (), np.float32(0.01).tobytes()),
    ]
    return out + ([(f"blocks.{i}.fc.comfy_quant", "U8", (len(marker),), marker)] if marker else [])


@pytest.mark.parametrize("pad", [0, 8, 2048, 4088])
@pytest.mark.parametrize("marker", [MARKER, None, b'{"format": "float8_e4m3fn"}'])
def test_copies_keep_their_place_in_a_page(tmp_path: Path, marker: bytes | None, pad: int) -> None:
    """Marked as it will be, without a marker, and with one of another length: all but the first is copied in pages."""
    tensors = [tensor for i in range(3) for tensor in layer(i, marker)]
    source = write(tmp_path / "in.safetensors", tensors, pad)
    with Checkpoint.open(source) as checkpoint:
        plan, laid = plan_job(Request(source, "comfy_fp8"), checkpoint)
        units = [unit for unit in make_units(plan, laid) if isinstance(unit, CopyUnit)]
    assert sum(unit.nbytes for unit in units) == 3 * (N * K + 4)
    whole = [unit for unit in units if unit.nbytes >= PAGE and unit.offset % PAGE == 0]
    shared = sum(unit.nbytes for unit in whole if unit.start % PAGE == 0)
    # Where markers of another length are left out, what follows the first lies elsewhere in its pages.
    kept = 1 if marker not in (MARKER, None) else 3
    assert shared >= kept * (N * K - PAGE)
    assert len(laid.prefix) % 8 == 0


def test_the_source_s_order_is_kept_and_new_markers_come_last(tmp_path: Path) -> None:
    tensors = [tensor for i in (2, 0, 1) for tensor in layer(i, None)]
    tensors.insert(3, ("norm.weight", "BF16", (8,), bytes(16)))
    source = write(tmp_path / "in.safetensors", tensors)
    target = tmp_path / "out.safetensors"
    with Checkpoint.open(source) as checkpoint:
        run_job(Request(source, "comfy_fp8", target), checkpoint)
    with Checkpoint.open(target) as written:
        names = [tensor.name for tensor in written.headers[0].tensors]
    assert names[: len(tensors)] == [name for name, *_ in tensors]
    assert names[len(tensors) :] == [f"blocks.{i}.fc.comfy_quant" for i in (2, 0, 1)]
    there = dict(safetensors.deserialize(target.read_bytes()))
    for name, _, _, data in tensors:
        assert bytes(there[name]["data"]) == data


def test_nothing_is_gained_by_small_copies_or_a_crooked_source(tmp_path: Path) -> None:
    small = [("blocks.0.fc.weight", "F8_E4M3", (16, 16), bytes([0x38] * 256))]
    small.append(("blocks.0.fc.weight_scale", "F32", (), np.float32(1).tobytes()))
    for source, pad in (
        (write(tmp_path / "small.safetensors", small), 0),
        (write(tmp_path / "crooked.safetensors", layer(0, MARKER), 3), 3),
    ):
        with Checkpoint.open(source) as checkpoint:
            plan, laid = plan_job(Request(source, "comfy_fp8"), checkpoint)
        assert page_offset(plan) is None, pad
        assert len(laid.prefix) % 8 == 0
        assert len(laid.prefix) - len(laid.prefix.rstrip(b" ")) < 8


def test_pieces_cover_a_copy_once(tmp_path: Path) -> None:
    """Cut at pages and at multiples of 16 MiB, whatever a run begins with."""
    size = 2 * COPY_BYTES + 12345
    raw = bytes(size // 2 * 2)
    source = write(tmp_path / "in.safetensors", [("blocks.0.norm.weight", "BF16", (size // 2,), raw)], 8)
    with Checkpoint.open(source) as checkpoint:
        plan, laid = plan_job(Request(source, "comfy_fp8"), checkpoint)
        units = [unit for unit in make_units(plan, laid) if isinstance(unit, CopyUnit)]
    at = laid.offsets["blocks.0.norm.weight"]
    for unit in units:
        assert unit.offset == at
        assert 0 < unit.nbytes <= COPY_BYTES
        at += unit.nbytes
    assert at == laid.file_size
    assert all(unit.offset % PAGE == 0 for unit in units[1:])


def test_the_kernel_s_copy_moves_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that copies a little at a time, as it may where only whole pages are shared."""
    if not hasattr(os, "copy_file_range"):
        pytest.skip("no copy_file_range here")
    real: Callable[..., int] = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, n, *at: real(a, b, min(n, 1000), *at))
    data = np.random.default_rng(0).bytes(10_001)
    (tmp_path / "a").write_bytes(b"12345" + data)
    with (tmp_path / "a").open("rb") as a, (tmp_path / "b").open("wb+") as b:
        assert copy_in_kernel(a.fileno(), b.fileno(), 5, 3, len(data))
        assert os.pread(b.fileno(), 20_000, 3) == data


@pytest.mark.parametrize("shift", [0, 1, 26, PAGE - 1])
@pytest.mark.parametrize("size", [1, PAGE, (1 << 20) - 1, (1 << 20) + 1, 3 << 20])
def test_a_run_is_copied_wherever_it_lies(tmp_path: Path, shift: int, size: int) -> None:
    """Alike in its pages or not, in one buffer or in several."""
    data = np.random.default_rng(1).bytes(shift + size)
    source = write(tmp_path / "in.safetensors", [("x", "U8", (len(data),), data)])
    with Checkpoint.open(source) as checkpoint, (tmp_path / "out").open("wb+") as handle:
        start = checkpoint.tensors["x"].start
        out = Writer(handle.fileno())
        copy_run(checkpoint, 0, start + shift, out, start % PAGE, size)
        assert os.pread(handle.fileno(), size + PAGE, start % PAGE) == data[shift:]
