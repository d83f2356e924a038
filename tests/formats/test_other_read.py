"""Layers of the other ecosystems in shapes that no golden has, packed here by the description of each format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.values import decode_rows

Rng = np.random.Generator
L = "blocks.0.fc"


@pytest.fixture
def read(opened: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """read(tensors, config, metadata) -> (layer, values), read in one run and in pieces."""

    def make(
        tensors: Mapping[str, Any], config: Any = None, metadata: Any = None, prefix: str = L
    ) -> tuple[Any, Any]:
        checkpoint = opened({f"{prefix}.{suffix}": t for suffix, t in tensors.items()}, metadata)
        checkpoint.config = {"quantization_config": config} if config else {}
        inventory = take_inventory(checkpoint)
        layer = inventory.layers[prefix]
        assert not inventory.loose
        reader = LayerReader(checkpoint, layer)
        values = decode_rows(layer, reader, 0, layer.n, backend)
        step = max(layer.codec.row_step(layer.options), 1)
        step = step if step > 1 else 7
        pieces = [
            decode_rows(layer, reader, a, min(a + step, layer.n), backend) for a in range(0, layer.n, step)
        ]
        assert np.array_equal(np.concatenate(pieces), values)
        return layer, values.astype(np.float64)

    return make


def small_float(exponent: int, mantissa: int) -> Any:
    """Values by code, by the text of the OCP specification."""
    bias = 2 ** (exponent - 1) - 1
    out = []
    for code in range(2 ** (1 + exponent + mantissa)):
        e, m = code >> mantissa & (2**exponent - 1), code & (2**mantissa - 1)
        x = m / 2**mantissa * 2.0 ** (1 - bias) if e == 0 else (1 + m / 2**mantissa) * 2.0 ** (e - bias)
        out.append(-x if code >> (exponent + mantissa) else x)
    return np.array(out)


def stream(codes: Any, bits: int) -> Any:
    """One little-endian bit string a row, filled up to whole int32 words."""
    rows, count = codes.shape
    planes = (codes[..., None].astype(np.int64) >> np.arange(bits)) & 1
    flat = planes.reshape(rows, count * bits)
    width = -(-count * bits // 32) * 32
    flat = np.pad(flat, ((0, 0), (0, width - count * bits))).astype(np.uint8)
    return np.packbits(flat, axis=1, bitorder="little").view(np.int32)


def pack6(codes: Any) -> Any:
    return np.ascontiguousarray(stream(codes, 6).view(np.uint8)[:, : codes.shape[1] * 6 // 8])


def spread(scales: Any, block: int) -> Any:
    return np.repeat(scales, block, axis=1)


MX = {"e2m1": (2, 1, 4), "e2m3": (2, 3, 6), "e3m2": (3, 2, 6)}


def mx(rng: Rng, d: ModuleType, element: str, n: int, k: int) -> tuple[Any, Any, Any]:
    """(packed codes, e8m0 bytes [N, K/32], values)."""
    exponent, mantissa, bits = MX[element]
    codes = rng.integers(0, 2**bits, (n, k))
    scales = rng.integers(100, 140, (n, k // 32)).astype(np.uint8)
    packed = d.pack4(codes, False) if bits == 4 else pack6(codes)
    values = small_float(exponent, mantissa)[codes] * spread(2.0 ** (scales.astype(float) - 127), 32)
    return packed.astype(np.uint8), scales, values


@pytest.mark.parametrize("shape", [(40, 224), (128, 128), (200, 4096)])
@pytest.mark.parametrize("element", ["e2m1", "e2m3"])
def test_compressed_mx(element: str, shape: Any, rng: Rng, d: ModuleType, read: Any) -> None:
    packed, scales, values = mx(rng, d, element, *shape)
    layer, got = read({"weight_packed": d.T("U8", packed), "weight_scale": d.T("U8", scales)})
    assert (layer.codec.name, layer.options["element"]) == ("compressed_mx", element)
    assert np.array_equal(got, values) and not layer.findings


@pytest.mark.parametrize("shape", [(40, 512), (128, 1024), (200, 640)])
@pytest.mark.parametrize("element", ["e2m1", "e3m2"])
def test_lightx2v_mx(element: str, shape: Any, rng: Rng, d: ModuleType, read: Any) -> None:
    packed, scales, values = mx(rng, d, element, *shape)
    layer, got = read({"weight": d.T("U8", packed), "weight_scale": d.T("F8_E8M0", d.swizzle(scales))})
    assert (layer.codec.name, layer.options["element"]) == ("lightx2v_mx", element)
    assert np.array_equal(got, values) and not layer.findings


@pytest.mark.parametrize("shape", [(40, 512), (130, 640)])
def test_mxfp8_of_every_tool(shape: Any, rng: Rng, d: ModuleType, read: Any) -> None:
    n, k = shape
    q = rng.integers(0, 0x7E, (n, k)).astype(np.uint8)
    scales = rng.integers(100, 140, (n, k // 32)).astype(np.uint8)
    values = d.E4M3[q] * spread(2.0 ** (scales.astype(float) - 127), 32)
    weight = d.T("F8_E4M3", q)
    padded = {"weight": d.T("U8", q), "weight_scale": d.T("F8_E8M0", d.swizzle(scales))}
    layer, got = read(padded)
    assert layer.codec.name == "lightx2v_mxfp8" and np.array_equal(got, values)
    for method, suffix in (
        ("compressed-tensors", "weight_scale"), ("modelopt", "weight_scale"), ("fp8", "weight_scale_inv"),
    ):  # fmt: skip
        layer, got = read({"weight": weight, suffix: d.T("U8", scales)}, {"quant_method": method})
        assert layer.codec.name == "mxfp8_row_major" and np.array_equal(got, values)
        assert [finding.level for finding in layer.findings] == ["note"]


def test_mxfp8_where_only_a_configuration_tells(rng: Rng, d: ModuleType, read: Any) -> None:
    """N and K fill whole tiles: row-major and swizzled have one shape."""
    q = rng.integers(0, 0x7E, (128, 256)).astype(np.uint8)
    scales = rng.integers(100, 140, (128, 8)).astype(np.uint8)
    tensors = {"weight": d.T("F8_E4M3", q), "weight_scale": d.T("U8", scales)}
    values = d.E4M3[q] * spread(2.0 ** (scales.astype(float) - 127), 32)
    layer, got = read(tensors, {"quant_method": "modelopt", "quant_algo": "MXFP8"})
    assert np.array_equal(got, values)
    layer, got = read(tensors)
    assert layer.codec.name == "mxfp8" and not np.array_equal(got, values)
    (guess,) = layer.findings
    assert guess.level == "guess" and "config.json or --assume would tell" in guess.evidence


# ---- nvfp4


def nvfp4(rng: Rng, d: ModuleType, n: int, k: int, block: int = 16) -> tuple[Any, Any, Any, Any]:
    """(codes a column, block scales, tensor scale, values)."""
    codes = rng.integers(0, 16, (n, k))
    scales = rng.integers(8, 0x70, (n, k // block)).astype(np.uint8)
    total = np.float32(rng.uniform(1e-4, 1e-2))
    values = small_float(2, 1)[codes] * spread(d.f32(d.E4M3[scales] * np.float64(total)), block)
    return codes, scales, total, d.f32(values)


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ("linear", {}),
        ("swizzled", {"checkpoint_weight_scale_layout": "swizzled"}),
        ("swizzled", {"checkpoint_weight_scale_layout": "swizzled", "swap_weight_nibbles": True}),
    ],
)
@pytest.mark.parametrize("shape", [(128, 128), (48, 96), (160, 1024)])
def test_modelopt_nvfp4(layout: str, keys: Any, shape: Any, rng: Rng, d: ModuleType, read: Any) -> None:
    codes, scales, total, values = nvfp4(rng, d, *shape)
    stored = d.swizzle(scales) if layout == "swizzled" else scales
    tensors = {
        "weight": d.T("U8", d.pack4(codes, keys.get("swap_weight_nibbles", False))),
        "weight_scale": d.T("F8_E4M3", stored),
        "weight_scale_2": d.f32_tensor(total),
        "input_scale": d.f32_tensor(0.01),
    }
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"} | keys
    layer, got = read(tensors, config)
    assert (layer.codec.name, layer.options["scales"]) == ("modelopt_nvfp4", layout)
    assert np.array_equal(got, values)
    # The same object in the header, and in hf_quant_config.json's nesting.
    layer, got = read(tensors, None, {"quantization_config": json.dumps(config)})
    assert np.array_equal(got, values) and not [f for f in layer.findings if f.level == "guess"]


def test_modelopt_padded_scales(rng: Rng, d: ModuleType, read: Any) -> None:
    """padding_strategy "row_col" fills scale columns up to 16 before it swizzles."""
    codes, scales, total, values = nvfp4(rng, d, 256, 192)
    padded = d.swizzle(np.pad(scales, ((0, 0), (0, 4))))
    assert padded.shape == (256, 16)
    tensors = {
        "weight": d.T("U8", d.pack4(codes, False)),
        "weight_scale": d.T("F8_E4M3", padded),
        "weight_scale_2": d.f32_tensor(total),
    }
    listed = {"format_version": "1.0", "layers": {L: {"format": "nvfp4"}}}
    metadata = {
        "quantization_config": json.dumps({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        "_quantization_metadata": json.dumps(listed),
    }
    layer, got = read(tensors, None, metadata)
    assert (layer.codec.name, layer.marker) == ("modelopt_nvfp4", None)
    assert np.array_equal(got, values)


def test_modelopt_padded_rows(rng: Rng, d: ModuleType, read: Any) -> None:
    """padding_strategy "row" fills rows up to 16; the bias tells how many there are."""
    codes, scales, total, values = nvfp4(rng, d, 48, 128)
    codes[40:], values = 0, values[:40]
    tensors = {
        "weight": d.T("U8", d.pack4(codes, False)),
        "weight_scale": d.T("F8_E4M3", scales),
        "weight_scale_2": d.f32_tensor(total),
        "bias": d.narrow(np.ones(40), "BF16"),
    }
    layer, got = read(tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert (layer.n, layer.k) == (40, 128) and np.array_equal(got, values)


def test_a_marker_tensor_is_comfyuis_whatever_lies_beside(rng: Rng, d: ModuleType, read: Any) -> None:
    codes, scales, total, values = nvfp4(rng, d, 128, 128)
    tensors = {
        "weight": d.T("U8", d.pack4(codes, True)),
        "weight_scale": d.T("F8_E4M3", d.swizzle(scales)),
        "weight_scale_2": d.f32_tensor(total),
        "comfy_quant": d.marker_tensor({"format": "nvfp4"}),
    }
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    layer, got = read(tensors, config, {"quantization_config": json.dumps(config)})
    assert layer.codec.name == "nvfp4" and np.array_equal(got, values)


def test_nvfp4_that_nothing_declares_is_a_guess(rng: Rng, d: ModuleType, read: Any) -> None:
    codes, scales, total, _ = nvfp4(rng, d, 128, 128)
    tensors = {
        "weight": d.T("U8", d.pack4(codes, False)),
        "weight_scale": d.T("F8_E4M3", scales),
        "weight_scale_2": d.f32_tensor(total),
    }
    layer, _ = read(tensors)
    assert layer.codec.name == "nvfp4"
    (guess,) = [f for f in layer.findings if f.level == "guess"]
    assert "a marker, ModelOpt's config.json or --assume would tell" in guess.evidence


@pytest.mark.parametrize("prefix", ["", "weight_quantizer._"])
def test_modelopt_svd(prefix: str, rng: Rng, d: ModuleType, read: Any) -> None:
    names = f"{prefix}svdquant_lora_a", f"{prefix}svdquant_lora_b"
    codes, scales, total, values = nvfp4(rng, d, 48, 96)
    a, b = (d.narrow(rng.standard_normal(shape) * 0.1, "BF16") for shape in ((8, 96), (48, 8)))
    tensors = {
        "weight": d.T("U8", d.pack4(codes, False)),
        "weight_scale": d.T("F8_E4M3", scales),
        "weight_scale_2": d.f32_tensor(total),
        "pre_quant_scale": d.narrow(rng.uniform(0.5, 2, 96), "BF16"),
        names[0]: a,
        names[1]: b,
    }
    layer, got = read(tensors)
    assert layer.codec.name == "modelopt_nvfp4_svd" and not layer.leftovers
    expected = values + d.widen(b) @ d.widen(a)
    assert np.abs(got - expected).max() < 1e-6 * np.abs(expected).max()


def test_modelopt_wide_blocks(rng: Rng, d: ModuleType, read: Any) -> None:
    codes, scales, total, values = nvfp4(rng, d, 48, 192, block=32)
    tensors = {
        "weight": d.T("U8", d.pack4(codes, False)),
        "weight_scale": d.T("F8_E4M3", scales),
        "weight_scale_2": d.f32_tensor(total),
    }
    layer, got = read(tensors)
    assert layer.codec.name == "modelopt_nvfp4_wide" and np.array_equal(got, values)


@pytest.mark.parametrize("two_stage", [False, True])
@pytest.mark.parametrize("shape", [(48, 256), (130, 384)])
def test_modelopt_int4(two_stage: bool, shape: Any, rng: Rng, d: ModuleType, read: Any) -> None:
    n, k = shape
    q = rng.integers(-8, 8, (n, k))
    scale = d.f32(rng.uniform(1e-3, 1e-2, (n, k // 128)))
    packed = ((q[0::2] & 15) | (q[1::2] & 15) << 4).astype(np.uint8)
    tensors = {"weight": d.T("U8", packed), "weight_scale": d.f32_tensor(scale)}
    values = d.f32(q * spread(scale, 128))
    if two_stage:
        total = np.float64(np.float32(8e-4))
        tensors["weight_scale_2"] = d.f32_tensor(total)
        rounded = d.narrow(d.f32(values / total), "F8_E4M3")
        values = d.f32(d.widen(rounded) * total)
    layer, got = read(tensors)
    assert (layer.codec.name, layer.options["two_stage"]) == ("modelopt_int4", two_stage)
    assert np.array_equal(got, values)


# ---- LightX2V


@pytest.mark.parametrize("absmax", [True, False])
@pytest.mark.parametrize("form", ["alpha", "global"])
def test_lightx2v_nvfp4(form: str, absmax: bool, rng: Rng, d: ModuleType, read: Any) -> None:
    codes, scales, total, values = nvfp4(rng, d, 136, 80)
    inverse = np.float32(2688 / 7.0)
    tensors = {"weight": d.T("U8", d.pack4(codes, False)), "weight_scale": d.T("F8_E4M3", d.swizzle(scales))}
    if form == "alpha":
        alpha = np.float32(total / inverse)
        tensors |= {"alpha": d.f32_tensor(alpha), "input_global_scale": d.f32_tensor(inverse)}
    else:
        tensors["weight_global_scale"] = d.f32_tensor(np.float32(1) / total)
        tensors |= {"input_absmax": d.f32_tensor(7.0)} if absmax else {}
    layer, got = read(tensors)
    assert (layer.codec.name, layer.options["form"]) == ("lightx2v_nvfp4", form)
    assert np.allclose(got, values, rtol=4e-7, atol=0)


# ---- integers of compressed-tensors


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("k", [256, 1000])
def test_integers_packed_before_0_17(bits: int, k: int, rng: Rng, d: ModuleType, read: Any) -> None:
    """32 // b codes a word, the top bits unused."""
    n, per = 24, 32 // bits
    codes = rng.integers(0, 2**bits, (n, k))
    padded = np.pad(codes, ((0, 0), (0, -k % per))).reshape(n, -1, per).astype(np.uint64)
    words = (
        (padded << (np.arange(per, dtype=np.uint64) * np.uint64(bits)))
        .sum(-1)
        .astype(np.uint32)
        .view(np.int32)
    )
    scale = d.narrow(rng.uniform(1e-3, 1e-2, (n, 1)), "BF16")
    tensors = {
        "weight_packed": d.T("I32", words),
        "weight_scale": scale,
        "weight_shape": d.T("I64", np.array([n, k], np.int64)),
    }
    values = d.f32((codes - 2 ** (bits - 1)) * d.widen(scale))
    layer, got = read(tensors)
    assert (layer.options["bits"], layer.options["dense"]) == (bits, False)
    assert np.array_equal(got, values)


