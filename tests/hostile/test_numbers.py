"""Numbers and shapes at the edges, for every target: the right result, or one line that says why there is none."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qconvert.formats.checkpoint import opened
from qconvert.formats.layers import take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.values import decode_rows
from qconvert.kernels.select import get_backend
from qconvert.runtime.targets import TARGETS, get_target

pytest.importorskip("torch")
pytest.importorskip("safetensors")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))
seeds: Any = importlib.import_module("fuzz_seeds")

Run = Callable[..., Any]
LAYER = "model.layers.0.self_attn.q_proj"
F32 = np.float32


def usual(*shape: int) -> Any:
    return (np.random.default_rng(0).standard_normal(shape) * 0.02).astype(F32)


def with_value(value: float) -> Any:
    x = usual(128, 256)
    x[70, 3] = value
    return x


def with_rows(x: Any, rows: Any, factor: float) -> Any:
    x[rows] *= F32(factor)
    return x


#: Weights that hold no number, or too large ones.
BROKEN = {"nan": with_value(np.nan), "inf": with_value(np.inf), "-inf": with_value(-np.inf)}
#: Weights that some formats hold and others cannot.
HARD = {
    "subnormal": usual(128, 256) * F32(1e-38),
    "tiny": usual(128, 256) * F32(1e-33),
    "huge": usual(128, 256) * F32(1e38),
    "tiny rows": with_rows(with_rows(usual(128, 256), 5, 1e-33), 9, 1e-37),
    "a huge row": with_rows(usual(128, 256), 5, 1e38),
}
#: Weights that every format holds.
EASY = {
    "zeros": np.zeros((128, 256), F32),
    "minus zero": -np.zeros((128, 256), F32),
    "zero rows": with_rows(with_rows(usual(128, 256), slice(0, 64), 0), slice(100, 128), 0),
    "one value": np.where(np.arange(128 * 256).reshape(128, 256) == 777, F32(1e-3), F32(0)),
}
SHAPES = [
    (0, 256),
    (128, 0),
    (0, 0),
    (1, 256),
    (128, 1),
    (1, 1),
    (2, 128),
    (),
    (128,),
    (2, 1, 4, 4, 256),
    (1,) * 5,
]


@pytest.fixture
def converted(tmp_path: Path, run: Run) -> Callable[..., tuple[Any, Any]]:
    """converted(weight, target) -> (how it ran, the weight as decoded from the output; None where it failed)."""

    def make(x: Any, name: str) -> tuple[Any, Any]:
        target, place = get_target(name), tmp_path / str(len(list(tmp_path.iterdir())))
        place.mkdir()
        box = seeds.plain(np.random.default_rng(1))
        box.tensors[f"{LAYER}.weight"] = ["F32", list(x.shape), x.tobytes()]
        (place / "in.safetensors").write_bytes(box.bytes())
        ending = "" if target.sidecars else f".{target.container}"
        out = place / f"out{ending}"
        ran = run(place / "in.safetensors", "--to", name, "-o", out, "--jobs", "1")
        if ran.code:
            assert ran.code == 1 and ran.err.count("\n") == 1 and "a fault of" not in ran.err, ran
            assert LAYER in ran.err or "scheme" in ran.err, ran.err
            assert not out.exists() or not list(out.iterdir())
            return ran, None
        with opened(out) as checkpoint:
            layer = take_inventory(checkpoint).layers[LAYER]
            reader, backend = LayerReader(checkpoint, layer), get_backend("cpu")
            runs = [
                decode_rows(layer, reader, a, min(a + 128, layer.n), backend) for a in range(0, layer.n, 128)
            ]
        return ran, np.concatenate(runs).reshape(x.shape) if runs else np.zeros(x.shape, F32)

    return make


NAMES = [target.name for target in TARGETS]


def sqnr(x: Any, y: Any) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    noise = float(((x - y) ** 2).sum())
    return np.inf if noise == 0 else float(10 * np.log10((x**2).sum() / noise))


@pytest.mark.parametrize("target", NAMES)
def test_nan_and_inf_are_refused_or_kept_as_they_are(target: str, converted: Any) -> None:
    for x in BROKEN.values():
        ran, y = converted(x, target)
        if y is None:
            assert "NaN or Inf" in ran.err and "--keep" in ran.err
        else:
            # Nothing is computed: the layer was copied, and no other value is touched.
            assert target == "fp32" and np.array_equal(x, y, equal_nan=True)


@pytest.mark.parametrize("target", NAMES)
def test_hard_numbers_are_held_or_refused(target: str, converted: Any) -> None:
    for name, x in HARD.items():
        ran, y = converted(x, target)
        if y is None:
            assert "nothing would be left" in ran.err or "do not fit" in ran.err or "NaN or Inf" in ran.err, (
                ran.err
            )
            continue
        assert np.isfinite(y).all() and sqnr(x, y) > 10, (name, sqnr(x, y))
        # A row that cannot be scaled is told; tensor-wide scales lose small rows by their nature.
        gone = int((x.any(axis=1) & ~y.any(axis=1)).sum())
        if gone and any(word in target for word in ("w4a8", "w4a4", "int8")) and "gptq" not in target:
            assert f"{gone} of 128 rows are smaller" in ran.out, (name, ran.out)


@pytest.mark.parametrize("target", NAMES)
def test_easy_numbers_are_right(target: str, converted: Any) -> None:
    for name, x in EASY.items():
        ran, y = converted(x, target)
        assert y is not None, (name, ran.err)
        assert sqnr(x, y) > 15, (name, sqnr(x, y))
        rows = ~x.any(axis=1)
        assert not y[rows].any(), name


@pytest.mark.parametrize("target", NAMES)
def test_odd_shapes(target: str, converted: Any) -> None:
    for shape in SHAPES:
        ran, y = converted(usual(*shape), target)
        if y is None:
            # The writer's own container has no such shape, or the format none such and all layers must agree.
            assert target.startswith("gguf") or "scheme" in ran.err or "would not take" in ran.err, (
                shape,
                ran,
            )
        elif y.size:
            assert sqnr(usual(*shape), y) > 10, shape


# ---- scales that are no scales


SCALES = {
    "nan": np.nan,
    "inf": np.inf,
    "zero": 0.0,
    "negative": -0.5,
    "subnormal": 1e-39,
    "overflowing": 3e38,
}
FORMATS = (
    "fp8",
    "fp8_row",
    "fp8_block",
    "e5m2",
    "nvfp4",
    "int8_scalar",
    "int8_row",
    "int8_convrot64",
    "w4a4",
    "w4a8",
)


@pytest.mark.parametrize("seed", list(seeds.encoded(FORMATS)), ids=lambda seed: seed.name)
@pytest.mark.parametrize("target", ["bf16", "comfy_nvfp4", "convrot_int8", "comfy_fp8"])
def test_scales_that_are_no_scales(seed: Any, target: str, tmp_path: Path, run: Run) -> None:
    for name, value in SCALES.items():
        box = seeds.Box.of(seed.files[seed.main])
        for tensor, parts in box.tensors.items():
            if tensor.startswith("blocks.0.fc.") and parts[0] == "F32":
                parts[2] = np.full(len(parts[2]) // 4, value, F32).tobytes()
        source, out = tmp_path / f"{name}.safetensors", tmp_path / f"out-{name}.safetensors"
        source.write_bytes(box.bytes())
        ran = run(source, "--to", target, "-o", out, "--jobs", "1")
        if ran.code:
            assert ran.code == 1 and ran.err.count("\n") == 1 and "blocks.0.fc" in ran.err, (name, ran)
            assert not out.exists()
            continue
        assert name not in ("nan", "inf"), (name, ran.out)
        with opened(source) as a, opened(out) as b:
            values = []
            for checkpoint in (a, b):
                layer = take_inventory(checkpoint).layers["blocks.0.fc"]
                reader = LayerReader(checkpoint, layer)
                values.append(decode_rows(layer, reader, 0, layer.n, get_backend("cpu")))
        x, y = values
        assert np.isfinite(y).all(), name
        assert (not x.any() and not y.any()) or sqnr(x, y) > 10, (name, sqnr(x, y))


@pytest.mark.parametrize("seed", list(seeds.encoded(FORMATS)), ids=lambda seed: seed.name)
@pytest.mark.parametrize("words", ["--min-sqnr 25", "--budget 8bpw"])
def test_nothing_is_measured_of_nan(seed: Any, words: str, tmp_path: Path, run: Run) -> None:
    """Scales that are NaN, of layers whose forms would be chosen by their error."""
    box = seeds.Box.of(seed.files[seed.main])
    for tensor, parts in box.tensors.items():
        if tensor.startswith("blocks.0.fc.") and parts[0] == "F32":
            parts[2] = np.full(len(parts[2]) // 4, np.nan, F32).tobytes()
    source = tmp_path / "in.safetensors"
    source.write_bytes(box.bytes())
    for target in ("comfyui:nvfp4", "modelopt_nvfp4", "comfyui:mxfp8", "comfyui:int8_tensorwise"):
        ran = run(source, "--to", target, *words.split(), "--dry-run", "--json")
        if ran.code:
            assert ran.code in (1, 2) and ran.err.count("\n") == 1 and "fault of qconvert" not in ran.err, ran


@pytest.mark.parametrize("group", [1, 7, 64, 1024, 1 << 38, -4, 4.0, "64", None])
@pytest.mark.parametrize(
    "seed",
    list(seeds.encoded(("nvfp4_convrot", "int8_convrot64", "w4a4", "w4a8"))),
    ids=lambda seed: seed.name,
)
def test_rotations_that_do_not_fit(seed: Any, group: Any, tmp_path: Path, run: Run) -> None:
    """K is 256. Whatever a marker claims: read in a group that there is, or refused."""
    box = seeds.Box.of(seed.files[seed.main])
    marker = json.loads(box.tensors["blocks.0.fc.comfy_quant"][2]) | {
        "convrot": True,
        "convrot_groupsize": group,
    }
    data = json.dumps(marker).encode()
    box.tensors["blocks.0.fc.comfy_quant"] = ["U8", [len(data)], data]
    source = tmp_path / "in.safetensors"
    source.write_bytes(box.bytes())
    for target in ("bf16", "comfyui:mxfp8", "comfyui:nvfp4", "convrot_int8"):
        ran = run(source, "--to", target, "-o", tmp_path / target.replace(":", "-"), "--jobs", "1")
        assert "fault of qconvert" not in ran.err and (ran.code == 0 or ran.err.count("\n") == 1), ran
        if group == 1 << 38 or group == 1024:
            assert ran.code or "taken as" in ran.out, ran


#: NaN in the 8-bit types of block scales.
NO_NUMBER = {"F8_E4M3": 0x7F, "F8_E8M0": 0xFF, "U8": 0xFF}
BLOCKED = ("nvfp4", "nvfp4_pre", "nvfp4_convrot", "mxfp8", "mxfp8_e8m0", "w4a8", "bank_nvfp4")


@pytest.mark.parametrize("seed", list(seeds.encoded(BLOCKED)), ids=lambda seed: seed.name)
def test_block_scales_that_are_nan_are_found_where_they_count(seed: Any, tmp_path: Path, run: Run) -> None:
    """In what is copied, too. What pads a tile of 128 rows, as those from row 64 on here, may hold anything."""
    box = seeds.Box.of(seed.files[seed.main])
    scales = [
        parts
        for tensor, parts in box.tensors.items()
        if tensor.startswith("blocks.0.fc.") and "weight_s" in tensor and parts[0] in NO_NUMBER
    ]
    assert scales
    right, copied = [parts[2] for parts in scales], 0
    for place in ("first", "padding"):
        for parts, data in zip(scales, right, strict=True):
            bad = bytes([NO_NUMBER[parts[0]]])
            parts[2] = bad + data[1:] if place == "first" else data[:-1] + bad
        source = tmp_path / f"{place}.safetensors"
        source.write_bytes(box.bytes())
        padded = place == "padding" and scales[0][1][-2] == 128
        for target in NAMES:
            out = tmp_path / f"{place}-{target.replace(':', '-')}"
            ran = run(source, "--to", target, "-o", out, "--jobs", "1", "--json")
            if padded:
                assert "NaN" not in ran.err, (target, ran.err)
            else:
                assert ran.code == 1 and "blocks.0.fc" in ran.err, (target, ran)
                copied += "get the file again" in ran.err
    assert copied


# ---- more elements than 32 bits count


def test_a_tensor_of_more_than_2_to_the_31_elements(tmp_path: Path, run: Run) -> None:
    """A sparse file: planned, checked and read near its end without reading all of it."""
    n, k = 1 << 16, (1 << 15) + 256
    entry = {"dtype": "F8_E4M3", "shape": [n, k], "data_offsets": [0, n * k]}
    marker = b'{"format": "float8_e4m3fn"}'
    scale = np.float32(0.5).tobytes()
    ends = [n * k, n * k + len(marker), n * k + len(marker) + 4]
    document = {
        "blocks.0.fc.weight": entry,
        "blocks.0.fc.comfy_quant": {"dtype": "U8", "shape": [len(marker)], "data_offsets": ends[:2]},
        "blocks.0.fc.weight_scale": {"dtype": "F32", "shape": [], "data_offsets": ends[1:]},
    }
    header = json.dumps(document).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(n * k - 256, os.SEEK_CUR)
        file.write(bytes([0x38]) * 256 + marker + scale)
    assert n * k > 1 << 31 and path.stat().st_blocks < 1 << 16
    for target in ("comfy_nvfp4", "bf16", "kitchen_w4a8"):
        ran = run(path, "--to", target, "--dry-run", "--json")
        assert ran.code == 0, ran.err
        (layer,) = json.loads(ran.out)["layers"]
        assert layer["layer"] == "blocks.0.fc"
    assert run("inspect", path).code == 0
    with opened(path) as checkpoint:
        layer = take_inventory(checkpoint).layers["blocks.0.fc"]
        last = decode_rows(layer, LayerReader(checkpoint, layer), n - 1, n, get_backend("cpu"))
    assert last.shape == (1, k) and not last[0, :-256].any() and (last[0, -256:] == 0.5).all()
