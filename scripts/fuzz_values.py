"""Values that nobody expects, and what makes wrong ones of right ones: JSON, text, bytes."""

from __future__ import annotations

import ast
import json
import struct
from functools import cache
from random import Random
from typing import Any

from fuzz_seeds import ROOT

NUMBERS: list[Any] = [
    0, -1, 1, 2, 3, 7, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63,
    1 << 64, -(1 << 63), 10**30, 0.5, -0.0, 1.0, 16.0, 1e308, 1e-320,
]  # fmt: skip
STRINGS = [
    "", " ", "a", "a.b", "__metadata__", "weight", "../x", "/etc/passwd", "C:\\x", "a/b", "..", "\x00", "\x1b[31m",
    "\n", "\u202e", "é", "😀", "\ud83d", "a" * 300, "." * 200, "true", "null", "NaN", "16", "1e3", "(a+)+$", ".*" * 30,
    "re:(a|aa)+$", "re:(", "re:.*", "*" * 50, "F8_E4M3", "BF16", "nvfp4", "%s%n", "${x}", "-", "--help",
]  # fmt: skip
CONSTANTS: list[Any] = [None, True, False, [], {}, [[]], [0], [{}], {"": None}]
#: What JSON is not, or what readers make different things of.
TEXTS = [
    "NaN", "Infinity", "-Infinity", "1e999", "-0", "01", "1.", ".5", "+1", "0x10", "'a'", '"\\ud800"', '"\\x00"',
    "[1,]",
    "9" * 5000, "1e-999", "/**/1", "nul", "{]", '{"a":1,"a":2}', "[" * 50 + "]" * 50, "[" * 3000 + "]" * 3000,
    '{"a":' * 1500 + "1" + "}" * 1500, "\x00", "\ufeff", '"\t"',
]  # fmt: skip


@cache
def words() -> list[str]:
    """Keys and values that the code knows: its string constants."""
    found: set[str] = set()
    for folder in ("formats", "runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and 0 < len(node.value) < 32
                ):
                    found.add(node.value)
    return sorted(word for word in found if " " not in word)


def anything(r: Random) -> Any:
    """A JSON value that was not expected."""
    kind = r.randrange(8)
    if kind < 2:
        return r.choice(NUMBERS)
    if kind < 4:
        return r.choice(STRINGS)
    if kind == 4:
        return r.choice(words())
    if kind == 5:
        # A copy: what is put into a document may be changed there.
        return json.loads(json.dumps(r.choice(CONSTANTS)))
    if kind == 6:
        return [anything(r) for _ in range(r.randrange(4))]
    return {r.choice(words()): anything(r) for _ in range(r.randrange(4))}


def places(value: Any, found: list[tuple[Any, Any]], limit: int = 4000) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    todo = [value]
    while todo and len(found) < limit:
        item = todo.pop()
        pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        for key, inner in pairs:
            found.append((item, key))
            todo.append(inner)
    return found


def bent(r: Random, value: Any) -> Any:
    """A value near the one that stood there."""
    if not isinstance(value, (int, str, list, dict)) or isinstance(value, bool) or r.randrange(3) == 0:
        return anything(r)
    if isinstance(value, int):
        return r.choice(
            [value + 1, value - 1, -value, value * 2, value // 2, value << 32, float(value), str(value)]
        )
    if isinstance(value, str):
        return r.choice(
            [
                value[:-1],
                value + "x",
                value.upper(),
                "re:" + value,
                value * 3,
                [value],
                {value: 1},
                value + "\0",
            ]
        )
    if isinstance(value, list):
        return r.choice(
            [value[:-1], value + value, value[::-1], [value], [*value, anything(r)], {"0": value}]
        )
    return r.choice([list(value), {"": value}, str(value)])


def spoil(r: Random, document: Any) -> str:
    """JSON text of a document after one to four changes, some of which only text can hold."""
    document = json.loads(json.dumps(document))
    holes: list[str] = []
    for _ in range(r.randint(1, 4)):
        found = places(document, [])
        if not found or r.randrange(40) == 0:
            document = anything(r)
            continue
        owner, key = r.choice(found)
        step = r.randrange(10)
        if step < 4:
            owner[key] = bent(r, owner[key])
        elif step < 6:
            owner[key] = anything(r)
        elif step == 6:
            del owner[key]
        elif step == 7 and isinstance(owner, dict):
            owner[r.choice(words()) if r.randrange(2) else r.choice(STRINGS)] = json.loads(
                json.dumps(owner[key])
            )
        elif step == 8 and isinstance(owner, dict):
            owner[r.choice(words())] = anything(r)
        else:
            holes.append(r.choice(TEXTS))
            owner[key] = f"@hole{len(holes) - 1}@"
    text = json.dumps(document, ensure_ascii=r.randrange(2) == 0)
    for index, hole in enumerate(holes):
        text = text.replace(f'"@hole{index}@"', hole)
    if r.randrange(12) == 0 and text.startswith("{") and len(text) > 2:
        # A key twice.
        text = text[:-1] + "," + text[1:]
    return text


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def hacked(r: Random, data: bytes, within: int) -> bytes:
    """Bytes changed, cut, repeated or put in, among the first `within`."""
    out = bytearray(data)
    for _ in range(r.randint(1, 5)):
        at = r.randrange(max(1, min(within, len(out))))
        kind = r.randrange(7)
        if kind == 0:
            out[at : at + 1] = bytes([r.randrange(256)])
        elif kind == 1:
            out[at : at + 8] = struct.pack(
                "<q", r.choice([x for x in NUMBERS if isinstance(x, int) and abs(x) < 1 << 63])
            )
        elif kind == 2:
            out[at : at + 4] = struct.pack(
                "<I", r.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, len(out)])
            )
        elif kind == 3:
            del out[at : at + r.randint(1, 64)]
        elif kind == 4:
            out[at:at] = r.randbytes(r.randint(1, 16))
        elif kind == 5:
            out[at:at] = out[at : at + r.randint(1, 200)]
        else:
            del out[at + r.randrange(max(1, len(out) - at)) :]
    return bytes(out)
