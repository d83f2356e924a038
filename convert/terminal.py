"""What reaches the terminal, and what signals do. Names in files come from strangers: nothing they hold acts there."""

from __future__ import annotations

import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Control characters but newline and tab, halves of surrogate pairs, and what turns the direction of writing.
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Terminated(BaseException):
    """SIGTERM was received."""


def harmless(text: str) -> str:
    """The text with characters that a terminal would act on written as escapes, as in JSON."""
    return _ACTING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class HarmlessStream:
    """A text stream that escapes what would act on a terminal, and what its encoding cannot hold."""

    def __init__(self, stream: Any) -> None:
        #: For texts of our own, such as colours.
        self.unescaped = stream

    def write(self, text: str) -> int:
        text = harmless(text)
        try:
            return int(self.unescaped.write(text))
        except UnicodeEncodeError:
            return int(self.unescaped.write(_ascii(text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


def _ascii(text: str) -> str:
    """Everything else as UTF-16 escapes, which JSON reads, too."""
    units = text.encode("utf-16-be")
    codes = (int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2))
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)


@contextmanager
def guarded() -> Iterator[None]:
    """Output is escaped, and SIGTERM is an exception like Ctrl-C, for the length of a block."""
    out, err = sys.stdout, sys.stderr
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    # Somebody else's handler stays.
    ours = main and handler == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _terminate)
    sys.stdout = HarmlessStream(out)
    try:
        with warnings.catch_warnings():
            # What libraries say of odd numbers is said by findings and errors; python -W still shows it.
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
            yield
    finally:
        sys.stdout, sys.stderr = out, err
        if ours:
            signal.signal(signal.SIGTERM, handler)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
