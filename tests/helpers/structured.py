"""Small networks whose channels hang together as trained ones do, and files of them, right and wrong.

The encoders and the file writer are this module's own (numpy, from FORMATS), so that what qconvert reads was not
written by qconvert.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Weights = dict[str, F32]
#: name -> (type as safetensors spells it, the elements' bits)
Tensors = dict[str, tuple[str, NDArray[Any]]]

HIDDEN, INNER, BLOCKS, VOCABULARY = 256, 512, 4, 320
_ENCODED: dict[int, tuple[F32, tuple[NDArray[np.uint8], NDArray[np.uint8], F32]]] = {}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def write(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, array) in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
    return path


def read(path: Path) -> Tensors:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    types = {"F32": np.float32, "BF16": np.uint16, "I64": np.int64, "I8": np.int8}
    tensors: Tensors = {}
    for name, entry in header.items():
        a, b = entry["data_offsets"]
        raw = np.frombuffer(data[8 + size + a : 8 + size + b], types.get(entry["dtype"], np.uint8))
        tensors[name] = (entry["dtype"], raw.reshape(entry["shape"]))
    return tensors


def network(seed: int = 1, structured: bool = True) -> Weights:
    """A stack of blocks. Structured: strong channels are weak in norms, strong in all that reads or writes them."""
    rng = np.random.default_rng(seed)
    channel, inner = (np.exp(rng.standard_normal(size) * 0.5) for size in (HIDDEN, INNER))

    def around(strength: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(strength * np.exp(rng.standard_normal(strength.shape) * 0.2))

    def matrix(n: int, k: int, rows: NDArray[Any] | None, columns: NDArray[Any] | None) -> F32:
        if not structured:
            return (rng.standard_normal((n, k)) * 0.03).astype(np.float32)
        # Laplace: heavy tails, as trained weights have them.
        w = rng.laplace(size=(n, k)) * 0.02
        w *= around(np.ones(n) if rows is None else rows)[:, None]
        return np.asarray(w * around(np.ones(k) if columns is None else columns)[None, :], np.float32)

    def norm() -> F32:
        spread = around(1 / channel) if structured else 1 + rng.standard_normal(HIDDEN) * 0.1
        return spread.astype(np.float32)

    weights = {"embed_tokens": matrix(VOCABULARY, HIDDEN, None, channel), "norm": norm()}
    for i in range(BLOCKS):
        p = f"layers.{i}"
        weights[f"{p}.input_layernorm"], weights[f"{p}.post_attention_layernorm"] = norm(), norm()
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{p}.self_attn.{name}"] = matrix(
                HIDDEN, HIDDEN, np.exp(rng.standard_normal(HIDDEN) * 0.3), channel
            )
        weights[f"{p}.self_attn.o_proj"] = matrix(HIDDEN, HIDDEN, channel, None)
        weights[f"{p}.mlp.up_proj"] = matrix(INNER, HIDDEN, inner, channel)
        weights[f"{p}.mlp.down_proj"] = matrix(HIDDEN, INNER, channel, inner)
    return weights


def is_linear(name: str, weight: NDArray[Any]) -> bool:
    return weight.ndim == 2 and "embed" not in name


def bf16(x: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return "BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def e4m3(x: NDArray[Any]) -> NDArray[np.uint8]:
    """Nearest float8_e4m3fn, ties to even, saturating."""
    size = np.minimum(np.abs(x), np.float32(448))
    _, exponent = np.frexp(size)
    exponent = np.where(size > 0, np.maximum(exponent - 1, -6), -6)
    steps = np.rint(np.ldexp(size, 3 - exponent)).astype(np.int32)
    return np.asarray(((exponent + 6) * 8 + steps) | np.where(np.signbit(x), 0x80, 0), np.uint8)


def from_e4m3(code: NDArray[np.uint8]) -> F32:
    exponent, fraction = (code >> 3) & 15, (code & 7) / np.float32(8)
    size = np.where(
        exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent.astype(np.int32) - 7)
    )
    return np.where(code & 0x80, -size, size).astype(np.float32)


def nvfp4(w: F32) -> tuple[NDArray[np.uint8], NDArray[np.uint8], F32]:
    """Codes with the high nibble first, block scales in rows and columns, the tensor's scale. Made once a weight."""
    if id(w) not in _ENCODED:
        # The weight is kept beside its codes, so that its id stays its own.
        _ENCODED[id(w)] = w, _nvfp4(w)
    return _ENCODED[id(w)][1]


