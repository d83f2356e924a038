"""Runs conversions in forked children and kills them. A process of its own: a fork needs a process without pytest.

Arguments: SOURCE OUTPUT MODE COUNT SEED. Modes:
`times`: children are killed at random moments; `steps`: children kill themselves before their n-th change of the file
system, for random n. After each kill the conversion is resumed to its end. One JSON object a round on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import qconvert.convert.execute as execute
import qconvert.convert.journal as journal
from qconvert.convert.job import Request, run_job
from qconvert.formats.checkpoint import opened

TARGET = "comfy_nvfp4"
#: What changes files. Each call is a moment at which a kill leaves another state behind.
STEPS = ("pwrite", "write", "ftruncate", "posix_fallocate", "fdatasync", "fsync", "link", "unlink", "replace")


def convert(source: Path, output: Path) -> None:
    with opened(source) as checkpoint:
        run_job(Request(source, TARGET, output=output, resume=True, jobs=2), checkpoint)


def forked(action: Callable[[], None]) -> int:
    """The pid of a child that runs `action` and leaves with 0, 1 for an exception."""
    pid = os.fork()
    if pid:
        return pid
    try:
        action()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def stepping(action: Callable[[], None], last: int, count_to: Path | None = None) -> None:
    """Run `action`, killed before step `last` (0: never)."""
    done = 0

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return run

    for name in STEPS:
        setattr(os, name, wrapped(getattr(os, name)))
    action()
    if count_to is not None:
        count_to.write_text(str(done))


def end_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_for_note(notes: Path, deadline: float) -> None:
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if notes.read_bytes().count(b"\n") > 1:
                return
        time.sleep(0.001)


def main() -> None:
    source, output, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    count, chance = int(sys.argv[4]), random.Random(int(sys.argv[5]))
    journal.FLUSH_SECONDS = 0.0
    execute.PIECE_ELEMENTS = 1 << 13
    convert(source, output)  # loads everything once, so that a fork is in the middle of its work at once
    output.unlink()
    counted, counts = output.with_suffix(".steps"), []
    for _ in range(3):
        output.unlink(missing_ok=True)
        begun = time.monotonic()
        assert end_of(forked(lambda: stepping(lambda: convert(source, output), 0, counted))) == 0
        seconds = time.monotonic() - begun
        counts.append(int(counted.read_text()))
    # Flushes beside the work are more or fewer, as time allows: few runs have fewer steps than the shortest of these.
    steps = min(counts)
    wanted = output.read_bytes()
    output.unlink()
    partial, notes = (output.with_name(f".{output.name}.{word}") for word in ("partial", "journal"))
    for number in range(count):
        if mode == "times":
            pid = forked(lambda: convert(source, output))
            if number % 2:
                # Half of the rounds end after something was noted, however slow the machine is.
                wait_for_note(notes, time.monotonic() + seconds)
            time.sleep(chance.random() * seconds / (10 if number % 2 else 1))
            os.kill(pid, signal.SIGKILL)
        else:
            # The last steps are the delicate ones: half of the rounds are among them.
            at = chance.randint(1, steps) if number % 2 else steps - number // 2 % 12
            pid = forked(lambda at=at: stepping(lambda: convert(source, output), at))  # type: ignore[misc]
        code = end_of(pid)
        early = output.exists() and output.read_bytes() != wanted
        noted = len(notes.read_bytes().splitlines()) - 1 if notes.exists() else -1
        again = 0 if output.exists() else end_of(forked(lambda: convert(source, output)))
        same = output.exists() and output.read_bytes() == wanted
        killed = code == -signal.SIGKILL
        leftover = not killed and (partial.exists() or notes.exists())
        facts = {"killed": killed, "early": early, "noted": noted, "same": same, "leftover": leftover}
        print(json.dumps(facts | {"again": again, "steps": steps}), flush=True)
        for path in (output, partial, notes):
            # A finished name may still be linked to the partial one; the next round must cope with neither left.
            if number % 3 or path is output:
                path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
