"""A batch as a TOML file: sources times targets with options, read as a whole and refused as a whole.

output = "converted"                  # folder; default: beside each source

[options]                             # of every job; named as on the command line
quality = "best"

[[job]]
source = ["models/*.safetensors", "hf://owner/repo/file.safetensors"]
target = ["comfy_nvfp4", "comfy_fp8"]
keep = ['blocks\\.0\\.']
"""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qconvert.convert.command import make_request
from qconvert.convert.job import Request, default_output
from qconvert.convert.recipe import DTYPES
from qconvert.formats.containers import SUFFIXES
from qconvert.formats.errors import UsageError, close_to
from qconvert.formats.remote import Place, Remote, place
from qconvert.runtime.targets import get_target

#: What a job may say beside source, target and output, and what it says when it does not.
DEFAULTS: dict[str, Any] = {
    "runtime": None, "keep": [], "dtype": "bf16", "embedding": "keep", "quality": "best", "native_fp4": False,
    "full_precision": False, "component": None, "keep_layers": None, "keep_prefix": False, "rename": [], "assume": [],
    "jobs": None,
    "memory": "512MiB", "strict": False, "force": False, "shard_size": None, "calibration": None, "budget": None,
    "min_sqnr": None, "staging": None, "engine": "local", "recipe": None,
}  # fmt: skip
_CHOICES = {
    "dtype": tuple(DTYPES),
    "embedding": ("keep", "int8"),
    "quality": ("fast", "best"),
    "engine": ("local", "ray"),
    "component": ("diffusion", "text_encoder", "vae"),
}
_LISTS = ("keep", "rename", "assume")
_MAX_BYTES = 1_000_000
_OWN = ("source", "target", "output")


def read_jobs(path: Path, overrides: Mapping[str, Any]) -> list[Request]:
    """Every job of a file, sources expanded. `overrides`: options of the command line, over those in the file.

    Relative paths are taken from the file's folder. Raises UsageError for anything that makes no sense: an unknown
    key, target or option, a pattern that matches nothing, two jobs that write one file.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError("is too large for a list of jobs", file=str(path))
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", file=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"is not valid TOML: {error}", file=str(path)) from None
    except RecursionError:
        raise UsageError("is not valid TOML: nested too deeply", file=str(path)) from None
    if _holds_nul(document):
        raise UsageError("names a file with a NUL character, which none can have", file=str(path))
    unknown = sorted(set(document) - {"job", "options", "output"})
    entries = document.get("job")
    if unknown:
        raise UsageError(f"unknown key {unknown[0]!r}", file=str(path), expected="job, options or output")
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise UsageError("no [[job]] in it", file=str(path))
    common = document.get("options", {})
    if not isinstance(common, dict):
        raise UsageError("options is not a table", file=str(path))
    _check_options(path, "options", common, DEFAULTS)
    found: list[tuple[Request, bool]] = []
    for number, entry in enumerate(entries, 1):
        where = f"job {number}"
        said = {key: value for key, value in entry.items() if key not in _OWN}
        _check_options(path, where, said, (*_OWN, *DEFAULTS))
        given = {key: value for key, value in entry.items() if key in DEFAULTS}
        options = DEFAULTS | common | given | dict(overrides)
        for key in ("calibration", "staging", "recipe"):
            if isinstance(options[key], str):
                options[key] = path.parent / options[key]
        output = _text(path, where, entry.get("output", document.get("output")), "output")
        found += _expand(path, where, entry, options, output)
    # Outputs beside their sources match the sources' pattern when a batch is run again.
    outputs = {str(request.output) for request, _ in found}
    requests = [request for request, named in found if named or str(request.source) not in outputs]
    _refuse_collisions(path, requests)
    return requests


def _holds_nul(value: Any) -> bool:
    """Whether any text holds the one character that no path, pattern or name can."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(map(_holds_nul, value)) or any(map(_holds_nul, value.values()))
    return isinstance(value, list) and any(map(_holds_nul, value))


