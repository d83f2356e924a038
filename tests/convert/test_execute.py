"""Conversions as a whole: the same bytes however the work is split, and nothing left behind when one fails."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.convert import execute, output
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.layers import take_inventory

import qconvert

Rng = np.random.Generator
Write = Callable[..., Path]
Convert = Callable[..., Any]

#: Layers of one file in many states, with rows that fill no whole number of pieces or tiles.
MIXED = (
    "bf16", "fp32", "fp8", "fp8_row", "nvfp4", "nvfp4_convrot", "mxfp8", "int8_row", "int8_convrot64", "w4a4_64",
    "w4a8", "w4a8_correction", "w4a8_6bit", "sym", "awq", "svdquant", "e5m2",
)  # fmt: skip
TARGETS = (
    "comfy_nvfp4", "kitchen_w4a8", "kitchen_w4a4", "convrot_int8", "comfy_fp8", "comfyui:awq_w4a16", "comfyui:mxfp8",
    "comfyui:nvfp4", "bf16",
)  # fmt: skip


@pytest.fixture
def mixed(d: ModuleType, sample: Any, write: Write) -> Path:
    tensors: dict[str, Any] = {
        "embed_tokens.weight": d.narrow(d.weights(np.random.default_rng(1), 77, 64), "BF16")
    }
    for i, name in enumerate(MIXED):
        tensors |= sample(name, 416, 256).named(f"blocks.{i}.fc")
        tensors[f"blocks.{i}.norm.weight"] = d.f32_tensor(np.full(256, i))
    bank = sample("bank_int8_convrot", 3, 160, 256)
    linear = d.nvfp4(linear=True)(np.random.default_rng(2), d.weights(np.random.default_rng(2), 400, 96))
    tensors |= bank.named("blocks.0.experts") | linear.named("blocks.0.linear")
    return write(tensors, {"format": "pt", "author": "someone"})


def small(rng: Rng, d: ModuleType) -> dict[str, Any]:
    """A file that is quickly converted: two bf16 linears, a norm, a table."""
    return {
        "blocks.0.a.weight": d.narrow(d.weights(rng, 128, 64), "BF16"),
        "blocks.0.b.weight": d.narrow(d.weights(rng, 256, 64), "BF16"),
        "blocks.0.b.bias": d.f32_tensor(np.arange(256)),
        "blocks.0.norm.weight": d.f32_tensor(np.ones(64)),
        "embed_tokens.weight": d.narrow(d.weights(rng, 40, 64), "BF16"),
    }


@pytest.fixture
def source(rng: Rng, d: ModuleType, write: Write) -> Path:
    return write(small(rng, d), {"format": "pt", "author": "someone"})


# ---- the same bytes however the work is split


@pytest.mark.parametrize("target", TARGETS)
def test_bytes_do_not_depend_on_the_split(
    target: str, mixed: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = convert(mixed, target, tmp_path / "first.safetensors", quality="fast")
    wanted = first.output.read_bytes()
    for jobs, piece in ((3, 1 << 20), (1, 1 << 13), (2, 40_000), (4, 1)):
        monkeypatch.setattr(execute, "PIECE_ELEMENTS", piece)
        again = convert(mixed, target, tmp_path / "again.safetensors", quality="fast", jobs=jobs, force=True)
        assert again.output.read_bytes() == wanted, (jobs, piece)
        assert again.results.keys() == first.results.keys()
        for name, result in again.results.items():
            # Energies are sums over pieces: equal up to the order of addition.
            assert np.isclose(result.noise, first.results[name].noise, rtol=1e-9)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("quality", ["fast", "best"])
def test_bytes_do_not_depend_on_the_backend(
    target: str, quality: str, source: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = convert(source, target, tmp_path / "cpu.safetensors", quality=quality).output.read_bytes()
    for jobs, piece in ((1, 1 << 20), (2, 1 << 12), (4, 1 << 11)):
        monkeypatch.setattr(execute, "PIECE_ELEMENTS", piece)
        path = tmp_path / f"{jobs}.safetensors"
        got = convert(source, target, path, quality=quality, jobs=jobs, backend="reference")
        assert got.output.read_bytes() == wanted, (jobs, piece)


def test_memory_does_not_change_bytes(mixed: Path, convert: Convert, tmp_path: Path) -> None:
    wanted = convert(mixed, "kitchen_w4a8", tmp_path / "a.safetensors", quality="fast").output.read_bytes()
    got = convert(mixed, "kitchen_w4a8", tmp_path / "b.safetensors", quality="fast", memory=4 << 20, jobs=2)
    assert got.output.read_bytes() == wanted


def test_copies_by_hand_are_the_same(
    mixed: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = convert(mixed, "comfyui:nvfp4", tmp_path / "a.safetensors", quality="fast").output.read_bytes()
    monkeypatch.setattr(execute, "_copy_in_kernel", lambda *args: False)
    got = convert(mixed, "comfyui:nvfp4", tmp_path / "b.safetensors", quality="fast").output.read_bytes()
    assert got == wanted


def test_energies_are_those_of_the_values(
    sample: Any, d: ModuleType, write: Write, convert: Convert, backend: Any, tmp_path: Path
) -> None:
    from qconvert.formats.reader import LayerReader
    from qconvert.formats.values import decode_rows

    made = sample("fp8", 416, 256)
    outcome = convert(write(made.named("fc")), "comfyui:nvfp4", tmp_path / "out.safetensors")
    with opened(outcome.output) as checkpoint:
        layer = take_inventory(checkpoint).layers["fc"]
        got = decode_rows(layer, LayerReader(checkpoint, layer), 0, layer.n, backend)
    result = outcome.results["fc"]
    assert np.isclose(result.signal, np.square(made.values).sum(), rtol=1e-9)
    assert np.isclose(result.noise, np.square(made.values - got).sum(), rtol=1e-9)


# ---- what is written


def test_the_source_stays_as_it_was_and_the_output_is_its_like(
    source: Path, convert: Convert, tmp_path: Path
) -> None:
    source.chmod(0o640)
    before, stat_before = source.read_bytes(), source.stat()
    outcome = convert(source, "comfy_nvfp4", tmp_path / "out.safetensors")
    assert source.read_bytes() == before
    assert source.stat().st_mtime_ns == stat_before.st_mtime_ns
    assert stat.S_IMODE(outcome.output.stat().st_mode) == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"in.safetensors", "out.safetensors"}
    assert outcome.output.stat().st_size == outcome.output_bytes


def test_provenance(
    rng: Rng, d: ModuleType, write: Write, convert: Convert, sample: Any, tmp_path: Path
) -> None:
    tensors = small(rng, d) | sample("nvfp4_unmarked", 128, 64).named("blocks.1.fc")
    layers = {"blocks.9.fc": {"format": "nvfp4"}}
    metadata = {
        "format": "pt",
        "author": "someone",
        "_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers}),
        "quantization_config": "{}",
        "quant_format": "mxfp8",
    }
    path = write(tensors, metadata, "my model.safetensors")
    outcome = convert(path, "comfy_nvfp4", tmp_path / "out.safetensors")
    written = d.read_metadata(outcome.output)
    assert written.keys() == {"format", "author", "qconvert", "qconvert_digest"}
    assert (written["format"], written["author"]) == ("pt", "someone")
    made = json.loads(written["qconvert"])
    with opened(path) as checkpoint:
        assert made["source_header_sha256"] == checkpoint.digest()
    assert made["version"] == qconvert.__version__
    assert (made["source"], made["target"]) == ("my model.safetensors", "comfy_nvfp4")
    assert made["contracts"][0] == "sglang-0.5.23"
    # A source with a quantised layer keeps what it leaves unquantised.
    assert made["actions"] == {"keep": 4, "retag": 1}
    assert len(made["guesses"]) == 1 and "blocks.1.fc" in made["guesses"][0]
    assert "/" not in made["source"] and str(tmp_path) not in written["qconvert"]


def test_equal_runs_give_equal_files(source: Path, convert: Convert, tmp_path: Path) -> None:
    a = convert(source, "comfy_nvfp4", tmp_path / "a.safetensors").output.read_bytes()
    b = convert(source, "comfy_nvfp4", tmp_path / "b.safetensors").output.read_bytes()
    assert a == b


def test_an_unquantised_source_gets_every_linear_quantised(
    source: Path, convert: Convert, d: ModuleType, tmp_path: Path
) -> None:
    outcome = convert(source, "comfy_nvfp4", tmp_path / "out.safetensors")
    after = d.read(outcome.output)
    assert after["blocks.0.a.weight"].dtype == after["blocks.0.b.weight"].dtype == "U8"
    assert after["embed_tokens.weight"].dtype == "BF16"
    outcome = convert(source, "comfy_nvfp4", tmp_path / "table.safetensors", quantise_embedding=True)
    after = d.read(outcome.output)
    assert after["embed_tokens.weight"].dtype == "I8" and after["embed_tokens.weight_scale"].bits.shape == (
        40,
        1,
    )


def test_converting_again_changes_nothing(
    source: Path, convert: Convert, d: ModuleType, tmp_path: Path
) -> None:
    once = convert(source, "comfy_nvfp4", tmp_path / "once.safetensors")
    twice = convert(once.output, "comfy_nvfp4", tmp_path / "twice.safetensors")
    assert {action.kind for action in twice.plan.actions} == {"keep", "copy"}
    a, b = d.read(once.output), d.read(twice.output)
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name].bits, b[name].bits) for name in a)


def test_shards_become_one_file(
    rng: Rng, d: ModuleType, convert: Convert, write: Write, tmp_path: Path
) -> None:
    tensors = small(rng, d)
    whole = convert(write(tensors), "comfy_nvfp4", tmp_path / "whole.safetensors")
    folder = tmp_path / "shards"
    folder.mkdir()
    names = sorted(tensors)
    weight_map = {}
    # A layer's tensors in two shards: its bias lies with another layer's weight.
    for i, part in enumerate((names[:2], names[2:])):
        file = f"model-{i + 1}-of-2.safetensors"
        d.write(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    one = convert(folder, "comfy_nvfp4", tmp_path / "one.safetensors")
    a, b = d.read(whole.output), d.read(one.output)
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name].bits, b[name].bits) for name in a)


# ---- names


def test_where_the_output_goes(
    source: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert convert(source, "bf16").output == tmp_path / "in.bf16.safetensors"
    assert convert(source, "comfyui:nvfp4").output == tmp_path / "in.comfyui-nvfp4.safetensors"
    assert convert(source, "kitchen_int8").output == tmp_path / "in.convrot_int8.safetensors"
    folder = tmp_path / "there"
    folder.mkdir()
    assert convert(source, "bf16", folder).output == folder / "in.bf16.safetensors"
    # Of a folder: beside it, so that it stays what it was and can be converted again.
    assert convert(folder, "fp16").output == tmp_path / "there.fp16.safetensors"
    assert convert(folder, "fp32").output == tmp_path / "there.fp32.safetensors"
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        assert convert(Path(), "comfy_fp8").output == tmp_path / "there.comfy_fp8.safetensors"
    assert [file.name for file in folder.iterdir()] == ["in.bf16.safetensors"]
    assert convert(source, "bf16", tmp_path / "new" / "deep" / "x.safetensors").output.is_file()


@pytest.mark.parametrize("target", ["comfy_nvfp4", "comfyui:nvfp4", "bf16"])
def test_the_prefix_goes_where_the_runtime_wants_none(
    target: str, rng: Rng, d: ModuleType, write: Write, convert: Convert, tmp_path: Path
) -> None:
    prefix = "model.diffusion_model."
    path = write({f"{prefix}{name}": tensor for name, tensor in small(rng, d).items()})
    out = convert(path, target, tmp_path / "out.safetensors")
    stripped = target == "comfy_nvfp4"
    assert all(name.startswith(prefix) != stripped for name in d.read(out.output))
    assert any("prefix" in note for note in out.plan.notes) == stripped
    kept = convert(path, target, tmp_path / "kept.safetensors", keep_prefix=True)
    assert all(name.startswith(prefix) for name in d.read(kept.output))


def test_a_prefix_of_some_tensors_only_stays(
    rng: Rng, d: ModuleType, write: Write, convert: Convert, tmp_path: Path
) -> None:
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in small(rng, d).items()}
    path = write(tensors | {"other.weight": d.f32_tensor(np.ones(4))})
    out = convert(path, "comfy_nvfp4", tmp_path / "out.safetensors")
    assert "model.diffusion_model.blocks.0.a.weight" in d.read(out.output)


def test_components_of_an_all_in_one_file(
    rng: Rng, d: ModuleType, write: Write, convert: Convert, tmp_path: Path
) -> None:
    parts = {
        "diffusion": "model.diffusion_model.",
        "text_encoder": "cond_stage_model.",
        "vae": "first_stage_model.",
    }
    tensors = {f"{prefix}{name}": t for prefix in parts.values() for name, t in small(rng, d).items()}
    path = write(tensors)
    with pytest.raises(UsageError, match="all-in-one"):
        convert(path, "comfy_nvfp4", tmp_path / "none.safetensors")
    for component, prefix in parts.items():
        out = convert(path, "comfy_nvfp4", tmp_path / f"{component}.safetensors", component=component)
        names = {name.removeprefix(prefix) for name in d.read(out.output) if not name.endswith("comfy_quant")}
        assert {name for name in names if not name.rpartition(".")[2].startswith("weight_")} == set(
            small(rng, d)
        )
    # ComfyUI loads such files as they are.
    whole = convert(path, "comfyui:nvfp4", tmp_path / "whole.safetensors")
    assert set(tensors) <= set(d.read(whole.output))
    only = write(small(rng, d), name="only.safetensors")
    with pytest.raises(UsageError, match="--component vae: not in this file"):
        convert(only, "comfy_nvfp4", tmp_path / "x.safetensors", component="vae")


def test_renames(source: Path, d: ModuleType, convert: Convert, tmp_path: Path) -> None:
    rules = ((r"^blocks\.(\d+)\.", r"layers.\1.mlp."), (r"norm\.weight$", "ln.weight"))
    after = d.read(convert(source, "comfy_nvfp4", tmp_path / "out.safetensors", rename=rules).output)
    names = {name for name in after if not name.rpartition(".")[2].startswith("weight_")}
    assert names == {
        "layers.0.mlp.a.weight", "layers.0.mlp.a.comfy_quant", "layers.0.mlp.b.weight", "layers.0.mlp.b.comfy_quant",
        "layers.0.mlp.b.bias", "layers.0.mlp.ln.weight", "embed_tokens.weight",
    }  # fmt: skip
    assert "layers.0.mlp.a.weight_scale" in after
    with pytest.raises(QConvertError, match="two tensors would be named"):
        convert(source, "bf16", tmp_path / "x.safetensors", rename=((r"\.[ab]\.", ".c."),))
    with pytest.raises(UsageError, match=r"ends in .weight"):
        convert(source, "bf16", tmp_path / "x.safetensors", rename=((r"a\.weight$", "a.w"),))
    for rule in (("(", "x"), ("a", r"\9")):
        with pytest.raises(UsageError, match="--rename"):
            convert(source, "bf16", tmp_path / "x.safetensors", rename=(rule,))
    assert not (tmp_path / "x.safetensors").exists()


# ---- what is left alone


def test_keep(source: Path, d: ModuleType, convert: Convert, tmp_path: Path) -> None:
    out = convert(source, "comfy_nvfp4", tmp_path / "out.safetensors", keep=(r"0\.a$",))
    before, after = d.read(source), d.read(out.output)
    assert np.array_equal(after["blocks.0.a.weight"].bits, before["blocks.0.a.weight"].bits)
    assert after["blocks.0.b.weight"].dtype == "U8"
    with pytest.raises(UsageError, match="--keep 'nothing' matches no layer"):
        convert(source, "comfy_nvfp4", tmp_path / "x.safetensors", keep=("0", "nothing"))
    with pytest.raises(UsageError, match="not a regular expression"):
        convert(source, "comfy_nvfp4", tmp_path / "x.safetensors", keep=("(",))


def test_a_kept_quantised_layer_is_decoded(
    sample: Any, d: ModuleType, write: Write, convert: Convert, tmp_path: Path
) -> None:
    made = sample("fp8", 128, 64)
    path = write(made.named("a") | sample("fp8", 128, 64, seed=1).named("b"))
    for dtype in ("BF16", "F32"):
        out = convert(path, "comfy_nvfp4", tmp_path / f"{dtype}.safetensors", keep=("^a$",), dtype=dtype)
        after = d.read(out.output)
        assert after["a.weight"].dtype == dtype and "a.comfy_quant" not in after
        assert np.array_equal(d.widen(after["a.weight"]), d.widen(d.narrow(made.values, dtype)))


@pytest.mark.parametrize(("n", "k"), [(100, 64), (128, 48), (96, 96), (250, 256), (8, 8)])
def test_what_the_target_cannot_hold_is_decoded_with_a_reason(
    n: int, k: int, sample: Any, d: ModuleType, write: Write, convert: Convert, tmp_path: Path
) -> None:
    made = sample("fp8", n, k)
    path = write(made.named("a") | sample("fp8", 128, 64).named("b"))
    out = convert(path, "comfy_nvfp4", tmp_path / "out.safetensors")
    action = next(action for action in out.plan.actions if action.prefix == "a")
    assert action.kind == "decode"
    assert str(n) in action.reason or str(k) in action.reason
    got = d.widen(d.read(out.output)["a.weight"])
    assert np.array_equal(got, d.widen(d.narrow(made.values, "BF16")))


# ---- failures: one line, and nothing left behind


@pytest.fixture
def fails(convert: Convert, tmp_path: Path) -> Callable[..., QConvertError]:
    """fails(words, *arguments of convert) -> the error; asserts that no file changed."""

    def snapshot() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def check(words: str, *args: Any, code: int = 1, **options: Any) -> QConvertError:
        before = snapshot()
        with pytest.raises(QConvertError, match=words) as caught:
            convert(*args, **options)
        assert snapshot() == before
        assert caught.value.exit_code == code
        assert "\n" not in caught.value.line()
        return caught.value

    return check


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 201, 255])
@pytest.mark.parametrize(
    "target", ["comfy_nvfp4", "kitchen_w4a8", "convrot_int8", "comfy_fp8", "comfyui:mxfp8"]
)
def test_nan_and_inf(
    bad: float, row: int, target: str, rng: Rng, d: ModuleType, write: Write, fails: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    w = d.weights(rng, 256, 256)
    w[row, 17] = bad
    good = d.narrow(d.weights(rng, 256, 256), "F32")
    path = write({"a.fc.weight": d.f32_tensor(w), "b.fc.weight": good})
    monkeypatch.setattr(execute, "PIECE_ELEMENTS", 1 << 14)
    error = fails("NaN or Inf", path, target, tmp_path / "out.safetensors", jobs=2)
    assert (error.file, error.layer) == (str(path), "a.fc")
    assert f"row {row}" in error.line() and "--keep" in error.line()


def test_a_scale_that_is_nan(sample: Any, d: ModuleType, write: Write, fails: Any, tmp_path: Path) -> None:
    """All-zero weights become this in comfy-kitchen: 0/0."""
    tensors = {name: d.T(t.dtype, t.bits.copy()) for name, t in sample("nvfp4", 128, 64).named("fc").items()}
    tensors["fc.weight_scale"].bits[0, 0] = 0x7F
    path = write(tensors)
    assert fails("NaN or Inf", path, "comfyui:float8_e4m3fn", tmp_path / "out.safetensors").layer == "fc"


def test_fp16_overflow(
    rng: Rng, d: ModuleType, write: Write, fails: Any, convert: Convert, tmp_path: Path
) -> None:
    w = d.weights(rng, 128, 64)
    w[77, 3] = 7e4
    path = write({"a.fc.weight": d.narrow(w, "BF16")})
    error = fails("do not fit F16", path, "fp16", tmp_path / "out.safetensors")
    assert (error.layer, error.file) == ("a.fc", str(path)) and "7.014e+04" in error.line()
    w[77, 3] = 65504
    assert convert(write({"a.fc.weight": d.f32_tensor(w)}), "fp16", tmp_path / "out.safetensors")


def test_missing_scale(sample: Any, write: Write, fails: Any, tmp_path: Path) -> None:
    for name, suffix in (
        ("nvfp4", "weight_scale_2"),
        ("int8_row", "weight_scale"),
        ("w4a8", "weight_s_channel"),
    ):
        tensors = sample(name, 128, 256).named("a.fc")
        del tensors[f"a.fc.{suffix}"]
        path = write(tensors)
        error = fails("no known format", path, "comfy_nvfp4", tmp_path / "out.safetensors")
        assert error.layer == "a.fc" and suffix in error.line()


def test_sources_that_are_no_sources(source: Path, fails: Any, tmp_path: Path) -> None:
    whole = source.read_bytes()
    for data in (b"", b"{}", whole[:-1], whole[:100], whole + b"\0", b"\0" * 1000):
        source.write_bytes(data)
        assert str(source) in fails(".", source, "bf16", tmp_path / "out.safetensors").line()
    fails("no such file", tmp_path / "none.safetensors", "bf16", code=2)


def test_the_source_itself_is_never_the_target(source: Path, fails: Any, tmp_path: Path) -> None:
    hard, soft = tmp_path / "hard.safetensors", tmp_path / "soft.safetensors"
    os.link(source, hard)
    soft.symlink_to(source)
    (tmp_path / "sub").mkdir()
    for target in (source, hard, soft, tmp_path / "sub" / ".." / "in.safetensors"):
        fails("same file", source, "bf16", target, force=True, code=2)


def test_what_exists_stays(source: Path, fails: Any, convert: Convert, tmp_path: Path) -> None:
    there = tmp_path / "out.safetensors"
    there.write_bytes(b"precious")
    fails("already exists", source, "bf16", there, code=2)
    there.chmod(0o600)
    assert convert(source, "bf16", there, force=True).output == there
    assert there.read_bytes() != b"precious"
    (tmp_path / "broken.safetensors").symlink_to(tmp_path / "nowhere" / "x")
    fails(".", source, "bf16", tmp_path / "broken.safetensors")


def test_force_keeps_the_old_file_until_the_new_one_is_right(
    rng: Rng, d: ModuleType, write: Write, fails: Any, tmp_path: Path
) -> None:
    w = d.weights(rng, 128, 64)
    w[3, 3] = np.nan
    there = tmp_path / "out.safetensors"
    there.write_bytes(b"precious")
    fails("NaN or Inf", write({"a.weight": d.f32_tensor(w)}), "comfy_fp8", there, force=True)
    assert there.read_bytes() == b"precious"


def test_folders_that_cannot_be_written(source: Path, fails: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    error = fails("cannot be written", source, "bf16", tmp_path / "file" / "out.safetensors")
    assert str(tmp_path / "file") in error.line()
    if os.getuid():
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        fails("cannot be written", source, "bf16", closed / "out.safetensors")


def test_no_space(source: Path, fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5000, 5000))
    error = fails("not enough space", source, "bf16", tmp_path / "out.safetensors")
    assert "found 0.00 GB free" in error.line()


@pytest.mark.parametrize("after", [0, 3])
def test_space_that_runs_out_while_writing(
    after: int, source: Path, fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    true, calls = os.pwrite, [0]

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    fails("No space left", source, "comfy_nvfp4", tmp_path / "out.safetensors", jobs=2)


def test_a_source_that_changes_while_it_is_read(
    source: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = execute.Executor.run

    def run(self: Any, *args: Any) -> Any:
        result = true(self, *args)
        os.utime(source)
        return result

    monkeypatch.setattr(execute.Executor, "run", run)
    with pytest.raises(QConvertError, match="source changed"):
        convert(source, "comfy_nvfp4", tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_what_the_runtime_would_refuse_is_not_written(
    source: Path, fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qconvert.runtime.contracts.base import Verdict, Violation
    from qconvert.runtime.contracts.sglang import SglangContract

    no = Verdict("sglang-0.5.23", None, (), (Violation("refuse", "test", "it will not have it"),))
    monkeypatch.setattr(SglangContract, "check", lambda self, view, tp=1: no)
    error = fails(
        "would not take the result: it will not have it", source, "comfy_nvfp4", tmp_path / "o.safetensors"
    )
    assert error.file == str(tmp_path / "o.safetensors")


@pytest.mark.parametrize("what", ["scales", "nibbles", "rows"])
def test_a_fault_in_what_was_written_is_noticed(
    what: str, source: Path, fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes that are right, stored wrongly: the file is read back before it gets its name."""
    from qconvert.formats.nvfp4 import Nvfp4

    true = Nvfp4.store

    def store(self: Any, codes: Any, options: Any, k: int) -> Any:
        out = true(self, codes, options, k)
        if what == "scales":
            out["weight_scale"] = np.ascontiguousarray(out["weight_scale"][:, ::-1])
        elif what == "nibbles":
            out["weight"] = out["weight"] << 4 | out["weight"] >> 4
        else:
            out["weight"] = np.roll(out["weight"], 1, axis=0)
        return out

    monkeypatch.setattr(Nvfp4, "store", store)
    error = fails(
        "does not read back as what was encoded", source, "comfy_nvfp4", tmp_path / "out.safetensors"
    )
    assert error.layer in ("blocks.0.a", "blocks.0.b")


