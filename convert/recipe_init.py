"""`qconvert recipe init SRC`: a recipe that says what happens anyway, to be changed by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import click
from qconvert.convert.recipe import VERSION
from qconvert.convert.text import size
from qconvert.formats.checkpoint import Checkpoint, dumps, opened
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.layers import Inventory, Layer, take_inventory
from qconvert.formats.patterns import MAX_PATTERN, wildcard
from qconvert.formats.remote import Place
from qconvert.runtime.families import FamilyMatch, Role, detect, generic_role, owner

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class _Group:
    """Layers of one kind whose names differ in numbers only."""

    template: str
    role: Role
    quantised: bool
    layers: list[Layer] = field(default_factory=list)


def run_init(source: Place, output: Path | None, force: bool, as_json: bool) -> None:
    """`qconvert recipe init SRC [-o FILE]`."""
    with opened(source) as checkpoint:
        text = starting_point(checkpoint, take_inventory(checkpoint))
        families = [match.title for match in detect(checkpoint.specs)]
    if output is not None:
        _write(output, text, force)
    if as_json:
        written = None if output is None else str(output)
        click.echo(dumps({"families": families, "output": written, "recipe": text}))
    elif output is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"written   {output}")


def _write(output: Path, text: str, force: bool) -> None:
    if output.exists() and not force:
        raise UsageError("already exists", file=str(output), hint="--force overwrites it")
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise QConvertError(f"cannot be written: {error.strerror or error}", file=str(output)) from None


def starting_point(checkpoint: Checkpoint, inventory: Inventory) -> str:
    """The recipe's text. Its active rules keep what the family keeps anyway; what is quantised stands in comments."""
    matches = detect(checkpoint.specs)
    groups = _groups(inventory, matches)
    names = list(inventory.layers)
    title = ", ".join(match.title for match in matches) or "an unknown model (generic rules)"
    lines = [
        f"# Recipe for {title}: {_comment(str(checkpoint.path.name))}, {len(names)} layers.",
        "# Use it with: qconvert SOURCE --to TARGET --recipe THIS_FILE",
        "#",
        "# Rules are tried from the top, and the first that matches the layer's whole name decides. In a glob only",
        "# * is special; regex = '...' knows more. What a rule may say:",
        "#   keep = true            not quantised",
        '#   to = "comfy_fp8"       the form of that target (`qconvert targets`), or a type: bf16, fp16, fp32',
        '#   dtype = "fp16"         the type of what is not quantised',
        "#   full_precision = true  fp8, mxfp8: ask for full-precision matmul",
        "#   native_fp4 = true      nvfp4 without the full-precision key",
        '#   why = "..."            printed with the plan',
        "# Layers that no rule matches are planned as without a recipe. A rule that decides nothing is an error.",
        f"qconvert_recipe = {VERSION}",
    ]
    kept = [group for group in groups if group.role.kind == "protected" and not group.quantised]
    rest = [group for group in groups if group.role.kind in ("linear", "embedding") or group.quantised]
    if kept:
        lines += ["", "# Kept in high precision, as the family's rules advise."]
    for group in kept:
        why = group.role.why or "delicate"
        lines += ["", f"# {_what(group)}", *_rules(group, names, "keep = true", f"why = {_string(why)}")]
    if rest:
        lines += ["", "# What --to TARGET applies to. Take the # away to decide otherwise."]
    for group in rest:
        said = "keep = true" if group.role.kind == "linear" else 'to = "bf16"'
        lines += ["", f"# {_what(group)}", *(f"# {line}" for line in _rules(group, names, said))]
    return "\n".join(lines) + "\n"


def _groups(inventory: Inventory, matches: tuple[FamilyMatch, ...]) -> list[_Group]:
    found: dict[tuple[str, Role, bool], _Group] = {}
    for layer in inventory.layers.values():
        if layer.bare or (layer.ndim != 2 and not layer.quantised):
            continue
        match = owner(matches, layer.prefix)
        role = match.role(layer.prefix) if match else generic_role(layer.prefix, layer.first.spec)
        template = _NUMBER.sub("*", layer.prefix)
        key = (template, role, layer.quantised)
        found.setdefault(key, _Group(template, role, layer.quantised)).layers.append(layer)
    return list(found.values())


def _what(group: _Group) -> str:
    shapes = sorted({(layer.n, layer.k) for layer in group.layers})
    shown = ", ".join(f"{n} x {k}" for n, k in shapes[:3]) + (", ..." if len(shapes) > 3 else "")
    forms = ", ".join(sorted({layer.word for layer in group.layers}))
    count = len(group.layers)
    kind = "table" if group.role.kind == "embedding" else "layer"
    total = size(sum(layer.nbytes for layer in group.layers))
    return f"{count} {kind}{'s' if count > 1 else ''} [{shown}], {_comment(forms)}, {total}"


def _rules(group: _Group, names: Sequence[str], *says: str) -> list[str]:
    """One rule, or several where no single pattern says which layers are meant."""
    return [line for pattern in _patterns(group, names) for line in ("[[rule]]", pattern, *says)]


def _patterns(group: _Group, names: Sequence[str]) -> list[str]:
    """A glob where one matches these layers and no others, else any numbers, else the numbers spelled out."""
    members = {layer.prefix for layer in group.layers}
    if not set(group.template) & set("?[]") and {n for n in names if wildcard(group.template, n)} == members:
        return [f"glob = {_string(group.template)}"]
    parts = _NUMBER.split(group.layers[0].prefix)
    if len(group.layers) > 1:
        anything = r"\d+".join(map(_escaped, parts))
        if {name for name in names if re.fullmatch(anything, name, re.ASCII)} == members:
            return [f"regex = {_string(anything)}"]
    columns: list[list[str]] = [[] for _ in parts[1:]]
    for layer in group.layers:
        for column, hit in zip(columns, _NUMBER.findall(layer.prefix), strict=True):
            if hit not in column:
                column.append(hit)
    exact = "".join(
        _escaped(part) + hole for part, hole in zip(parts, [*map(_choice, columns), ""], strict=True)
    )
    if len(members) == prod(map(len, columns)) and len(exact) <= MAX_PATTERN:
        return [f"regex = {_string(exact)}"]
    return [f"regex = {_string(_escaped(name))}" for name in sorted(members)]


def _choice(numbers: list[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"


def _escaped(text: str) -> str:
    return re.sub(r"([.^$*+?{}\[\]|()\\])", r"\\\1", text)


def _string(text: str) -> str:
    """A TOML string: literal where it may be, for patterns are full of backslashes."""
    if "\\" in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    return '"' + "".join(_characters(text)) + '"'


def _characters(text: str) -> Iterator[str]:
    for char in text:
        if char in '"\\':
            yield f"\\{char}"
        elif char.isprintable():
            yield char
        else:
            yield f"\\U{ord(char):08x}"


def _comment(text: str) -> str:
    """Text from a file inside a comment: whatever it holds, the line ends where the comment does."""
    return "".join(char if char.isprintable() else "?" for char in text)
