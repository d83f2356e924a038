"""`--report FILE`: a page, JSON or CSV, by the file's ending."""

from __future__ import annotations

import csv
import io
import math
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qconvert.convert.report_model import Report
from qconvert.convert.verdicts import verdict_json
from qconvert.formats.checkpoint import dumps
from qconvert.formats.errors import QConvertError, UsageError

SUFFIXES = (".html", ".json", ".csv")


def check_report(path: Path, *, force: bool) -> None:
    """Raises UsageError for a report that could not be written once the conversion is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--report {str(path)!r}", expected=f"a name that ends in {', '.join(SUFFIXES)}")
    if path.suffix.lower() == ".html" and find_spec("jinja2") is None:
        raise UsageError(
            "--report: an HTML page needs the package jinja2",
            hint="pip install 'qconvert[report]', or name a .json or .csv file",
        )
    if path.exists() and not force:
        raise UsageError("already exists", file=str(path), hint="--force overwrites it")
    if not path.parent.is_dir():
        raise UsageError("no such folder", file=str(path.parent))


def write_report(path: Path, report: Report) -> None:
    """Raises QConvertError when the file cannot be written; what stood there before is then still there."""
    suffix = path.suffix.lower()
    if suffix == ".html":
        from qconvert.convert.report_html import render

        text = render(report)
    else:
        text = report_csv(report) if suffix == ".csv" else dumps(report_json(report)) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.write_text(text, "utf-8", newline="")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise QConvertError(f"cannot be written: {error.strerror or error}", file=str(path)) from None


def report_json(report: Report) -> dict[str, Any]:
    """The report's fields; decibels of what is exact are the word "exact", what was not measured is null."""
    document = asdict(report)
    document["sqnr"] = _db(report.sqnr)
    document["verdicts"] = [verdict_json(verdict) for verdict in report.verdicts]
    for entry, row in zip(document["classes"], report.classes, strict=True):
        entry["sqnr"] = _db(row.sqnr)
        entry["bits_per_weight"] = row.bits
    for entry, layer in zip(document["layers"], report.layers, strict=True):
        entry["sqnr"] = _db(layer.sqnr)
    document["findings"] = [{"level": level, "text": text} for level, text in report.findings]
    document["drops"] = [{"suffix": s, "reason": r, "count": n} for s, r, n in report.drops]
    return document


def report_csv(report: Report) -> str:
    """One line a layer. Cells that a spreadsheet would take for a formula get a quote in front."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(
        ["layer", "class", "role", "action", "from", "to", "n", "k", "parameters", "bytes_before",
         "bytes_after", "relative_error", "sqnr_db", "reason"]
    )  # fmt: skip
    for row in report.layers:
        error = "" if row.error is None else f"{row.error:.6g}"
        sqnr = _db(row.sqnr)
        writer.writerow(
            [_cell(row.name), row.cls, row.role, row.action, row.before, row.after, *row.shape, row.params,
             row.bytes_before, row.bytes_after, error, "" if sqnr is None else sqnr, _cell(row.reason)]
        )  # fmt: skip
    return out.getvalue()


def _cell(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _db(value: float | None) -> float | str | None:
    if value is None:
        return None
    return round(value, 3) if math.isfinite(value) else "exact" if value > 0 else "none"
