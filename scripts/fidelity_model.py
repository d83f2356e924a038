"""all-MiniLM-L6-v2 in numpy: tokens of real text, a forward pass, and what every linear layer was given.

BERT as published (arXiv 1810.04805): post-norm blocks, exact GELU, WordPiece. Sentences come from the docstrings of
the Python standard library: English prose that every machine with Python has.
"""

from __future__ import annotations

import ast
import math
import re
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
BLOCKS, HEADS = 6, 12
#: Called with (layer name, its input [tokens, K]).
Hook = Callable[[str, F32], None]


def sentences(count: int) -> list[str]:
    """Sentences of 8 to 60 words from docstrings, in the order of file names; the same on equal Python versions."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for text in _docstrings(path):
            for paragraph in re.split(r"\n\s*\n", text):
                for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
                    if 8 <= len(sentence.split()) <= 60 and ">>>" not in sentence:
                        found[sentence] = None
    every = max(1, len(found) // count)
    return list(found)[::every][:count]


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


class WordPiece:
    """Lower-cased WordPiece: greedy longest match, `##` for what continues a word."""

    def __init__(self, vocabulary: str) -> None:
        self.ids = {word: i for i, word in enumerate(vocabulary.splitlines())}

    def __call__(self, text: str, limit: int = 128) -> list[int]:
        plain = unicodedata.normalize("NFD", text.lower())
        plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
        pieces = [p for word in re.findall(r"\w+|[^\w\s]", plain) for p in self._pieces(word)]
        return [self.ids["[CLS]"], *pieces[: limit - 2], self.ids["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        out, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in self.ids:
                    out.append(self.ids[piece])
                    start = end
                    break
            else:
                return [self.ids["[UNK]"]]
        return out


class MiniLM:
    """The encoder over sentences of one length at a time (no padding, no mask)."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.t = tensors

    def linear(self, name: str, x: F32, hook: Hook | None) -> F32:
        if hook is not None:
            hook(name, x.reshape(-1, x.shape[-1]))
        out: F32 = x @ self.t[f"{name}.weight"].T + self.t[f"{name}.bias"]
        return out

    def norm(self, name: str, x: F32) -> F32:
        centred = x - x.mean(-1, keepdims=True)
        spread = np.sqrt((centred * centred).mean(-1, keepdims=True) + np.float32(1e-12))
        out: F32 = centred / spread * self.t[f"{name}.weight"] + self.t[f"{name}.bias"]
        return out

    def __call__(self, ids: NDArray[np.int64], hook: Hook | None = None) -> F32:
        """[B, T] token ids -> [B, T, 384] hidden states."""
        b, length = ids.shape
        e = "embeddings"
        x = self.t[f"{e}.word_embeddings.weight"][ids] + self.t[f"{e}.position_embeddings.weight"][:length]
        x = self.norm(f"{e}.LayerNorm", x + self.t[f"{e}.token_type_embeddings.weight"][0])
        for i in range(BLOCKS):
            p = f"encoder.layer.{i}"
            q, k, v = (
                self.linear(f"{p}.attention.self.{part}", x, hook)
                .reshape(b, length, HEADS, -1)
                .transpose(0, 2, 1, 3)
                for part in ("query", "key", "value")
            )
            scores = q @ k.transpose(0, 1, 3, 2) / np.float32(math.sqrt(q.shape[-1]))
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = scores / scores.sum(-1, keepdims=True) @ v
            mixed = mixed.transpose(0, 2, 1, 3).reshape(b, length, -1)
            x = self.norm(
                f"{p}.attention.output.LayerNorm", x + self.linear(f"{p}.attention.output.dense", mixed, hook)
            )
            inner = gelu(self.linear(f"{p}.intermediate.dense", x, hook))
            x = self.norm(f"{p}.output.LayerNorm", x + self.linear(f"{p}.output.dense", inner, hook))
        return x


def gelu(x: F32) -> F32:
    """x/2 (1 + erf(x/sqrt 2)); erf by Abramowitz and Stegun 7.1.26, good to 1.5e-7."""
    z = np.abs(x) / np.float32(math.sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * z)
    poly = np.zeros_like(t)
    for c in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        poly = (poly + np.float32(c)) * t
    erf = np.sign(x) * (1 - poly * np.exp(-z * z))
    out: F32 = (x * (1 + erf) / 2).astype(np.float32)
    return out


def record(model: MiniLM, tokens: list[list[int]], limit: int = 1 << 30) -> dict[str, F32]:
    """layer -> inputs [S, K] over all sentences, at most `limit` rows a layer."""
    rows: dict[str, list[F32]] = {}
    for batch in batches(tokens):
        model(batch, lambda name, x: rows.setdefault(name, []).append(x))
    return {name: np.concatenate(parts)[:limit] for name, parts in rows.items()}


def batches(tokens: list[list[int]], size: int = 16) -> Iterator[NDArray[np.int64]]:
    """Sentences of one length together, so that nothing has to be padded."""
    by_length: dict[int, list[list[int]]] = {}
    for ids in tokens:
        by_length.setdefault(len(ids), []).append(ids)
    for same in by_length.values():
        for i in range(0, len(same), size):
            yield np.array(same[i : i + size])
