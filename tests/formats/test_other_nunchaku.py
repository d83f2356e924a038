"""nunchaku: goldens of its packers, and every layout packed here, one element at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import other_files as o
import pytest
import torch
from qconvert.formats import nunchaku

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def packed(q: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    n, k = q.shape
    words = np.zeros(n * k // 8, np.uint32)
    for i in range(n):
        for j in range(k):
            at = (i // 128) * (k // 64) + j // 64
            at = ((at * 8 + i % 128 // 16) * 8 + i % 8) * 4 + j % 32 // 8
            at = (at * 2 + i % 16 // 8) * 2 + j % 64 // 32
            words[at] |= np.uint32((int(q[i, j]) & 15) << (4 * (j % 8)))
    return words.view(np.int8).reshape(n, k // 2)


def vector(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    out = np.empty_like(values)
    for i, value in enumerate(values):
        r = i % 128
        out[i - r + (r // 16) * 16 + ((r % 8) // 2) * 4 + ((r % 16) // 8) * 2 + r % 2] = value
    return out


def block_scales(scale: np.ndarray[Any, Any], unit: int) -> np.ndarray[Any, Any]:
    n, groups = scale.shape
    out = np.empty(n * groups, scale.dtype)
    for i in range(n):
        for g in range(groups):
            at = ((i // 128) * (groups // unit) + g // unit) * 8 + i % 8
            out[((at * 4 + i % 32 // 8) * 4 + i % 128 // 32) * unit + g % unit] = scale[i, g]
    return out.reshape(groups, n)


def lora(factor: np.ndarray[Any, Any], down: bool) -> np.ndarray[Any, Any]:
    features, rank = factor.shape
    out = np.empty(features * rank, factor.dtype)
    for c in range(features):
        for r in range(rank):
            a, b = (r, c) if down else (c, r)
            at = ((c // 16) * (rank // 16) + r // 16) * 8 + a % 8
            at = ((at * 4 + b % 8 // 2) * 2 + a % 16 // 8) * 2 + b % 16 // 8
            out[at * 2 + b % 2] = factor[c, r]
    return out.reshape(features, rank)


def test_int4_with_branch(tmp_path: Path, rng: np.random.Generator) -> None:
    n, k, rank = 256, 128, 16
    q = rng.integers(-8, 8, (n, k))
    scale = rng.random((n, k // 64)).astype(np.float16)
    smooth = (rng.random(k) + 0.5).astype(np.float16)
    up, down = (rng.normal(size=(size, rank)).astype(np.float16) for size in (n, k))
    tensors = {
        "a.qweight": packed(q),
        "a.wscales": np.stack(
            [vector(scale[t : t + 128, g]) for t in (0, 128) for g in range(k // 64)]
        ).reshape(k // 64, n),
        "a.proj_down": lora(down, True),
        "a.proj_up": lora(up, False),
        "a.smooth_factor": vector(smooth),
        "a.smooth_factor_orig": vector(smooth),
        "a.bias": np.zeros(n, np.float16),
    }
    layer, values = o.read_layer(o.save(tmp_path / "m.safetensors", tensors), "a")
    assert (layer.codec.name, layer.options["kind"], layer.options["rank"]) == ("nunchaku", "int4", rank)
    assert not layer.leftovers
    assert [finding.level for finding in layer.findings] == ["note"]
    residual = q * np.repeat(scale.astype(np.float64), 64, axis=1) / smooth.astype(np.float64)
    want = residual + up.astype(np.float64) @ down.astype(np.float64).T
    assert np.allclose(values, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_block_scales(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    n, k = 128, 256
    group, unit = {"nvfp4": (16, 4), "mxfp4": (32, 2)}[kind]
    q = rng.integers(0, 16, (n, k))
    tensors: dict[str, Any] = {"a.qweight": packed(q)}
    if kind == "nvfp4":
        scale = torch.from_numpy(rng.random((n, k // group)).astype(np.float32) * 400).to(torch.float8_e4m3fn)
        raw = scale.view(torch.uint8).numpy()
        channel = rng.random(n).astype(np.float16)
        tensors["a.wscales"] = torch.from_numpy(block_scales(raw, unit)).view(torch.float8_e4m3fn)
        tensors["a.wcscales"], tensors["a.wtscale"] = vector(channel), np.array([0.125], np.float16)
        spread = scale.float().numpy() * (channel.astype(np.float32) * np.float32(0.125))[:, None]
    else:
        raw = rng.integers(120, 130, (n, k // group)).astype(np.uint8)
        tensors["a.wscales"] = block_scales(raw, unit)
        spread = np.ldexp(np.float32(1), raw.astype(int) - 127)
    layer, values = o.read_layer(o.save(tmp_path / "m.safetensors", tensors), "a")
    assert layer.options["kind"] == kind and not layer.leftovers
    assert np.array_equal(values, E2M1[q] * np.repeat(spread.astype(np.float32), group, axis=1))


@pytest.mark.parametrize("splits", [1, 3])
def test_w4a16(splits: int, tmp_path: Path, rng: np.random.Generator) -> None:
    n, k = 24, 128
    q = rng.integers(0, 16, (n, k))
    scale, zero = (rng.normal(size=(k // 64, n)).astype(np.float16) for _ in range(2))
    halves = np.zeros(n // 4 * k, np.uint16)
    for i in range(n):
        for j in range(k):
            at = (i // 4) * k + (j // 64) * 64 + (i % 4) * 16 + j % 64 // 32 * 8 + j % 8
            halves[at] |= np.uint16(int(q[i, j]) << (4 * (j % 32 // 8)))
    tensors = {
        "a.qweight": halves.view(np.int32).reshape(n // 4, k // 2),
        "a.wscales": scale,
        "a.wzeros": zero,
    }
    path = o.save(tmp_path / "m.safetensors", tensors)
    stored = q * np.repeat(scale.T.astype(np.float32), 64, axis=1) + np.repeat(
        zero.T.astype(np.float32), 64, axis=1
    )
    if splits == 1:
        layer, values = o.read_layer(path, "a")
        assert [finding.level for finding in layer.findings] == ["guess"]
        assert np.array_equal(values, stored.astype(np.float32))
        return
    _, values = o.read_layer(path, "a", "a=nunchaku_w4a16,splits=3")
    want = np.empty_like(stored)
    for i in range(n):
        want[(i % splits) * (n // splits) + i // splits] = stored[i]
    assert np.array_equal(values, want.astype(np.float32))


@pytest.mark.skipif(not o.names("*nunchaku*"), reason=o.WITHOUT)
def test_goldens(tmp_path: Path) -> None:
    # AutoRound's mxfp4: exact, and nothing but zeros in the padding.
    path, spec = o.place("ar_nunchaku_mxfp4.safetensors", tmp_path)
    layer, values = o.read_layer(path, "l")
    want, (n, k) = o.reference(path), (spec["N"], spec["K"])
    assert (layer.n, layer.k) == (128, 256)
    assert torch.equal(torch.from_numpy(values[:n, :k]).to(want.dtype), want)
    assert not values[n:].any() and not values[:, k:].any()
    # AutoRound's W4A16: its reference is its own float weight; wzeros are rounded to bf16.
    path, _ = o.place("ar_nunchaku_w4a16.safetensors", tmp_path)
    _, values = o.read_layer(path, "l")
    want = o.reference(path).float().numpy()
    assert np.linalg.norm(values - want) < 6e-3 * np.linalg.norm(want)
    # nunchaku's packer: the reference is of the residual alone; smoothing holds its own indices.
    path, spec = o.place("nunchaku_int4.safetensors", tmp_path)
    tensors = o.load(path)
    assert np.array_equal(nunchaku.vector(tensors["l.smooth"].float().numpy()), np.arange(spec["K"]))
    tensors["l.smooth"].fill_(1)
    del tensors["l.lora_up"], tensors["l.lora_down"]
    _, values = o.read_layer(o.save(tmp_path / "residual.safetensors", tensors), "l")
    want = tensors["ref.dequant"]
    assert torch.equal(torch.from_numpy(values).to(want.dtype), want)
    path, _ = o.place("nunchaku_lowrank_ref.safetensors", tmp_path)
    plain, stored = o.load(path), o.load(tmp_path / "nunchaku_int4.safetensors")
    up = nunchaku._lora(stored["l.lora_up"].float().numpy(), rank_first=False)
    down = nunchaku._lora(stored["l.lora_down"].float().numpy(), rank_first=True)
    assert np.array_equal(up, plain["up"].float().numpy())
    assert np.array_equal(down.T, plain["down"].float().numpy())
