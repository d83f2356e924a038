"""The other ecosystems' libraries read what is written here, and what they write (any shape) is read as they read it.

Each test skips itself, and says so, where its library is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from qconvert.formats.layers import take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.registry import codec
from qconvert.formats.values import decode_rows

LOW = {"nibbles": "low", "scales": "linear", "rotation": 0, "full_precision": False}


def as_torch(arrays: Mapping[str, Any], parts: Any, d: ModuleType) -> dict[str, torch.Tensor]:
    return {
        part.suffix: d.to_torch(d.T(part.spec.dtype, arrays[part.suffix].reshape(part.spec.shape)))
        for part in parts
    }


def encoded(name: str, options: Mapping[str, Any], x: Any, backend: Any, d: ModuleType) -> tuple[Any, Any]:
    """(tensors of a layer as we write it, the values that we say they are)."""
    item = codec(name)
    common: Any = {}
    if item.statistic(options) == "amax":
        common = item.prepare(float(np.abs(x).max()), options, backend, "best")
    codes = item.encode(x, common, options, backend, "best")
    tensors = as_torch(item.store(codes, options, x.shape[1]), item.parts(*x.shape, options), d)
    return tensors, torch.from_numpy(item.decode(codes, options, backend))


def read_back(
    tensors: Mapping[str, torch.Tensor], opened: Callable[..., Any], d: ModuleType, backend: Any,
    config: Mapping[str, Any] | None = None, metadata: Mapping[str, str] | None = None, prefix: str = "a.fc",
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """Values as we read a layer of these tensors, and the layer."""
    checkpoint = opened(
        {f"{prefix}.{name}": d.from_torch(t.contiguous()) for name, t in tensors.items()}, metadata
    )
    checkpoint.config = dict(config or {})
    layer = take_inventory(checkpoint).layers[prefix]
    values = decode_rows(layer, LayerReader(checkpoint, layer), 0, layer.n, backend)
    return torch.from_numpy(values), layer


def guesses(layer: Any) -> list[str]:
    return [f.message for f in layer.findings if f.level == "guess"]


@pytest.fixture
def weights(rng: np.random.Generator) -> Callable[..., Any]:
    def make(n: int, k: int) -> Any:
        return (rng.standard_normal((n, k)) * rng.uniform(0.2, 2.0, (n, 1)) * 0.03).astype(np.float32)

    return make


# ---- compressed-tensors


def scheme(**weights: Any) -> Any:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


NVFP4_ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize("shape", [(32, 256), (48, 80), (128, 128)])
def test_compressed_tensors_reads_our_nvfp4(
    shape: tuple[int, int], weights: Any, d: ModuleType, backend: Any
) -> None:
    args = scheme(**NVFP4_ARGS, scale_dtype=torch.float8_e4m3fn)
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor

    tensors, values = encoded("compressed_nvfp4", LOW, weights(*shape), backend, d)
    got = NVFP4PackedCompressor.decompress(tensors, args)["weight"]
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, values.bfloat16())


def packed(
    w: torch.Tensor, bits: int, group: int, symmetric: bool
) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """(tensors of pack-quantized, the library's own values, its configuration)."""
    args = scheme(
        num_bits=bits, type="int", symmetric=symmetric, strategy="group" if group else "channel",
        group_size=group or None,
    )  # fmt: skip
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    spread = w.reshape(w.shape[0], -1, group or w.shape[1])
    scale, zero = calculate_qparams(spread.amin(-1), spread.amax(-1), args.weights)
    state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
    tensors = PackedQuantizationCompressor.compress(state, args)
    values = PackedQuantizationCompressor.decompress(dict(tensors), args)["weight"]
    document = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": args.weights.model_dump(mode="json")}
        },
    }
    return tensors, values, {"quantization_config": document}


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(("shape", "group"), [((48, 256), 32), ((40, 252), 0), ((96, 384), 64)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_integers(
    bits: int, shape: tuple[int, int], group: int, symmetric: bool, weights: Any, opened: Callable[..., Any],
    d: ModuleType, backend: Any,
) -> None:  # fmt: skip
    w = torch.from_numpy(weights(*shape)).bfloat16()
    tensors, expected, config = packed(w, bits, group, symmetric)
    for given in (config, None):
        got, layer = read_back(tensors, opened, d, backend, given)
        assert (layer.codec.name, layer.options["bits"]) == ("compressed_packed", bits)
        assert not guesses(layer)
        assert torch.equal(got.bfloat16(), expected.bfloat16())


@pytest.mark.parametrize(
    ("name", "bits"), [("mxfp4-pack-quantized", 4), ("mxfp6-pack-quantized", 6), ("mxfp8-quantized", 8)]
)
@pytest.mark.parametrize("shape", [(48, 192), (128, 256)])
def test_compressed_mx(
    name: str, bits: int, shape: tuple[int, int], weights: Any, opened: Callable[..., Any], d: ModuleType,
    backend: Any,
) -> None:  # fmt: skip
    args = scheme(num_bits=bits, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    w = torch.from_numpy(weights(*shape)).bfloat16()
    spread = w.reshape(shape[0], -1, 32)
    scale, zero = calculate_qparams(spread.amin(-1), spread.amax(-1), args.weights)
    library = BaseCompressor.get_value_from_registry(name)
    state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
    tensors = library.compress(state, args)
    expected = library.decompress(dict(tensors), args)["weight"]
    said = {"quantization_config": {"quant_method": "compressed-tensors", "format": name}}
    got, layer = read_back(tensors, opened, d, backend, said)
    assert layer.codec.family in ("mx", "mxfp8") and not guesses(layer)
    assert torch.equal(got.bfloat16(), expected.bfloat16())


# ---- torchao


def flattened(
    weight: torch.Tensor, config: Any
) -> tuple[dict[str, torch.Tensor], dict[str, str], torch.Tensor]:
    """(tensors, header, the library's own values) of a linear layer's weight."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    model = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)).bfloat16()
    model[0].weight.data.copy_(weight)
    quantize_(model, config)
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    return tensors, metadata, model[0].weight.dequantize().float()


def torchao_configs() -> dict[str, Any]:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    return {
        "Float8Tensor": Float8WeightOnlyConfig(),
        "Int8Tensor": Int8WeightOnlyConfig(version=2),
        "NVFP4Tensor": NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=True),
        "NVFP4Tensor without a tensor scale": NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False),
    }


@pytest.mark.parametrize("shape", [(32, 256), (160, 192), (256, 128)])
@pytest.mark.parametrize(
    "kind", ["Float8Tensor", "Int8Tensor", "NVFP4Tensor", "NVFP4Tensor without a tensor scale"]
)
def test_torchao_files(
    kind: str, shape: tuple[int, int], weights: Any, opened: Callable[..., Any], d: ModuleType, backend: Any
) -> None:
    config = torchao_configs()[kind]
    w = torch.from_numpy(weights(*shape)).bfloat16()
    tensors, metadata, expected = flattened(w, config)
    local = {name.removeprefix("0."): t for name, t in tensors.items()}
    got, layer = read_back(local, opened, d, backend, metadata=metadata, prefix="0")
    assert layer.codec.name.startswith("torchao_") and not guesses(layer)
    assert torch.equal(got.bfloat16(), expected.bfloat16())


def test_torchao_reads_our_nvfp4(weights: Any, d: ModuleType, backend: Any) -> None:
    pytest.importorskip("torchao")
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    tensors, values = encoded("torchao_nvfp4", LOW, weights(64, 256), backend, d)
    record = {
        "_type": "NVFP4Tensor",
        "_data": {
            "block_size": 16,
            "orig_dtype": {"_type": "torch.dtype", "_data": "float32"},
            "is_swizzled_scales": False,
            "use_triton_kernel": False,
            "act_quant_kwargs": None,
        },
        "_tensor_data_names": ["qdata", "scale", "per_tensor_scale"],
    }
    metadata = {"a.weight": json.dumps(record), "tensor_names": json.dumps(["a.weight"])}
    state, left = unflatten_tensor_state_dict({f"a.{n}": t for n, t in tensors.items()}, metadata)
    assert not left
    assert torch.equal(state["a.weight"].dequantize(torch.float32), values)


# ---- diffusers' BFL reader


@pytest.mark.parametrize("kind", ["fp8r", "nvfp4"])
def test_diffusers_bfl(
    kind: str, weights: Any, opened: Callable[..., Any], d: ModuleType, backend: Any
) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("accelerate")
    from diffusers import BFLQuantizationConfig
    from diffusers.quantizers.bfl import utils
    from diffusers.quantizers.bfl.bfl_quantizer import BFLQuantizer

    # What its reader makes of ours.
    x = weights(96, 160)
    row = {"kind": "F8_E4M3", "scale": "row", "flat": True, "unmarked": True, "full_precision": False}
    name, options = ("modelopt_nvfp4", LOW | {"activation": 1.0}) if kind == "nvfp4" else ("float8", row)
    tensors, values = encoded(name, options, x, backend, d)
    reader = BFLQuantizer(BFLQuantizationConfig())
    state = reader.maybe_update_state_dict({f"a.fc.{suffix}": t for suffix, t in tensors.items()})
    assert list(state) == ["a.fc.weight"]
    assert torch.equal(utils._dequantize_weight(state["a.fc.weight"]), values)
    # What we make of its writer's.
    w = torch.from_numpy(x)
    if kind == "nvfp4":
        q, scale, total = utils.quantize_nvfp4(w)
        given = {"weight": q, "weight_scale": scale, "weight_scale_2": total, "input_scale": torch.ones(())}
        expected = utils.dequantize_nvfp4(q, scale, total)
    else:
        q, scale = utils.quantize_fp8r(w)
        given, expected = {"weight": q, "weight_scale": scale}, utils.dequantize_fp8r(q, scale)
    said = {"quantization_config": json.dumps({"quant_method": "bfl"})}
    got, layer = read_back(given, opened, d, backend, metadata=said)
    assert not guesses(layer)
    assert torch.equal(got, expected)


def test_diffusers_builds_no_bfl_from_a_config() -> None:
    """Why the config.json beside a BFL file names no method."""
    pytest.importorskip("diffusers")
    from diffusers.quantizers.auto import DiffusersAutoQuantizer

    with pytest.raises(TypeError, match="unexpected keyword argument 'quant_method'"):
        DiffusersAutoQuantizer.from_dict({"quant_method": "bfl"})


# ---- ModelOpt


def test_modelopt_reads_our_nvfp4_and_we_read_its(
    weights: Any, opened: Callable[..., Any], d: ModuleType, backend: Any
) -> None:
    modelopt = pytest.importorskip("modelopt.torch.quantization.qtensor")
    x = weights(64, 256)
    tensors, values = encoded("modelopt_nvfp4", LOW, x, backend, d)
    ours = modelopt.NVFP4QTensor(torch.Size(x.shape), torch.float32, tensors["weight"])
    scales = {
        "scale": tensors["weight_scale"],
        "double_scale": tensors["weight_scale_2"],
        "block_sizes": {-1: 16},
    }
    got = ours.dequantize(dtype=torch.float32, **scales)
    assert torch.allclose(got, values, rtol=3e-7, atol=0)
    theirs, scale, total = modelopt.NVFP4QTensor.quantize(torch.from_numpy(x), 16)
    given = {"weight": theirs._quantized_data, "weight_scale": scale, "weight_scale_2": total}
    said = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    mine, layer = read_back(given, opened, d, backend, said)
    assert layer.codec.name == "modelopt_nvfp4" and not guesses(layer)
    expected = theirs.dequantize(dtype=torch.float32, scale=scale, double_scale=total, block_sizes={-1: 16})
    assert torch.allclose(mine, expected, rtol=3e-7, atol=0)


# ---- transformers' block fp8


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("block", [[128, 128], [64, 32]])
def test_transformers_block_fp8(
    ue8m0: bool, block: list[int], weights: Any, opened: Callable[..., Any], d: ModuleType, backend: Any
) -> None:
    pytest.importorskip("transformers")
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    scale_fmt = "ue8m0" if ue8m0 else "float"
    quantiser = SimpleNamespace(
        quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    )
    w = torch.from_numpy(weights(256, 384))
    tensors = Fp8Quantize(quantiser).convert({"weight": w})
    expected = Fp8Dequantize(quantiser)._dequantize_one(
        tensors["weight"], tensors["weight_scale_inv"], torch.float32
    )
    document = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    for said in ({"quantization_config": document}, None):
        got, layer = read_back(tensors, opened, d, backend, said)
        assert bool(guesses(layer)) == (said is None)
        assert torch.equal(got, expected)
