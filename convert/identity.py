"""What an output is made of, as digests: a plan, and one conversion of one source as it lies there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qconvert.convert.actions import CopyOut, Plan, out_spec
from qconvert.formats.checkpoint import Checkpoint, dumps
from qconvert.formats.digest import PENDING, digest_place
from qconvert.formats.header import Layout
from qconvert.formats.remote import Place
from qconvert.kernels.arrays import np


def plan_digest(plan: Plan) -> str:
    """sha256 over everything that decides the output's bytes beside the source's.

    How a source layer is read counts as much as what is written: another --assume gives the same header over other
    bytes.
    """
    state = hashlib.sha256()
    settings = [plan.target.name, [c.name for c in plan.contracts], plan.quality, plan.dtype, plan.metadata]
    state.update(dumps(_plain(settings)).encode())
    for action in plan.actions:
        layer = action.layer
        entry = [
            action.kind, action.prefix, action.fold, action.codec.name, action.options,
            layer.prefix, layer.codec.name, layer.options, layer.experts,
        ]  # fmt: skip
        state.update(dumps(_plain(entry)).encode())
    for out in plan.outputs():
        spec, origin = out_spec(out), out.source.name if isinstance(out, CopyOut) else ""
        state.update(dumps([out.name, spec.dtype, list(spec.shape), origin]).encode())
    return state.hexdigest()


def _plain(value: Any) -> Any:
    """`value` as JSON with one spelling: keys in order, sets sorted, arrays by their bytes."""
    # First, for nearly everything is one of these, and the plan of a plain source need not import numpy.
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, np.generic):
        return value.item()
    # An address in memory would make every run another one.
    return f"<{type(value).__qualname__}>"


def job_digest(laid: Layout, checkpoint: Checkpoint) -> str:
    """Names what is being made: the output's header (which holds plan and version) and the source as it lies there.

    Size and modification time of the source count too: a file changed between two runs must not be continued.
    """
    state = hashlib.sha256(laid.prefix)
    state.update(checkpoint.digest().encode())
    for version in checkpoint.state():
        state.update(f"{version};".encode("utf-8", "surrogatepass"))
    return state.hexdigest()


def _unsealed(head: bytes, prefix: bytes) -> bytes:
    """A written header as it was laid out: without its digest, which only the payload tells."""
    place, mark = digest_place(prefix), PENDING.encode()
    if place is None:
        return head
    return head[:place] + mark + head[place + len(mark) :]


def is_finished(path: Place, laid: Layout, checkpoint: Checkpoint) -> bool:
    """Whether `path` is what this conversion would write.

    The header holds the digests of the source's header and of the plan, and the version: it must be the same, byte
    for byte. A file appears under its name only when whole. Payload that changed under the same header shows in the
    source's time, where both have one.
    """
    try:
        size = path.stat().st_size
        if size != laid.file_size:
            return False
        with path.open("rb") as handle:
            same = _unsealed(handle.read(len(laid.prefix)), laid.prefix) == laid.prefix
        if not isinstance(path, Path):
            path.bytes().close()
            return same
        made = path.stat().st_mtime_ns
        return same and all(file.stat().st_mtime_ns <= made for file in checkpoint.local_files)
    except OSError:
        return False
