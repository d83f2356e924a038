"""Writing that begins before values were looked at: the same output, and nothing of it where they say otherwise."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structured as s
from qconvert.convert import job, writing
from qconvert.convert.job import Request, execute_plan, head_start, plan_job, run_job
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError

NVFP4 = {"format": "nvfp4"}
#: A re-tag, and two repacks, one of them into a folder.
TARGETS = ["comfy_nvfp4", "modelopt_nvfp4", "comfyui:nvfp4"]
Source = Callable[..., Path]


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    return {"structured": s.network(), "random": s.network(structured=False)}


@pytest.fixture
def made(weights: dict[str, Any], tmp_path: Path) -> Source:
    """made(kind, linear=, low=) -> a file marked as ComfyUI's nvfp4, whatever its layout."""

    def make(kind: str, *, linear: bool = False, low: bool = False) -> Path:
        tensors = s.nvfp4_file(weights[kind], linear=linear, low=low, mark=NVFP4)
        return s.write(tmp_path / f"{kind}-{linear}-{low}.safetensors", tensors)

    return make


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each head start that was made, whether it was taken over in the end."""
    told: list[bool] = []
    begin, taken = writing.HeadStart.begin, writing.HeadStart.taken

    def noted_begin(self: writing.HeadStart, *args: Any) -> None:
        begin(self, *args)
        if self._begun is not None:
            told.append(False)

    def noted_taken(self: writing.HeadStart, *args: Any) -> Any:
        found = taken(self, *args)
        if found is not None:
            told[-1] = True
        return found

    monkeypatch.setattr(writing.HeadStart, "begin", noted_begin)
    monkeypatch.setattr(writing.HeadStart, "taken", noted_taken)
    return told


def tree(path: Path) -> dict[str, bytes]:
    """Every file at or under `path`, what is hidden too."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def by_hand(source: Path, target: str, output: Path, done: list[int] | None = None) -> dict[str, bytes]:
    """The output made without a head start, and its progress."""
    request = Request(source, target, output, jobs=2)
    with opened(source) as checkpoint:
        plan, laid = plan_job(request, checkpoint)
        execute_plan(request, checkpoint, plan, laid, [].append if done is None else done.append, 0.0)
    return tree(output)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kind", "linear", "low"),
    [
        ("structured", False, False),
        ("random", False, False),
        ("structured", True, False),
        ("structured", False, True),
        ("structured", True, True),
    ],
)
def test_the_output_is_that_of_work_begun_after_looking(
    made: Source, heads: list[bool], tmp_path: Path, target: str, kind: str, linear: bool, low: bool
) -> None:
    source = made(kind, linear=linear, low=low)
    progress: list[int] = []
    wanted = by_hand(source, target, tmp_path / "a" / "model", progress)
    assert not heads
    output = tmp_path / "b" / "model"
    done: list[int] = []
    with opened(source) as checkpoint:
        run_job(Request(source, target, output, jobs=2), checkpoint, done.append)
    assert sum(done) == sum(progress) > 0
    assert tree(output) == wanted
    assert [path.name for path in output.parent.iterdir()] == ["model"]
    # Values that contradict the markers: what was begun from them is gone.
    assert heads == [not (linear or low)]


def test_a_refusal_after_looking_leaves_nothing(
    made: Source, heads: list[bool], tmp_path: Path, run: Callable[..., Any]
) -> None:
    source = made("structured", linear=True)
    ran = run(source, "--to", "modelopt_nvfp4", "-o", tmp_path / "out" / "model", "--strict")
    assert ran.code == 1 and "--strict refuses a guess" in ran.err
    assert heads == [False]
    assert not (tmp_path / "out" / "model").exists()
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [source]


def test_a_dry_run_begins_nothing(
    made: Source, heads: list[bool], tmp_path: Path, run: Callable[..., Any]
) -> None:
    source = made("structured")
    before = sorted(tmp_path.rglob("*"))
    assert run(source, "--to", "comfy_nvfp4", "--dry-run").code == 0
    assert sorted(tmp_path.rglob("*")) == before and not heads


