"""Models at true size without their weights: names and shapes from data/skeletons, files with holes for payload."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from qconvert.formats.header import layout
from qconvert.formats.tensors import Spec

SKELETONS = Path(__file__).parents[1] / "data" / "skeletons"
ALL = sorted(path.stem for path in SKELETONS.glob("*.json"))
Header = dict[str, Spec]


@cache
def document(name: str) -> dict[str, Any]:
    return dict(json.loads((SKELETONS / f"{name}.json").read_text()))


@cache
def skeleton(name: str) -> Mapping[str, Spec]:
    """Names and shapes at true size; `{0..3,7}` in a key stands for each of those numbers."""
    header: Header = {}
    for key, text in document(name)["tensors"].items():
        dtype, *shape = text.split()
        spec = Spec(dtype, tuple(map(int, shape)))
        pattern = re.sub(r"\{[^}]*\}", "{}", key)
        for choice in product(*map(_numbers, re.findall(r"\{([^}]*)\}", key))):
            header[pattern.format(*choice)] = spec
    assert len(header) == document(name)["n_tensors"]
    return header


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        a, _, b = part.partition("..")
        found += range(int(a), int(b or a) + 1)
    return found


def prefixed(header: Mapping[str, Spec], prefix: str) -> Header:
    return {prefix + name: spec for name, spec in header.items()}


def fp8(header: Mapping[str, Spec], chosen: Callable[[str], bool]) -> tuple[Header, dict[str, bytes]]:
    """The chosen layers as ComfyUI stores fp8 with one scale, and the payload of their markers by tensor name."""
    marker = b'{"format": "float8_e4m3fn"}'
    out: Header = {}
    payload: dict[str, bytes] = {}
    for name, spec in header.items():
        layer = name.removesuffix(".weight")
        if layer == name or not chosen(layer):
            out[name] = spec
            continue
        out[name] = Spec("F8_E4M3", spec.shape)
        out[f"{layer}.weight_scale"] = Spec("F32", ())
        out[f"{layer}.comfy_quant"] = Spec("U8", (len(marker),))
        payload[f"{layer}.comfy_quant"] = marker
    return out, payload


def sparse(path: Path, header: Mapping[str, Spec], payload: Mapping[str, bytes] | None = None) -> Path:
    """A safetensors file of true size; what `payload` does not give is a hole of zeros."""
    laid = layout(header.items(), {})
    with path.open("wb") as file:
        file.write(laid.prefix)
        file.truncate(laid.file_size)
        for name, data in (payload or {}).items():
            file.seek(laid.offsets[name])
            file.write(data)
    return path
