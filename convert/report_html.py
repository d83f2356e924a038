"""A report as one HTML page that needs nothing else: styles, script and plots stand in it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from importlib import resources

from qconvert.convert.report_model import Histogram, LayerRow, Report
from qconvert.convert.text import db, size

#: Of a histogram's picture, in its own units.
WIDTH, HEIGHT = 320, 120
#: A space that does not break the line.
NBSP = "\u00a0"


def render(report: Report) -> str:
    """The page. Raises ImportError without jinja2 (`check_report` says so first)."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"size": _size, "db": _db, "percent": percent, "count": _count}
    environment.globals |= {"outline": outline, "area": area, "WIDTH": WIDTH, "HEIGHT": HEIGHT}
    text = (resources.files("qconvert.convert") / "templates" / "report.html").read_text("utf-8")
    worst = max((row.error or 0.0 for row in report.layers), default=0.0)
    largest = max((max(row.bytes_before, row.bytes_after) for row in report.classes), default=0)
    return environment.from_string(text).render(
        r=report,
        layers=sorted(report.layers, key=_worst_first),
        changed=sum(row.changed for row in report.layers),
        share=lambda value, whole=worst: f"{100 * (value or 0) / whole:.2f}" if whole else "0",
        width=lambda value: f"{100 * value / largest:.2f}" if largest else "0",
        provenance=json.dumps(report.provenance, indent=1, ensure_ascii=False),
    )


def _worst_first(row: LayerRow) -> tuple[float, str]:
    return (-(row.error or 0.0), row.name)


def _db(value: float | None) -> str:
    return "not measured" if value is None else db(value).replace(" ", NBSP)


def _size(nbytes: float) -> str:
    return size(nbytes).replace(" ", NBSP)


def percent(error: float | None) -> str:
    """A relative error with three figures; 0 is "exact"."""
    if error is None:
        return "not measured"
    return "exact" if error == 0 else f"{100 * error:.3g}{NBSP}%"


def _count(value: int) -> str:
    """1234567 with spaces that do not break."""
    return f"{value:,}".replace(",", NBSP)


def _points(counts: Iterable[int], peak: int) -> list[tuple[float, float]]:
    """Steps through the tops of the bins, left to right. Heights go by the square root: tails stay visible."""
    values = list(counts)
    step = WIDTH / len(values)
    points = []
    for i, count in enumerate(values):
        y = HEIGHT * (1 - math.sqrt(count / peak)) if peak else HEIGHT
        points += [(i * step, y), ((i + 1) * step, y)]
    return points


def outline(counts: Iterable[int], histogram: Histogram) -> str:
    """The path of a histogram's upper edge."""
    peak = max(*histogram.before, *histogram.after)
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in _points(counts, peak))


def area(counts: Iterable[int], histogram: Histogram) -> str:
    """The path of a histogram's area."""
    return f"{outline(counts, histogram)} L{WIDTH} {HEIGHT} L0 {HEIGHT} Z"