def test_integers_with_ordered_groups(rng: Rng, d: ModuleType, read: Any) -> None:
    n, k = 24, 256
    codes, order = rng.integers(0, 16, (n, k)), rng.permutation(np.arange(k) // 64).astype(np.int32)
    scale = d.narrow(rng.uniform(1e-3, 1e-2, (n, 4)), "BF16")
    tensors = {
        "weight_packed": d.T("I32", stream(codes, 4)),
        "weight_scale": scale,
        "weight_shape": d.T("I64", np.array([n, k], np.int64)),
        "weight_g_idx": d.T("I32", order),
    }
    layer, got = read(tensors)
    assert layer.options["order"] == "act"
    assert np.array_equal(got, d.f32((codes - 8) * d.widen(scale)[:, order]))


def test_integers_without_their_shape(rng: Rng, d: ModuleType, read: Any) -> None:
    """K is told by the configuration, and by nothing else where it is missing too."""
    codes = rng.integers(0, 16, (24, 256))
    scale = d.narrow(rng.uniform(1e-3, 1e-2, (24, 4)), "BF16")
    tensors = {"weight_packed": d.T("I32", stream(codes, 4)), "weight_scale": scale}
    weights = {"num_bits": 4, "group_size": 64, "strategy": "group", "type": "int"}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }
    _, got = read(tensors, config)
    assert np.array_equal(got, d.f32((codes - 8) * spread(d.widen(scale), 64)))
    with pytest.raises(QConvertError, match="K is not known"):
        read(tensors)


