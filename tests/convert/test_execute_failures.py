"""Conversions that fail: one line, and nothing left behind."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.convert import execute, output
from qconvert.formats.errors import QConvertError
from small_file import small

Rng = np.random.Generator
Write = Callable[..., Path]
Convert = Callable[..., Any]


@pytest.fixture
def source(rng: Rng, d: ModuleType, write: Write) -> Path:
    return write(small(rng, d), {"format": "pt", "author": "someone"})


@pytest.fixture
def fails(convert: Convert, tmp_path: Path) -> Callable[..., QConvertError]:
    """fails(words, *arguments of convert) -> the error; asserts that no file changed."""

    def snapshot() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def check(words: str, *args: Any, code: int = 1, **options: Any) -> QConvertError:
        before = snapshot()
        with pytest.raises(QConvertError, match=words) as caught:
            convert(*args, **options)
        assert snapshot() == before
        assert caught.value.exit_code == code
        assert "\n" not in caught.value.line()
        return caught.value

    return check


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 201, 255])
@pytest.mark.parametrize(
    "target", ["comfy_nvfp4", "kitchen_w4a8", "convrot_int8", "comfy_fp8", "comfyui:mxfp8"]
)
def test_nan_and_inf(
    bad: float, row: int, target: str, rng: Rng, d: ModuleType, write: Write, fails: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    w = d.weights(rng, 256, 256)
    w[row, 17] = bad
    good = d.narrow(d.weights(rng, 256, 256), "F32")
    path = write({"a.fc.weight": d.f32_tensor(w), "b.fc.weight": good})
    monkeypatch.setattr(execute, "PIECE_ELEMENTS", 1 << 14)
    error = fails("NaN or Inf", path, target, tmp_path / "out.safetensors", jobs=2)
    assert (error.file, error.layer) == (str(path), "a.fc")
    assert f"row {row}" in error.line() and "--keep" in error.line()


def test_a_scale_that_is_nan(sample: Any, d: ModuleType, write: Write, fails: Any, tmp_path: Path) -> None:
    """All-zero weights become this in comfy-kitchen: 0/0."""
    tensors = {name: d.T(t.dtype, t.bits.copy()) for name, t in sample("nvfp4", 128, 64).named("fc").items()}
    tensors["fc.weight_scale"].bits[0, 0] = 0x7F
    path = write(tensors)
    assert fails("NaN or Inf", path, "comfyui:float8_e4m3fn", tmp_path / "out.safetensors").layer == "fc"


def test_fp16_overflow(
    rng: Rng, d: ModuleType, write: Write, fails: Any, convert: Convert, tmp_path: Path
) -> None:
    w = d.weights(rng, 128, 64)
    w[77, 3] = 7e4
    path = write({"a.fc.weight": d.narrow(w, "BF16")})
    error = fails("do not fit F16", path, "fp16", tmp_path / "out.safetensors")
    assert (error.layer, error.file) == ("a.fc", str(path)) and "7.014e+04" in error.line()
    w[77, 3] = 65504
    assert convert(write({"a.fc.weight": d.f32_tensor(w)}), "fp16", tmp_path / "out.safetensors")


def test_missing_scale(sample: Any, write: Write, fails: Any, tmp_path: Path) -> None:
    for name, suffix in (
        ("nvfp4", "weight_scale_2"),
        ("int8_row", "weight_scale"),
        ("w4a8", "weight_s_channel"),
    ):
        tensors = sample(name, 128, 256).named("a.fc")
        del tensors[f"a.fc.{suffix}"]
        path = write(tensors)
        error = fails("no known format", path, "comfy_nvfp4", tmp_path / "out.safetensors")
        assert error.layer == "a.fc" and suffix in error.line()


def test_sources_that_are_no_sources(source: Path, fails: Any, tmp_path: Path) -> None:
    whole = source.read_bytes()
    for data in (b"", b"{}", whole[:-1], whole[:100], whole + b"\0", b"\0" * 1000):
        source.write_bytes(data)
        assert str(source) in fails(".", source, "bf16", tmp_path / "out.safetensors").line()
    fails("no such file", tmp_path / "none.safetensors", "bf16", code=2)


def test_the_source_itself_is_never_the_target(source: Path, fails: Any, tmp_path: Path) -> None:
    hard, soft = tmp_path / "hard.safetensors", tmp_path / "soft.safetensors"
    os.link(source, hard)
    soft.symlink_to(source)
    (tmp_path / "sub").mkdir()
    for target in (source, hard, soft, tmp_path / "sub" / ".." / "in.safetensors"):
        fails("same file", source, "bf16", target, force=True, code=2)


def test_what_exists_stays(source: Path, fails: Any, convert: Convert, tmp_path: Path) -> None:
    there = tmp_path / "out.safetensors"
    there.write_bytes(b"precious")
    fails("already exists", source, "bf16", there, code=2)
    there.chmod(0o600)
    assert convert(source, "bf16", there, force=True).output == there
    assert there.read_bytes() != b"precious"
    (tmp_path / "broken.safetensors").symlink_to(tmp_path / "nowhere" / "x")
    fails(".", source, "bf16", tmp_path / "broken.safetensors")


def test_force_keeps_the_old_file_until_the_new_one_is_right(
    rng: Rng, d: ModuleType, write: Write, fails: Any, tmp_path: Path
) -> None:
    w = d.weights(rng, 128, 64)
    w[3, 3] = np.nan
    there = tmp_path / "out.safetensors"
    there.write_bytes(b"precious")
    fails("NaN or Inf", write({"a.weight": d.f32_tensor(w)}), "comfy_fp8", there, force=True)
    assert there.read_bytes() == b"precious"


def test_folders_that_cannot_be_written(source: Path, fails: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    error = fails("cannot be written", source, "bf16", tmp_path / "file" / "out.safetensors")
    assert str(tmp_path / "file") in error.line()
    if os.getuid():
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        fails("cannot be written", source, "bf16", closed / "out.safetensors")


def test_no_space(source: Path, fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5000, 5000))
    error = fails("not enough space", source, "bf16", tmp_path / "out.safetensors")
    assert "found 0.00 GB free" in error.line()


@pytest.mark.parametrize("after", [0, 3])
def test_space_that_runs_out_while_writing(
    after: int, source: Path, fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    true, calls = os.pwrite, [0]

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    fails("No space left", source, "comfy_nvfp4", tmp_path / "out.safetensors", jobs=2)


def test_a_source_that_changes_while_it_is_read(
    source: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = execute.Executor.run

    def run(self: Any, *args: Any) -> Any:
        result = true(self, *args)
        os.utime(source)
        return result

    monkeypatch.setattr(execute.Executor, "run", run)
    with pytest.raises(QConvertError, match="source changed"):
        convert(source, "comfy_nvfp4", tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_what_the_runtime_would_refuse_is_not_written(
    source: Path, fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qconvert.runtime.contracts.base import Verdict, Violation
    from qconvert.runtime.contracts.sglang import SglangContract

    no = Verdict("sglang-0.5.23", None, (), (Violation("refuse", "test", "it will not have it"),))
    monkeypatch.setattr(SglangContract, "check", lambda self, view, tp=1: no)
    error = fails(
        "would not take the result: it will not have it", source, "comfy_nvfp4", tmp_path / "o.safetensors"
    )
    assert error.file == str(tmp_path / "o.safetensors")


@pytest.mark.parametrize("what", ["scales", "nibbles", "rows"])
def test_a_fault_in_what_was_written_is_noticed(
    what: str, source: Path, fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes that are right, stored wrongly: the file is read back before it gets its name."""
    from qconvert.formats.nvfp4 import Nvfp4

    true = Nvfp4.store

    def store(self: Any, codes: Any, options: Any, k: int) -> Any:
        out = true(self, codes, options, k)
        if what == "scales":
            out["weight_scale"] = np.ascontiguousarray(out["weight_scale"][:, ::-1])
        elif what == "nibbles":
            out["weight"] = out["weight"] << 4 | out["weight"] >> 4
        else:
            out["weight"] = np.roll(out["weight"], 1, axis=0)
        return out

    monkeypatch.setattr(Nvfp4, "store", store)
    error = fails(
        "does not read back as what was encoded", source, "comfy_nvfp4", tmp_path / "out.safetensors"
    )
    assert error.layer in ("blocks.0.a", "blocks.0.b")