@pytest.mark.parametrize("at", [0, -1], ids=["first byte", "last byte"])
def test_a_fault_in_what_was_copied_is_noticed(
    sample: Any, write: Write, fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The codes of a re-tagged layer, one bit of them flipped on the way."""
    path = write(sample("nvfp4", 128, 64).named("fc"))
    copied = execute._copy_in_kernel

    def flipped(source: int, target: int, start: int, offset: int, size: int) -> bool:
        done = copied(source, target, start, offset, size)
        where = offset if at == 0 else offset + size - 1
        os.pwrite(target, bytes([os.pread(target, 1, where)[0] ^ 1]), where)
        return done

    monkeypatch.setattr(execute, "_copy_in_kernel", flipped)
    error = fails("was not copied as it is", path, "comfy_nvfp4", tmp_path / "out.safetensors")
    assert error.layer == "fc"


def test_strict(sample: Any, write: Write, fails: Any, convert: Convert, tmp_path: Path) -> None:
    guess = write(sample("fp8_cast", 128, 64).named("a"))
    error = fails("--strict refuses a guess", guess, "comfy_nvfp4", tmp_path / "out.safetensors", strict=True)
    assert error.layer == "a"
    repair = write(sample("fp8_bf16_scale", 128, 64).named("a"), name="repair.safetensors")
    assert convert(repair, "comfy_nvfp4", tmp_path / "out.safetensors", strict=True)


def test_what_is_asked_for_makes_sense(source: Path, fails: Any, tmp_path: Path) -> None:
    fails("unknown target 'nvfp5'.*qconvert targets", source, "nvfp5", code=2)
    fails("does not serve", source, "comfy_nvfp4", runtime="comfyui", code=2)
    fails("no meaning", source, "bf16", runtime="comfyui", code=2)


def test_the_rename_after_writing_does_not_overwrite_what_appeared(
    source: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "out.safetensors"
    true = output.OutputFile.commit

    def commit(self: Any) -> None:
        there.write_bytes(b"precious")
        true(self)

    monkeypatch.setattr(output.OutputFile, "commit", commit)
    with pytest.raises(QConvertError):
        convert(source, "bf16", there)
    assert there.read_bytes() == b"precious"
