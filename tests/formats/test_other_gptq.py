"""GPTQ and AWQ: what other tools write is read exactly, and repacked without touching a value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import other_files as o
import pytest
import torch
from qconvert.convert.job import Request, run_job
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.layers import take_inventory

GOLDENS = o.names("gptq*", "awq*")
#: Without config.json nothing but the values' mean tells v1 from v2, and one step of 8 bits is too little to see.
UNDECIDABLE = {"gptq_v1_w8_asym.safetensors", "gptq_v2_w8_asym.safetensors"}


# ---- independent definitions: bit by bit, python integers


def pack(codes: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Rows of codes as rows of int32 words, one little-endian bit string each."""
    words = []
    for row in codes.tolist():
        number = sum(code << (bits * i) for i, code in enumerate(row))
        words.append([(number >> (32 * i)) & 0xFFFFFFFF for i in range(len(row) * bits // 32)])
    return np.array(words, np.uint32).view(np.int32)


def gptq(
    rng: Any,
    n: int,
    k: int,
    bits: int,
    group: int,
    version: str,
    sym: bool,
    act: bool = False,
    zero0: bool = False,
) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    groups = -(-k // group)
    q = rng.integers(0, 1 << bits, (n, k))
    zero = np.full((groups, n), 1 << (bits - 1)) if sym else rng.integers(1, 1 << bits, (groups, n))
    if zero0:
        zero[:, ::3] = 0
    scale = (rng.normal(size=(groups, n)) * 0.01).astype(np.float16)
    index = np.arange(k) // group
    if act:
        index = rng.permutation(index)
    words = pack(zero, bits).view(np.uint32)
    if version == "v1" and bits == 3:
        words = pack((zero - 1) & 7, bits).view(np.uint32)
    elif version == "v1":
        words = words - np.uint32({2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits])
    tensors = {
        "l.qweight": pack(q, bits).T,
        "l.qzeros": words.view(np.int32),
        "l.scales": scale,
    }
    if act:
        tensors["l.g_idx"] = index.astype(np.int32)
    values = (q - zero[index].T) * scale.astype(np.float64)[index].T
    return tensors, values.astype(np.float32)


def awq(rng: Any, n: int, k: int, group: int, sym: bool) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    q = rng.integers(0, 16, (k, n))
    zero = np.full((k // group, n), 8) if sym else rng.integers(0, 16, (k // group, n))
    scale = (rng.normal(size=(k // group, n)) * 0.01).astype(np.float16)

    def packed(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        # Nibbles 0..7 hold columns 0, 2, 4, 6, 1, 3, 5, 7.
        spread = codes.reshape(len(codes), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack(spread.reshape(len(codes), -1), 4)

    tensors = {"l.qweight": packed(q), "l.qzeros": packed(zero), "l.scales": scale}
    index = np.arange(k) // group
    return tensors, ((q - zero[index]) * scale.astype(np.float64)[index]).T.astype(np.float32)


def config(version: str, **more: Any) -> dict[str, Any]:
    packing = {"v1": "auto_round:auto_gptq", "v2": "auto_round:gptqmodel"}[version]
    return {"quantization_config": {"quant_method": "auto-round", "packing_format": packing, **more}}


# ---- reading


@pytest.mark.skipif(not GOLDENS, reason=o.WITHOUT)
@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_are_exact(name: str, tmp_path: Path) -> None:
    path, spec = o.place(name, tmp_path)
    layer, values = o.read_layer(path, spec["prefix"])
    assert layer.codec.name == spec["decode"]
    assert (layer.n, layer.k) == (spec["N"], spec["K"])
    assert layer.options["bits"] == spec["bits"]
    assert not [finding for finding in layer.findings if finding.level == "guess"]
    want = o.reference(path)
    assert torch.equal(torch.from_numpy(values).to(want.dtype), want)


@pytest.mark.skipif(not GOLDENS, reason=o.WITHOUT)
@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_without_a_config(name: str, tmp_path: Path) -> None:
    path, spec = o.place(name, tmp_path, config=False)
    layer, values = o.read_layer(path, spec["prefix"])
    want = o.reference(path)
    guesses = [finding.message for finding in layer.findings if finding.level == "guess"]
    assert bool(guesses) == ("_asym" in name)
    if name in UNDECIDABLE:
        assert "checkpoint_format" in guesses[0]
    else:
        assert torch.equal(torch.from_numpy(values).to(want.dtype), want)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("form", ["sym", "asym", "act", "one group"])
def test_gptq(bits: int, version: str, form: str, tmp_path: Path, rng: np.random.Generator) -> None:
    n, k, group = 96, 160, 160 if form == "one group" else 32
    tensors, want = gptq(rng, n, k, bits, group, version, form == "sym", form == "act")
    path = o.save(tmp_path / "m.safetensors", tensors, config(version))
    layer, values = o.read_layer(path, "l")
    assert layer.codec.name == "gptq" and layer.options["zeros"] == version
    assert layer.options["symmetric"] == (form == "sym")
    assert layer.options["order"] == ("act" if form == "act" else "natural")
    assert np.array_equal(values, want)
    assert not layer.leftovers


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_of_zero_borrows(bits: int, tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, want = gptq(rng, 64, 64, bits, 32, "v1", False, zero0=True)
    _, values = o.read_layer(o.save(tmp_path / "m.safetensors", tensors, config("v1")), "l")
    assert np.array_equal(values, want)


def test_group_size_that_does_not_divide(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, want = gptq(rng, 32, 160, 4, 64, "v2", False)
    path = o.save(tmp_path / "m.safetensors", tensors)
    with (
        opened(path) as checkpoint,
        pytest.raises(QConvertError, match="no configuration says the group size"),
    ):
        take_inventory(checkpoint)
    o.save(path, tensors, config("v2", group_size=64))
    _, values = o.read_layer(path, "l")
    assert np.array_equal(values, want)


def test_symmetric_zeros_overrule_a_wrong_config(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, want = gptq(rng, 64, 64, 4, 32, "v2", True)
    layer, values = o.read_layer(o.save(tmp_path / "m.safetensors", tensors, config("v1", sym=True)), "l")
    assert np.array_equal(values, want)
    assert [finding.level for finding in layer.findings] == ["guess"]


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(symmetric: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, want = awq(rng, 72, 96, 32, symmetric)
    document = {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemm"}}
    path = o.save(tmp_path / "m.safetensors", tensors, document)
    layer, values = o.read_layer(path, "l")
    assert layer.codec.name == "awq" and layer.options["symmetric"] == symmetric
    assert np.array_equal(values, want)
    document["quantization_config"]["version"] = "gemv"
    o.save(path, tensors, document)
    with opened(path) as checkpoint, pytest.raises(QConvertError, match="gemv layout is another one"):
        take_inventory(checkpoint)


def test_large_layers_are_read_by_columns(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qconvert.formats.reader.KEPT_BYTES", 64)
    for maker in (lambda: gptq(rng, 96, 128, 3, 32, "v2", False), lambda: awq(rng, 96, 128, 32, False)):
        tensors, want = maker()
        _, values = o.read_layer(o.save(tmp_path / "m.safetensors", tensors, config("v2")), "l")
        assert np.array_equal(values, want)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"l.qzeros": np.zeros((2, 5), np.int32)}, "agree on no number of bits"),
        ({"l.scales": np.zeros((2, 60), np.float16)}, "has not the 60 columns"),
        ({"l.g_idx": np.zeros(7, np.int32)}, "g_idx"),
        ({"l.qzeros": None}, "no qzeros"),
        ({"l.scales": None}, "no float scales"),
    ],
)
def test_what_does_not_fit_is_named(
    change: dict[str, Any], words: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    tensors, _ = gptq(rng, 64, 64, 4, 32, "v1", False)
    tensors = {name: value for name, value in (tensors | change).items() if value is not None}
    path = o.save(tmp_path / "m.safetensors", tensors)
    with opened(path) as checkpoint, pytest.raises(QConvertError, match="no known format explains") as caught:
        take_inventory(checkpoint)
    assert words in str(caught.value)


def test_g_idx_out_of_range(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, _ = gptq(rng, 64, 64, 4, 32, "v1", False, act=True)
    tensors["l.g_idx"][5] = 2
    with pytest.raises(QConvertError, match="a group that is not there"):
        o.read_layer(o.save(tmp_path / "m.safetensors", tensors, config("v1")), "l")


# ---- writing


def network(rng: Any, n: int = 128, k: int = 256) -> dict[str, torch.Tensor]:
    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=(rows, columns)).astype(np.float32) * 0.02).bfloat16()

    return {
        "blocks.0.fc1.weight": weight(n, k),
        "blocks.0.fc1.bias": weight(1, n)[0],
        "blocks.0.fc2.weight": weight(k, n),
        "blocks.0.narrow.weight": weight(40, k),
        "blocks.0.ragged.weight": weight(n, 96),
        "norm.weight": weight(1, k)[0],
        "embed_tokens.weight": weight(32, k),
    }


@pytest.mark.parametrize(("target", "bits", "least"), [("auto_gptq", 4, 19.5), ("auto_gptq:int8", 8, 42)])
def test_auto_gptq(target: str, bits: int, least: float, tmp_path: Path, rng: np.random.Generator) -> None:
    source = o.save(tmp_path / "m.safetensors", network(rng), {"_class_name": "X", "hidden": 5})
    out = tmp_path / "out"
    outcome = o.run(source, target, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]
    document = json.loads((out / "config.json").read_text())
    assert document.pop("quantization_config") == {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": bits,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "desc_act": False,
        # The Marlin kernel takes neither 40 rows nor 96 columns.
        "extra_config": {"blocks.0.narrow": {"bits": 16}, "blocks.0.ragged": {"bits": 16}},
    }
    assert document == {"_class_name": "X", "hidden": 5}
    tensors = o.load(outcome.output)
    per = 32 // bits
    assert tensors["blocks.0.fc1.qweight"].shape == (256 // per, 128)
    assert tensors["blocks.0.fc1.g_idx"].tolist() == [k // 128 for k in range(256)]
    zeros = tensors["blocks.0.fc1.qzeros"].numpy().view(np.uint32)
    assert zeros.shape == (2, 128 // per) and (zeros == {4: 0x77777777, 8: 0x7F7F7F7F}[bits]).all()
    assert tensors["blocks.0.fc1.scales"].dtype == torch.float16
    assert not [name for name in tensors if name.endswith("comfy_quant")]
    for name in ("blocks.0.fc1", "blocks.0.fc2"):
        _, values = o.read_layer(outcome.output, name)
        want = o.load(source)[f"{name}.weight"].float().numpy()
        error = 10 * np.log10((want**2).sum() / ((want - values) ** 2).sum())
        assert error > least
    for name in ("blocks.0.fc1.bias", "blocks.0.narrow.weight", "norm.weight", "embed_tokens.weight"):
        assert torch.equal(tensors[name], o.load(source)[name])


@pytest.mark.parametrize(
    ("make", "bits"),
    [
        (lambda rng: awq(rng, 128, 256, 64, True), 4),
        (lambda rng: awq(rng, 128, 256, 64, False), 8),
        (lambda rng: gptq(rng, 128, 256, 4, 128, "v2", True), 4),
        (lambda rng: gptq(rng, 128, 256, 8, 256, "v1", True), 8),
        (lambda rng: gptq(rng, 128, 256, 2, 32, "v1", False), 4),
        (lambda rng: gptq(rng, 128, 256, 3, 64, "v2", False), 4),
        (lambda rng: gptq(rng, 128, 256, 4, 64, "v1", False), 8),
    ],
)
def test_integer_codes_are_carried(make: Any, bits: int, tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, _ = make(rng)
    source = o.save(tmp_path / "m.safetensors", tensors)
    with opened(source) as checkpoint:
        version = take_inventory(checkpoint).layers["l"].options.get("zeros", "v2")
    o.save(source, tensors, config(version))
    _, before = o.read_layer(source, "l")
    outcome = o.run(source, "auto_gptq", tmp_path / "out")
    assert o.kinds(outcome) == {"l": "repack"}
    layer, after = o.read_layer(outcome.output, "l")
    assert layer.options["bits"] == bits and layer.options["symmetric"]
    assert np.array_equal(before, after)
    assert torch.equal(o.load(outcome.output)["l.scales"], torch.from_numpy(tensors["l.scales"]))


def test_already_right_is_copied(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, _ = gptq(rng, 128, 256, 4, 128, "v1", True)
    tensors["l.g_idx"] = (np.arange(256) // 128).astype(np.int32)
    source = o.save(tmp_path / "m.safetensors", tensors, config("v1"))
    outcome = o.run(source, "auto_gptq", tmp_path / "out")
    assert o.kinds(outcome) == {"l": "copy"}
    written = o.load(outcome.output)
    assert all(np.array_equal(written[name].numpy(), value) for name, value in tensors.items())
    again = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (again["bits"], again["group_size"], again["extra_config"]) == (4, 128, {})


def test_act_order_is_encoded_anew(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, _ = gptq(rng, 128, 256, 4, 64, "v1", True, act=True)
    outcome = o.run(o.save(tmp_path / "m.safetensors", tensors, config("v1")), "auto_gptq", tmp_path / "out")
    assert o.kinds(outcome) == {"l": "requantise"}


def test_zero_points_that_turn_out_different_are_refused(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More zero points than recognition looks at; the last group's are not symmetric.
    monkeypatch.setattr("qconvert.formats.layers.MAX_MARKER_BYTES", 256)
    tensors, _ = gptq(rng, 128, 512, 8, 128, "v2", True)
    tensors["l.qzeros"][-1] = 0
    tensors["l.qweight"][-1] = -1
    source = o.save(tmp_path / "m.safetensors", tensors, config("v2"))
    with pytest.raises(QConvertError, match="zero points are not symmetric"):
        o.run(source, "auto_gptq", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mixed_file_lists_what_differs(tmp_path: Path, rng: np.random.Generator) -> None:
    four, _ = gptq(rng, 128, 256, 4, 128, "v1", True)
    eight, _ = gptq(rng, 128, 256, 8, 256, "v1", True)
    tensors = {f"a.{i}.{name[2:]}": value for i in range(2) for name, value in four.items()}
    tensors |= {f"b.{name[2:]}": value for name, value in eight.items()}
    tensors["c.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
    outcome = o.run(o.save(tmp_path / "m.safetensors", tensors, config("v1")), "auto_gptq", tmp_path / "out")
    document = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (document["bits"], document["group_size"]) == (4, 128)
    assert document["extra_config"] == {
        "b": {"bits": 8, "group_size": -1, "sym": True},
        "c": {"bits": 16},
    }
    assert outcome.output.name == "model.safetensors"


def test_folders_are_never_overwritten_silently(tmp_path: Path, rng: np.random.Generator) -> None:
    source = o.save(tmp_path / "m.safetensors", network(rng), {"model_type": "x"})
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="already exists"):
        o.run(source, "auto_gptq", out)
    assert [path.name for path in out.iterdir()] == ["config.json"]
    with opened(source) as checkpoint, pytest.raises(UsageError, match="the source's own folder"):
        run_job(Request(source, "auto_gptq", tmp_path, force=True), checkpoint)
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "x"}


def test_fused_projections_take_one_form(tmp_path: Path, rng: np.random.Generator) -> None:
    def weight(rows: int, columns: int = 128) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=(rows, columns)).astype(np.float32) * 0.02).bfloat16()

    tensors = {"model.norm.weight": weight(1)[0]}
    for i in range(3):
        layer = f"model.layers.{i}."
        tensors[f"{layer}self_attn.q_norm.weight"] = weight(1, 32)[0]
        # In the second layer k_proj has 48 rows, which Marlin's tiles do not hold.
        for name, rows in (("q", 128), ("k", 48 if i == 1 else 64), ("v", 64)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = weight(rows)
        for name in ("gate", "up"):
            tensors[f"{layer}mlp.{name}_proj.weight"] = weight(256)
    outcome = o.run(o.save(tmp_path / "m.safetensors", tensors), "auto_gptq", tmp_path / "out")
    assert outcome.plan.families == ("Qwen3",)
    assert any("no config.json beside it" in note for note in outcome.plan.notes)
    document = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert document["extra_config"] == {
        f"model.layers.1.self_attn.{name}_proj": {"bits": 16} for name in "kqv"
    }
    kinds = o.kinds(outcome)
    assert kinds["model.layers.0.self_attn.k_proj"] == "quantise"
    assert kinds["model.layers.1.self_attn.q_proj"] == "keep"


@pytest.mark.parametrize("name", ["quantize_config.json", "quantization_config.json"])
def test_configs_of_older_versions(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, want = gptq(rng, 64, 64, 8, 32, "v2", False)
    path = o.save(tmp_path / "m.safetensors", tensors)
    document = {"bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2", "desc_act": False}
    (tmp_path / name).write_text(json.dumps(document))
    layer, values = o.read_layer(path, "l")
    assert np.array_equal(values, want) and not layer.findings


@pytest.mark.parametrize("bits", [4, 8])
def test_auto_round_reads_what_we_write(bits: int, tmp_path: Path, rng: np.random.Generator) -> None:
    module = pytest.importorskip(
        "auto_round_extension.torch.qlinear_torch_zp", reason="auto-round is not installed"
    )
    target = {4: "auto_gptq", 8: "auto_gptq:int8"}[bits]
    source = o.save(tmp_path / "m.safetensors", network(rng), {"model_type": "x"})
    outcome = o.run(source, target, tmp_path / "out")
    written = o.load(outcome.output)
    layer = module.QuantLinear(bits, 128, 256, 128, bias=False, g_idx=True)
    own = {name: written[f"blocks.0.fc1.{name}"] for name in ("qweight", "qzeros", "scales", "g_idx")}
    layer.load_state_dict(own, strict=True)
    layer.post_init()
    weight = layer(torch.eye(256)).T
    _, values = o.read_layer(outcome.output, "blocks.0.fc1")
    assert torch.allclose(weight.float(), torch.from_numpy(values), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_we_read_what_auto_round_packs(
    bits: int, version: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    name = {"v1": "qlinear_torch_zp", "v2": "qlinear_torch"}[version]
    module = pytest.importorskip(f"auto_round_extension.torch.{name}", reason="auto-round is not installed")
    linear = torch.nn.Linear(256, 64, bias=False)
    scale = torch.from_numpy((rng.random((64, 4)) * 0.02 + 0.01).astype(np.float32))
    scale[::2] *= -1
    zero = torch.from_numpy(rng.integers(1, 1 << bits, (64, 4)).astype(np.float32))
    q = torch.from_numpy(rng.integers(0, 1 << bits, (64, 256)).astype(np.float32))
    scale = scale.half().float()
    spread = [x.repeat_interleave(64, dim=1) for x in (scale, zero)]
    linear.weight.data = (q - spread[1]) * spread[0]
    packer = module.QuantLinear(bits, 64, 256, 64, bias=False)
    packer.device = torch.device("cpu")
    packer.pack(linear, scale, zero, None)
    tensors = {f"l.{key}": value for key, value in packer.state_dict().items() if key != "g_idx"}
    _, values = o.read_layer(o.save(tmp_path / "m.safetensors", tensors, config(version)), "l")
    assert np.array_equal(values, linear.weight.data.numpy())
