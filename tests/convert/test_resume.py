"""A conversion that is killed goes on where it stopped, and gives the bytes it would have given."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structured as s
from qconvert.convert import execute, journal, output
from qconvert.convert.cli import main
from qconvert.convert.identity import plan_digest
from qconvert.convert.job import Request, plan_job, run_job
from qconvert.convert.journal import Journal, StaleError
from qconvert.convert.output import LockedError, OutputFile
from qconvert.convert.plan import PlanOptions
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError, TransferError, UsageError
from qconvert.formats.layers import parse_assumption

import qconvert

KILLS = int(os.environ.get("QCONVERT_KILLS", "10"))
HOST = Path(__file__).with_name("resume_host.py")
TARGET = "comfy_nvfp4"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    weights = {name: w for name, w in s.network().items() if not name.startswith(("layers.2", "layers.3"))}
    tensors = {f"{name}.weight": s.bf16(w) for name, w in weights.items()}
    return Path(s.write(tmp_path / "source.safetensors", tensors))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, each noted at once."""
    monkeypatch.setattr(journal, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(execute, "PIECE_ELEMENTS", 1 << 13)


def run(source: Path, path: Path, stop_after: int | None = None, **request: Any) -> None:
    """Convert; `stop_after`: interrupted, as by Ctrl-C, after so many pieces."""
    left = stop_after

    def progress(done: int) -> None:
        nonlocal left
        if left is not None:
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

    with opened(source) as checkpoint:
        run_job(Request(source, TARGET, output=path, jobs=1, **request), checkpoint, progress)


def main_code(words: list[str]) -> Any:
    """The exit code of `qconvert WORDS`."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    return stop.value.code


def noted(path: Path) -> list[str]:
    lines = path.with_name(f".{path.name}.journal").read_text().splitlines()
    return [json.loads(line)["key"] for line in lines[1:]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked children")
@pytest.mark.parametrize("mode", ["times", "steps"])
def test_killed_at_any_moment_and_resumed_gives_the_same_bytes(
    original: Path, tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "out" / "out.safetensors"
    words = [str(original), str(path), mode, str(KILLS), "1"]
    done = subprocess.run([sys.executable, str(HOST), *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == KILLS
    assert sum(r["killed"] for r in rounds) >= KILLS // 2
    # Work was really taken over, not only begun anew.
    assert sum(r["killed"] and r["noted"] > 0 for r in rounds) >= KILLS // 5
    for r in rounds:
        assert not r["early"] and r["again"] == 0 and r["same"] and not r["leftover"], (r, done.stderr)


@pytest.mark.usefixtures("small")
def test_only_unfinished_pieces_are_redone(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "out.safetensors", tmp_path / "whole.safetensors"
    run(original, whole)
    with pytest.raises(KeyboardInterrupt):
        run(original, path, stop_after=20)
    assert not path.exists()
    before = noted(path)
    assert len(before) >= 20
    added: list[str] = []
    add = Journal.add

    def counting(self: Journal, key: str, **facts: Any) -> None:
        added.append(key)
        add(self, key, **facts)

    monkeypatch.setattr(Journal, "add", counting)
    run(original, path, resume=True)
    assert added and not set(added) & set(before)
    assert path.read_bytes() == whole.read_bytes()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


@pytest.mark.usefixtures("small")
def test_what_is_taken_over_is_said(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.safetensors"
    words = [str(original), "--to", TARGET, "-o", str(path), "--jobs", "1"]
    with pytest.raises(KeyboardInterrupt):
        run(original, path, stop_after=20)
    pieces = len(noted(path))
    assert main_code([*words, "--resume"]) == 0
    assert f"resumed   {pieces} pieces that an earlier run had finished" in capsys.readouterr().out
    assert main_code([*words, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pieces_taken_over"] == 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("change", ["source", "touched", "plan", "version"])
def test_another_source_plan_or_version_is_not_continued(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = tmp_path / "out.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(original, path, stop_after=10)
    partial = path.with_name(f".{path.name}.partial")
    before, options = partial.read_bytes(), {}
    if change == "source":
        tensors = s.read(original)
        tensors["extra.weight"] = s.bf16(s.network()["norm"])
        s.write(original, tensors)
    elif change == "touched":
        # Same header, same size: only the time says that the payload may be another.
        facts = original.stat()
        os.utime(original, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    elif change == "plan":
        options["plan"] = PlanOptions(quality="fast")
    else:
        monkeypatch.setattr(qconvert, "__version__", "99.0")
    with pytest.raises(StaleError, match="another source, plan or version"):
        run(original, path, resume=True, **options)
    assert partial.read_bytes() == before and not path.exists()
    run(original, path, **options)
    assert path.exists() and not partial.exists()


def test_another_reading_of_the_source_is_another_plan(tmp_path: Path) -> None:
    """Same source, same output tensors; only how the codes are read differs."""
    file = s.write(
        tmp_path / "int8.safetensors",
        s.int8_file(s.network(), rotated=True, mark={"format": "int8_tensorwise"}),
    )
    digests = set()
    for group in (16, 64):
        text = f"mlp.up_proj=int8_tensorwise,convrot=true,convrot_groupsize={group}"
        with opened(file) as checkpoint:
            plan, _ = plan_job(Request(file, "bf16", assume=(parse_assumption(text),)), checkpoint)
        digests.add(plan_digest(plan))
    assert len(digests) == 2


def test_the_digest_of_a_plan_stays(tmp_path: Path) -> None:
    """Another one would keep every unfinished output from being continued, and call every finished one stale."""
    mark = {"format": "int8_tensorwise"}
    file = s.write(tmp_path / "int8.safetensors", s.int8_file(s.network(), rotated=True, mark=mark))
    with opened(file) as checkpoint:
        plan, _ = plan_job(Request(file, "bf16"), checkpoint)
    # Metadata hold the version and the source's own name.
    known = replace(plan, contracts=(), metadata={"größe": "1 µm"})
    assert plan_digest(known) == "2cd778eea98b0186a1443e1042e124d8799c404b7c45e1ae1b6e95da6abdcb69"


@pytest.mark.usefixtures("small")
def test_notes_without_their_bytes_are_not_believed(original: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "out.safetensors", tmp_path / "whole.safetensors"
    run(original, whole)
    with pytest.raises(KeyboardInterrupt):
        run(original, path, stop_after=20)
    path.with_name(f".{path.name}.partial").unlink()
    run(original, path, resume=True)
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.usefixtures("small")
def test_a_torn_journal_is_believed_up_to_the_tear(original: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "out.safetensors", tmp_path / "whole.safetensors"
    run(original, whole)
    for tail in (b'{"key":"copy:', b"\0" * 40 + b"\n" + b'{"key":"copy:0"}\n', b"[]\n"):
        with pytest.raises(KeyboardInterrupt):
            run(original, path, stop_after=20)
        file = path.with_name(f".{path.name}.journal")
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(lines[:10]) + tail)
        run(original, path, resume=True)
        assert path.read_bytes() == whole.read_bytes()
        path.unlink()


def test_garbage_left_under_the_partial_name_does_not_shine_through(original: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "out.safetensors", tmp_path / "whole.safetensors"
    run(original, whole)
    path.with_name(f".{path.name}.partial").write_bytes(b"\xa5" * (whole.stat().st_size + 999))
    run(original, path)
    assert path.read_bytes() == whole.read_bytes()


def test_a_finished_file_still_linked_to_the_partial_name_is_not_written_to(
    original: Path, tmp_path: Path
) -> None:
    """Killed between link and unlink: both names are one file."""
    path = tmp_path / "out.safetensors"
    run(original, path)
    finished = path.read_bytes()
    os.link(path, path.with_name(f".{path.name}.partial"))
    with pytest.raises(UsageError, match="already exists"):
        run(original, path, resume=True)
    with pytest.raises(KeyboardInterrupt):
        run(original, path, stop_after=1, force=True, plan=PlanOptions(quality="fast"))
    assert path.read_bytes() == finished


@pytest.mark.parametrize("left", ["nothing", "link", "journal", "index"])
def test_what_an_earlier_run_had_finished_is_recognised(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    """Killed at the very end: every file has its name, what belongs to the run lies about, or an index is missing."""
    path = tmp_path / "out" / "out.safetensors"
    words = [str(original), "--to", "bf16" if left == "index" else TARGET, "-o", str(path)]
    words += ["--shard-size", "100KB"] if left == "index" else []
    assert main_code(words) == 0
    files = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    times = {file.name: file.stat().st_mtime_ns for file in path.parent.glob("*.safetensors")}
    if left == "link":
        os.link(path, path.with_name(f".{path.name}.partial"))
    if left in ("link", "journal"):
        path.with_name(f".{path.name}.journal").write_text("{}")
    if left == "index":
        assert len(times) > 1
        (path.parent / f"{path.name}.index.json").unlink()
    capsys.readouterr()
    assert main_code([*words, "--resume"]) == 0
    said = capsys.readouterr().out
    assert "was finished by an earlier run; `qconvert verify --digest " in said and "closeness" not in said
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == files
    assert {file.name: file.stat().st_mtime_ns for file in path.parent.glob("*.safetensors")} == times
    assert main_code(shlex.split(said.partition("`")[2].partition("`")[0])[1:]) == 0


@pytest.mark.parametrize("change", ["plan", "source", "bytes", "partial"])
def test_another_file_is_not_taken_for_a_finished_one(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    path = tmp_path / "out.safetensors"
    words = [str(original), "--to", TARGET, "-o", str(path)]
    assert main_code(words) == 0
    other = path.with_name(f".{path.name}.partial")
    if change == "plan":
        words += ["--quality", "fast"]
    elif change == "source":
        later = path.stat().st_mtime_ns + 1_000_000_000
        os.utime(original, ns=(later, later))
    elif change == "bytes":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        other.write_bytes(b"another run's")
    before = path.read_bytes()
    capsys.readouterr()
    if change == "partial":
        assert main_code([*words, "--resume"]) == 0
        assert other.read_bytes() == b"another run's"
    else:
        assert main_code([*words, "--resume"]) == 2
        assert "already exists; --force overwrites it" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_two_runs_on_one_target_exclude_each_other(original: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    descriptor = os.open(path.with_name(f".{path.name}.partial"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(LockedError, match="another qconvert is writing this file"):
        run(original, path)
    assert path.with_name(f".{path.name}.partial").exists()
    os.close(descriptor)
    run(original, path)
    assert path.exists()


def test_who_waits_out_another_run_does_not_write_into_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run renames the partial file after this one opened it and before it holds the lock."""
    path, real = tmp_path / "out.safetensors", output.lock
    theirs = path.with_name(f".{path.name}.partial")
    theirs.write_bytes(b"finished by the other run")

    def late(descriptor: int, file: Path) -> None:
        if theirs.exists() and not path.exists():
            theirs.rename(path)
        real(descriptor, file)

    monkeypatch.setattr(output, "lock", late)
    with OutputFile(path, 10, digest="x", force=True, resume=False) as mine:
        mine.write(b"0123456789", 0)
        assert path.read_bytes() == b"finished by the other run"
        mine.commit()
    assert path.read_bytes() == b"0123456789"


@pytest.mark.parametrize(("error", "kept"), [(QConvertError, False), (TransferError, True)])
def test_what_may_pass_is_kept_what_will_not_is_removed(
    tmp_path: Path, error: type[QConvertError], kept: bool
) -> None:
    path = tmp_path / "out.safetensors"
    with pytest.raises(error), OutputFile(path, 10, digest="x", force=False, resume=False):
        raise error("no")
    assert bool(list(tmp_path.iterdir())) == kept
