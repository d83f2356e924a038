"""Copying runs of bytes as they are, from a source file into the output."""

from __future__ import annotations

import os
from typing import Protocol

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.header import PAGE

#: Bytes that pass through a buffer at once: they are still in the cache when they are written.
_BUFFER_BYTES = 1 << 20


class Target(Protocol):
    """Where bytes go: an output file, or a worker's view of one."""

    @property
    def fd(self) -> int: ...

    def write(self, data: memoryview | bytes, offset: int) -> None: ...

    def wrote(self, offset: int, size: int) -> None: ...


def copy_run(checkpoint: Checkpoint, file: int, start: int, out: Target, offset: int, size: int) -> None:
    """`size` bytes from byte `start` of the source's shard `file` to byte `offset` of `out`.

    The kernel does it where both lie alike in their pages: file systems that can then share them. Where they do not, it
    would move them page by page in two parts each; through a buffer they take half the time (1.02 GB: 0.5 s against
    1.0 s before the flush). Raises QConvertError where a read or a write fails.
    """
    source = checkpoint.fd(file)
    if source is None:
        # A remote file is best asked for everything at once.
        out.write(checkpoint.pread(file, start, size).data, offset)
        return
    if (start - offset) % PAGE == 0 and copy_in_kernel(source, out.fd, start, offset, size):
        out.wrote(offset, size)
        return
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, size)))
    for done in range(0, size, _BUFFER_BYTES):
        piece = buffer[: size - done]
        checkpoint.pread_into(file, start + done, piece)
        out.write(piece, offset + done)


def copy_in_kernel(source: int, target: int, start: int, offset: int, size: int) -> bool:
    """Let the kernel move the bytes (or share them, where the file system can); False when it cannot."""
    if not hasattr(os, "copy_file_range"):
        return False
    done = 0
    while done < size:
        try:
            moved = os.copy_file_range(source, target, size - done, start + done, offset + done)
        except OSError:
            return False
        if moved == 0:
            return False
        done += moved
    return True
