"""GGUF: every block type of the golden, files as other writers lay them out, malformed ones, and what we write."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import other_files as o
import pytest
import torch
from qconvert.formats import gguf_blocks, gguf_encode, gguf_write
from qconvert.formats.checkpoint import Checkpoint, opened
from qconvert.formats.errors import HeaderError, QConvertError, UsageError
from qconvert.formats.layers import take_inventory
from qconvert.formats.tensors import Spec
from qconvert.kernels.select import get_backend

GOLDEN = o.GOLDEN / "gguf_all.gguf"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


# ---- an independent writer


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        body = b"".join(text(v) if isinstance(v, str) else struct.pack("<i", v) for v in value)
        kind = 8 if value and isinstance(value[0], str) else 5
        return text(name) + struct.pack("<IIQ", 9, kind, len(value)) + body
    return text(name) + struct.pack("<II", 4, value)


def gguf(
    tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]],
    keys: Mapping[str, Any] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file: name -> (ggml's number of the type, torch's shape, data)."""
    entries = dict(keys or {})
    if alignment != 32:
        entries["general.alignment"] = alignment
    infos, data = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        infos += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        infos += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % alignment)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    head += b"".join(key(name, value) for name, value in entries.items()) + infos
    return head + bytes(-len(head) % alignment) + data


