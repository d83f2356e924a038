"""What people read: labelled lines and tables, in colour and fitted to the window on a terminal, plain elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import click
from qconvert.convert.terminal import harmless
from qconvert.convert.text import table

Volume = Literal["quiet", "normal", "verbose"]
Row = tuple[str, ...]

_volume: ContextVar[Volume] = ContextVar("volume", default="normal")
#: Labels whose meaning has a colour; the others are dim.
_COLOURS = {
    "done": "green", "accepted": "green", "proof": "green", "converted": "green", "right": "green",
    "refused": "red", "wrong": "red", "failed": "red", "refuse": "red", "trap": "red",
    "guess": "yellow", "note": "yellow", "environment": "yellow", "found": "yellow",
}  # fmt: skip
LABEL = 10
#: Columns that the last cell of a row must be left, to be folded into.
NARROW = 16


@contextmanager
def speaking(volume: Volume) -> Iterator[None]:
    """For the length of a block, `quiet` prints nothing of what stands here; errors are not said here."""
    token = _volume.set(volume)
    try:
        yield
    finally:
        _volume.reset(token)


def volume_of(quiet: bool, verbose: bool) -> Volume:
    """What the two options mean together. Raises click.UsageError for both."""
    if quiet and verbose:
        raise click.UsageError("--quiet and --verbose exclude each other")
    return "quiet" if quiet else "verbose" if verbose else "normal"


def quiet() -> bool:
    return _volume.get() == "quiet"


def verbose() -> bool:
    return _volume.get() == "verbose"


def say(label: str, text: str) -> None:
    """One line: a label in a column of its own, then the text."""
    if quiet():
        return
    padded = f"{label:{LABEL - 1}} " if label else " " * LABEL
    if _coloured() and label:
        colour = _COLOURS.get(label)
        styled = click.style(padded, fg=colour, bold=True) if colour else click.style(padded, dim=True)
        _stream().write(styled)
        click.echo(text)
    else:
        click.echo((padded + text).rstrip())


def say_line(line: str) -> None:
    """A line as `say` would make it, given whole: its label is what stands in the first column."""
    label, text = line[: LABEL - 1].rstrip(), line[LABEL:]
    if label.isalpha() and line[LABEL - 1 : LABEL] == " ":
        say(label, text)
    elif not quiet():
        click.echo(line)


def say_rows(rows: Sequence[Row], indent: int = 0, *, head: bool = False) -> None:
    """Rows in aligned columns; `head`: the first row names them. On a terminal the last column is folded to fit."""
    if quiet() or not rows:
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    columns = _columns() if _terminal() else 0
    if columns - indent - sum(widths) - 2 * len(widths) < NARROW:
        for line in table(rows, " " * indent):
            click.echo(line)
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 2, 0, 0), show_header=head, header_style="dim", pad_edge=False)
    names = rows[0] if head else ("",) * len(rows[0])
    for name, width in zip(names, [*widths, None], strict=True):
        grid.add_column(Text(_shown(name)), overflow="fold", min_width=width)
    for row in rows[1:] if head else rows:
        grid.add_row(*(Text(_shown(cell)) for cell in row))
    console = Console(file=_stream(), highlight=False, no_color=not _coloured(), width=columns)
    console.print(Padding(grid, (0, 0, 0, indent)))


def _columns() -> int:
    """Of the window."""
    # Here, for it brings every compression that Python knows.
    from shutil import get_terminal_size

    return get_terminal_size().columns


def _terminal() -> bool:
    return sys.stdout.isatty()


def _coloured() -> bool:
    """Whether colours are wanted: a terminal, and neither NO_COLOR nor a terminal without any."""
    return _terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _shown(cell: str) -> str:
    """A cell without anything that acts on a terminal, or that the terminal's encoding cannot hold."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return harmless(cell).encode(encoding, "backslashreplace").decode(encoding)


def _stream() -> Any:
    """Standard output before its texts are escaped: what is written here has been escaped, or is ours."""
    return getattr(sys.stdout, "unescaped", sys.stdout)
