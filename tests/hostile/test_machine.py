"""Signals, odd names and places, links, permissions: conversions end cleanly, and say why."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qconvert.convert import copying, execute, journal, output
from qconvert.convert.cli import main

pytest.importorskip("torch")
pytest.importorskip("safetensors")
if sys.platform == "win32":
    pytest.skip("signals and permissions of Unix", allow_module_level=True)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))
seeds: Any = importlib.import_module("fuzz_seeds")
Run = Callable[..., Any]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    path.write_bytes(seeds.plain(np.random.default_rng(9)).bytes())
    return path


@pytest.fixture
def wanted(source: Path, tmp_path: Path, run: Run) -> bytes:
    out = tmp_path / "wanted.safetensors"
    assert run(source, "--to", "comfy_nvfp4", "-o", out).code == 0
    return out.read_bytes()


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_signal_ends_cleanly_and_can_be_resumed(
    number: signal.Signals, word: str, jobs: int, source: Path, wanted: bytes, tmp_path: Path, run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(journal, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(execute, "PIECE_ELEMENTS", 1 << 13)
    out = tmp_path / "out.safetensors"
    add = journal.Journal.add
    done = 0

    def signalling(self: journal.Journal, key: str, **facts: Any) -> None:
        nonlocal done
        add(self, key, **facts)
        done += 1
        if done == 3:
            os.kill(os.getpid(), number)

    words = (source, "--to", "comfy_nvfp4", "-o", out, "--jobs", jobs)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "add", signalling)
        ran = run(*words)
    assert ran.code == 128 + number
    assert ran.err.strip() == f"qconvert: {word}; the same command with --resume continues"
    assert not out.exists() and (tmp_path / ".out.safetensors.partial").exists()
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert run(*words, "--resume").code == 0
    assert out.read_bytes() == wanted
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_signal_before_anything_was_written_offers_nothing(
    source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr("qconvert.convert.command.plan_job", killed)
    ran = run(source, "--to", "comfy_nvfp4", "-o", tmp_path / "out.safetensors")
    assert (ran.code, ran.err) == (143, "qconvert: terminated\n")
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize(
    "name",
    [
        "with spaces.safetensors",
        "größe-模型-😀.safetensors",
        "-starts-with-a-dash.safetensors",
        "a\nnewline.safetensors",
        "per%20cent 'quotes\".safetensors",
        "x" * 240 + ".safetensors",
        ("folder " + "y" * 90 + "/") * 4 + "deep.safetensors",
    ],
    ids=lambda name: name[:12].strip(),
)
def test_odd_names_and_long_paths(name: str, source: Path, wanted: bytes, tmp_path: Path, run: Run) -> None:
    there, out = tmp_path / "from" / name, tmp_path / "to" / name
    there.parent.mkdir(parents=True)
    shutil.copyfile(source, there)
    ran = run("convert", there, "--to", "comfy_nvfp4", "-o", out)
    assert ran.code == 0, ran.err
    # The file's own name stands in its header.
    assert len(out.read_bytes()) - len(wanted) < 2000 and out.read_bytes()[-5000:] == wanted[-5000:]
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    assert run("inspect", out).code == 0 and run("check", out).code == 0
    assert run("verify", there, out).code == 0
    refused = run("convert", there, "--to", "comfy_nvfp4", "-o", out)
    assert refused.code == 2 and refused.err.count("\n") == 1


def test_a_name_that_no_system_takes(source: Path, tmp_path: Path, run: Run) -> None:
    ran = run(source, "--to", "comfy_nvfp4", "-o", tmp_path / ("x" * 300 + ".safetensors"))
    assert ran.code == 1 and "File name too long" in ran.err and ran.err.count("\n") == 1
    for path in (tmp_path / ("x" * 300), tmp_path / "no" / "such"):
        ran = run("inspect", path)
        assert ran.code in (1, 2) and ran.err.count("\n") == 1


@pytest.mark.parametrize("link", ["symbolic", "hard", "of the folder"])
def test_links_between_source_and_target(link: str, source: Path, tmp_path: Path, run: Run) -> None:
    data, out = source.read_bytes(), tmp_path / "out.safetensors"
    if link == "symbolic":
        out.symlink_to(source)
    elif link == "hard":
        os.link(source, out)
    else:
        (tmp_path / "same").symlink_to(tmp_path)
        out = tmp_path / "same" / source.name
    ran = run(source, "--to", "comfy_nvfp4", "-o", out, "--force")
    assert ran.code == 2 and "same file" in ran.err
    assert source.read_bytes() == data


def test_links_planted_under_the_unfinished_names_are_not_followed(
    source: Path, tmp_path: Path, run: Run
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    out = tmp_path / "out.safetensors"
    for planted in output.unfinished(out):
        for words in ((), ("--resume",)):
            planted.symlink_to(victim)
            ran = run(source, "--to", "comfy_nvfp4", "-o", out, *words)
            assert ran.code == 1 and ran.err.count("\n") == 1, ran
            assert victim.read_bytes() == b"precious" and not out.exists()
            planted.unlink(missing_ok=True)


def test_a_dangling_link_is_an_existing_name(source: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.safetensors"
    out.symlink_to(tmp_path / "nowhere")
    ran = run(source, "--to", "comfy_nvfp4", "-o", out)
    assert ran.code in (1, 2) and out.is_symlink() and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o640])
def test_permissions_are_the_source_s(mode: int, source: Path, tmp_path: Path, run: Run) -> None:
    source.chmod(mode)
    assert run(source, "--to", "comfy_nvfp4", "-o", tmp_path / "out.safetensors").code == 0
    assert stat.S_IMODE((tmp_path / "out.safetensors").stat().st_mode) == mode


def test_file_and_folder_are_flushed(
    source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes before they get their name, the folder after it."""
    real, seen = os.fsync, []

    def flushed(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        seen.append(("folder" if is_folder else "file", (tmp_path / "out.safetensors").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", flushed)
    assert run(source, "--to", "comfy_nvfp4", "-o", tmp_path / "out.safetensors").code == 0
    assert ("file", False) in seen and seen[-1] == ("folder", True)


@pytest.mark.parametrize("folder", [True, False])
def test_no_permission(
    folder: bool, source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the target's folder, or of the source. Root may do anything, so there the system's answer is made up."""
    if folder:
        place = tmp_path / "locked"
        place.mkdir()
        place.chmod(0o500)
    else:
        source.chmod(0)
    if os.geteuid() == 0:
        refused = place / ".out.safetensors.partial" if folder else source
        for name in ("os.open", "io.open"):
            module = importlib.import_module(name.partition(".")[0])
            real = module.open

            def denied(path: Any, *rest: Any, real: Any = real, **more: Any) -> Any:
                if isinstance(path, str | os.PathLike) and Path(path) == refused:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
                return real(path, *rest, **more)

            monkeypatch.setattr(module, "open", denied)
    out = (place if folder else tmp_path) / "out.safetensors"
    ran = run(source, "--to", "comfy_nvfp4", "-o", out)
    assert ran.code == 1 and "Permission denied" in ran.err and ran.err.count("\n") == 1, ran
    assert not out.exists()


def test_clocks_that_jump_change_nothing(
    source: Path, wanted: bytes, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [2e9]

    def jumping() -> float:
        now[0] = -now[0] * 1.5
        return now[0]

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping()))
    out = tmp_path / "out.safetensors"
    assert run(source, "--to", "comfy_nvfp4", "-o", out).code == 0
    assert out.read_bytes() == wanted


def test_a_full_file_system(source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a tmpfs: there was room when it was asked for, and there is none when bytes are laid down."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("posix_fallocate", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            patch.setattr(copying, "copy_in_kernel", lambda *_: False)
            ran = run(source, "--to", "comfy_nvfp4", "-o", tmp_path / "o" / "out.safetensors")
        assert ran.code == 1 and "No space left on device" in ran.err and ran.err.count("\n") == 1
        assert list((tmp_path / "o").iterdir()) == []


def test_a_pipe_is_neither_source_nor_output(source: Path, tmp_path: Path, run: Run) -> None:
    """Nor a device; and none is waited for, or replaced."""
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    for words in ((), ("--force",)):
        ran = run(source, "--to", "comfy_nvfp4", "-o", pipe, *words)
        assert ran.code == 2 and "no file" in ran.err and pipe.is_fifo()
    for command in ("inspect", "check"):
        ran = run(command, pipe)
        assert ran.code == 2 and ran.err.count("\n") == 1


def test_two_jobs_whose_outputs_differ_in_case_only(source: Path, tmp_path: Path, run: Run) -> None:
    for name in ("A", "a"):
        (tmp_path / name).mkdir()
        shutil.copyfile(source, tmp_path / name / f"{name}x.safetensors")
    entries = "".join(f'[[job]]\nsource = "{n}/{n}x.safetensors"\ntarget = "bf16"\n' for n in ("A", "a"))
    (tmp_path / "jobs.toml").write_text('output = "out"\n' + entries)
    ran = run("batch", tmp_path / "jobs.toml", "--dry-run")
    assert ran.code == 2 and "two jobs write" in ran.err


def test_signals_do_not_reach_a_host_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program's SIGTERM handler stays while qconvert runs inside it."""
    mine = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(SystemExit):
            main(["targets"])
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
