"""Small files beside the output: written under temporary names first, renamed once the tensors are in place."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from qconvert.formats.errors import QConvertError, UsageError


class Sidecars:
    """Context manager for a target's files beside the tensors. Leaving without `commit` removes every trace.

    An existing file of that name is refused without `force`, before any payload moves.
    """

    def __init__(self, folder: Path, files: dict[str, bytes], *, force: bool) -> None:
        for name in files:
            if not name or name != Path(name).name:
                raise ValueError(f"{name!r} is not a plain file name")
        self._folder, self._files, self._force = folder, files, force
        self._made = False
        self._pending: list[tuple[Path, Path]] = []

    def __enter__(self) -> Sidecars:
        for name in self._files:
            if (self._folder / name).exists() and not self._force:
                raise UsageError(
                    "already exists", file=str(self._folder / name), hint="--force overwrites it"
                )
        try:
            if self._files:
                self._made = not self._folder.exists()
                self._folder.mkdir(parents=True, exist_ok=True)
            for name, data in self._files.items():
                temporary = self._folder / f".{name}.{os.getpid()}.partial"
                self._pending.append((temporary, self._folder / name))
                with temporary.open("xb") as handle:
                    handle.write(data)
                    handle.flush()
                    os.fsync(handle.fileno())
        except OSError as error:
            self._discard()
            raise QConvertError(
                f"cannot be written: {error.strerror or error}", file=str(self._folder)
            ) from None
        except BaseException:
            # Interrupted: whoever does not get in does not leave either.
            self._discard()
            raise
        return self

    def config(self) -> dict[str, Any]:
        """config.json as it will stand beside the output ({} where the target writes none)."""
        document = json.loads(self._files.get("config.json", b"{}"))
        return document if isinstance(document, dict) else {}

    def commit(self) -> None:
        """Put every file under its own name."""
        try:
            while self._pending:
                temporary, path = self._pending[0]
                temporary.replace(path)
                self._pending.pop(0)
        except OSError as error:
            raise QConvertError(
                f"cannot be written: {error.strerror or error}", file=str(self._folder)
            ) from None
        self._made = False

    def _discard(self) -> None:
        for temporary, _ in self._pending:
            with contextlib.suppress(OSError):
                temporary.unlink()
        self._pending = []
        if self._made:
            # Only an empty folder goes; anything that appeared in it meanwhile stays.
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()