def _nvfp4(w: F32) -> tuple[NDArray[np.uint8], NDArray[np.uint8], F32]:
    total = np.float32(np.abs(w).max() / 2688)
    scales = e4m3(np.minimum(np.abs(w).reshape(w.shape[0], -1, 16).max(2) / 6 / total, 448))
    step = np.repeat(from_e4m3(scales) * total, 16, axis=1)
    size = np.where(step > 0, np.abs(w) / np.where(step > 0, step, 1), 0)
    code = np.abs(np.minimum(size, 6)[..., None] - _E2M1).argmin(-1) | np.where(w < 0, 8, 0)
    return (code[:, 0::2] << 4 | code[:, 1::2]).astype(np.uint8), scales, np.asarray(total, np.float32)


def swizzle(scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """FORMATS 5, for whole tiles."""
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles).reshape(rows, columns)


def rotate(w: F32, group: int) -> F32:
    """FORMATS 6."""
    if not group:
        return w
    h4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32)
    h = np.ones((1, 1), np.float32)
    while h.shape[0] < group:
        h = np.kron(h, h4)
    return np.asarray((w.reshape(-1, group) @ (h / np.float32(np.sqrt(group)))).reshape(w.shape), np.float32)


def usual_group(k: int) -> int:
    return max((group for group in (256, 64, 16) if k % group == 0), default=0)


def marker(document: Any) -> tuple[str, NDArray[Any]]:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return "U8", np.frombuffer(text, np.uint8)


def nvfp4_file(
    weights: Weights, *, linear: bool = False, low: bool = False, mark: dict[str, Any] | None = None
) -> Tensors:
    """Linears in nvfp4, the rest in bf16. `mark`: every linear's marker; None writes none."""
    tensors: Tensors = {}
    for name, w in weights.items():
        if not is_linear(name, w):
            tensors[f"{name}.weight"] = bf16(w)
            continue
        codes, scales, total = nvfp4(w)
        tensors[f"{name}.weight"] = "U8", (codes << 4 | codes >> 4) if low else codes
        tensors[f"{name}.weight_scale"] = "F8_E4M3", scales if linear else swizzle(scales)
        tensors[f"{name}.weight_scale_2"] = "F32", total
        if mark is not None:
            tensors[f"{name}.comfy_quant"] = marker(mark)
    return tensors


def int8_file(weights: Weights, *, rotated: bool, mark: dict[str, Any] | None) -> Tensors:
    """Linears in int8 by rows. "right" as a marker's group is replaced by the group that was used."""
    tensors: Tensors = {}
    for name, w in weights.items():
        if not is_linear(name, w):
            tensors[f"{name}.weight"] = bf16(w)
            continue
        group = usual_group(w.shape[1]) if rotated else 0
        x = rotate(w, group)
        scale = np.maximum(np.abs(x).max(1, keepdims=True) / 127, 1e-30).astype(np.float32)
        tensors[f"{name}.weight"] = "I8", np.clip(np.rint(x / scale), -127, 127).astype(np.int8)
        tensors[f"{name}.weight_scale"] = "F32", scale
        if mark is not None:
            keys = {
                key: usual_group(w.shape[1]) if value == "right" else value for key, value in mark.items()
            }
            tensors[f"{name}.comfy_quant"] = marker(keys)
    return tensors


def mxfp8_file(weights: Weights, *, linear: bool = False, mark: dict[str, Any] | None = None) -> Tensors:
    """Linears in mxfp8, the rest in bf16."""
    tensors: Tensors = {}
    for name, w in weights.items():
        if not is_linear(name, w):
            tensors[f"{name}.weight"] = bf16(w)
            continue
        peak = np.abs(w).reshape(w.shape[0], -1, 32).max(2) / np.float32(448)
        exponent = np.clip(np.ceil(np.log2(np.maximum(peak, 2.0**-126))), -126, 127).astype(np.int32)
        scales = (exponent + 127).astype(np.uint8)
        step = np.repeat(np.ldexp(np.float32(1), exponent), 32, axis=1)
        tensors[f"{name}.weight"] = "F8_E4M3", e4m3(w / step)
        tensors[f"{name}.weight_scale"] = "U8", scales if linear else swizzle(scales)
        if mark is not None:
            tensors[f"{name}.comfy_quant"] = marker(mark)
    return tensors


def fp8_file(
    weights: Weights, *, scale: bool = True, mark: dict[str, Any] | None, lost: bool = False
) -> Tensors:
    """Linears in fp8 e4m3. `lost`: codes are scaled, and the scale is left out."""
    tensors: Tensors = {}
    for name, w in weights.items():
        if not is_linear(name, w):
            tensors[f"{name}.weight"] = bf16(w)
            continue
        factor = np.float32(np.abs(w).max() / 448) if scale or lost else np.float32(1)
        tensors[f"{name}.weight"] = "F8_E4M3", e4m3(w / factor)
        if scale:
            tensors[f"{name}.weight_scale"] = "F32", np.asarray(factor, np.float32)
        if mark is not None:
            tensors[f"{name}.comfy_quant"] = marker(mark)
    return tensors
