"""Files of other machines through fsspec: read by byte ranges, retried, and refused when they change meanwhile.

`Remote` stands where a pathlib.Path stands for a local file and answers the same questions, as far as reading a
checkpoint asks any. fsspec is imported when the first of them is asked.
"""

from __future__ import annotations

import io
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

from qconvert.formats.errors import QConvertError, TransferError

if TYPE_CHECKING:
    from concurrent.futures import Future

#: Bytes asked for at once; pieces of layers are smaller and come from what is there.
BLOCK_BYTES = 4 << 20
#: Blocks kept of one file, and blocks asked for ahead of one that follows another.
KEPT_BLOCKS, AHEAD = 12, 3
THREADS = 4
ATTEMPTS = 7
BACKOFF_SECONDS, LONGEST_SECONDS = 0.5, 30.0
#: How often a file that is being read is asked whether it is still the same.
CHECK_SECONDS = 30.0

#: Where file systems say which version of a file this is; the first that is there counts.
_VERSIONS = (
    "ETag",
    "etag",
    "sha256",
    "blob_id",
    "generation",
    "LastModified",
    "Last-Modified",
    "mtime",
    "created",
)
_HTTP = ("http", "https")
_T = TypeVar("_T")


class RemoteStat(NamedTuple):
    """What a file system says of a file. `version`: "" where it says nothing of the kind."""

    st_size: int
    version: str


class Remote:
    """One file or folder by URL. Equal URLs are equal; copies of one object share what was read."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __reduce__(self) -> tuple[type[Remote], tuple[str]]:
        return Remote, (self.url,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __str__(self) -> str:
        # What follows "?" may be a signature, which is nobody's business in a log.
        return self.url.partition("?")[0] if self.protocol in _HTTP else self.url

    def __repr__(self) -> str:
        return f"Remote({str(self)!r})"

    @property
    def protocol(self) -> str:
        return self.url.partition("://")[0]

    @property
    def name(self) -> str:
        return str(self).rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    @property
    def parent(self) -> Remote:
        return Remote(str(self).rstrip("/").rpartition("/")[0])

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url.rstrip('/')}/{name}")

    @cached_property
    def _place(self) -> tuple[Any, str]:
        try:
            import fsspec
        except ImportError:
            raise QConvertError(
                "files of other machines are read with fsspec",
                file=str(self),
                hint="pip install 'qconvert[remote]'",
            ) from None
        # Compressed on the way, a byte range would no longer be one of the file's.
        options = {"client_kwargs": {"headers": {"Accept-Encoding": "identity"}}} if self._is_http else {}
        try:
            system, path = fsspec.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise QConvertError(f"cannot be opened: {error}", file=str(self)) from None
        return system, path

    @property
    def filesystem(self) -> Any:
        return self._place[0]

    @property
    def path(self) -> str:
        """As the file system names it."""
        return self._place[1]

    @property
    def _is_http(self) -> bool:
        return self.protocol in _HTTP

    def stat(self) -> RemoteStat:
        """Asked anew every time. Raises FileNotFoundError, TransferError after several attempts."""

        def ask() -> dict[str, Any]:
            self.filesystem.invalidate_cache()
            info: dict[str, Any] = self.filesystem.info(self.path)
            return info

        info = attempts(ask, str(self))
        size = info.get("size")
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise QConvertError(
                "the server does not say how large the file is",
                file=str(self),
                found=None if size is None else repr(size)[:40],
                expected="a number of bytes",
            )
        version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
        return RemoteStat(size, version)

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        if self.url.endswith("/"):
            return False
        try:
            if self._is_http:
                # Its file system answers "is it a folder" by loading the file as a page.
                self.stat()
                return True
            return bool(attempts(lambda: self.filesystem.isfile(self.path), str(self)))
        except (FileNotFoundError, PermissionError):
            return False

    def is_dir(self) -> bool:
        if self._is_http:
            return self.url.endswith("/")
        return bool(attempts(lambda: self.filesystem.isdir(self.path), str(self)))

    def iterdir(self) -> Iterator[Remote]:
        if self._is_http:
            return
        for path in attempts(lambda: self.filesystem.ls(self.path, detail=False), str(self)):
            yield self / str(path).rstrip("/").rpartition("/")[2]

    def glob(self, pattern: str) -> Iterator[Remote]:
        return (file for file in self.iterdir() if fnmatch(file.name, pattern))

    def resolve(self) -> Remote:
        return self

    @cached_property
    def _bytes(self) -> RemoteBytes:
        return RemoteBytes(self)

    def bytes(self) -> RemoteBytes:
        """The open file, shared by all who read it."""
        if self.__dict__.get("_bytes") is not None and self._bytes.closed:
            del self.__dict__["_bytes"]
        return self._bytes

    def close(self) -> None:
        """End the threads that read it, if any were begun."""
        begun = self.__dict__.get("_bytes")
        if begun is not None:
            begun.close()

    def open(self, mode: str = "rb") -> BinaryIO:
        return io.BufferedReader(_Handle(self.bytes()), 1 << 16)

    def read_text(self, encoding: str = "utf-8") -> str:
        """All of a small file."""
        data: bytes = attempts(lambda: self.filesystem.cat_file(self.path), str(self))
        return data.decode(encoding)


Place = Path | Remote


def place(text: str) -> Place:
    """A path, or a URL of a file system that fsspec knows. A letter before the colon is a drive."""
    scheme, found, _ = text.partition("://")
    if found and len(scheme) > 1 and scheme.replace("+", "").isalnum():
        return Path(text.removeprefix("file://")) if scheme == "file" else Remote(text)
    return Path(text)


def attempts(call: Callable[[], _T], name: str, wait: Callable[[float], object] = time.sleep) -> _T:
    """What `call` gives, tried again after failures that may pass. Raises TransferError when they do not."""
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except QConvertError:
            raise
        except Exception as error:  # every file system has its own
            _raise_if_final(error)
            if attempt + 1 == ATTEMPTS:
                problem = " ".join(str(error).split())[:200] or type(error).__name__
                raise TransferError(
                    f"{ATTEMPTS} attempts failed: {problem}", file=name, hint="--resume continues"
                ) from None
            from random import random

            # At random, so that many workers do not come back at the same moment.
            wait(min(LONGEST_SECONDS, BACKOFF_SECONDS * 2**attempt) * (0.5 + random()))
    raise AssertionError("unreachable")


def _raise_if_final(error: Exception) -> None:
    """Raise what another attempt will not change: an absent file, a missing permission."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
    status = getattr(cause, "status", None)
    if status in (404, 410):
        raise FileNotFoundError(str(error)) from None
    if status in (401, 403):
        raise PermissionError(f"the server refuses (HTTP {status})") from None
    # fsspec calls everything that happens while asking an HTTP server "not found", a dropped connection too.
    if isinstance(error, PermissionError) or (isinstance(error, FileNotFoundError) and cause is None):
        raise error


