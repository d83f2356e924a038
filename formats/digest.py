"""A digest of a whole file, kept in its own header: `qconvert verify --digest` finds any bit that flipped.

The file is cut into blocks of 16 MiB behind its header; the digest is the sha256 over the header, with the digest's own
place filled in as if it were not known yet, and over the CRC-32 of each block. CRC-32 finds every single flipped bit,
and every run of wrong bits of up to 32; it runs as fast as memory. It does not keep out who changes a file on purpose.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError

#: The header's string entry.
KEY = "qconvert_digest"
_MARK = "crc16m:"
#: What stands in a header until its payload is known; as long as what replaces it.
PENDING = _MARK + "?" * 64
BLOCK = 16 << 20
_PIECE = 1 << 20

#: (offset, size) -> bytes
Read = Callable[[int, int], Any]


def digest_place(prefix: bytes) -> int | None:
    """Where the digest stands in a header as laid out; None where it has no single place."""
    mark = PENDING.encode()
    return prefix.find(mark) if prefix.count(mark) == 1 else None


def file_digest(prefix: bytes, read: Read, start: int, end: int, jobs: int) -> str:
    """The digest of a file whose header, the digest not filled in, is `prefix`, and whose payload is [start, end)."""

    def checksum(begin: int) -> bytes:
        value = 0
        for at in range(begin, min(begin + BLOCK, end), _PIECE):
            value = zlib.crc32(read(at, min(_PIECE, begin + BLOCK - at, end - at)), value)
        return value.to_bytes(4, "little")

    state = hashlib.sha256(prefix)
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for value in pool.map(checksum, range(start, end, BLOCK)):
            state.update(value)
    return _MARK + state.hexdigest()


def check_digests(checkpoint: Checkpoint, jobs: int) -> None:
    """Raises QConvertError where a file records no digest, or is not what it records."""
    for index, header in enumerate(checkpoint.headers):
        file = str(checkpoint.files[index])
        recorded = header.metadata.get(KEY, "")
        prefix = checkpoint.pread(index, 0, header.data_start).tobytes()
        if len(recorded) != len(PENDING) or prefix.count(recorded.encode()) != 1:
            raise QConvertError("records no digest", file=file, hint="files that qconvert writes do")

        def read(at: int, size: int, index: int = index) -> Any:
            return checkpoint.pread(index, at, size)

        clean = prefix.replace(recorded.encode(), PENDING.encode())
        found = file_digest(clean, read, header.data_start, header.file_size, jobs)
        if found != recorded:
            raise QConvertError(
                "is not what was written: bits have changed since",
                file=file,
                found=found,
                expected=recorded,
                hint="convert again, or get the file again",
            )
