"""Leaving out blocks behind the first N: for runtimes that load fewer layers than a source holds.

The list that is cut is the one that holds most of the file: a text encoder's language layers, not its vision
tower's. Nothing is cut unless the user says `--keep-layers N`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qconvert.formats.errors import UsageError
from qconvert.formats.layers import Inventory
from qconvert.runtime.families import FamilyMatch

#: The first number in a name counts the blocks; what stands before it names the list.
_BLOCK = re.compile(r"(?P<stem>(?:[^.]*\.)*?)(?P<block>\d+)\.")


@dataclass(frozen=True)
class Cut:
    """What is left out: layers by prefix, and every tensor by name, each with the reason. `note` says it in a line."""

    layers: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    note: str = ""


def cut_layers(
    inventory: Inventory, keep: int | None, selected: Callable[[str], bool] = lambda name: True
) -> Cut:
    """Everything in blocks from `keep` on; nothing where `keep` is None.

    `selected` tells which layers and tensors are converted at all (--component). Raises UsageError when nothing in
    the file is counted in blocks; a `keep` that leaves nothing out is a note.
    """
    if keep is None:
        return Cut()
    stem, count = _main_list(inventory, selected)
    if keep >= count:
        return Cut(note=f"--keep-layers {keep}: the file has {count} blocks under {stem!r}; none is left out")
    reason = f"--keep-layers {keep}: {stem}N with N >= {keep}"
    layers: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for layer in inventory.layers.values():
        if selected(layer.prefix) and _number(layer.prefix + ".", stem) >= keep:
            layers[layer.prefix] = reason
            tensors.update((tensor.name, reason) for tensor in layer.tensors.values())
    for tensor in (*inventory.loose, *inventory.sentinels):
        if selected(tensor.name) and _number(tensor.name, stem) >= keep:
            tensors[tensor.name] = reason
    note = f"--keep-layers {keep}: blocks {keep} to {count - 1} under {stem!r} are left out ({len(layers)} layers)"
    return Cut(layers, tensors, note)


def offer(matches: Sequence[FamilyMatch], runtime: str, format_name: str) -> str | None:
    """The option that leaves out what the runtime would not read; None where it reads everything."""
    for match in matches:
        rules = match.runtime_rules(runtime, format_name)
        count = rules.max_layers()
        beyond = sum(1 for layer in match.layers if rules.beyond(layer))
        if count is not None and beyond:
            return f"{beyond} layers lie in blocks that {runtime} does not read; --keep-layers {count} leaves them out"
    return None


def _number(name: str, stem: str) -> int:
    """The block of `stem` that a tensor lies in, -1 for none."""
    found = _BLOCK.match(name)
    return int(found["block"]) if found and found["stem"] == stem else -1


def _main_list(inventory: Inventory, selected: Callable[[str], bool]) -> tuple[str, int]:
    """The list of blocks that holds most bytes: the start of its names, and how many blocks it counts."""
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for layer in inventory.layers.values():
        found = _BLOCK.match(layer.prefix + ".") if selected(layer.prefix) else None
        if found:
            sizes[found["stem"]] = sizes.get(found["stem"], 0) + layer.nbytes
            counts[found["stem"]] = max(counts.get(found["stem"], 0), int(found["block"]) + 1)
    if not sizes:
        raise UsageError("--keep-layers: no layer of this file is counted in blocks")
    stem = max(sizes, key=lambda name: (sizes[name], name))
    return stem, counts[stem]
