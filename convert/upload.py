"""Outputs on other machines: written and proven here first, since object stores cannot be written at offsets."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from qconvert.convert.actions import Plan
from qconvert.convert.identity import is_finished
from qconvert.convert.job import Outcome, Request, execute_plan, final_output, output_path
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import TransferError, UsageError
from qconvert.formats.header import Layout
from qconvert.formats.remote import Remote, attempts

DEFAULT_STAGING = Path("qconvert-staging")
#: Stores where an upload appears whole or not at all.
_ATOMIC = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf")
#: Parts of a multipart upload: S3 takes 10000 of them at most, which makes 640 GB.
PART_BYTES = 64 << 20
_READ_ONLY = ("http", "https")


def staging_folder(request: Request, remote: Remote) -> Path:
    """Where an output is made before it is uploaded: the same folder for every run, so that it can be resumed."""
    name = hashlib.sha256(remote.url.encode()).hexdigest()[:12]
    return (request.staging or DEFAULT_STAGING) / f"{remote.name}-{name}"


def execute_staged(
    request: Request,
    checkpoint: Checkpoint,
    plan: Plan,
    laid: Layout,
    progress: Callable[[int], object],
    begun: float,
) -> Outcome:
    """`execute_plan` for a remote output. What was made is kept until it is uploaded."""
    remote, final = output_path(request, plan.target), final_output(request, checkpoint, plan)
    assert isinstance(remote, Remote)
    assert isinstance(final, Remote)
    if remote.protocol in _READ_ONLY:
        raise UsageError(f"{remote.protocol}:// can be read, not written", file=str(remote))
    if not request.force and final.is_file():
        raise UsageError("already exists", file=str(final), hint="--force overwrites it")
    folder = staging_folder(request, remote)
    here = replace(request, output=folder / remote.name, force=True)
    path = final_output(here, checkpoint, plan)
    assert isinstance(path, Path)
    if request.shard_size is None and is_finished(path, laid, checkpoint):
        # Only the upload failed last time.
        outcome = Outcome(plan, path, checkpoint.nbytes, laid.file_size, {}, (), 0.0)
    else:
        outcome = execute_plan(here, checkpoint, plan, laid, progress, begun)
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and not file.name.endswith((".partial", ".journal"))
    )
    for file in files:
        target = remote.parent
        for part in file.relative_to(folder).parts:
            target = target / part
        upload(file, target)
    for file in files:
        file.unlink()
    with contextlib.suppress(OSError):
        for inner in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
            inner.rmdir()
        folder.rmdir()
        folder.parent.rmdir()
    return replace(outcome, output=final.parent / outcome.output.name, seconds=time.monotonic() - begun)


def upload(file: Path, target: Remote) -> None:
    """Put a file there, whole or not at all. Raises TransferError when several attempts fail."""
    system, path = target.filesystem, target.path
    size = file.stat().st_size
    first = path if target.protocol in _ATOMIC else f"{path}.partial"

    def put() -> None:
        if target.protocol not in _ATOMIC:
            system.makedirs(system._parent(path), exist_ok=True)
        options = {"chunksize": PART_BYTES} if target.protocol in ("s3", "s3a") else {}
        system.put_file(str(file), first, **options)
        if first != path:
            system.mv(first, path)
        if target.stat().st_size != size:
            raise OSError(f"arrived with {target.stat().st_size} bytes of {size}")

    try:
        attempts(put, str(target))
    except (FileNotFoundError, PermissionError) as error:
        raise TransferError(
            f"cannot be uploaded: {error}", file=str(target), found=f"kept as {file}"
        ) from None
