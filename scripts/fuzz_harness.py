"""Runs one hostile case through the command line, in this process, and says what was wrong with how it ended."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from fuzz_case import Case
from fuzz_remote import PROTOCOL
from qconvert.convert.cli import main
from qconvert.formats import remote
from qconvert.formats.errors import QConvertError
from qconvert.formats.header import read_header
from safetensors import SafetensorError, safe_open

SECONDS = 2.0
#: How a batch tells of a job that failed by what nobody foresaw.
_UNNAMED = re.compile(r"\b[A-Z]\w*(?:Error|Exception): [^\n]{0,80}")
BYTES = 200 << 20
#: How the file is called, after a case's folder, that takes what is written past sys.stderr.
STDERR = ".stderr"


class Hang(BaseException):
    """The case took too long."""


@dataclass(frozen=True)
class Report:
    """How a case ended. `faults`: what must not be; `stricter`: why a file that safetensors opens was refused."""

    category: str
    code: int | None
    seconds: float
    grown: int
    faults: list[str]
    stricter: str | None = None


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises Hang after so much computing (this process's own, so that a busy machine does not count)."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _status(key: str) -> int:
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def settle_libraries() -> None:
    """What libraries keep for themselves, they take now."""
    many = np.ones((512, 512), np.float32)
    many @ many


def limit_memory(more: int = BYTES + (100 << 20)) -> None:
    """Let this process map no more than it has and so many bytes: what is never touched counts, too.

    Before every case: a process of 40,000 has mapped as much in all, and CPython dies where it is given no more.
    """
    resource.setrlimit(
        resource.RLIMIT_AS, (_status("VmSize:") + more, resource.getrlimit(resource.RLIMIT_AS)[1])
    )


@contextlib.contextmanager
def descriptor_2(path: Path) -> Iterator[None]:
    """What is written past sys.stderr, by a library's log or by a crash, goes to a file, which stays when we die."""
    sys.stderr.flush()
    kept, there = os.dup(2), os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(there, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(there)


def run_case(case: Case, folder: Path) -> Report:
    """`folder` is emptied, and stays as the case left it; beside it, what was written past sys.stderr."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    arguments = [
        word.replace("{}", str(folder), 1) if word.startswith(("{}", f"{PROTOCOL}://")) else word
        for word in case.arguments
    ]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="", write_through=True) for _ in "oe")
    Path("/proc/self/clear_refs").write_text("5")
    past = folder.with_name(folder.name + STDERR)
    before, begun = _status("VmRSS:"), _cpu()
    code: int | None = None
    faults: list[str] = []
    try:
        with (
            descriptor_2(past),
            # Nothing is gained by waiting for a file system that lies.
            patch.object(remote, "BACKOFF_SECONDS", 0.0),
            time_limit(SECONDS),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else -1
    except Hang:
        faults.append("hang: " + _where())
    except BaseException as error:
        faults.append(f"traceback: {type(error).__name__}: {str(error)[:120]} {_where()}")
    seconds, grown = _cpu() - begun, _status("VmHWM:") - before
    if grown > BYTES:
        faults.append(f"memory: {grown >> 20} MiB")
    printed, said = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err))
    if code is not None:
        faults += list(_ending(case, code, printed, said))
    if past.stat().st_size:
        faults.append(f"written past sys.stderr: {last_line(past)[:200]}")
    faults += list(_leftovers(case, code, folder))
    stricter = None
    for name in case.compared:
        wrong, stricter = compare(folder / name)
        faults += [wrong] if wrong else []
    return Report(case.category, code, seconds, grown, faults, stricter)


def last_line(path: Path) -> str:
    """Of a file that may be absent or empty: "" then."""
    lines = path.read_text("utf-8", "replace").split("\n") if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _where() -> str:
    frames = [f for f in traceback.extract_tb(sys.exc_info()[2]) if "fuzz_harness" not in f.filename]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-4:]))


def _ending(case: Case, code: int, printed: str, said: str) -> Iterator[str]:
    if code not in (0, 1, 2):
        yield f"exit code {code}"
    if code and not (printed.strip() or said.strip()):
        yield f"exit code {code} without a word"
    if said.startswith("qconvert: ") and said.strip().count("\n"):
        yield f"an error of several lines: {said[:120]!r}"
    if "a fault of qconvert" in said:
        yield "traceback: " + said.partition("report it: ")[2].strip()[:200]
    if "Warning: " in said:
        yield "a warning: " + said.partition("Warning: ")[2].strip()[:120]
    if case.arguments[0] == "batch" and _UNNAMED.search(printed):
        yield f"a job failed by {_UNNAMED.search(printed)}"
    for text in (printed, said):
        if any(char < " " and char not in "\n\r\t" for char in text) or "\x7f" in text:
            yield "control characters on the terminal"
    if "--json" in case.arguments and printed.strip():
        try:
            json.loads(printed, parse_constant=_refuse)
        except ValueError as error:
            yield f"output is no JSON: {error}"


def _refuse(text: str) -> Any:
    raise ValueError(text)


def _leftovers(case: Case, code: int | None, folder: Path) -> Iterator[str]:
    for name, data in case.files.items():
        if not (folder / name).exists() or (folder / name).read_bytes() != data:
            yield f"the input {name} was changed"
    made = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - set(case.files)
    converts = case.arguments[0] in ("convert", "batch")
    if made and (not converts or "--dry-run" in case.arguments):
        yield f"something was written: {sorted(made)[0]}"
    if made and code != 0 and case.arguments[0] == "convert":
        yield f"something was left behind: {sorted(made)[0]}"
    if any(name.endswith((".partial", ".journal")) for name in made):
        yield "temporary files were left behind"


def compare(path: Path) -> tuple[str | None, str | None]:
    """(wrong acceptance, None), (None, why ours is stricter), or (None, None) where both agree."""
    try:
        with safe_open(path, "numpy"):
            theirs = None
    except MemoryError:
        # It maps the file, which the limit on this process may forbid: no answer.
        return None, None
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        theirs = f"{type(error).__name__}: {error}"
    try:
        read_header(path)
    except QConvertError as error:
        return None, None if theirs else _reason(error)
    except BaseException as error:
        return f"reading the header: {type(error).__name__}: {error}", None
    return (f"accepted what safetensors refuses: {theirs[:120]}" if theirs else None), None


def _reason(error: QConvertError) -> str:
    """The message without its names and numbers."""
    words = []
    for word in error.problem.split():
        plain = not any(char in word for char in "'\"[]") and not any(char.isdigit() for char in word)
        words.append(word if plain else "X")
    return " ".join(words)[:70]
