"""Layers from a file: built from the header alone, held as stored, within the budget, in pieces or whole."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from qconvert.formats.checkpoint import Checkpoint, opened  # noqa: E402
from qconvert.formats.errors import QConvertError, UsageError  # noqa: E402
from qconvert.formats.layers import take_inventory  # noqa: E402
from qconvert.kernels.layout import swizzle  # noqa: E402
from qconvert.kernels.reference_backend import ReferenceBackend  # noqa: E402
from qconvert.runtime.layers import QuantEmbedding, QuantLinear, linear_method  # noqa: E402
from qconvert.runtime.layers.modules import StoredLayer  # noqa: E402
from qconvert.runtime.loader import LazyLayers, StreamedEmbedding, StreamedLinear, stored_bytes  # noqa: E402

N, K = 640, 256


def save(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header: dict[str, Any] = {}
    payload = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(payload), len(payload) + len(data)],
        }
        payload += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)


def content() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """One layer of each way that rows lie in a file, encoded by the reference."""
    backend = ReferenceBackend()
    x = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).numpy()
    made: dict[str, tuple[str, tuple[int, ...], bytes]] = {}

    def put(name: str, dtype: str, shape: tuple[int, ...], data: Any) -> None:
        made[name] = (dtype, shape, data.tobytes())

    def mark(layer: str, **marker: Any) -> None:
        text = json.dumps(marker).encode()
        made[f"{layer}.comfy_quant"] = ("U8", (len(text),), text)

    scale = backend.int8_row_scale(x, "fast")
    put("rows.weight", "I8", (N, K), backend.int8_encode(x, scale))
    put("rows.weight_scale", "F32", (N, 1), scale)
    mark("rows", format="int8_tensorwise", convrot=True, convrot_groupsize=256)
    made["embed_tokens.weight"], made["embed_tokens.weight_scale"] = (
        made["rows.weight"],
        made["rows.weight_scale"],
    )
    mark("embed_tokens", format="int8_tensorwise")
    total = backend.nvfp4_tensor_scale(backend.amax(x))
    codes, blocks = backend.nvfp4_encode(x, total, "fast")
    for layer, nibbles in (("tiles", "nvfp4"), ("table.embed_tokens", "nvfp4")):
        put(f"{layer}.weight", "U8", (N, K // 2), codes)
        put(f"{layer}.weight_scale", "F8_E4M3", (N, K // 16), swizzle(blocks))
        put(f"{layer}.weight_scale_2", "F32", (), total)
        mark(layer, format=nibbles)
    q, powers = backend.mxfp8_encode(x[:90], "fast")
    put("padded.weight", "F8_E4M3", (90, K), q)
    put("padded.weight_scale", "U8", (128, K // 32), swizzle(powers))
    mark("padded", format="mxfp8", full_precision_matrix_mult=True)
    grid, s_rel, channel = backend.w4a8_encode(x, 16, None, "fast")
    put("columns.weight", "I8", (N, K // 2), grid)
    put("columns.weight_s_rel", "F8_E4M3", (N, K // 16), s_rel)
    put("columns.weight_s_channel", "F32", (N,), channel)
    correction = (torch.arange(K // 16 * N) % 11 - 5).to(torch.float32).reshape(K // 16, N) / 1000
    put("columns.weight_correction", "F32", (K // 16, N), correction.numpy())
    mark("columns", format="asym_w4a8_int8", group_size=16, convrot=True, convrot_groupsize=64)
    one = backend.fp8_scale(backend.amax(x), "F8_E5M2")
    put("whole.weight", "F8_E5M2", (N, K), backend.fp8_encode(x, one, "F8_E5M2"))
    put("whole.weight_scale", "F32", (), one)
    put("whole.bias", "F16", (N,), x[:, 0].astype("float16"))
    put("whole.input_scale", "F32", (1,), one)
    mark("whole", format="float8_e5m2")
    put("scales.weight", "F8_E4M3", (N, K), backend.fp8_encode(x, one, "F8_E4M3"))
    put("scales.weight_scale_inv", "F32", (N // 128, K // 128), x[:5, :2].copy())
    put("plain.weight", "BF16", (N, K), backend.from_f32(x, "BF16"))
    put("bank.weight", "I8", (2, 320, K), backend.int8_encode(x, scale))
    put("bank.weight_scale", "F32", (2, 320, 1), scale)
    mark("bank", format="int8_tensorwise")
    return made


LINEARS = ("rows", "tiles", "padded", "columns", "whole", "scales", "plain")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("lazy") / "model.safetensors"
    save(path, content())
    with opened(path) as found:
        yield found


def inputs(rows: int = 3) -> Any:
    return torch.randn(2, rows, K, generator=torch.Generator().manual_seed(2))


def test_built_from_the_header_alone(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = take_inventory(checkpoint).layers

    def refuse(*_: object) -> None:
        raise AssertionError("payload was read")

    monkeypatch.setattr(Checkpoint, "pread", refuse)
    module = QuantLinear(layers["tiles"])
    assert {name: (tuple(b.shape), b.dtype) for name, b in module.named_buffers()} == {
        "weight": ((N, K // 2), torch.uint8),
        "weight_scale": ((N, K // 16), torch.float8_e4m3fn),
        "weight_scale_2": ((), torch.float32),
    }
    with pytest.raises(QConvertError, match="not loaded"):
        module(inputs())
    assert "nvfp4 activations" in repr(module)


@pytest.mark.parametrize("name", [*LINEARS, "embed_tokens", "table.embed_tokens"])
def test_holds_the_stored_tensors_and_nothing_else(checkpoint: Checkpoint, name: str) -> None:
    module = LazyLayers(checkpoint)[name]
    assert isinstance(module, StoredLayer)
    assert not list(module.parameters())
    made = content()
    for suffix, tensor in module.state_dict().items():
        _, shape, data = made[f"{name}.{suffix}"]
        assert tuple(tensor.shape) == shape
        assert tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == data
    assert module.nbytes == stored_bytes(module.layer)


@pytest.mark.parametrize("name", LINEARS)
def test_streamed_rows_give_what_the_whole_layer_gives(checkpoint: Checkpoint, name: str) -> None:
    whole = LazyLayers(checkpoint)[name]
    layer = whole.layer
    streamed = StreamedLinear(checkpoint, layer, stored_bytes(layer) // 3)
    parts = [(part.first, part.last) for part in streamed.parts()]
    assert len(parts) > (1 if layer.n > 128 else 0) and parts[-1][1] == layer.n
    x = inputs()
    a, b = whole(x), streamed(x)
    assert a.shape == (2, 3, layer.n)
    # Sums of floats may be taken in another order when fewer rows are multiplied at a time.
    assert torch.allclose(a, b, rtol=0, atol=3e-6 * float(a.abs().max()))


def test_a_padded_scale_and_a_short_last_tile(checkpoint: Checkpoint) -> None:
    module = LazyLayers(checkpoint)["padded"]
    assert isinstance(module, QuantLinear)
    x = inputs()
    want = x.double() @ module.operand().decode().double().T
    assert torch.allclose(module(x).double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["embed_tokens", "table.embed_tokens"])
def test_lookup_decodes_the_rows_asked_for(
    checkpoint: Checkpoint, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = LazyLayers(checkpoint, dtype=torch.float32)
    module = lazy[name]
    assert isinstance(module, QuantEmbedding)
    index = torch.tensor([[0, 639, 130], [5, 5, 129]])
    want = module.operand().decode()[index]
    assert torch.equal(module(index), want)
    assert module(index[:0]).shape == (0, 3, K)
    streamed = StreamedEmbedding(checkpoint, module.layer, dtype=torch.float32)
    read: list[int] = []
    pread = Checkpoint.pread

    def count(self: Checkpoint, file: int, start: int, size: int) -> Any:
        read.append(size)
        return pread(self, file, start, size)

    monkeypatch.setattr(Checkpoint, "pread", count)
    assert torch.equal(streamed(index), want)
    assert sum(read) < stored_bytes(module.layer) * 0.7
    for bad in (-1, N):
        for table in (module, streamed):
            with pytest.raises(IndexError):
                table(torch.tensor([bad]))


def test_budget(checkpoint: Checkpoint) -> None:
    layers = take_inventory(checkpoint).layers
    budget = stored_bytes(layers["rows"]) + stored_bytes(layers["tiles"])
    lazy = LazyLayers(checkpoint, memory=budget)
    assert lazy.held == 0
    rows = lazy["rows"]
    assert lazy["rows"] is rows
    lazy["tiles"]
    assert lazy.held == budget
    lazy["rows"]
    lazy["padded"]
    assert lazy.held <= budget
    assert lazy["rows"] is rows, "the layer used last was dropped"
    small = LazyLayers(checkpoint, memory=50_000)
    for name in LINEARS:
        module = small[name]
        assert isinstance(module, StreamedLinear) or module.nbytes <= 50_000
        assert small.held <= 50_000
    assert isinstance(small["embed_tokens"], StreamedEmbedding)
    with pytest.raises(UsageError):
        LazyLayers(checkpoint, memory=0)


def test_what_cannot_be_run_is_named(checkpoint: Checkpoint) -> None:
    lazy = LazyLayers(checkpoint)
    assert set(lazy.refusals()) == {"bank"}
    assert "plain" not in lazy and set(lazy.names()) == {*LINEARS, "embed_tokens", "table.embed_tokens"} - {
        "plain"
    }
    with pytest.raises(QConvertError, match="experts"):
        lazy["bank"]
    with pytest.raises(KeyError):
        lazy["missing"]


@pytest.mark.parametrize(
    ("name", "activation", "rotation"),
    [
        ("rows", "int8", 256),
        ("tiles", "nvfp4", 0),
        ("padded", "none", 0),
        ("columns", "none", 64),
        ("whole", "none", 0),
        ("scales", "none", 0),
        ("plain", "none", 0),
    ],
)
def test_method(checkpoint: Checkpoint, name: str, activation: str, rotation: int) -> None:
    method = linear_method(take_inventory(checkpoint).layers[name])
    assert (method.activation, method.rotation) == (activation, rotation)
    assert method.reason in str(method)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LINEARS)
def test_output_has_the_type_of_the_input(checkpoint: Checkpoint, name: str, dtype: Any) -> None:
    module = LazyLayers(checkpoint)[name]
    x = inputs().to(dtype)
    exact = module(x.float())
    out = module(x)
    assert out.dtype == dtype
    bound = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-6}[dtype]
    assert float((out.float() - exact).norm() / exact.norm()) <= bound
    assert module(x[:, :0]).shape == (2, 0, module.layer.n)
