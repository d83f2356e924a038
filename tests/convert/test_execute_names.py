"""Where outputs go, how their tensors are called, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.formats.errors import QConvertError, UsageError
from small_file import small

Rng = np.random.Generator
Write = Callable[..., Path]
Convert = Callable[..., Any]


@pytest.fixture
def source(rng: Rng, d: ModuleType, write: Write) -> Path:
    return write(small(rng, d), {"format": "pt", "author": "someone"})


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