def q8_0(rng: Any, rows: int, k: int) -> tuple[bytes, np.ndarray[Any, Any]]:
    scale = rng.random((rows * k // 32, 1)).astype(np.float16)
    q = rng.integers(-128, 128, (rows * k // 32, 32)).astype(np.int8)
    raw = b"".join(s.tobytes() + c.tobytes() for s, c in zip(scale, q, strict=True))
    return raw, (q * scale.astype(np.float32)).reshape(rows, k)


# ---- reading


@pytest.mark.skipif(not GOLDEN.exists(), reason=o.WITHOUT)
def test_golden_is_exact() -> None:
    want = o.load(GOLDEN.with_name("gguf_all.ref.safetensors"))
    with opened(GOLDEN) as checkpoint:
        inventory = take_inventory(checkpoint)
        assert checkpoint.metadata["general.architecture"] == "wan"
        seen = {tensor.name for tensor in inventory.loose}
        for name, layer in inventory.layers.items():
            full = name if layer.bare else f"{name}.weight"
            got = o.decode(checkpoint, layer, 1)
            assert np.array_equal(got.reshape(want[full].shape), want[full].numpy()), name
            seen.add(full)
        assert inventory.layers["conv"].options["shape"] == (8, 16, 2, 4)
        assert seen == set(want)


@pytest.mark.parametrize("alignment", [32, 64, 256])
def test_shapes_names_and_keys(alignment: int, tmp_path: Path, rng: np.random.Generator) -> None:
    raw, values = q8_0(rng, 6, 96)
    flat, conv = q8_0(rng, 3, 96)
    bias = rng.normal(size=6).astype(np.float32)
    keys = {
        "general.architecture": "flux",
        "general.name": "näme",
        "tokenizer.ggml.tokens": ["a", "b", "c"],
        "tokenizer.ggml.scores": list(range(40)),
        "general.file_type": 7,
        "comfy.gguf.orig_shape.conv.weight": [4, 2, 6, 6],
    }
    tensors = {
        "a.weight": (8, (6, 96), raw),
        "a.bias": (0, (6,), bias.tobytes()),
        "conv.weight": (8, (3, 96), flat),
        "half.weight": (30, (2, 3), np.arange(6, dtype=np.uint16).tobytes()),
        "scalar": (0, (), bias[:1].tobytes()),
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(tensors, keys, alignment))
    layer, got = o.read_layer(path, "a")
    assert (layer.codec.name, layer.n, layer.k) == ("gguf", 6, 96)
    assert np.array_equal(got, values)
    layer, got = o.read_layer(path, "conv")
    # Rows of 72 elements do not begin with a block.
    assert layer.options["flat"] and layer.ndim == 4 and not layer.bare
    assert np.array_equal(got, conv.reshape(4, 72))
    with opened(path) as checkpoint:
        assert checkpoint.metadata == {"general.architecture": "flux", "general.name": "näme"}
        assert np.array_equal(checkpoint.read("a.bias"), bias)
        assert checkpoint.tensors["half.weight"].spec == Spec("BF16", (2, 3))
    outcome = o.run(path, "bf16", tmp_path / "out.safetensors")
    written = o.load(outcome.output)
    assert written["conv.weight"].shape == (4, 2, 6, 6)
    assert torch.equal(written["a.weight"], torch.from_numpy(values).bfloat16())
    assert set(written) == set(tensors)


def malformed(case: str, raw: bytes) -> bytes:
    good: dict[str, Any] = {"a.weight": (8, (6, 96), raw)}
    data = bytearray(gguf(good, {"general.name": "x"}))
    if case == "magic":
        data[:4] = b"GGUX"
    elif case == "version":
        data[4] = 9
    elif case in ("tensor count", "key count"):
        at = 8 if case == "tensor count" else 16
        data[at : at + 8] = struct.pack("<Q", 1 << 62)
    elif case == "cut header":
        data = data[:60]
    elif case == "cut data":
        data = data[:-700]
    elif case == "string length":
        data[24:32] = struct.pack("<Q", 1 << 63)
    elif case == "unknown type":
        data = bytearray(gguf({"a.weight": (99, (6, 96), raw)}))
    elif case == "partial blocks":
        data = bytearray(gguf({"a.weight": (8, (96, 6), raw)}))
    elif case == "twice":
        once = gguf({"a.weight": (8, (6, 96), raw), "b.weight": (8, (6, 96), raw)})
        data = bytearray(once.replace(b"b.weight", b"a.weight"))
    elif case == "key twice":
        data = bytearray(gguf(good, {"k1": "x", "k2": "x"}).replace(b"k2", b"k1"))
    elif case == "overlap":
        first = gguf({"a.weight": (8, (6, 96), raw), "b.weight": (8, (6, 96), raw)})
        at = first.index(b"b.weight") + 8 + 4 + 16 + 4
        data = bytearray(first[:at] + struct.pack("<Q", 32) + first[at + 8 :])
    elif case == "alignment":
        data = bytearray(gguf(good, {"general.alignment": 0}))
    elif case == "orig_shape":
        data = bytearray(gguf(good, {"comfy.gguf.orig_shape.a.weight": [5, 96]}))
    elif case == "huge axis":
        data = bytearray(gguf({"a.weight": (0, (1 << 62, 1 << 62), b"")}))
    elif case == "axes":
        data = bytearray(gguf({"a.weight": (0, (1,) * 9, bytes(4))}))
    return bytes(data)


@pytest.mark.parametrize(
    "case",
    """magic version|tensor count|key count|cut header|cut data|string length|unknown type|partial blocks|twice
    |key twice|overlap|alignment|orig_shape|huge axis|axes""".replace("magic version", "magic|version").split(
        "|"
    ),
)
def test_malformed(case: str, tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(malformed(case.strip(), q8_0(rng, 6, 96)[0]))
    with pytest.raises(HeaderError):
        Checkpoint.open(path)


def test_a_quantised_parameter_without_a_module(tmp_path: Path, rng: np.random.Generator) -> None:
    raw, values = q8_0(rng, 8, 32)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf({"pos_embed": (8, (8, 32), raw)}))
    outcome = o.run(path, "convrot_int8", tmp_path / "out.safetensors")
    written = o.load(outcome.output)
    assert list(written) == ["pos_embed"]
    assert torch.equal(written["pos_embed"], torch.from_numpy(values).bfloat16())


def test_nvfp4_moves_into_the_other_dialects(tmp_path: Path, rng: np.random.Generator) -> None:
    n, k = 128, 256
    blocks = rng.integers(0, 256, (n * k // 64, 36)).astype(np.uint8)
    blocks[:, :4] &= 0x7F
    total = np.array([0.37], np.float32)
    path = tmp_path / "m.gguf"
    tensors = {"a.weight": (40, (n, k), blocks.tobytes()), "a.scale": (0, (1,), total.tobytes())}
    path.write_bytes(gguf(tensors))
    layer, values = o.read_layer(path, "a")
    assert layer.codec.name == "gguf_nvfp4" and not layer.leftovers
    scale = np.zeros(128, np.float32)
    for code in range(127):
        scale[code] = (
            (code & 7) / 8 * 2.0**-6 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)
        )
    low, high = blocks[:, 4:].reshape(-1, 4, 8) & 15, blocks[:, 4:].reshape(-1, 4, 8) >> 4
    q = np.array(E2M1, np.float32)[np.concatenate([low, high], axis=2)]
    want = (q * (scale[blocks[:, :4]] * total)[..., None]).reshape(n, k)
    assert np.array_equal(values, want)
    outcome = o.run(path, "comfy_nvfp4", tmp_path / "out.safetensors")
    assert o.kinds(outcome) == {"a": "repack"}
    _, after = o.read_layer(outcome.output, "a")
    assert np.array_equal(after, want)


# ---- writing


def network(rng: Any) -> dict[str, torch.Tensor]:
    def values(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_t(5, size=shape).astype(np.float32) * 0.02).bfloat16()

    prefix = "model.diffusion_model."
    return {
        f"{prefix}blocks.0.fc1.weight": values(64, 512),
        f"{prefix}blocks.0.fc1.bias": values(64),
        f"{prefix}blocks.0.fc2.weight": values(64, 160),
        f"{prefix}odd.weight": values(5, 33),
        f"{prefix}patch.weight": values(16, 4, 1, 2, 2),
        f"{prefix}norm.weight": values(512).float(),
        f"{prefix}ids": torch.arange(4),
    }


#: target -> types of the two layers, and the least SQNR of the first in dB.
WRITTEN = {
    "gguf:q8_0": ("Q8_0", "Q8_0", 43),
    "gguf:q4_0": ("Q4_0", "Q4_0", 19),
    "gguf:q4_k": ("Q4_K", "Q8_0", 21),
}


@pytest.mark.parametrize("target", WRITTEN)
def test_written_files(target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = network(rng)
    source = o.save(tmp_path / "m.safetensors", tensors)
    outcome = o.run(source, target, tmp_path / "m.gguf")
    bare = {name.removeprefix("model.diffusion_model."): value for name, value in tensors.items()}
    with opened(outcome.output) as checkpoint:
        assert set(checkpoint.tensors) == set(bare)
        assert all(tensor.start % 32 == 0 for tensor in checkpoint.tensors.values())
        assert checkpoint.tensors["blocks.0.fc1.weight"].dtype == WRITTEN[target][0]
        assert checkpoint.tensors["blocks.0.fc2.weight"].dtype == WRITTEN[target][1]
        assert checkpoint.tensors["patch.weight"].spec == Spec("BF16", (16, 4, 1, 2, 2))
        for name in set(bare) - {"blocks.0.fc1.weight", "blocks.0.fc2.weight"}:
            raw = bare[name].contiguous().view(torch.uint8).numpy().tobytes()
            assert checkpoint.read(name).tobytes() == raw
        assert "general.architecture" not in checkpoint.metadata
    _, values = o.read_layer(outcome.output, "blocks.0.fc1")
    want = bare["blocks.0.fc1.weight"].float().numpy()
    assert 10 * np.log10((want**2).sum() / ((want - values) ** 2).sum()) > WRITTEN[target][2]
    # What is right already is copied, byte for byte.
    again = o.run(outcome.output, target, tmp_path / "again.gguf")
    assert set(o.kinds(again).values()) == {"copy", "keep"}
    with opened(outcome.output) as one, opened(again.output) as two:
        assert all(np.array_equal(one.read(name), two.read(name)) for name in one.tensors)


@pytest.mark.parametrize("kind", gguf_encode.WRITTEN)
@pytest.mark.parametrize("best", [True, False])
def test_hard_blocks(kind: str, best: bool, rng: np.random.Generator) -> None:
    x = rng.normal(size=(16, 512)).astype(np.float32)
    x[0] = 0
    x[1] = 3
    x[2] = -1e-30
    x[3, 7] = 3e4
    x[4] = np.abs(x[4])
    x[5] = -np.abs(x[5])
    x[6, :32] = 0
    backend = get_backend("cpu")
    blocks = gguf_encode.encode(kind, x, backend, best)
    y = gguf_blocks.decode(kind, blocks).reshape(x.shape)
    assert np.isfinite(y).all()
    assert not y[0].any() and np.allclose(y[1], 3, rtol=0.07) and not np.abs(y[2]).any()
    rest = slice(4, None)
    least = {"Q8_0": 40, "Q4_0": 18, "Q4_K": 19}[kind]
    assert 10 * np.log10((x[rest] ** 2).sum() / ((x[rest] - y[rest]) ** 2).sum()) > least


def test_what_gguf_cannot_hold(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(QConvertError, match="GGUF has no type for F8_E4M3"):
        gguf_write.lay_out([("a", Spec("F8_E4M3", (2, 2)))], {})
    with pytest.raises(QConvertError, match="too long for GGUF's readers"):
        gguf_write.lay_out([("a" * 128, Spec("F32", (2, 2)))], {})
    both = {
        "model.diffusion_model.a.weight": torch.zeros(32, 32),
        "first_stage_model.b.weight": torch.zeros(32, 32),
    }
    source = o.save(tmp_path / "m.safetensors", both)
    with pytest.raises(UsageError, match="one component at a time"):
        o.run(source, "gguf:q8_0", tmp_path / "m.gguf")
    outcome = o.run(source, "gguf:q8_0", tmp_path / "m.gguf", component="diffusion")
    with opened(outcome.output) as checkpoint:
        assert set(checkpoint.tensors) == {"a.weight"}


@pytest.mark.parametrize("target", WRITTEN)
def test_the_gguf_package_reads_it(target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    source = o.save(tmp_path / "m.safetensors", network(rng))
    outcome = o.run(source, target, tmp_path / "m.gguf")
    reader = package.GGUFReader(str(outcome.output))
    assert reader.fields["general.quantization_version"].contents() == 2
    assert reader.fields["comfy.gguf.orig_shape.patch.weight"].contents() == [16, 4, 1, 2, 2]
    want = {name.removeprefix("model.diffusion_model."): value for name, value in network_of(source).items()}
    assert {tensor.name for tensor in reader.tensors} == set(want)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blocks") or tensor.name.endswith("bias"):
            continue
        theirs = package.quants.dequantize(tensor.data, tensor.tensor_type)
        _, ours = o.read_layer(outcome.output, tensor.name.removesuffix(".weight"))
        assert np.array_equal(theirs, ours)
        x = want[tensor.name].float().numpy()
        try:
            plain = package.quants.dequantize(
                package.quants.quantize(x, tensor.tensor_type), tensor.tensor_type
            )
        except NotImplementedError:
            continue
        assert ((x - ours) ** 2).sum() < ((x - plain) ** 2).sum()


def network_of(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = o.load(path)
    return tensors


@pytest.mark.parametrize("kind", ["IQ1_S", "IQ2_XS", "IQ3_S", "TQ2_0", "Q8_0", "Q3_K"])
def test_rare_types(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    number = next(n for n, name in gguf_blocks.TYPES.items() if name == kind)
    elements, size = gguf_write.BLOCKS[kind]
    raw = rng.integers(0, 60, (4 * 256 // elements, size)).astype(np.uint8)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf({"a.weight": (number, (4, 256), raw.tobytes())}))
    if importlib.util.find_spec("gguf") is None:
        if kind in ("Q8_0", "Q3_K"):
            o.read_layer(path, "a")
            return
        with pytest.raises(QConvertError, match="decoded by the gguf package"):
            o.read_layer(path, "a")
        return
    from gguf import GGMLQuantizationType, quants

    want = quants.dequantize(raw, GGMLQuantizationType[kind]).reshape(4, 256)
    _, values = o.read_layer(path, "a")
    assert np.array_equal(values, want)


def test_no_contract_takes_a_gguf_file_for_unquantised(tmp_path: Path, rng: np.random.Generator) -> None:
    from qconvert.runtime.contracts.registry import contract_names, get_contract

    raw, _ = q8_0(rng, 64, 64)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf({"a.weight": (8, (64, 64), raw)}))
    with opened(path) as checkpoint:
        view = checkpoint.view()
    for name in contract_names():
        violations = get_contract(name).check(view).all_violations()
        assert "container" in [violation.rule for violation in violations], name