def _expand(
    path: Path, where: str, entry: Mapping[str, Any], options: dict[str, Any], output: str | None
) -> Iterator[tuple[Request, bool]]:
    """Requests, and whether their source was named rather than found."""
    targets = _texts(path, where, entry, "target")
    for text in targets:
        get_target(text)
    for pattern in _texts(path, where, entry, "source"):
        for source in _sources(path, where, pattern):
            for target in targets:
                request = make_request(source, target, None, options | {"resume": True})
                name = default_output(source, get_target(target))
                folder: Place = name.parent if output is None else _from(path.parent, output)
                if output is None and isinstance(source, Remote):
                    folder = path.parent
                yield replace(request, output=folder / name.name), source == _from(path.parent, pattern)


def _from(folder: Path, text: str) -> Place:
    """A URL, or a path seen from `folder`."""
    found = place(text)
    return folder / found.expanduser() if isinstance(found, Path) else found


def _sources(path: Path, where: str, pattern: str) -> Sequence[Place]:
    """What a path, a pattern or a folder of checkpoints names. A plain path need not exist: its job will fail."""
    remote = place(pattern)
    if isinstance(remote, Remote):
        return _remote_sources(path, where, remote)
    full = os.path.expanduser(str(path.parent / pattern))  # noqa: PTH111
    if glob.has_magic(full) and not os.path.lexists(full):
        found = [Path(name) for name in sorted(glob.glob(full, recursive=True))]  # noqa: PTH207
        found = [file for file in found if not file.name.startswith(".")]
        if not found:
            raise UsageError(f"{where}: source {pattern!r} matches nothing", file=str(path))
        return found
    source = Path(full)
    if source.is_dir() and not any(source.glob("*.index.json")):
        # A folder of single files is a shelf; a folder with an index is one checkpoint.
        files = sorted(f for f in source.iterdir() if f.suffix in SUFFIXES and not f.name.startswith("."))
        if len(files) > 1:
            return files
    return [source]


def _remote_sources(path: Path, where: str, remote: Remote) -> list[Remote]:
    """A URL, or the files of its folder that match its last part. Folders are listed by the file system, once."""
    if not glob.has_magic(remote.name) or remote.protocol in ("http", "https"):
        return [remote]
    found = sorted(remote.parent.glob(remote.name), key=str)
    if not found:
        raise UsageError(f"{where}: source {remote} matches nothing", file=str(path))
    return found


def _check_options(path: Path, where: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    for key, value in options.items():
        if key not in DEFAULTS:
            hint = close_to(key, known, f"one of {', '.join(known)}")
            raise UsageError(f"{where}: unknown key {key!r}", file=str(path), hint=hint)
        if key in _LISTS:
            right = isinstance(value, list) and all(isinstance(item, str) for item in value)
            expected = "a list of strings"
        elif key in _CHOICES:
            right, expected = value in _CHOICES[key], f"one of {', '.join(_CHOICES[key])}"
        elif isinstance(DEFAULTS[key], bool):
            right, expected = isinstance(value, bool), "true or false"
        elif key == "jobs":
            right, expected = type(value) is int and value > 0, "a number of threads"
        elif key == "min_sqnr":
            right, expected = type(value) in (int, float) and value == value, "decibels"
        else:
            right, expected = isinstance(value, str), "a string"
        if not right:
            raise UsageError(f"{where}: {key} is {value!r}", file=str(path), expected=expected)


def _text(path: Path, where: str, value: Any, key: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(f"{where}: {key} is {value!r}", file=str(path), expected="a string")
    return value


def _texts(path: Path, where: str, entry: Mapping[str, Any], key: str) -> list[str]:
    value = entry.get(key)
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, str) and item for item in items):
        raise UsageError(
            f"{where}: {key} is {value!r}", file=str(path), expected="a string, or a list of them"
        )
    return items


def _refuse_collisions(path: Path, requests: list[Request]) -> None:
    """Two jobs must not write one file, and none may write what another reads."""
    sources = {str(request.source): request for request in requests}
    outputs: dict[str, Request] = {}
    for request in requests:
        name = str(request.output)
        # Where a file system does not tell case, names that differ in nothing else are one.
        first = outputs.setdefault(name.casefold(), request)
        if first is not request:
            raise UsageError(
                f"two jobs write {name}", file=str(path), found=f"{first.source} and {request.source}"
            )
        if name in sources:
            raise UsageError(f"{name} is a job's output and another's source", file=str(path))
