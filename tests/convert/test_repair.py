"""Files that load and draw noise, or do not load: converted, they are accepted and mean what their bytes meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structured as s
from qconvert.convert.job import Outcome, Request, run_job
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import take_inventory
from qconvert.kernels.select import get_backend
from qconvert.runtime.verify import compare_files

Convert = Callable[..., tuple[Outcome, Path]]
LAYER = "layers.0.mlp.up_proj"
NVFP4 = {"format": "nvfp4", "full_precision_matrix_mult": True}
FP8 = {"format": "float8_e4m3fn"}
ROTATED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
DEEP = "model.diffusion_model."


@pytest.fixture(scope="module")
def weights() -> Any:
    return {
        name: w
        for name, w in s.network().items()
        if not name.startswith(("layers.1", "layers.2", "layers.3"))
    }


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    def run(tensors: Any, target: str, metadata: Any = None, **request: Any) -> tuple[Outcome, Path]:
        source = s.write(tmp_path / "source.safetensors", tensors, metadata)
        out = tmp_path / "out.safetensors"
        with opened(source) as checkpoint:
            return run_job(Request(source, target, output=out, force=True, **request), checkpoint), out

    return run


def payload(path: Path) -> dict[str, bytes]:
    with opened(path) as checkpoint:
        return {name: checkpoint.read(name).tobytes() for name in checkpoint.tensors}


def guesses(outcome: Outcome) -> list[str]:
    return [finding.message for finding in outcome.plan.guesses]


@pytest.mark.parametrize("mark", [NVFP4, None])
@pytest.mark.parametrize(("linear", "low"), [(True, False), (False, True), (True, True)])
def test_wrong_nvfp4_layouts_are_repaired_bit_by_bit(
    convert: Convert, tmp_path: Path, linear: bool, low: bool, mark: Any
) -> None:
    network = s.network()
    outcome, out = convert(s.nvfp4_file(network, linear=linear, low=low, mark=mark), "comfy_nvfp4")
    assert guesses(outcome)
    repaired = payload(out)
    right = s.nvfp4_file(network, mark=NVFP4)
    assert repaired.keys() == right.keys()
    for name, (_, array) in right.items():
        if not name.endswith("comfy_quant"):
            assert repaired[name] == array.tobytes(), name
    with pytest.raises(
        QConvertError, match=r"--strict refuses a guess: .*(its values show|no marker; taken as)"
    ):
        convert(s.nvfp4_file(network, linear=linear, low=low, mark=mark), "comfy_nvfp4", strict=True)


@pytest.mark.parametrize("mark", [{"format": "int8_tensorwise"}, None])
def test_a_lost_rotation_flag_is_repaired_without_touching_codes(convert: Convert, mark: Any) -> None:
    tensors = s.int8_file(s.network(), rotated=True, mark=mark)
    outcome, out = convert(tensors, "convrot_int8")
    assert {action.kind for action in outcome.plan.actions if action.layer.quantised} == {"retag"}
    repaired = payload(out)
    assert repaired[f"{LAYER}.weight"] == tensors[f"{LAYER}.weight"][1].tobytes()
    assert json.loads(repaired[f"{LAYER}.comfy_quant"]) == ROTATED


def test_a_false_rotation_flag_is_seen(convert: Convert, tmp_path: Path) -> None:
    tensors = s.int8_file(s.network(), rotated=False, mark=ROTATED)
    _, out = convert(tensors, "bf16")
    plain = payload(out)[f"{LAYER}.weight"]
    codes, scale = tensors[f"{LAYER}.weight"][1], tensors[f"{LAYER}.weight_scale"][1]
    assert plain == s.bf16(codes.astype(np.float32) * scale)[1].tobytes()


def test_lost_fp8_scales_are_refused(convert: Convert, tmp_path: Path, weights: Any) -> None:
    tensors = s.fp8_file(weights, scale=False, lost=True, mark=None)
    with pytest.raises(QConvertError, match="there is no scale: it was lost"):
        convert(tensors, "comfy_nvfp4")
    assert [p.name for p in tmp_path.iterdir()] == ["source.safetensors"]


# ---- broken markers. Each changes a good file; `words` stand in some finding, `guess` says that --strict refuses.

Tensors = dict[str, Any]
Metadata = dict[str, str]


def set_marker(tensors: Tensors, document: Any, layer: str = LAYER) -> None:
    tensors[f"{layer}.comfy_quant"] = s.marker(document)


def retype(tensors: Tensors, name: str, dtype: str) -> None:
    tensors[name] = dtype, tensors[name][1]


def reshape(tensors: Tensors, name: str, *shape: int) -> None:
    tensors[name] = tensors[name][0], tensors[name][1].reshape(shape)


def to_bf16(tensors: Tensors, name: str) -> None:
    tensors[name] = s.bf16(tensors[name][1])


def nul(t: Tensors, m: Metadata) -> None:
    set_marker(t, bytes(29))


def nul_on_plain(t: Tensors, m: Metadata) -> None:
    set_marker(t, bytes(29), "embed_tokens")


def no_json(t: Tensors, m: Metadata) -> None:
    set_marker(t, b'{"format": "nvfp4"')


def padded_with_nul(t: Tensors, m: Metadata) -> None:
    set_marker(t, json.dumps(NVFP4).encode() + bytes(12))


def a_list(t: Tensors, m: Metadata) -> None:
    set_marker(t, ["nvfp4"])


def no_format(t: Tensors, m: Metadata) -> None:
    set_marker(t, {"full_precision_matrix_mult": True})


def unknown_format(t: Tensors, m: Metadata) -> None:
    set_marker(t, {"format": "nvfp4_e2m1"})


def conflict(t: Tensors, m: Metadata) -> None:
    m["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": {LAYER: FP8}})


def header_is_no_json(t: Tensors, m: Metadata) -> None:
    m["_quantization_metadata"] = "{"


def missing_layer(t: Tensors, m: Metadata) -> None:
    set_marker(t, NVFP4, "layers.9.mlp.up_proj")


def missing_layer_in_header(t: Tensors, m: Metadata) -> None:
    m["_quantization_metadata"] = json.dumps({"layers": {"layers.9.mlp.up_proj": NVFP4}})


def prefix_in_header(t: Tensors, m: Metadata) -> None:
    layers = {}
    for name in [name for name in t if name.endswith(".comfy_quant")]:
        layers[DEEP + name.removesuffix(".comfy_quant")] = NVFP4
        del t[name]
    m["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})


def prefix_in_tensors(t: Tensors, m: Metadata) -> None:
    layers = {name.removesuffix(".comfy_quant"): NVFP4 for name in t if name.endswith(".comfy_quant")}
    for name in list(t):
        value = t.pop(name)
        if not name.endswith(".comfy_quant"):
            t[DEEP + name] = value
    m["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})


def weight_tagged_i8(t: Tensors, m: Metadata) -> None:
    t[f"{LAYER}.weight"] = "I8", t[f"{LAYER}.weight"][1].view(np.int8)


def scales_tagged_u8(t: Tensors, m: Metadata) -> None:
    retype(t, f"{LAYER}.weight_scale", "U8")


def total_in_bf16(t: Tensors, m: Metadata) -> None:
    to_bf16(t, f"{LAYER}.weight_scale_2")


def total_as_list(t: Tensors, m: Metadata) -> None:
    reshape(t, f"{LAYER}.weight_scale_2", 1)


def with_input_scale(t: Tensors, m: Metadata) -> None:
    t[f"{LAYER}.input_scale"] = "F32", np.asarray(0.004, np.float32)


def with_fp8_leftover(t: Tensors, m: Metadata) -> None:
    t[f"{LAYER}.scale_weight"] = "F32", np.asarray(0.004, np.float32)


def with_w4a8_leftover(t: Tensors, m: Metadata) -> None:
    t[f"{LAYER}.weight_s_channel"] = "F32", np.ones(512, np.float32)


def leftover_on_plain(t: Tensors, m: Metadata) -> None:
    t["embed_tokens.weight_scale"] = "F32", np.asarray(0.004, np.float32)
    set_marker(t, FP8, "embed_tokens")


NVFP4_FAULTS = [
    (nul, "a placeholder", True),
    (nul_on_plain, "a placeholder", False),
    (no_json, "its bytes are not JSON", True),
    (padded_with_nul, "", False),
    (a_list, "it is a JSON list, not an object", True),
    (no_format, "no format is named", True),
    (unknown_format, "format 'nvfp4_e2m1' is unknown", True),
    (conflict, "header and tensor disagree", True),
    (header_is_no_json, "is not JSON", True),
    (missing_layer, "", False),
    (missing_layer_in_header, "marker for a layer that does not exist; dropped", False),
    (prefix_in_header, "header marker is named", False),
    (prefix_in_tensors, "header marker is named", False),
    (weight_tagged_i8, "packed weight is tagged I8, not U8", False),
    (scales_tagged_u8, "block scales are tagged U8", False),
    (total_in_bf16, "weight_scale_2 is BF16, not F32", False),
    (total_as_list, "", False),
    (with_input_scale, "", False),
    (with_fp8_leftover, "", False),
    (with_w4a8_leftover, "", False),
    (leftover_on_plain, "marker not believed: marked float8_e4m3fn but the weight is BF16", False),
]


def as_values(source: Path, out: Path) -> None:
    """Every layer of the source is there and stands for exactly the same values."""
    with opened(source) as a, opened(out) as b:
        found = compare_files((a, take_inventory(a)), (b, take_inventory(b)), get_backend())
    assert found.matches and not found.missing and not found.mismatched
    assert all(match.noise <= 1e-12 * match.signal for match in found.matches)


@pytest.mark.parametrize(("fault", "words", "guess"), NVFP4_FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_broken_markers_of_nvfp4(
    convert: Convert, tmp_path: Path, weights: Any, fault: Any, words: str, guess: bool
) -> None:
    tensors, metadata = s.nvfp4_file(weights, mark=NVFP4), {}
    fault(tensors, metadata)
    outcome, out = convert(tensors, "comfy_nvfp4", metadata)
    assert outcome.verdicts[0].accepted
    assert any(words in f.message for f in outcome.plan.findings)
    assert bool(guesses(outcome)) == guess
    as_values(tmp_path / "source.safetensors", out)
    if guess:
        with pytest.raises(QConvertError, match="--strict refuses a guess"):
            convert(tensors, "comfy_nvfp4", metadata, strict=True)
    written = payload(out)
    assert json.loads(written[f"{LAYER}.comfy_quant"]) == NVFP4
    named = {name for name in written if name.startswith(f"{LAYER}.")}
    assert named == {f"{LAYER}.{x}" for x in ("weight", "weight_scale", "weight_scale_2", "comfy_quant")}
    # No tensor vanishes without a word.
    lost = {name.removeprefix(DEEP) for name in tensors} - written.keys()
    assert lost <= {drop.tensor for drop in outcome.plan.drops}
    assert all(drop.reason for drop in outcome.plan.drops)


def tagged_u8(t: Tensors, m: Metadata) -> None:
    retype(t, f"{LAYER}.weight", "U8")


def scale_in_bf16(t: Tensors, m: Metadata) -> None:
    to_bf16(t, f"{LAYER}.weight_scale")


def scale_as_list(t: Tensors, m: Metadata) -> None:
    reshape(t, f"{LAYER}.weight_scale", 1)


def alias(t: Tensors, m: Metadata) -> None:
    set_marker(t, {"format": "fp8_e4m3fn"})


def second_scale(t: Tensors, m: Metadata) -> None:
    t[f"{LAYER}.weight_scale_2"] = "F32", np.ones((), np.float32)


FP8_FAULTS = [
    (tagged_u8, "fp8 weight is tagged U8"),
    (scale_in_bf16, "weight_scale is BF16, not F32"),
    (scale_as_list, ""),
    (alias, "format name 'fp8_e4m3fn' is no ComfyUI format"),
    (second_scale, ""),
]


@pytest.mark.parametrize(("fault", "words"), FP8_FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_broken_fp8(convert: Convert, tmp_path: Path, weights: Any, fault: Any, words: str) -> None:
    tensors = s.fp8_file(weights, mark=FP8)
    fault(tensors, {})
    outcome, out = convert(tensors, "comfy_fp8", strict=True)
    assert outcome.verdicts[0].accepted
    assert any(words in f.message for f in outcome.plan.findings) or not words
    as_values(tmp_path / "source.safetensors", out)
    with opened(out) as written:
        spec = written.tensors[f"{LAYER}.weight_scale"]
        assert (spec.dtype, spec.shape) == ("F32", ())


def flat_scale(t: Tensors, m: Metadata) -> None:
    reshape(t, f"{LAYER}.weight_scale", 512)


def nested(t: Tensors, m: Metadata) -> None:
    params = {"convrot": True, "convrot_groupsize": 256}
    set_marker(t, {"format": "int8_tensorwise", "params": params})


def flag_as_text(t: Tensors, m: Metadata) -> None:
    set_marker(t, {"format": "int8_tensorwise", "convrot": "true", "convrot_groupsize": 256})


def no_group(t: Tensors, m: Metadata) -> None:
    set_marker(t, {"format": "int8_tensorwise", "convrot": True})


INT8_FAULTS = [
    (flat_scale, "row scale is F32[512], not [512, 1]"),
    (scale_in_bf16, "weight_scale is BF16, not F32"),
    (nested, "keeps its options in a nested params"),
    (flag_as_text, ""),
    (no_group, ""),
]


@pytest.mark.parametrize(("fault", "words"), INT8_FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_broken_int8(convert: Convert, tmp_path: Path, weights: Any, fault: Any, words: str) -> None:
    tensors = s.int8_file(weights, rotated=True, mark=ROTATED)
    fault(tensors, {})
    outcome, out = convert(tensors, "convrot_int8", strict=True)
    assert outcome.verdicts[0].accepted
    assert any(words in f.message for f in outcome.plan.findings)
    as_values(tmp_path / "source.safetensors", out)
    assert json.loads(payload(out)[f"{LAYER}.comfy_quant"]) == ROTATED
