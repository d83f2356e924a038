"""A model's parameter list, from whatever a user has of it, and what a file's names lack or have too much."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from qconvert.formats.checkpoint import MAX_JSON_BYTES, Checkpoint, opened
from qconvert.formats.errors import UsageError
from qconvert.formats.header import strict_json
from qconvert.formats.tensors import HeaderView
from qconvert.runtime.contracts.base import Violation
from qconvert.runtime.markers_api import check_names

_EXPECTED = (
    "a JSON list of names, an object with names as keys, an index.json, a .safetensors file or folder, or a "
    "config.json"
)
#: How configs of transformers call the number of blocks.
_DEPTH = ("num_hidden_layers", "num_layers", "n_layers", "depth", "n_layer")
_BLOCK = r"(?P<stem>(?:[^.0-9][^.]*\.)+)(?P<block>\d+)\."


def read_model(path: Path) -> frozenset[str] | dict[str, Any]:
    """The names of a model's parameters, or its config where that is all there is. Raises UsageError."""
    if not path.exists():
        raise UsageError("--model: no such file or folder", file=str(path))
    if path.is_dir() or path.suffix == ".safetensors":
        with opened(path) as checkpoint:
            return _names(checkpoint)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is too large")
        document = strict_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--model: not JSON ({error})", file=str(path), expected=_EXPECTED) from None
    return _from_json(document, path)


def _from_json(document: Any, path: Path) -> frozenset[str] | dict[str, Any]:
    if isinstance(document, list) and document and all(isinstance(name, str) for name in document):
        return frozenset(document)
    if isinstance(document, dict):
        names = document.get("weight_map", document)
        if "weight_map" not in document and _depth(document) is not None:
            return document
        if isinstance(names, dict) and any(isinstance(name, str) and "." in name for name in names):
            return frozenset(name for name in names if name != "__metadata__")
    raise UsageError("--model: no list of parameters", file=str(path), expected=_EXPECTED)


def _names(checkpoint: Checkpoint) -> frozenset[str]:
    return frozenset(name for name in checkpoint.tensors if not name.endswith(".comfy_quant"))


def model_name_violations(view: HeaderView, model: frozenset[str] | dict[str, Any]) -> list[Violation]:
    """What the model would miss in the file, and what it would not know."""
    return _against_config(view, model) if isinstance(model, dict) else check_names(view, model)


def name_options(view: HeaderView, model: frozenset[str] | dict[str, Any]) -> tuple[str, ...]:
    """Options of a conversion that give the file the model's names; empty where no simple one does."""
    if isinstance(model, dict):
        depth, blocks = _depth(model), _blocks(view.tensors)
        return ("--keep-layers", str(depth)) if depth and blocks and blocks[1] > depth else ()
    names = {name for name in view.tensors if name.rpartition(".")[2] in ("weight", "bias")}
    unknown, missing = names - model, model - names
    for name in sorted(unknown):
        for wanted in sorted(missing):
            if name.endswith("." + wanted):
                prefix = name.removesuffix(wanted)
                if all(x.startswith(prefix) and x.removeprefix(prefix) in missing for x in unknown):
                    return ("--rename", f"^{re.escape(prefix)}=")
            elif wanted.endswith("." + name):
                prefix = wanted.removesuffix(name)
                if all(prefix + x in missing for x in unknown):
                    return ("--rename", f"^={prefix}")
        break
    there, wants = _blocks(names), _blocks(model)
    if there and wants and there[0] == wants[0] and there[1] > wants[1] and not missing:
        return ("--keep-layers", str(wants[1]))
    return ()


def _depth(config: dict[str, Any]) -> int | None:
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(part, dict):
            for key in _DEPTH:
                value = part.get(key)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
    return None


def _blocks(names: Collection[str]) -> tuple[str, int] | None:
    """The longest list of blocks: its name, and how many it holds."""
    found: dict[str, int] = {}
    for name in names:
        hit = re.match(_BLOCK, name)
        if hit:
            found[hit["stem"]] = max(found.get(hit["stem"], 0), int(hit["block"]) + 1)
    return max(found.items(), key=lambda item: (item[1], item[0])) if found else None


def _against_config(view: HeaderView, config: dict[str, Any]) -> list[Violation]:
    """A config names no parameters; the number of blocks and the sizes of the tables can be compared."""
    out = []
    depth, blocks = _depth(config), _blocks(view.tensors)
    if depth is not None and blocks is not None and blocks[1] != depth:
        kind = "name-unknown" if blocks[1] > depth else "name-missing"
        message = f"the model has {depth} blocks, the file has {blocks[1]} under {blocks[0].rstrip('.')}"
        out.append(Violation("refuse", kind, message, None, str(blocks[1]), str(depth)))
    text = config.get("text_config")
    sizes = text if isinstance(text, dict) else config
    for name, spec in sorted(view.tensors.items()):
        if name.endswith("embed_tokens.weight") and len(spec.shape) == 2:
            for axis, key in enumerate(("vocab_size", "hidden_size")):
                wanted = sizes.get(key)
                packed = axis == 1 and spec.dtype == "U8"
                if isinstance(wanted, int) and spec.shape[axis] != wanted and not packed:
                    found = str(list(spec.shape))
                    message = f"the size of the embedding is not the model's {key}"
                    out.append(Violation("refuse", "shape-model", message, name, found, str(wanted)))
    return out
