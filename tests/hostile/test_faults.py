"""Every call to the system fails in turn: never a wrong or partial file, always one line that says why, and resumable.

The calls are wrapped in this process and counted; run number n lets call number n of one name fail in one way. Names
that only tidy up may fail without failing the job, in which case the output must be right.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from qconvert.convert import copying, execute, job, journal

pytest.importorskip("torch")
pytest.importorskip("safetensors")
if not hasattr(os, "preadv"):
    pytest.skip("wraps positional reads", allow_module_level=True)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))
plain: Any = importlib.import_module("fuzz_seeds").plain

WRITES = ("pwrite", "write", "ftruncate", "posix_fallocate", "fdatasync", "fsync", "copy_file_range")
NAMES = ("link", "replace", "unlink", "open", "mkdir", "chmod")
#: What a failure says, by the error that is injected.
SAYS = {errno.EIO: "Input/output error", errno.ENOSPC: "No space left", errno.EACCES: "Permission denied"}
JOBS = {
    "one file": ("comfy_nvfp4",),
    "shards": ("fp16", "--shard-size", "100KB"),
    "a folder": ("auto_gptq",),
}


class Fault:
    """Lets call number `at` of an os function fail with an error, or come short; 0: only counts."""

    def __init__(self, name: str, kind: int | str, at: int) -> None:
        self.name, self.kind, self.at = name, kind, at
        self.calls = 0
        self._real: Callable[..., Any] = getattr(os, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._counts(args):
            return self._real(*args, **kwargs)
        self.calls += 1
        if self.calls != self.at:
            return self._real(*args, **kwargs)
        if isinstance(self.kind, int):
            raise OSError(self.kind, os.strerror(self.kind), None)
        return self._short(*args)

    def _counts(self, args: tuple[Any, ...]) -> bool:
        """Opening the source is not what is tested here, and the interpreter opens modules as well."""
        return self.name != "open" or str(args[0]).endswith((".partial", ".journal"))

    def _short(self, *args: Any) -> Any:
        if self.name == "preadv":
            descriptor, (view,), offset = args
            return self._real(descriptor, [view[: max(1, len(view) // 3)]], offset)
        if self.name == "copy_file_range":
            source, target, count, *rest = args
            return self._real(source, target, max(1, count // 3), *rest)
        descriptor, data, *rest = args
        return self._real(descriptor, data[: max(1, len(data) // 3)], *rest)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "in.safetensors"
    path.parent.mkdir()
    import numpy as np

    path.write_bytes(plain(np.random.default_rng(9)).bytes())
    return path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(execute, "PIECE_ELEMENTS", 1 << 13)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def arguments(what: str, source: Path, out: Path) -> list[object]:
    target, *more = JOBS[what]
    name = out if what == "a folder" else out / "model.safetensors"
    return [source, "--to", target, "-o", name, "--jobs", "1", *more]


def numbers(calls: int) -> list[int]:
    """Call numbers to fail at: all of a few, else the first and last ones and some between, and one too many."""
    chosen = range(1, calls + 1)
    if calls > 12:
        chosen = sorted({*range(1, 4), *range(4, calls - 3, calls // 4), *range(calls - 3, calls + 1)})
    return [*chosen, calls + 1]


def faults() -> list[tuple[str, int | str]]:
    return [
        *((name, kind) for name in WRITES for kind in (errno.EIO, errno.ENOSPC)),
        *((name, errno.EACCES) for name in NAMES),
        *((name, "short") for name in ("pwrite", "write", "copy_file_range", "preadv")),
        ("preadv", errno.EIO),
    ]


@pytest.mark.parametrize("what", JOBS)
@pytest.mark.parametrize(("name", "kind"), faults(), ids=lambda value: errno.errorcode.get(value, str(value)))
def test_each_call_in_turn(
    what: str,
    name: str,
    kind: int | str,
    source: Path,
    tmp_path: Path,
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = tmp_path / "whole"
    counted = Fault(name, kind, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, counted)
        assert run(*arguments(what, source, whole)).code == 0
    right, original = tree(whole), source.read_bytes()
    # Without files beside the tensors, some names are never called.
    assert counted.calls or name in ("replace", "copy_file_range", "mkdir")
    for number in numbers(counted.calls):
        fault = Fault(name, kind, number)
        out = tmp_path / f"out{number}"
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fault)
            ran = run(*arguments(what, source, out))
        there = tree(out) if out.exists() else {}
        named = {key: data for key, data in there.items() if not Path(key).name.startswith(".")}
        # Whatever stands under a final name is right; after a failure nothing does.
        assert all(right[key] == data for key, data in named.items()), fault.at
        if ran.code == 0:
            assert named == right, fault.at
        else:
            assert ran.code == 1 and not named, (fault.at, ran, named.keys())
            lines = ran.err.strip().splitlines()
            assert len(lines) == 1 and lines[0].startswith("qconvert: "), ran.err
            assert "a fault of qconvert" not in ran.err
            assert isinstance(kind, int) and SAYS[kind] in ran.err, ran.err
            again = run(*arguments(what, source, out), "--resume")
            assert again.code == 0, again.err
            assert {k: v for k, v in tree(out).items() if not k.startswith(".")} == right
        if kind == "short":
            assert ran.code == 0, ran.err
        assert source.read_bytes() == original


def test_a_source_that_is_cut_while_it_is_read(
    source: Path, tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every read in turn, the rest of the source goes."""
    data = source.read_bytes()
    real = os.preadv
    monkeypatch.setattr(copying, "copy_in_kernel", lambda *_: False)
    for number in range(1, 12):
        source.write_bytes(data)
        calls = 0

        def cutting(descriptor: int, views: Any, offset: int, number: int = number) -> int:
            nonlocal calls
            calls += 1
            if calls == number:
                os.truncate(source, offset)
            return real(descriptor, views, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", cutting)
            ran = run(source, "--to", "comfy_nvfp4", "-o", tmp_path / "o" / "x.safetensors", "--jobs", "1")
        if calls < number:
            break
        assert ran.code == 1 and "in.safetensors" in ran.err and ran.err.count("\n") == 1, ran.err
        assert not (tmp_path / "o" / "x.safetensors").exists()
    assert number > 5


def test_a_source_that_changes_while_it_is_read(
    source: Path, tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def touching(descriptor: int, views: Any, offset: int) -> int:
        with source.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        os.utime(source, ns=(1, 1))
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", touching)
    ran = run(source, "--to", "comfy_nvfp4", "-o", tmp_path / "x.safetensors", "--jobs", "1")
    assert ran.code == 1 and "changed while it was being read" in ran.err
    assert not (tmp_path / "x.safetensors").exists()


def test_an_open_file_cannot_be_renamed_elsewhere(
    source: Path, tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: no rename, and no removal, while a descriptor is open on the file."""
    if sys.platform != "linux":
        pytest.skip("looks into /proc")

    def held(path: Any) -> bool:
        return any(link.exists() and link.samefile(path) for link in Path("/proc/self/fd").iterdir())

    for name in ("replace", "unlink", "rename"):
        real = getattr(os, name)

        def strict(path: Any, *rest: Any, real: Callable[..., Any] = real) -> Any:
            if Path(path).exists() and held(path):
                raise PermissionError(errno.EACCES, "The process cannot access the file", str(path))
            return real(path, *rest)

        monkeypatch.setattr(os, name, strict)

    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr("qconvert.convert.output.RENAMES_OPEN_FILES", False)
    for words in ((), ("--force",)):
        ran = run(source, "--to", "comfy_nvfp4", "-o", tmp_path / "o" / "x.safetensors", *words)
        assert ran.code == 0, ran.err
        assert [p.name for p in (tmp_path / "o").iterdir()] == ["x.safetensors"]
    # A refused job leaves nothing there, too.
    monkeypatch.setattr(job, "gate", lambda *_: (_ for _ in ()).throw(job.QConvertError("refused")))
    ran = run(source, "--to", "comfy_nvfp4", "-o", tmp_path / "p" / "x.safetensors")
    assert ran.code == 1 and list((tmp_path / "p").iterdir()) == []
