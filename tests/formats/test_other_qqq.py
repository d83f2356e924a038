"""QQQ: the golden of its own packer, and both forms packed here, one element at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import other_files as o
import pytest
import torch

GOLDENS = o.names("qqq*")


def place(k: int, n: int, grouped: bool) -> tuple[int, int, int]:
    """Row, word and nibble of the code of column k and row n of the weight, from the fragments of the kernel."""
    row, word = k // 16, n // 64 * 128
    n %= 64
    thread = (n % 8) * 4 + k % 16 // 4
    # Eight codes a thread and strip: row n % 16 below 8 first, then the other.
    inside = (n % 16 // 8) * 4 + k % 4
    order = [0, 2, 4, 6, 1, 3, 5, 7] if grouped else [4, 0, 5, 1, 6, 2, 7, 3]
    return row, word + thread * 4 + n // 16, order.index(inside)


def packed(q: np.ndarray[Any, Any], grouped: bool) -> np.ndarray[Any, Any]:
    n, k = q.shape
    words = np.zeros((k // 16, 2 * n), np.uint32)
    for i in range(n):
        for j in range(k):
            row, word, nibble = place(j, i, grouped)
            words[row, word] |= np.uint32((int(q[i, j]) & 15) << (4 * nibble))
    return words.view(np.int32)


def single(scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return scale.reshape(-1, 32)[:, order].reshape(scale.shape)


@pytest.mark.skipif(not GOLDENS, reason=o.WITHOUT)
@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_are_exact(name: str, tmp_path: Path) -> None:
    path, spec = o.place(name, tmp_path)
    layer, values = o.read_layer(path, spec["prefix"])
    assert (layer.codec.name, layer.n, layer.k) == ("qqq", spec["N"], spec["K"])
    assert not layer.findings and not layer.leftovers
    want = o.reference(path)
    assert torch.equal(torch.from_numpy(values).to(want.dtype), want)


def test_per_channel(tmp_path: Path, rng: np.random.Generator) -> None:
    q = rng.integers(-7, 8, (128, 48))
    scale = rng.random((1, 128)).astype(np.float32)
    tensors = {"a.B": packed(q, False), "a.s_channel": single(scale), "a.s_group": np.zeros(0, np.float16)}
    _, values = o.read_layer(o.save(tmp_path / "m.safetensors", tensors), "a")
    assert np.array_equal(values, (q * 16).astype(np.float32) * scale.T)


def test_per_group(tmp_path: Path, rng: np.random.Generator) -> None:
    u = rng.integers(0, 16, (64, 256))
    channel = rng.random((1, 64)).astype(np.float32)
    group = (rng.random((2, 64)) * 16).astype(np.float16)
    order = [i + 8 * j for i in range(8) for j in range(8)]
    tensors = {
        "a.B": packed(u, True),
        "a.s_channel": single(channel),
        "a.s_group": group.reshape(-1, 64)[:, order].reshape(group.shape),
    }
    layer, values = o.read_layer(o.save(tmp_path / "m.safetensors", tensors), "a")
    assert layer.options == {"group": 128}
    grid = np.rint((u - 8) * np.repeat(group.astype(np.float32).T, 128, axis=1))
    assert np.array_equal(values, grid.astype(np.float32) * channel.T)