class RemoteBytes:
    """A file's bytes in blocks, the next ones fetched while the last ones are computed with. Thread-safe."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.first = remote.stat()
        self.closed = False
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        # Imported where a remote file is opened: it is a tenth of what `inspect` of a local one takes.
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="qconvert-remote")
        self._ended = threading.Event()
        self._checked = time.monotonic()
        if remote._is_http and self.first.st_size > 1:
            self._require_ranges()

    @property
    def size(self) -> int:
        return self.first.st_size

    def _require_ranges(self) -> None:
        """A server that ignores ranges answers each with the whole file: found out with one byte, not with 20 GB."""

        def probe() -> None:
            with self.remote.filesystem.open(self.remote.path, "rb", cache_type="none") as handle:
                handle.seek(1)
                handle.read(1)

        try:
            attempts(probe, str(self.remote))
        except TransferError as error:
            if "range" not in error.problem.lower():
                raise
            raise QConvertError(
                "the server does not answer byte ranges",
                file=str(self.remote),
                hint="download the file first",
            ) from None

    def read_into(self, view: memoryview, start: int) -> int:
        """Fill `view` from `start` as far as the file goes; bytes read. Raises TransferError, QConvertError."""
        size = min(len(view), self.size - start)
        if size <= 0:
            return 0
        first, last = start // BLOCK_BYTES, (start + size - 1) // BLOCK_BYTES
        futures = self._asked(first, last)
        for index, future in zip(range(first, last + 1), futures, strict=True):
            data = future.result()
            a, b = max(start, index * BLOCK_BYTES), min(start + size, (index + 1) * BLOCK_BYTES)
            view[a - start : b - start] = memoryview(data)[a - index * BLOCK_BYTES : b - index * BLOCK_BYTES]
        return size

    def _asked(self, first: int, last: int) -> list[Future[bytes]]:
        with self._lock:
            sequential = first == 0 or first - 1 in self._blocks
            end = last + AHEAD if sequential else last
            for index in range(first, min(end, (self.size - 1) // BLOCK_BYTES) + 1):
                known = self._blocks.get(index)
                if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
                    self._blocks[index] = self._pool.submit(self._fetch, index)
                self._blocks.move_to_end(index)
            wanted = [self._blocks[index] for index in range(first, last + 1)]
            while len(self._blocks) > max(KEPT_BLOCKS, end - first + 1):
                # Not cancelled: another thread may be waiting for it.
                self._blocks.popitem(last=False)
        return wanted

    def _fetch(self, index: int) -> bytes:
        start = index * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self.size)
        tried = False

        def get() -> bytes:
            nonlocal tried
            if tried or time.monotonic() - self._checked > CHECK_SECONDS:
                self.check_unchanged()
            tried = True
            data: bytes = self.remote.filesystem.cat_file(self.remote.path, start=start, end=end)
            if len(data) != end - start:
                raise OSError(f"{len(data)} bytes came where {end - start} were asked for")
            return data

        try:
            return attempts(get, str(self.remote), self._ended.wait)
        except FileNotFoundError:
            raise QConvertError(
                "the source vanished while it was being read", file=str(self.remote)
            ) from None
        except PermissionError as error:
            raise QConvertError(f"cannot be read: {error}", file=str(self.remote)) from None

    def check_unchanged(self) -> None:
        """Raises QConvertError when the file is another one than was opened (etag or size)."""
        try:
            now = self.remote.stat()
        except FileNotFoundError:
            raise QConvertError(
                "the source vanished while it was being read", file=str(self.remote)
            ) from None
        self._checked = time.monotonic()
        if now != self.first:
            raise QConvertError(
                "the source changed while it was being read",
                file=str(self.remote),
                found=f"{now.st_size} bytes, version {now.version or 'unknown'}",
                expected=f"{self.first.st_size} bytes, version {self.first.version or 'unknown'}",
            )

    def close(self) -> None:
        self.closed = True
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._blocks.clear()


class _Handle(io.RawIOBase):
    """RemoteBytes as a file object, for what reads headers."""

    def __init__(self, source: RemoteBytes) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        done = self._source.read_into(memoryview(buffer).cast("B"), self._at)
        self._at += done
        return done