@pytest.mark.parametrize("zeros", [True, False])
def test_unpacked_integers(zeros: bool, rng: Rng, d: ModuleType, read: Any) -> None:
    q = rng.integers(-128, 128, (24, 256)).astype(np.int8)
    scale = d.narrow(rng.uniform(1e-3, 1e-2, (24, 1 if zeros else 2)), "F16")
    zero = rng.integers(-9, 9, (24, 1)).astype(np.int8)
    tensors = {"weight": d.T("I8", q), "weight_scale": scale}
    tensors |= {"weight_zero_point": d.T("I8", zero)} if zeros else {}
    layer, got = read(tensors)
    assert layer.codec.name == "compressed_int"
    offset = zero.astype(float) if zeros else 0.0
    assert np.array_equal(got, d.f32((q - offset) * spread(d.widen(scale), 256 if zeros else 128)))


def test_codes_beyond_the_stated_bits_are_refused(d: ModuleType, read: Any) -> None:
    tensors = {
        "weight": d.T("I8", np.full((8, 256), 9, np.int8)),
        "weight_scale": d.narrow(np.ones((8, 2)), "BF16"),
    }
    weights = {"num_bits": 4, "group_size": 128, "strategy": "group", "type": "int"}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }
    with pytest.raises(QConvertError, match="do not fit the 4 bits"):
        read(tensors, config)


