"""Every stored state of a layer to every target: converted and right, lossless where that is possible."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.convert.actions import LOSSLESS
from qconvert.formats.checkpoint import opened
from qconvert.formats.layers import Inventory, Layer, parse_assumption, take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.values import change_basis, decode_rows
from qconvert.runtime.contracts.registry import get_contract
from qconvert.runtime.targets import get_target

Rng = np.random.Generator
FC, TABLE, NORM = "blocks.0.fc", "embed_tokens", "blocks.0.norm"
PLAIN = ("bf16", "fp16", "fp32", "fp64")

FP8 = {
    "fp8", "fp8_one", "fp8_bf16_scale", "fp8_full", "fp8_input_scale", "fp8_cast", "fp8_cast_marked", "fp8_unmarked",
    "fp8_tagged_u8", "fp8_legacy", "fp8_legacy_full",
}  # fmt: skip
NV = {"nvfp4", "nvfp4_full", "nvfp4_u8_scales", "nvfp4_unmarked", "nvfp4_pre", "nvfp4_input_scale"}
MX = {"mxfp8", "mxfp8_e8m0", "mxfp8_inv", "mxfp8_tagged_u8", "mxfp8_unmarked"}
ROTATED = {"int8_convrot16", "int8_convrot64", "int8_convrot256", "int8_convrot_1d", "int8_convrot_params"}
FLAT = {"int8_scalar", "int8_row", "int8_row_1d", "int8_bf16_scale", "int8_unmarked"}
W4A4 = {
    "w4a4", "w4a4_64", "w4a4_16", "w4a4_2d", "w4a4_bf16_scale", "w4a4_linear_int8", "w4a4_params",
}  # fmt: skip
W4A8 = {
    "w4a8", "w4a8_uniform", "w4a8_no_convrot_key", "w4a8_srel_u8", "w4a8_g4", "w4a8_g8", "w4a8_g32", "w4a8_g64",
    "w4a8_rot64", "w4a8_rot4", "w4a8_params", "w4a8_unmarked", "sym", "sym_g32",
}  # fmt: skip
AWQ = {"awq", "awq_g32", "awq_fp16", "awq_f32", "awq_unmarked"}
#: target -> sources whose codes it takes as they are
SAME_CODES: dict[str, set[str]] = {
    "comfy_nvfp4": NV,
    "kitchen_w4a8": W4A8 | {"w4a8_correction", "w4a8_correction_f32"},
    "kitchen_w4a4": W4A4,
    "convrot_int8": ROTATED,
    "comfy_fp8": FP8,
    "comfy_mxfp8": MX,
    "comfyui:float8_e4m3fn": FP8,
    "comfyui:float8_e5m2": {"e5m2", "e5m2_cast"},
    "comfyui:nvfp4": NV | {"nvfp4_convrot"},
    "comfyui:mxfp8": MX,
    "comfyui:int8_tensorwise": FLAT | ROTATED | {"int8_convrot4"},
    "comfyui:convrot_w4a4": W4A4 | {"w4a4_4"},
    "comfyui:asym_w4a8_int8": W4A8 | {"w4a8_6bit", "w4a8_srel_f32"},
    "comfyui:awq_w4a16": AWQ,
}
#: target -> format of its linear layers
FORMAT = {
    "comfy_nvfp4": "nvfp4",
    "kitchen_w4a8": "asym_w4a8_int8",
    "kitchen_w4a4": "convrot_w4a4",
    "convrot_int8": "int8_tensorwise",
    "comfy_fp8": "float8_e4m3fn",
    "comfy_mxfp8": "mxfp8",
}
PLAIN_TARGETS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def target_format(target: str) -> str:
    return FORMAT.get(target) or target.removeprefix("comfyui:")


def source_file(d: ModuleType, rng: Rng, linear: Any, table: Any) -> dict[str, Any]:
    """A linear layer and a table, a norm and biases beside them."""
    tensors = {
        **linear.named(FC),
        **table.named(TABLE),
        f"{FC}.bias": d.narrow(rng.standard_normal(128), "BF16"),
        f"{NORM}.weight": d.f32_tensor(rng.standard_normal(256)),
        f"{NORM}.bias": d.f32_tensor(rng.standard_normal(256)),
        "rope.freqs": d.f32_tensor(rng.standard_normal(8)),
    }
    return tensors


def decoded(checkpoint: Any, layer: Layer, backend: Any) -> Any:
    return decode_rows(layer, LayerReader(checkpoint, layer), 0, layer.n, backend)


def in_stored_basis(checkpoint: Any, layer: Layer, backend: Any) -> Any:
    codes = layer.codec.load(LayerReader(checkpoint, layer), 0, layer.n, backend)
    return layer.codec.decode(codes, layer.options, backend)


def check_values(
    sample: Any, action: Any, layer: Layer, checkpoint: Any, d: ModuleType, writing: ModuleType, backend: Any
) -> None:
    """Bit for bit where codes moved; else no further from the source than encoding its values directly."""
    factor = 1.0
    if "pre_quant_scale" in sample.tensors and "pre_quant_scale" not in layer.tensors:
        factor = d.widen(sample.tensors["pre_quant_scale"])
    values = sample.values * factor
    got = decoded(checkpoint, layer, backend)
    if action.kind in LOSSLESS:
        assert np.array_equal(in_stored_basis(checkpoint, layer, backend).astype(np.float64), sample.stored)
        return
    name, options = action.codec.name, action.options
    if name == "plain":
        expected = d.widen(d.narrow(values, options["dtype"]))
        if sample.tolerance or isinstance(factor, np.ndarray):
            # Rotated back in float32, or multiplied: the last bit of the type may differ.
            steps = {"BF16": 2.0**-8, "F16": 2.0**-10, "F32": 2.0**-23}[options["dtype"]]
            assert (np.abs(got - values) <= steps * np.abs(values) + 4e-6 * np.abs(values).max()).all()
        else:
            assert np.array_equal(got.astype(np.float64), expected)
        return
    codes = writing.encode(name, options, values, backend)
    direct = change_basis(
        action.codec.decode(codes, options, backend), action.codec.rotation(options), 0, backend
    )
    assert d.sqnr(values, got) >= d.sqnr(values, direct) - 0.1


def check_nothing_is_lost(before: dict[str, Any], after: dict[str, Any], outcome: Any) -> None:
    """Every tensor of the source is copied, became part of its layer's new form, or is listed with a reason."""
    dropped = {drop.tensor: drop.reason for drop in outcome.plan.drops}
    assert all(dropped.values())
    owned = {
        action.layer.tensors[suffix].name
        for action in outcome.plan.actions
        for suffix in (*action.layer.owned, *(["pre_quant_scale"] if action.fold else []))
    }
    marked = {f"{action.layer.prefix}.comfy_quant" for action in outcome.plan.actions if action.layer.marker}
    for name in before:
        prefix, _, suffix = name.rpartition(".")
        renamed = f"{prefix}.input_scale" if suffix == "scale_input" else name
        assert renamed in after or name in dropped or name in owned or name in marked, name
        if suffix == "weight":
            assert name in after
        assert not (name in dropped and name in after), name