@pytest.mark.parametrize("at", [0, -1], ids=["first byte", "last byte"])
def test_a_fault_in_what_was_copied_is_noticed(
    sample: Any, write: Write, fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The codes of a re-tagged layer, one bit of them flipped on the way."""
    path = write(sample("nvfp4", 128, 64).named("fc"))
    copied = execute.copy_run

    def flipped(checkpoint: Any, file: int, start: int, out: Any, offset: int, size: int) -> None:
        copied(checkpoint, file, start, out, offset, size)
        where = offset if at == 0 else offset + size - 1
        os.pwrite(out.fd, bytes([os.pread(out.fd, 1, where)[0] ^ 1]), where)

    monkeypatch.setattr(execute, "copy_run", flipped)
    error = fails("was not copied as it is", path, "comfy_nvfp4", tmp_path / "out.safetensors")
    assert error.layer == "fc"


def test_strict(sample: Any, write: Write, fails: Any, convert: Convert, tmp_path: Path) -> None:
    guess = write(sample("fp8_cast", 128, 64).named("a"))
    error = fails("--strict refuses a guess", guess, "comfy_nvfp4", tmp_path / "out.safetensors", strict=True)
    assert error.layer == "a"
    repair = write(sample("fp8_bf16_scale", 128, 64).named("a"), name="repair.safetensors")
    assert convert(repair, "comfy_nvfp4", tmp_path / "out.safetensors", strict=True)


def test_what_is_asked_for_makes_sense(source: Path, fails: Any, tmp_path: Path) -> None:
    fails("unknown target 'nvfp5'.*qconvert targets", source, "nvfp5", code=2)
    fails("does not serve", source, "comfy_nvfp4", runtime="comfyui", code=2)
    fails("no meaning", source, "bf16", runtime="comfyui", code=2)


def test_the_rename_after_writing_does_not_overwrite_what_appeared(
    source: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "out.safetensors"
    true = output.OutputFile.commit

    def commit(self: Any) -> None:
        there.write_bytes(b"precious")
        true(self)

    monkeypatch.setattr(output.OutputFile, "commit", commit)
    with pytest.raises(QConvertError):
        convert(source, "bf16", there)
    assert there.read_bytes() == b"precious"