# ---- fp8


@pytest.mark.parametrize(
    ("shape", "grid", "config"),
    [
        ((130, 300), (2, 3), {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ((130, 300), (2, 1, 3, 1), {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}),
        ((96, 256), (3, 4), {"quant_method": "fp8", "weight_block_size": [32, 64]}),
        ((96, 256), (3, 4), None),
        ((96, 250), (2, 4), {"quant_method": "fp8", "weight_block_size": [50, 64]}),
    ],
)
def test_block_fp8(shape: Any, grid: Any, config: Any, rng: Rng, d: ModuleType, read: Any) -> None:
    q = rng.integers(0, 0x7E, shape).astype(np.uint8)
    scale = d.f32(rng.uniform(1e-3, 1e-2, grid))
    name = "weight_scale" if len(grid) == 4 else "weight_scale_inv"
    layer, got = read({"weight": d.T("F8_E4M3", q), name: d.f32_tensor(scale)}, config)
    flat = scale.reshape(grid[0], -1)
    block = (config or {}).get("weight_block_size") or ([32, 64] if config is None else [128, 128])
    spread_rows = np.repeat(flat, block[0], 0)[: shape[0]]
    values = d.f32(d.E4M3[q] * np.repeat(spread_rows, block[1], 1)[:, : shape[1]])
    assert layer.options["scale"] == "block" and np.array_equal(got, values)
    assert bool([f for f in layer.findings if f.level == "guess"]) == (config is None)


def test_lightx2vs_comfyui_mode(rng: Rng, d: ModuleType, read: Any) -> None:
    q = rng.integers(-128, 128, (24, 64)).astype(np.int8)
    layer, got = read({"weight": d.T("I8", q), "scale_weight": d.f32_tensor(0.01)})
    assert layer.codec.name == "int8"
    assert np.array_equal(got, d.f32(q * np.float64(np.float32(0.01))))


# ---- torchao


@pytest.mark.parametrize("recorded", [True, False])
def test_torchao_swizzled_scales(recorded: bool, rng: Rng, d: ModuleType, read: Any) -> None:
    codes, scales, total, values = nvfp4(rng, d, 160, 96)
    tiles = d.swizzle(scales).reshape(64, 32)
    record = {"_type": "NVFP4Tensor", "_data": {"is_swizzled_scales": True}, "_tensor_data_names": []}
    metadata = {f"{L}.weight": json.dumps(record)} if recorded else None
    tensors = {
        "_weight_qdata": d.T("U8", d.pack4(codes, False)),
        "_weight_scale": d.T("F8_E4M3", tiles),
        "_weight_per_tensor_scale": d.f32_tensor(total),
    }
    layer, got = read(tensors, None, metadata)
    assert layer.options["scales"] == "swizzled" and np.array_equal(got, values)


def test_torchao_layouts_of_a_kernel_are_named(rng: Rng, d: ModuleType, read: Any) -> None:
    tensors = {
        "_weight_qdata": d.T("U8", rng.integers(0, 255, (32, 64)).astype(np.uint8)),
        "_weight_scale": d.narrow(np.ones((2, 32)), "BF16"),
    }
    metadata = {f"{L}.weight": json.dumps({"_type": "Int4Tensor", "_data": {}})}
    with pytest.raises(QConvertError, match="torchao's Int4Tensor is stored for its kernel"):
        read(tensors, None, metadata)