def check_plain_parts(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Norms, biases and loose tensors are the same bytes."""
    for name in (f"{NORM}.weight", f"{NORM}.bias", f"{FC}.bias", "rope.freqs"):
        assert after[name].dtype == before[name].dtype, name
        assert np.array_equal(after[name].bits, before[name].bits), name


def check_contract(target: str, checkpoint: Any) -> None:
    runtime = get_target(target).runtime
    if runtime == "none":
        assert not checkpoint.marker_bytes()
        return
    verdict = get_contract("comfyui" if runtime == "comfyui" else "sglang-0.5.23").check(checkpoint.view())
    assert verdict.accepted, [v.line() for v in verdict.all_violations()]


def table_format(target: str) -> str | None:
    if target in ("kitchen_w4a4", "comfy_fp8", "comfy_mxfp8", *PLAIN_TARGETS):
        return None
    return target_format(target) if "float8" in target else "int8_tensorwise"


def test_matrix(
    source: str, target: str, d: ModuleType, writing: ModuleType, sample: Any, rng: Rng, write: Callable[..., Path],
    convert: Callable[..., Any], backend: Any, tmp_path: Path,
) -> None:  # fmt: skip
    # The tiles of a packed layer are 128 rows.
    linear, table = sample(source, 128, 256), sample(source, 256, 256)
    before = source_file(d, rng, linear, table)
    path = write(before)
    outcome = convert(path, target, tmp_path / "out.safetensors")
    after = d.read(outcome.output)
    check_nothing_is_lost(before, after, outcome)
    check_plain_parts(before, after)
    assert "scaled_fp8" not in after
    actions = {action.prefix: action for action in outcome.plan.actions}
    with opened(outcome.output) as checkpoint:
        there: Inventory = take_inventory(checkpoint)
        assert there.all_findings() == []
        assert set(there.layers) == {FC, TABLE, NORM}
        check_contract(target, checkpoint)
        for name, stored, wanted in (
            (FC, linear, None if target in PLAIN_TARGETS else target_format(target)),
            (TABLE, table, table_format(target) if source not in PLAIN else None),
        ):
            layer, action = there.layers[name], actions[name]
            assert (layer.n, layer.k) == stored.values.shape
            assert (layer.marker or {}).get("format") == wanted, action.reason
            if layer.codec.name == "plain":
                assert layer.options["dtype"] == action.options["dtype"]
            check_values(stored, action, layer, checkpoint, d, writing, backend)
        # What has a lossless way takes it, and nothing else claims to.
        same_type = target == source and target in PLAIN_TARGETS
        lossless = same_type or source in SAME_CODES.get(target, ())
        assert (actions[FC].kind in LOSSLESS) == lossless, actions[FC].reason
        check_correction(source, target, there.layers[FC], before, after, d)
        check_companions(source, target, after)


def check_correction(
    source: str, target: str, layer: Layer, before: dict[str, Any], after: dict[str, Any], d: ModuleType
) -> None:
    """The offsets of asymmetric w4a8 are written in F32 for sglang, never for ComfyUI, which does not read them."""
    written = after.get(f"{FC}.weight_correction")
    assert (written is not None) == (target == "kitchen_w4a8" and source.startswith("w4a8_correction"))
    if written is not None:
        assert written.dtype == "F32"
        assert np.array_equal(d.widen(written), d.widen(before[f"{FC}.weight_correction"]))


def check_companions(source: str, target: str, after: dict[str, Any]) -> None:
    """Activation scales stay with the format that they were made for, where the runtime reads them."""
    given = f"{FC}.input_scale" in after
    if source == "fp8_input_scale":
        assert given == (target in ("comfy_fp8", "comfyui:float8_e4m3fn", "comfyui:float8_e5m2"))
    elif source == "nvfp4_input_scale":
        assert given == (target == "comfyui:nvfp4")
    else:
        assert not given
    assert (f"{FC}.pre_quant_scale" in after) == (
        source == "nvfp4_pre" and target in ("comfy_nvfp4", "comfyui:nvfp4")
    )


def test_full_precision_follows_the_source_or_the_runtime(
    d: ModuleType, rng: Rng, write: Callable[..., Path], convert: Callable[..., Any], tmp_path: Path
) -> None:
    def key(source: str, target: str, **options: Any) -> Any:
        path = write(d.SOURCES[source](rng, d.weights(rng, 128, 256)).named(FC), name=f"{source}.safetensors")
        out = convert(path, target, tmp_path / "out.safetensors", force=True, **options)
        marker = json.loads(d.read(out.output)[f"{FC}.comfy_quant"].bits.tobytes())
        return marker.get("full_precision_matrix_mult")

    from qconvert.runtime.targets import Wishes

    for source in ("bf16", "nvfp4", "fp8", "nvfp4_full"):
        assert key(source, "comfy_nvfp4") is True
        assert key(source, "comfy_nvfp4", wishes=Wishes(native_fp4=True)) is None
    assert key("fp8", "comfy_fp8") is None and key("fp8_full", "comfy_fp8") is True
    assert key("fp8_legacy", "comfy_fp8") is None and key("fp8_legacy_full", "comfy_fp8") is True
    assert key("bf16", "comfy_fp8") is None
    assert key("bf16", "comfy_fp8", wishes=Wishes(full_precision=True)) is True
    assert key("nvfp4", "comfyui:nvfp4") is None and key("nvfp4_full", "comfyui:nvfp4") is True


def test_banks(
    bank: str, target: str, d: ModuleType, sample: Any, write: Callable[..., Path], convert: Callable[..., Any],
    backend: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """A bank of experts stays where ComfyUI reads its format, and is decoded everywhere else."""
    made = sample(bank, 3, 128, 256)
    before = made.named("blocks.0.experts")
    outcome = convert(write(before), target, tmp_path / "out.safetensors")
    after = d.read(outcome.output)
    check_nothing_is_lost(before, after, outcome)
    with opened(outcome.output) as checkpoint:
        check_contract(target, checkpoint)
        (layer,) = take_inventory(checkpoint).layers.values()
        assert not layer.findings
        name = (layer.marker or {}).get("format")
        shape = checkpoint.tensors[layer.prefix + ".weight"].shape
        if layer.codec.name == "plain":
            assert shape == made.values.shape
            values = d.widen(after[layer.prefix + ".weight"])
            dtype = layer.options["dtype"]
            step = {"BF16": 2.0**-8, "F16": 2.0**-10, "F32": 2.0**-22}[dtype] if bank != "bank_bf16" else 0
            assert (np.abs(values - made.values) <= step * np.abs(made.values) + 4e-6).all()
            kept = None
        else:
            kept = name
            assert (layer.n, layer.k, layer.experts) == (128, 256, 3)
            assert layer.marker is not None and layer.marker["num_experts"] == 3
            for suffix, tensor in made.tensors.items():
                stored = after[f"{layer.prefix}.{suffix}"]
                assert np.array_equal(stored.bits.reshape(-1), tensor.bits.reshape(-1)), suffix
    comfy = target.removeprefix("comfyui:") if target.startswith("comfyui:") else None
    readable = made.marker is not None and made.marker["format"] == comfy and "codebook" not in bank
    assert (kept is not None) == readable, (kept, outcome.plan.actions[0].reason)


def test_convolutions(
    convolution: str, target: str, d: ModuleType, sample: Any, write: Callable[..., Path], convert: Callable[..., Any],
    backend: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """A convolution's weight keeps its four axes whatever becomes of it."""
    made = sample(convolution, 24, 8, 3, 3)
    before = made.named("conv_in")
    outcome = convert(write(before), target, tmp_path / "out.safetensors")
    after = d.read(outcome.output)
    check_nothing_is_lost(before, after, outcome)
    with opened(outcome.output) as checkpoint:
        check_contract(target, checkpoint)
        (layer,) = take_inventory(checkpoint).layers.values()
        assert not [f for f in layer.findings if f.level != "note"]
        assert after["conv_in.weight"].bits.shape == (24, 8, 3, 3)
        got = decoded(checkpoint, layer, backend)
    values = made.values.reshape(24, -1)
    dtype = outcome.plan.actions[0].options.get("dtype", "BF16")
    step = {"BF16": 2.0**-8, "F16": 2.0**-10, "F32": 0}[dtype]
    assert (np.abs(got - values) <= step * np.abs(values) + 1e-7).all()


@pytest.mark.parametrize("told", ["bias", "orig_shape", "nothing"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_padded_layers(
    name: str, told: str, target: str, d: ModuleType, write: Callable[..., Path], convert: Callable[..., Any],
    backend: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """The true shape comes out everywhere, but where ComfyUI slices by itself; values are the unpadded part's."""
    rng = np.random.default_rng(7)
    n, k, padded = 250, 256, 256
    keys = {"orig_shape": [n, k]} if told == "orig_shape" else {}
    made = getattr(d, name)(pad=True, **keys)(rng, d.weights(rng, n, k))
    tensors = made.named(FC)
    if told == "bias":
        tensors[f"{FC}.bias"] = d.narrow(rng.standard_normal(n), "BF16")
    outcome = convert(write(tensors), target, tmp_path / "out.safetensors")
    after = d.read(outcome.output)
    own = target == f"comfyui:{name}"
    with opened(outcome.output) as checkpoint:
        check_contract(target, checkpoint)
        layer = take_inventory(checkpoint).layers[FC]
        rows = n if told != "nothing" else padded
        assert (layer.n, layer.k) == (rows, k)
        got = decoded(checkpoint, layer, backend)
    if own:
        assert outcome.plan.actions[0].kind == "copy"
        for suffix, tensor in made.tensors.items():
            assert np.array_equal(after[f"{FC}.{suffix}"].bits, tensor.bits)
        assert np.array_equal(got, made.values[:rows])
    else:
        assert d.sqnr(made.values[:n], got[:n]) >= 14


LAYOUTS = [("swizzled", "low"), ("linear", "high"), ("linear", "low"), ("swizzled", "high")]


@pytest.mark.parametrize(("scales", "nibbles"), LAYOUTS)
@pytest.mark.parametrize("target", ["comfy_nvfp4", "comfyui:nvfp4"])
def test_nvfp4_layouts_that_the_user_names_are_laid_out_anew(
    scales: str, nibbles: str, target: str, d: ModuleType, write: Callable[..., Path], convert: Callable[..., Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    rng = np.random.default_rng(8)
    writer = d.nvfp4(linear=scales == "linear", low_first=nibbles == "low", marked=False)
    made = writer(rng, d.weights(rng, 256, 128))
    assume = (parse_assumption(f"fc=nvfp4,scales={scales},nibbles={nibbles}"),)
    outcome = convert(write(made.named(FC)), target, tmp_path / "out.safetensors", assume=assume, strict=True)
    after = d.read(outcome.output)
    tensors = {suffix: after[f"{FC}.{suffix}"] for suffix in made.tensors}
    assert np.array_equal(d.decode_nvfp4(tensors), made.stored)
    assert outcome.plan.actions[0].kind in LOSSLESS


@pytest.mark.parametrize("target", ["comfy_mxfp8", "comfyui:mxfp8"])
def test_mxfp8_scales_that_the_user_names_are_laid_out_anew(
    target: str, d: ModuleType, write: Callable[..., Path], convert: Callable[..., Any], tmp_path: Path
) -> None:
    rng = np.random.default_rng(9)
    made = d.mxfp8(linear=True, marked=False)(rng, d.weights(rng, 128, 256))
    assume = (parse_assumption("fc=mxfp8,scales=linear"),)
    outcome = convert(write(made.named(FC)), target, tmp_path / "out.safetensors", assume=assume, strict=True)
    after = d.read(outcome.output)
    tensors = {suffix: after[f"{FC}.{suffix}"] for suffix in ("weight", "weight_scale")}
    assert np.array_equal(d.decode_mxfp8(tensors), made.stored)
    assert outcome.plan.actions[0].kind in LOSSLESS
