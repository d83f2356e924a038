"""What every codec writes: tensors as its parts say, read back as the same codes, decoded by independent formulas."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.formats.base import Options
from qconvert.formats.layers import take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.registry import CODECS, codec
from qconvert.formats.values import change_basis

Rng = np.random.Generator
Open = Callable[..., Any]

QUALITIES = ("fast", "best")


def by_formula(d: ModuleType, name: str, options: Options, tensors: dict[str, Any]) -> Any:
    match name:
        case "float8" | "int8":
            return d.decode_scaled(tensors)
        case "nvfp4":
            return d.decode_nvfp4(tensors, options["nibbles"] == "low", options["scales"] == "linear")
        case "mxfp8":
            return d.decode_mxfp8(tensors, linear=options["scales"] == "linear")
        case "w4a4":
            return d.decode_w4a4(tensors)
        case "w4a8":
            return d.decode_w4a8(tensors, bits=options["bits"])
        case "awq_w4a16":
            return d.decode_awq(tensors)
    return d.widen(tensors["weight"])


def test_every_writable_format_of_comfyui_is_here(writing: ModuleType) -> None:
    ours = {item.name for item in CODECS if item.writable and item.marker_formats}
    assert ours <= {name for name, _, _ in writing.WRITTEN.values()}


@pytest.mark.parametrize("quality", QUALITIES)
def test_written_layers(
    label: str, quality: Any, d: ModuleType, writing: ModuleType, rng: Rng, opened: Open, backend: Any
) -> None:
    name, options, least = writing.WRITTEN[label]
    it, n, k = codec(name), 160, 256
    w = d.weights(rng, n, k)
    assert it.refusal(n, k, options) is None
    codes = writing.encode(name, options, w, backend, quality)
    y = it.decode(codes, options, backend)
    assert d.sqnr(w, d.rotate(y.astype(np.float64), it.rotation(options))) >= least - (quality == "fast")
    tensors = writing.stored(d, name, options, codes, n, k)
    assert np.array_equal(y.astype(np.float64), by_formula(d, name, options, tensors))
    # The file is recognised as what was written, with nothing to mend or to guess.
    content = {f"a.fc.{suffix}": tensor for suffix, tensor in tensors.items()}
    marker = it.marker(options)
    if marker is not None:
        content["a.fc.comfy_quant"] = d.marker_tensor(marker)
    checkpoint = opened(content)
    layer = take_inventory(checkpoint).layers["a.fc"]
    assert layer.codec is it and layer.marker == marker and not layer.findings
    assert (layer.n, layer.k) == (n, k)
    assert {key: layer.options[key] for key in options if key in layer.options} == options
    # And loads as the very codes.
    back = it.load(LayerReader(checkpoint, layer), 0, n, backend)
    for key, array in back.items():
        assert np.asarray(array).tobytes() == np.asarray(codes[key]).tobytes(), key
    assert name == "plain" or it.carries(layer.options, options)
    again = writing.stored(d, name, options, {**codes, **back}, n, k)
    assert all(again[suffix].bits.tobytes() == tensor.bits.tobytes() for suffix, tensor in tensors.items())


@pytest.mark.parametrize("nibbles", ["high", "low"])
@pytest.mark.parametrize("scales", ["swizzled", "linear"])
def test_nvfp4_is_laid_out_in_every_way_from_the_same_codes(
    nibbles: str, scales: str, d: ModuleType, writing: ModuleType, rng: Rng, backend: Any
) -> None:
    options = writing.NV | {"nibbles": nibbles, "scales": scales}
    codes = writing.encode("nvfp4", writing.NV, d.weights(rng, 130, 80), backend)
    tensors = writing.stored(d, "nvfp4", options, codes, 130, 80)
    got = d.decode_nvfp4(tensors, nibbles == "low", scales == "linear")
    assert np.array_equal(got, codec("nvfp4").decode(codes, writing.NV, backend))
    if scales == "swizzled":
        assert tensors["weight_scale"].bits.shape == (256, 8)
        # What pads the scales is zero, so that equal weights give equal files.
        assert not d.unswizzle(tensors["weight_scale"].bits, 256, 8)[130:].any()
        assert not d.unswizzle(tensors["weight_scale"].bits, 256, 8)[:, 5:].any()


def test_tables_written_with_a_layer_are_ascending_and_finite(
    d: ModuleType, writing: ModuleType, rng: Rng, backend: Any
) -> None:
    for w in (d.weights(rng, 64, 256), rng.standard_t(3, (64, 256)), np.ones((64, 256))):
        table = codec("w4a8").prepare(w.astype(np.float32), writing.W4A8, backend, "best")["codebook"]
        assert table.shape == (16,) and np.isfinite(table).all() and (np.diff(table) >= 0).all()


# ---- weights that break encoders


def hard(case: str, rng: Rng) -> Any:
    x, rows, columns = rng.standard_normal((32, 256)), np.arange(32)[:, None], np.arange(256)
    return {
        "zeros": x * 0,
        "a zero row": x * (rows != 5),
        "zero blocks": x * ((columns // 64) % 2),
        "one value": np.eye(32, 256) * 3,
        "tiny": x * 1e-20,
        "under fp16": x * 1e-9,
        "large": x * 1e4,
        "huge": x * 1e20,
        "an outlier": x * 0.02 + np.eye(32, 256) * 1000 * (rows == 3),
        "constant": x * 0 - 0.75,
        "steps": np.geomspace(1e-6, 1, 32)[:, None] * np.sign(x),
    }[case]


CASES = (
    "zeros", "a zero row", "zero blocks", "one value", "tiny", "under fp16", "large", "huge", "an outlier", "constant",
    "steps",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_hard_weights_stay_finite(label: str, case: str, writing: ModuleType, rng: Rng, backend: Any) -> None:
    name, options, _ = writing.WRITTEN[label]
    if case == "huge" and label in ("awq_g32_fp16", "fp16"):
        pytest.skip("fp16 scales cannot hold it; the executor refuses")
    x = hard(case, rng).astype(np.float32)
    it = codec(name)
    for quality in QUALITIES:
        codes = writing.encode(name, options, x, backend, quality)
        y = it.decode(codes, options, backend)
        assert np.isfinite(y).all()
        assert all(np.isfinite(v).all() for v in codes.values() if v.dtype == np.float32)
        back = change_basis(y, it.rotation(options), 0, backend).astype(np.float64)
        if case == "zeros":
            assert not back.any()
        if case == "a zero row" and not it.rotation(options) and name != "awq_w4a16":
            assert not back[5].any()
        # Never worse than all zeros would be.
        assert np.square(back - x).sum() <= np.square(x.astype(np.float64)).sum() * 1.0001


def test_refusals_name_the_multiple_and_the_size(writing: ModuleType) -> None:
    cases: list[tuple[str, Options, tuple[int, int], str]] = [
        ("nvfp4", writing.NV, (250, 256), "[250, 256]"),
        ("nvfp4", writing.NV, (256, 250), "[256, 250]"),
        ("nvfp4", writing.NV | {"rotation": 64}, (16, 96), "K = 96"),
        ("mxfp8", writing.MX, (90, 224), "[90, 224]"),
        ("mxfp8", writing.MX, (96, 200), "[96, 200]"),
        ("int8", {"scale": "row", "rotation": 256}, (8, 320), "K = 320"),
        ("w4a4", {"rotation": 16}, (8, 80), "K = 80"),
        ("w4a4", {"rotation": 256}, (8, 320), "K = 320"),
        ("w4a8", writing.W4A8, (8, 320), "K = 320"),
        ("w4a8", writing.W4A8 | {"rotation": 4}, (8, 8), "K = 8"),
        ("w4a8", writing.W4A8 | {"rotation": 16, "group": 48}, (8, 64), "K = 64"),
        ("w4a8", writing.W4A8 | {"rotation": 16, "group": 24}, (8, 48), "K = 48"),
        ("w4a8", writing.W4A8 | {"rotation": 16, "bits": 6}, (8, 48), "K = 48"),
        ("w4a8", writing.W4A8 | {"rotation": 16, "bits": 6, "group": 8}, (8, 64), "group 8"),
        ("awq_w4a16", {"group": 64, "dtype": "BF16"}, (8, 96), "K = 96"),
    ]
    for name, options, (n, k), words in cases:
        assert words in (codec(name).refusal(n, k, options) or ""), (name, n, k)


def test_what_a_codec_carries(writing: ModuleType) -> None:
    """Codes move only where they mean the same values."""
    it = codec("w4a8")
    own = writing.W4A8 | {"rotation": 64}
    assert it.carries(own, own) and it.carries(own | {"signed": True}, own)
    for change in (
        {"group": 32}, {"rotation": 16}, {"bits": 6}, {"codebook": False}, {"correction": True},
        {"grid": False}, {"srel_dtype": "F32"},
    ):  # fmt: skip
        assert not it.carries(own | change, own), change
    fp8 = codec("float8")

    def kind(scale: str, kind: str = "F8_E4M3") -> Options:
        return writing.FP8 | {"kind": kind, "scale": scale}

    assert fp8.carries(kind("none"), kind("scalar")) and fp8.carries(kind("scalar"), kind("row"))
    assert not fp8.carries(kind("row"), kind("scalar"))
    assert not fp8.carries(kind("block"), kind("scalar"))
    assert not fp8.carries(kind("scalar", "F8_E5M2"), kind("scalar"))
    int8 = codec("int8")
    row, one = {"scale": "row", "rotation": 0}, {"scale": "scalar", "rotation": 0}
    assert int8.carries(one, row) and not int8.carries(row, one)
    assert not int8.carries(row, row | {"rotation": 16})
    awq = codec("awq_w4a16")
    assert awq.carries({"group": 64, "dtype": "BF16"}, {"group": 64, "dtype": "BF16"})
    assert not awq.carries({"group": 32, "dtype": "BF16"}, {"group": 64, "dtype": "BF16"})
    assert not awq.carries({"group": 64, "dtype": "F16"}, {"group": 64, "dtype": "BF16"})