def test_what_stands_against_an_output_is_told_in_its_place(
    made: Source, heads: list[bool], tmp_path: Path, run: Callable[..., Any]
) -> None:
    """After the plan, as ever; and the file that is there stays."""
    source, output = made("structured"), tmp_path / "out.safetensors"
    output.write_bytes(b"mine")
    ran = run(source, "--to", "comfy_nvfp4", "-o", output)
    assert ran.code == 2 and "already exists" in ran.err and ran.err.count("already exists") == 1
    assert output.read_bytes() == b"mine" and not heads
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_work_that_fails_meanwhile_fails_the_run(
    made: Source, heads: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise QConvertError("the disk is gone")

    source = made("structured")
    monkeypatch.setattr("qconvert.convert.execute.copy_run", broken)
    request = Request(source, "comfy_nvfp4", tmp_path / "out" / "out.safetensors")
    with opened(source) as checkpoint, pytest.raises(QConvertError, match="the disk is gone"):
        run_job(request, checkpoint)
    assert heads == [True] and not list((tmp_path / "out").iterdir())


def test_a_fault_while_looking_leaves_nothing(
    made: Source, heads: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise QConvertError("cannot be read")

    source = made("structured")
    monkeypatch.setattr(job, "weigh_source", broken)
    request = Request(source, "comfy_nvfp4", tmp_path / "out" / "out.safetensors")
    with opened(source) as checkpoint, pytest.raises(QConvertError, match="cannot be read"):
        run_job(request, checkpoint)
    assert heads == [False] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["comfy_nvfp4", "modelopt_nvfp4"])
def test_folders_made_for_a_draft_go_with_it(
    made: Source, tmp_path: Path, run: Callable[..., Any], target: str
) -> None:
    source = made("structured", linear=True)
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    ran = run(source, "--to", target, "-o", tmp_path / "there" / "new" / "newer" / "model", "--strict")
    assert ran.code == 1 and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("linear", [False, True])
def test_an_interruption_while_looking_can_be_continued(
    made: Source, heads: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linear: bool
) -> None:
    """Also where the values contradict the markers, so that what was begun is not what is made."""
    source = made("structured", linear=linear)
    wanted = by_hand(source, "modelopt_nvfp4", tmp_path / "a" / "model")
    request = Request(source, "modelopt_nvfp4", tmp_path / "b" / "model")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job, "weigh_source", interrupted)
        with opened(source) as checkpoint, pytest.raises(KeyboardInterrupt):
            run_job(request, checkpoint)
    assert heads == [False]
    assert not (tmp_path / "b").exists()
    again = Request(source, "modelopt_nvfp4", tmp_path / "b" / "model", resume=True)
    with opened(source) as checkpoint:
        run_job(again, checkpoint)
    assert tree(tmp_path / "b" / "model") == wanted
    # A run that continues another begins once it knows everything.
    assert heads == [False]


def test_giving_up_ends_the_work(made: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece is begun after the head start was left, and leaving waits for those that run."""
    monkeypatch.setattr("qconvert.convert.execute.PIECE_ELEMENTS", 1 << 10)
    source = made("structured")
    pieces: list[int] = []
    real = writing.Executor._store

    def counted(self: Any, *args: Any) -> None:
        pieces.append(1)
        real(self, *args)

    monkeypatch.setattr(writing.Executor, "_store", counted)
    request = Request(source, "modelopt_nvfp4", tmp_path / "out" / "model", jobs=2)
    with opened(source) as checkpoint:
        with head_start(request, checkpoint) as head:
            plan_job(request, checkpoint, head)
        at_the_end = len(pieces)
        assert not [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert len(pieces) == at_the_end


def test_a_kill_while_looking_can_be_continued(
    made: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun from markers that values contradict is no unfinished output of another plan."""
    monkeypatch.setattr("qconvert.convert.journal.FLUSH_SECONDS", 0.0)
    source, output = made("structured", linear=True), tmp_path / "b" / "model"
    wanted = by_hand(source, "modelopt_nvfp4", tmp_path / "a" / "model")
    left: dict[str, bytes] = {}
    request = Request(source, "modelopt_nvfp4", output, jobs=2)
    real = job.weigh_source

    def looked(*args: Any) -> Any:
        # All is written that can be before the values are known, and nothing is tidied up any more.
        written.wait(30)
        left.update(tree(output))
        return real(*args)

    written = threading.Event()
    run_of = writing.Writing._run

    def told(self: writing.Writing) -> Any:
        try:
            return run_of(self)
        finally:
            written.set()

    with monkeypatch.context() as patch:
        patch.setattr(job, "weigh_source", looked)
        patch.setattr(writing.Writing, "_run", told)
        with opened(source) as checkpoint:
            run_job(request, checkpoint)
    assert {".model.safetensors.partial", ".model.safetensors.journal"} <= set(left)
    shutil.rmtree(output)
    output.mkdir()
    for name in (".model.safetensors.partial", ".model.safetensors.journal"):
        (output / name).write_bytes(left[name])
    with opened(source) as checkpoint:
        run_job(replace(request, resume=True), checkpoint)
    assert tree(output) == wanted


def test_a_thread_whose_start_was_interrupted_is_not_waited_for(
    made: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it begins later or never: nothing is written any more, and nothing is left."""
    late: list[threading.Thread] = []

    def interrupted(self: threading.Thread) -> None:
        late.append(self)
        raise KeyboardInterrupt

    source = made("structured")
    request = Request(source, "comfy_nvfp4", tmp_path / "out" / "model.safetensors", jobs=2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with opened(source) as checkpoint, pytest.raises(KeyboardInterrupt):
            run_job(request, checkpoint)
    assert len(late) == 1 and not (tmp_path / "out").exists()
    late[0].start()
    late[0].join(30)
    assert not late[0].is_alive() and not (tmp_path / "out").exists()
