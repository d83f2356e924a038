"""Short human output: sizes, counts, grouped findings."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from qconvert.formats.errors import UsageError
from qconvert.formats.finding import Finding


def size(nbytes: float) -> str:
    """Bytes in decimal units, three figures."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000 or unit == "GB":
            return (
                f"{nbytes:.0f} {unit}"
                if unit == "B"
                else f"{nbytes:.3g} {unit}"
                if nbytes < 1000
                else f"{nbytes:.0f} {unit}"
            )
        nbytes /= 1000
    raise AssertionError("unreachable")


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: str) -> int:
    """ "512MiB", "2GB", "1000000" in bytes. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise UsageError(f"{text!r} is not a size", expected="something like 512MiB or 2GB")
    return int(float(found[1]) * _UNITS[found[2]])


def db(value: float) -> str:
    """Decibels, or "exact" when there is no error."""
    return "exact" if math.isinf(value) and value > 0 else f"{value:.2f} dB"


def grouped(findings: Iterable[Finding]) -> list[str]:
    """One line for findings that say the same of several layers, in order of first appearance."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.level, finding.message), []).append(finding)
    lines = []
    for (level, message), members in groups.items():
        layers = [m.layer for m in members if m.layer]
        where = (
            f"{layers[0]}: "
            if len(layers) == 1
            else f"{len(layers)} layers, e.g. {layers[0]}: "
            if layers
            else ""
        )
        evidence = f" [{members[0].evidence}]" if members[0].evidence else ""
        lines.append(f"{level}: {where}{message}{evidence}")
    return lines


def tally(words: Iterable[str]) -> str:
    """ "36 nvfp4, 1 int8_tensorwise", most frequent first."""
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common())


def table(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> list[str]:
    """Columns aligned by padding."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
