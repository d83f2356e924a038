"""A shelf of checkpoints: one broken file does not stop the others, and a second run does what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structured as s
from qconvert.convert import batch
from qconvert.convert.cli import main
from qconvert.convert.job import Request, run_job
from qconvert.formats.checkpoint import opened

SCRIPT = Path(__file__).parents[2] / "scripts" / "batch"


TARGETS = ["comfy_nvfp4", "comfy_fp8", "bf16"]


def write(path: Path, seed: int) -> None:
    weights = {
        n: w for n, w in s.network(seed).items() if not n.startswith(("layers.1", "layers.2", "layers.3"))
    }
    s.write(path, {f"{name}.weight": s.bf16(w) for name, w in weights.items()})


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Four sources; with three targets, twelve jobs."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for seed in range(4):
        write(folder / f"model{seed}.safetensors", seed)
    return folder


def jobs_file(folder: Path, text: str) -> Path:
    path = folder / "jobs.toml"
    path.write_text(text)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(["batch", *map(str, words)])
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out + out.err


TWELVE = """
output = "done"
[options]
quality = "fast"
[[job]]
source = "shelf/model[0-2].safetensors"
target = ["comfy_nvfp4", "comfy_fp8", "bf16"]
[[job]]
source = "shelf/model3.safetensors"
target = ["comfy_nvfp4", "comfy_fp8"]
[[job]]
source = "shelf/broken.safetensors"
target = "comfy_nvfp4"
"""


def test_twelve_jobs_with_one_broken_source(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, done = jobs_file(tmp_path, TWELVE), tmp_path / "done"
    broken = shelf / "broken.safetensors"
    write(broken, 9)
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    code, said = run(capsys, file)
    assert code == 1
    assert "12 jobs: 11 converted, 0 finished before, 1 failed" in said
    assert "space     " in said and "broken.safetensors" in said
    files = sorted(done.iterdir())
    assert len(files) == 11
    for path in files:
        stem, target, _ = path.name.split(".")
        one = tmp_path / "one.safetensors"
        request = Request(shelf / f"{stem}.safetensors", target, output=one, force=True)
        request = request.__class__(**{**vars(request), "plan": request.plan.__class__(quality="fast")})
        with opened(request.source) as checkpoint:
            run_job(request, checkpoint)
        assert path.read_bytes() == one.read_bytes()

    # The source is mended; only its job runs.
    broken.write_bytes(whole)
    times = {path: path.stat().st_mtime_ns for path in files}
    ran: list[Request] = []

    def counting(request: Request, *rest: Any) -> Any:
        ran.append(request)
        return run_job(request, *rest)

    monkeypatch.setattr(batch, "run_job", counting)
    code, said = run(capsys, file, "--json")
    report = json.loads(said)
    assert code == 0 and report["ok"] and [r.source.name for r in ran] == ["broken.safetensors"]
    assert [job["status"] for job in report["jobs"]] == ["finished"] * 11 + ["converted"]
    last = report["jobs"][-1]
    assert last["sqnr_db"] > 15 and last["output_bytes"] == Path(last["output"]).stat().st_size
    assert {path: path.stat().st_mtime_ns for path in files} == times
    assert len(list(done.iterdir())) == 12


def test_dry_run_writes_nothing(shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = jobs_file(
        tmp_path, '[[job]]\nsource = "shelf"\ntarget = ["comfy_nvfp4", "bf16"]\noutput = "done"\n'
    )
    code, said = run(capsys, file, "--dry-run")
    assert code == 0 and said.count(" new") == 8 and "to write" in said
    assert (
        sorted(p.name for p in tmp_path.iterdir()) == ["jobs.toml", "shelf"]
        and len(list(shelf.iterdir())) == 4
    )


def test_outputs_beside_their_sources_are_no_sources(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = jobs_file(tmp_path, '[[job]]\nsource = "shelf/*.safetensors"\ntarget = "comfy_fp8"\n')
    assert run(capsys, file)[0] == 0
    code, said = run(capsys, file)
    assert code == 0 and "4 jobs: 0 converted, 4 finished before" in said


def test_half_done_is_continued_and_stale_is_made_anew(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[[job]]\nsource = "shelf/model0.safetensors"\ntarget = "comfy_nvfp4"\noutput = "done"\n'
    file, out = jobs_file(tmp_path, text), tmp_path / "done" / "model0.comfy_nvfp4.safetensors"
    source = shelf / "model0.safetensors"

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    for spoil in (False, True):
        with pytest.raises(KeyboardInterrupt), opened(source) as checkpoint:
            run_job(Request(source, "comfy_nvfp4", output=out, resume=True, jobs=1), checkpoint, interrupt)
        if spoil:
            write(source, 7)
        code, said = run(capsys, file)
        assert code == 0 and "half done" in said and "1 converted" in said
        assert not [p for p in out.parent.iterdir() if p.name.startswith(".")]
        out.unlink()


def test_changed_payload_under_the_same_header_is_seen(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[[job]]\nsource = "shelf/model0.safetensors"\ntarget = "comfy_nvfp4"\noutput = "done"\n'
    file, source = jobs_file(tmp_path, text), shelf / "model0.safetensors"
    assert run(capsys, file)[0] == 0
    write(source, 7)
    os.utime(source, ns=(2**62, 2**62))
    code, said = run(capsys, file)
    assert code == 1 and "already exists" in said
    assert run(capsys, file, "--force")[0] == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no [[job]]"),
        ("[[job]", "not valid TOML"),
        ("bogus = 1", "unknown key 'bogus'"),
        ('[[job]]\nsource = "shelf"\ntarget = "no_such_target"', "no_such_target"),
        ('[[job]]\nsource = "shelf"', "target is None"),
        ('[[job]]\nsource = []\ntarget = "bf16"', "source is []"),
        ('[[job]]\nsource = "nothing/*.gguf"\ntarget = "bf16"', "matches nothing"),
        (
            '[[job]]\nsource = "shelf"\ntarget = "bf16"\nkeeep = ["x"]',
            "unknown key 'keeep'; did you mean keep?",
        ),
        ('[[job]]\nsource = "shelf"\ntargets = "bf16"', "did you mean target?"),
        ('[[job]]\nsource = "shelf"\nto = "bf16"', "; one of source, target, output, runtime,"),
        ('[options]\ntarget = "bf16"\n[[job]]\nsource = "shelf"', "; one of runtime, keep,"),
        ('[[job]]\nsource = "shelf"\ntarget = "bf16"\nkeep = "x"', "expected a list of strings"),
        (
            '[options]\nquality = "good"\n[[job]]\nsource = "shelf"\ntarget = "bf16"',
            "expected one of fast, best",
        ),
        ('[[job]]\nsource = "shelf"\ntarget = "bf16"\nstrict = 1', "expected true or false"),
        ('[[job]]\nsource = "shelf"\ntarget = "bf16"\nmemory = "much"', "is not a size"),
        ('[[job]]\nsource = "shelf"\ntarget = ["bf16", "bf16"]', "two jobs write"),
        ('[[job]]\nsource = "shelf/\\u0000"\ntarget = "bf16"', "a NUL character"),
        ('[[job]]\nsource = ["shelf", "a\\u0000"]\ntarget = "bf16"', "a NUL character"),
        ('[[job]]\nsource = "shelf"\ntarget = "bf16"\noutput = "\\u0000"', "a NUL character"),
        ('[[job]]\nsource = "shelf"\ntarget = "bf16"\ncalibration = "c\\u0000"', "a NUL character"),
        ('[options]\nrecipe = "r\\u0000"\n[[job]]\nsource = "shelf"\ntarget = "bf16"', "a NUL character"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    good = '[[job]]\nsource = "shelf/model1.safetensors"\ntarget = "bf16"\noutput = "done"\n'
    file = jobs_file(tmp_path, f"{text}\n{good}" if text.startswith(("[[job]]\n", "[options]\n")) else text)
    code, said = run(capsys, file)
    assert code == 2 and problem in said
    assert not (tmp_path / "done").exists() and len(list(shelf.iterdir())) == 4


def test_space_for_all_outputs_is_asked_for_first(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = batch.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(batch.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    file = jobs_file(tmp_path, '[[job]]\nsource = "shelf"\ntarget = "bf16"\noutput = "done"\n')
    code, said = run(capsys, file)
    assert code == 1 and "not enough space for all outputs" in said and not (tmp_path / "done").exists()


def test_script_takes_a_pattern_and_a_folder(shelf: Path, tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "shelf/model[01].*", "done", "comfy_fp8,bf16"]
    for said in ("4 converted", "4 finished before"):
        ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert ran.returncode == 0 and said in ran.stdout, ran.stdout + ran.stderr
    assert len(list((tmp_path / "done").iterdir())) == 4
