"""What `diff` and `check` and `inspect` say on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structured as s
from qconvert.convert.cli import main

NVFP4 = {"format": "nvfp4", "full_precision_matrix_mult": True}
LAYER = "layers.0.mlp.up_proj"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def weights() -> Any:
    return s.network()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*args: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        out = capsys.readouterr()
        return int(stop.value.code or 0), out.out, out.err

    return run


def test_the_same_file_twice(cli: Cli, tmp_path: Path, weights: Any) -> None:
    a = s.write(tmp_path / "a.safetensors", s.nvfp4_file(weights, mark=NVFP4))
    code, out, err = cli("diff", a, a)
    assert (code, err) == (0, "")
    assert out == "0 layers and tensors differ, 34 are the same\n"


def test_a_repaired_file_differs_in_layout_not_in_values(cli: Cli, tmp_path: Path, weights: Any) -> None:
    a = s.write(tmp_path / "a.safetensors", s.nvfp4_file(weights, linear=True, low=True, mark=NVFP4))
    b = s.write(tmp_path / "b.safetensors", s.nvfp4_file(weights, mark=NVFP4))
    code, out, _ = cli("diff", a, b)
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "layers.0.self_attn.q_proj and 23 layers like it"
    assert lines[1:3] == ["  scales linear -> swizzled", "  nibbles low -> high"]
    assert "weight U8[256, 128] -> same type and shape, bits differ in" in lines[3]
    assert lines[5:] == ["  values exactly the same", "24 layers and tensors differ, 10 are the same"]


def test_every_kind_of_change_is_named(cli: Cli, tmp_path: Path, weights: Any) -> None:
    tensors = s.nvfp4_file(weights, mark=NVFP4)
    a = s.write(tmp_path / "a.safetensors", tensors, {"format": "pt", "note": "x"})
    changed = dict(tensors)
    changed[f"{LAYER}.comfy_quant"] = s.marker({"format": "nvfp4"})
    total = changed[f"{LAYER}.weight_scale_2"][1]
    changed[f"{LAYER}.weight_scale_2"] = "F32", (total * np.float32(1.5)).reshape(1)
    changed["norm.weight"] = "F32", weights["norm"]
    del changed["layers.1.input_layernorm.weight"]
    changed["extra"] = "F32", np.ones(3, np.float32)
    b = s.write(tmp_path / "b.safetensors", changed, {"format": "pt"})
    code, out, _ = cli("diff", a, b, "--json")
    found = json.loads(out)
    assert code == 1 and not found["same"]
    assert found["only_a"] == ["layers.1.input_layernorm"] and found["only_b"] == ["extra"]
    assert found["metadata"] == [{"what": "metadata note", "a": "x", "b": "absent"}]
    layers = {layer["layer"]: layer for layer in found["layers"]}
    assert layers.keys() == {LAYER, "norm"}
    assert layers[LAYER]["changes"] == [
        {"what": "marker", "a": json.dumps(NVFP4, separators=(",", ":")), "b": '{"format":"nvfp4"}'},
        {"what": "weight_scale_2", "a": "F32[]", "b": "F32[1], bits differ in 100 % of its bytes"},
    ]
    # Everything is half as large again: the error is half of the signal, 6 dB under it.
    assert layers[LAYER]["sqnr_db"] == pytest.approx(6.02, abs=0.01)
    norm = layers["norm"]
    assert norm["changes"][0] == {"what": "format", "a": "BF16", "b": "F32"}
    assert norm["sqnr_db"] > 40


def test_trouble_is_neither_same_nor_different(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("diff", tmp_path / "a", tmp_path / "b")
    assert (code, out) == (2, "") and "no such file or folder" in err


def test_check_names_the_trap_and_the_command_that_mends_it(cli: Cli, tmp_path: Path, weights: Any) -> None:
    path = s.write(tmp_path / "a.safetensors", s.nvfp4_file(weights, linear=True, mark=NVFP4))
    for runtime, target in (("sglang-0.5.23", "comfy_nvfp4"), ("comfyui", "comfyui:nvfp4")):
        code, out, _ = cli("check", path, "--runtime", runtime)
        assert code == 1
        assert "marked nvfp4, but its values show linear block scales (24 layers) (found rows and" in out
        assert f"mend it     qconvert {path} --to {target}\n" in out
        assert out.endswith(f"{runtime}: not accepted\n")
    right = s.write(tmp_path / "b.safetensors", s.nvfp4_file(weights, mark=NVFP4))
    code, out, _ = cli("check", right)
    assert code == 0 and "mend it" not in out


def test_check_shows_a_few_of_each_rule(cli: Cli, tmp_path: Path, weights: Any) -> None:
    path = s.write(
        tmp_path / "a.safetensors", s.int8_file(weights, rotated=False, mark={"format": "int8_tensorwise"})
    )
    code, out, _ = cli("check", path)
    assert code == 1
    assert out.count("built as an unquantised linear layer") == 3
    assert "... and 21 more of the rule int8-linear-unrotated (--json lists them)" in out
    assert f"mend it     qconvert {path} --to convrot_int8\n" in out
    code, out, _ = cli("check", path, "--json")
    assert sum(v["rule"] == "int8-linear-unrotated" for v in json.loads(out)["violations"]) == 24


def test_check_says_which_layers_break_under_tensor_parallelism(
    cli: Cli, tmp_path: Path, weights: Any
) -> None:
    mark = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": "right"}
    path = s.write(tmp_path / "a.safetensors", s.int8_file(weights, rotated=True, mark=mark))
    assert cli("check", path, "--tp", "2")[0] == 1
    _, out, _ = cli("check", path, "--tp", "2", "--json")
    broken = {v["layer"] for v in json.loads(out)["violations"] if v["rule"] == "tp-input"}
    assert broken == {f"layers.{i}.self_attn.o_proj" for i in range(4)}
    assert cli("check", path, "--tp", "1")[0] == 0


def write_json(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_check_compares_names_with_a_model(cli: Cli, tmp_path: Path, weights: Any) -> None:
    path = s.write(tmp_path / "a.safetensors", s.nvfp4_file(weights, mark=NVFP4))
    names = [f"{name}.weight" for name in weights]
    lists = [
        write_json(tmp_path / "names.json", names),
        write_json(tmp_path / "index.json", {"metadata": {}, "weight_map": dict.fromkeys(names, "x")}),
        write_json(tmp_path / "keys.json", dict.fromkeys(names, "BF16 1")),
        s.write(tmp_path / "model.safetensors", {f"{name}.weight": s.bf16(w) for name, w in weights.items()}),
    ]
    for model in lists:
        assert cli("check", path, "--model", model)[0] == 0
    short = write_json(tmp_path / "short.json", [name for name in names if not name.startswith("layers.3")])
    code, out, _ = cli("check", path, "--model", short)
    assert code == 1 and "Parameter layers.3.input_layernorm.weight not found in the model" in out
    assert f"mend it     qconvert {path} --to comfy_nvfp4 --keep-layers 3\n" in out
    more = write_json(tmp_path / "more.json", [*names, "head.weight"])
    code, out, _ = cli("check", path, "--model", more)
    assert code == 1 and "the file has no tensor head.weight" in out
    deep = write_json(tmp_path / "deep.json", [f"model.{name}" for name in names])
    code, out, _ = cli("check", path, "--model", deep)
    assert code == 1 and f"mend it     qconvert {path} --to comfy_nvfp4 --rename '^=model.'\n" in out
    bare = write_json(tmp_path / "bare.json", [name.removeprefix("layers.") for name in names])
    assert cli("check", path, "--model", bare)[0] == 1


def test_check_compares_with_a_config(cli: Cli, tmp_path: Path, weights: Any) -> None:
    path = s.write(tmp_path / "a.safetensors", s.nvfp4_file(weights, mark=NVFP4))
    config = {"num_hidden_layers": 4, "hidden_size": 256, "vocab_size": 320}
    assert cli("check", path, "--model", write_json(tmp_path / "config.json", config))[0] == 0
    config |= {"num_hidden_layers": 3, "vocab_size": 321}
    code, out, _ = cli("check", path, "--model", write_json(tmp_path / "config.json", config))
    assert code == 1
    assert "the model has 3 blocks, the file has 4 under layers" in out
    assert "the size of the embedding is not the model's vocab_size" in out
    assert "--keep-layers 3" in out
    code, _, err = cli("check", path, "--model", write_json(tmp_path / "x.json", {"a": 1}))
    assert code == 2 and "--model: no list of parameters" in err


def test_inspect_shows_everything_on_one_screen(cli: Cli, tmp_path: Path, weights: Any) -> None:
    path = s.write(tmp_path / "a.safetensors", s.nvfp4_file(weights, linear=True, low=True, mark=NVFP4))
    code, out, _ = cli("inspect", path)
    assert code == 0
    assert len(out.splitlines()) < 24
    for words in (
        "24 comfy_quant tensors",
        "linear     nvfp4   24",
        "values show low nibble first",
        "runtime   comfyui: no",
    ):
        assert words in out
    code, out, _ = cli("inspect", path, "--json")
    assert {finding["level"] for finding in json.loads(out)["findings"]} == {"guess"}


def test_inspect_shows_provenance(cli: Cli, tmp_path: Path, weights: Any) -> None:
    path = s.write(tmp_path / "a.safetensors", s.nvfp4_file(weights, linear=True, mark=NVFP4))
    out_path = tmp_path / "b.safetensors"
    assert cli(path, "--to", "comfy_nvfp4", "-o", out_path)[0] == 0
    _, out, _ = cli("inspect", out_path)
    assert "made by   qconvert " in out
    assert "a.safetensors to comfy_nvfp4, " in out and "repack 24" in out and "24 guesses" in out


def test_inspect_shows_what_it_can_of_an_unknown_format(cli: Cli, tmp_path: Path) -> None:
    tensors = {"a.weight": ("U8", np.zeros((8, 8), np.uint8)), "b.weight": s.bf16(np.ones((8, 8)))}
    code, out, _ = cli("inspect", s.write(tmp_path / "a.safetensors", tensors))
    assert code == 1
    assert "unread    " in out and "no known format explains this quantised weight" in out


def test_looking_imports_nothing_heavy(tmp_path: Path, weights: Any) -> None:
    import subprocess

    path = s.write(tmp_path / "a.safetensors", s.nvfp4_file(weights, mark=NVFP4))
    for command in ("inspect", "check"):
        code = (
            "import sys; from qconvert.convert.cli import main\n"
            f"try: main([{command!r}, {str(path)!r}])\n"
            "except SystemExit as e: assert not e.code\n"
            "assert not {'numba', 'torch'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
