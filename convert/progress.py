"""A progress bar in bytes of source."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qconvert.convert.screen import quiet


@contextmanager
def progress_bar(total: int, silent: bool) -> Iterator[Callable[[int], object]]:
    """Bytes of source done, with rate and time left; nothing when not a terminal, or after --quiet."""
    if silent or quiet() or not sys.stderr.isatty():
        yield lambda done: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:
        yield bar.update
