"""A digest of a whole file, kept in its own header: `qconvert verify --digest` finds any bit that flipped.

The file is cut into blocks of 16 MiB behind its header; the digest is the sha256 over the header, with the digest's own
place filled in as if it were not known yet, and over the CRC-32 of each block. CRC-32 finds every single flipped bit,
and every run of wrong bits of up to 32; it runs as fast as memory. It does not keep out who changes a file on purpose.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError

try:
    # The same numbers at four times the speed, where the machine has instructions for them.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

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


class Checksums:
    """The CRC-32 of each block of the payload [start, end) of a file.

    Of a file that is being written, a block is read as soon as all of it is there: later it may have to come back from
    the device. `wrote` says what is there; it may be called from several threads, for other bytes each.
    """

    def __init__(self, read: Read, start: int, end: int) -> None:
        self._read, self._start, self._end = read, start, end
        self._missing = [min(BLOCK, end - at) for at in range(start, end, BLOCK)]
        self._known: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def wrote(self, offset: int, size: int) -> None:
        """Bytes [offset, offset + size) of the file are there. Raises what reading raises."""
        begin, end = max(offset, self._start), min(offset + size, self._end)
        whole = []
        with self._lock:
            for block in range((begin - self._start) // BLOCK, -((self._start - end) // BLOCK)):
                at = self._start + block * BLOCK
                self._missing[block] -= min(end, at + BLOCK) - max(begin, at)
                # Written once more: what was read is no longer so.
                self._known.pop(block, None)
                if not self._missing[block]:
                    whole.append(block)
        for block in whole:
            value = self._checksum(block)
            with self._lock:
                if not self._missing[block]:
                    self._known[block] = value

    def values(self, jobs: int) -> Iterator[bytes]:
        """All of them in order, 4 bytes each, those that are not known yet on `jobs` threads."""
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            yield from pool.map(self._value, range(len(self._missing)))

    def _value(self, block: int) -> bytes:
        known = self._known.get(block)
        return self._checksum(block) if known is None else known

    def _checksum(self, block: int) -> bytes:
        begin = self._start + block * BLOCK
        value = 0
        for at in range(begin, min(begin + BLOCK, self._end), _PIECE):
            value = crc32(self._read(at, min(_PIECE, begin + BLOCK - at, self._end - at)), value)
        return value.to_bytes(4, "little")


def file_digest(prefix: bytes, checksums: Checksums, jobs: int) -> str:
    """The digest of a file whose header, the digest not filled in, is `prefix`, before the payload of `checksums`."""
    state = hashlib.sha256(prefix)
    for value in checksums.values(jobs):
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
        found = file_digest(clean, Checksums(read, header.data_start, header.file_size), jobs)
        if found != recorded:
            raise QConvertError(
                "is not what was written: bits have changed since",
                file=file,
                found=found,
                expected=recorded,
                hint="convert again, or get the file again",
            )
