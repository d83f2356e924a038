"""Calibration: sequential rounding against its definition, outputs on held-out inputs, files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qconvert.convert import execute
from qconvert.convert.calibration import Calibration
from qconvert.convert.job import Outcome, Request, run_job
from qconvert.formats.calibrated import Moments, encode_calibrated
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.header import layout
from qconvert.formats.layers import take_inventory
from qconvert.formats.reader import LayerReader
from qconvert.formats.registry import codec as get_codec
from qconvert.formats.tensors import Spec
from qconvert.formats.values import decode_rows
from qconvert.kernels.cpu import sequential
from qconvert.kernels.gptq import gptq_factor, gptq_round
from qconvert.kernels.select import get_backend
from qconvert.kernels.weighted import nvfp4_scales, row_scale
from qconvert.runtime.calibration_record import write_calibration

K = 256
FORMATS = {
    "nvfp4": {"nibbles": "high", "scales": "swizzled", "rotation": 0},
    "w4a4": {"rotation": 256, "linear_dtype": "int4"},
    "int8": {"scale": "row", "rotation": 0},
    "w4a8": {
        "bits": 4, "group": 16, "codebook": True, "correction": False, "grid": True,
        "signed": False, "srel_dtype": "F8_E4M3", "source": "weight_s_rel", "rotation": 256,
    },
    "w6a8": {
        "bits": 6, "group": 16, "codebook": False, "correction": False, "grid": True,
        "signed": False, "srel_dtype": "F8_E4M3", "source": "weight_s_rel", "rotation": 64,
    },
    "fp8 row": {"kind": "F8_E4M3", "scale": "row"},
    "fp8 scalar": {"kind": "F8_E5M2", "scale": "scalar"},
    "mxfp8": {"scales": "swizzled", "source": "weight_scale"},
}  # fmt: skip
CODECS = {"w6a8": "w4a8", "fp8 row": "float8", "fp8 scalar": "float8"}


@pytest.fixture(scope="module")
def backend() -> Any:
    return get_backend("cpu")


def correlated(rng: np.random.Generator, rows: int, mix: np.ndarray) -> np.ndarray:
    """Inputs with a few strong directions, as real layers have them."""
    return (rng.standard_normal((rows, mix.shape[0])) @ mix).astype(np.float32)


@pytest.fixture(scope="module")
def layer() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    mix = rng.standard_normal((K, K)) * np.geomspace(3, 0.05, K)[:, None]
    return {
        "w": (rng.standard_normal((128, K)) * 0.02).astype(np.float32),
        "seen": correlated(rng, 2000, mix),
        "unseen": correlated(rng, 500, mix),
    }


def output_error(d: np.ndarray, x: np.ndarray) -> float:
    return float(((x.astype(np.float64) @ d.T.astype(np.float64)) ** 2).sum())


def test_factor_is_the_triangle_of_the_damped_inverse(layer: Any) -> None:
    h = layer["seen"][:, :150].T @ layer["seen"][:, :150] / 2000
    u = gptq_factor(h, damping=0.01).astype(np.float64)
    damped = h + 0.01 * np.diag(h).mean() * np.eye(150)
    assert np.allclose(u, np.triu(u))
    assert np.allclose(u.T @ u @ damped, np.eye(150), atol=2e-3)


def test_rounding_carries_the_error_into_the_next_column() -> None:
    # 0.4 becomes 0; at correlation 0.9 the second column should be 0.4 + 0.9 * 0.4 = 0.76 and becomes 1, not 0.
    h = np.array([[1, 0.9], [0.9, 1]], np.float32)
    x, u = np.array([[0.4, 0.4]], np.float32), gptq_factor(h, damping=1e-6)
    assert integers(x, u, block=2).tolist() == [[0, 1]]
    seen: list[float] = []
    assert integers(x, u, 1, seen).tolist() == [[0, 1]]
    assert seen == pytest.approx([0.4, 0.76], abs=1e-4)


def integers(x: np.ndarray, u: np.ndarray, block: int, seen: list[float] | None = None) -> np.ndarray:
    """x rounded to integers in sequence; `seen`: the first row of each block as the blocks before left it."""
    codes = np.empty(x.shape, np.int8)

    def round_block(a: int, w: np.ndarray, part: np.ndarray) -> None:
        if seen is not None:
            seen.extend(map(float, w[0]))
        q = np.empty(w.shape, np.int8)
        sequential.uniform(w, part, np.ones(len(w), np.float32), np.float32(127), q)
        codes[:, a : a + w.shape[1]] = q

    gptq_round(x, u, round_block, block)
    return codes


def test_blocks_do_not_change_the_result(layer: Any) -> None:
    u = gptq_factor(layer["seen"].T @ layer["seen"])
    x = layer["w"] * 300
    one, many = (integers(x, u, block) for block in (K, 16))
    # Sums in another order may tip a value that lies between two integers, which moves what follows in its row.
    assert (one != many).any(axis=1).mean() < 0.1


@pytest.mark.parametrize("name", FORMATS)
def test_rows_do_not_depend_on_their_piece(name: str, layer: Any, backend: Any) -> None:
    """The executor cuts layers by rows: any cut gives the same bytes, with moments of either kind."""
    codec, options = get_codec(CODECS.get(name, name)), FORMATS[name]
    group = codec.rotation(options)
    x = layer["w"] if not group else backend.rotate(layer["w"], group)
    statistic = {"none": None, "amax": backend.amax(x), "sample": x}[codec.statistic(options)]
    common = codec.prepare(statistic, options, backend, "best")
    full = layer["seen"].T @ layer["seen"] / np.float32(2000)
    for moments in (full, np.diag(full).copy()):
        m = Moments.of(moments, group, backend)
        whole = encode_calibrated(codec, x, common, options, backend, "best", m)
        for cut in (1, 37, 64):
            parts = [
                encode_calibrated(codec, p, common, options, backend, "best", m) for p in (x[:cut], x[cut:])
            ]
            for key, value in whole.items():
                if key in common or value.shape[:1] != (len(x),):
                    continue
                assert np.array_equal(value, np.concatenate([part[key] for part in parts])), (key, cut)


@pytest.mark.parametrize("name", FORMATS)
def test_outputs_are_closer_on_inputs_not_seen(name: str, layer: Any, backend: Any) -> None:
    codec, options = get_codec(CODECS.get(name, name)), FORMATS[name]
    group = codec.rotation(options)
    turn = (lambda a: backend.rotate(np.ascontiguousarray(a), group)) if group else (lambda a: a)
    x = turn(layer["w"])
    statistic = {"none": None, "amax": backend.amax(x), "sample": x}[codec.statistic(options)]
    common = codec.prepare(statistic, options, backend, "best")
    plain = codec.encode(x, common, options, backend, "best")
    moments = Moments.of(layer["seen"].T @ layer["seen"] / 2000, group, backend)
    known = encode_calibrated(codec, x, common, options, backend, "best", moments)
    assert {k: (v.dtype, v.shape) for k, v in known.items()} == {
        k: (v.dtype, v.shape) for k, v in plain.items()
    }
    errors = [
        output_error(layer["w"] - turn(codec.decode(codes, options, backend)), layer["unseen"])
        for codes in (plain, known)
    ]
    assert errors[1] < 0.7 * errors[0]


def test_diagonal_moments_move_the_scales(layer: Any, backend: Any) -> None:
    d = np.geomspace(100, 0.01, K).astype(np.float32)
    np.random.default_rng(0).shuffle(d)
    codec, options = get_codec("nvfp4"), FORMATS["nvfp4"]
    common = codec.prepare(backend.amax(layer["w"]), options, backend, "best")
    plain = codec.encode(layer["w"], common, options, backend, "best")
    known = encode_calibrated(codec, layer["w"], common, options, backend, "best", Moments.of(d, 0, backend))
    errors = [
        float(((layer["w"] - codec.decode(c, options, backend)) ** 2 @ d).sum()) for c in (plain, known)
    ]
    assert errors[1] < 0.95 * errors[0]


def test_equal_weights_search_as_without(layer: Any, backend: Any) -> None:
    w, even = layer["w"], np.ones(K, np.float32)
    _, scale = backend.w4a4_encode(w, "best")
    assert (row_scale(w, even, 7) == scale).mean() > 0.95
    t = backend.nvfp4_tensor_scale(backend.amax(w))
    _, scales = backend.nvfp4_encode(w, t, "best")
    assert (nvfp4_scales(w, even, t) == scales).mean() > 0.95


def test_moments_are_rotated_with_the_weight(backend: Any) -> None:
    rng = np.random.default_rng(2)
    h4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    r = np.kron(np.eye(2), np.kron(h4, h4))
    d = rng.random(32).astype(np.float32) + 0.1
    turned = r @ np.diag(d) @ r.T
    assert np.allclose(Moments.of(d, 16, backend).diagonal, np.diag(turned) / d.mean(), atol=1e-5)
    full = Moments.of(np.diag(d), 16, backend)
    assert full.factor is not None
    assert np.allclose(full.factor, gptq_factor(turned.astype(np.float32)), atol=1e-4)


# ---- files


@pytest.fixture
def model_file(tmp_path: Path, layer: Any) -> Path:
    path = tmp_path / "source.safetensors"
    write_calibration(path, {"blocks.0.fc.weight": layer["w"], "blocks.1.fc.weight": -layer["w"]})
    return path


def convert(model_file: Path, calibration: Path | None, name: str, **more: Any) -> tuple[Outcome, Path]:
    out = model_file.parent / name
    with opened(model_file) as checkpoint:
        request = Request(model_file, "comfy_nvfp4", output=out, calibration=calibration, **more)
        return run_job(request, checkpoint), out


def read(path: Path, layer: str, backend: Any) -> np.ndarray:
    with opened(path) as checkpoint:
        found = take_inventory(checkpoint).layers[layer]
        return decode_rows(found, LayerReader(checkpoint, found), 0, found.n, backend)


def test_conversion_with_a_file(model_file: Path, layer: Any, backend: Any, tmp_path: Path) -> None:
    moments, inputs = tmp_path / "m.safetensors", tmp_path / "i.safetensors"
    write_calibration(
        moments, {"blocks.0.fc.second_moment": layer["seen"].T @ layer["seen"] / np.float32(2000)}
    )
    write_calibration(inputs, {"blocks.0.fc.inputs": layer["seen"]})
    convert(model_file, None, "plain.safetensors")
    outcome, known = convert(model_file, moments, "known.safetensors")
    assert any(note.startswith("calibration: 1 layers") for note in outcome.plan.notes)
    plain = read(tmp_path / "plain.safetensors", "blocks.0.fc", backend)
    better = read(known, "blocks.0.fc", backend)
    before, after = (output_error(layer["w"] - y, layer["unseen"]) for y in (plain, better))
    assert after < 0.7 * before
    # A layer that the file does not name is encoded as ever, to the same bytes.
    other = [read(p, "blocks.1.fc", backend) for p in (tmp_path / "plain.safetensors", known)]
    assert np.array_equal(*other)
    _, sampled = convert(model_file, inputs, "sampled.safetensors")
    assert np.array_equal(read(sampled, "blocks.0.fc", backend), better)
    with opened(known) as checkpoint, opened(moments) as file:
        digest = checkpoint.metadata["qconvert_calibration"]
        assert len(digest) == 64 and file.nbytes > 0
        assert "plan_sha256" in json.loads(checkpoint.metadata["qconvert"])


@pytest.mark.parametrize(("target", "span"), [("modelopt_fp8", 448), ("modelopt_nvfp4", 2688)])
def test_recorded_maxima_become_static_scales(
    target: str, span: float, model_file: Path, layer: Any, tmp_path: Path
) -> None:
    moments, folder = tmp_path / "m.safetensors", tmp_path / "out"
    amax = np.float32(np.abs(layer["seen"]).max())
    write_calibration(
        moments,
        {
            "blocks.0.fc.second_moment": layer["seen"].T @ layer["seen"] / np.float32(2000),
            "blocks.0.fc.input_amax": np.asarray(amax),
        },
    )
    with opened(model_file) as checkpoint:
        outcome = run_job(Request(model_file, target, output=folder, calibration=moments), checkpoint)
    assert outcome.verdicts and all(verdict.accepted for verdict in outcome.verdicts)
    assert any(note.startswith("calibration: 1 layers get an input_scale") for note in outcome.plan.notes)
    with opened(Path(str(outcome.output))) as checkpoint:
        scale = checkpoint.tensors["blocks.0.fc.input_scale"]
        assert scale.dtype == "F32" and scale.shape == ()
        assert checkpoint.read(scale.name).reshape(-1)[0] == pytest.approx(amax / span)
        assert "blocks.1.fc.input_scale" not in checkpoint.tensors


@pytest.mark.parametrize("target", ["convrot_int8", "comfyui:float8_e4m3fn", "kitchen_w4a8"])
def test_threads_and_pieces_do_not_change_the_bytes(
    target: str, model_file: Path, layer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = tmp_path / "m.safetensors"
    write_calibration(moments, {"blocks.0.fc.second_moment": layer["seen"].T @ layer["seen"]})
    found = []
    for jobs, elements in ((1, 1 << 20), (3, 1 << 20), (3, 24 * K), (2, 5 * K)):
        monkeypatch.setattr(execute, "PIECE_ELEMENTS", elements)
        out = tmp_path / f"{jobs}-{elements}.safetensors"
        with opened(model_file) as checkpoint:
            run_job(Request(model_file, target, output=out, calibration=moments, jobs=jobs), checkpoint)
        found.append(out.read_bytes())
    assert all(data == found[0] for data in found)


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ({"blocks.0.fc.second_moment": np.ones((K, K - 1), np.float32)}, QConvertError, "does not fit"),
        ({"blocks.0.fc.inputs": np.ones(K, np.float32)}, QConvertError, "does not fit"),
        ({"elsewhere.second_moment": np.ones(K, np.float32)}, UsageError, "none of the source's layers"),
        ({"blocks.0.fc.weight": np.ones(K, np.float32)}, UsageError, "holds no "),
    ],
)
def test_files_that_do_not_fit(model_file: Path, tensors: Any, error: Any, words: str) -> None:
    path = model_file.parent / "c.safetensors"
    write_calibration(path, {name: value.astype(np.float32) for name, value in tensors.items()})
    with pytest.raises(error, match=words):
        convert(model_file, path, "out.safetensors")
    assert not (model_file.parent / "out.safetensors").exists()


def _moments(**change: float) -> np.ndarray:
    """The identity [K, K] with entries `_row_column` changed."""
    h = np.eye(K, dtype=np.float32)
    for place, value in change.items():
        _, row, column = place.split("_")
        h[int(row), int(column)] = value
    return h


@pytest.mark.parametrize(
    ("suffix", "values", "line"),
    [
        ("second_moment", _moments(_3_5=np.nan), f"NaN or Inf.*found 1 of {K * K} values, expected finite"),
        ("second_moment", np.r_[np.inf, np.ones(K - 1)], f"NaN or Inf.*found 1 of {K} values, expected finite"),
        ("inputs", np.full((2, K), 3e38), f"overflows.*found {K * K} of {K * K} values, expected finite"),
        ("second_moment", np.zeros((K, K)), f"all zero .found {K} mean squares of 0, expected at least one"),
        ("second_moment", np.zeros(K), f"all zero .found {K} mean squares of 0, expected at least one"),
        ("inputs", np.zeros((4, K)), f"all zero .found {K} mean squares of 0, expected at least one"),
        ("second_moment", -np.eye(K), "negative .found a mean square of -1 in column 0, expected none below"),
        ("second_moment", _moments(_7_7=-2), "negative .found a mean square of -2 in column 7, expected none"),
        ("second_moment", np.r_[np.ones(K - 1), -0.5], f"mean square of -0.5 in column {K - 1}, expected none"),
        ("second_moment", _moments(_2_9=0.5), r"found 0.5 at \[2, 9\] and 0 at \[9, 2\], expected the same"),
        ("second_moment", _moments(_2_9=4, _9_2=4), "not positive definite .found no Cholesky.*expected moments"),
    ],
)  # fmt: skip
def test_moments_that_no_inputs_have(model_file: Path, suffix: str, values: np.ndarray, line: str) -> None:
    path = model_file.parent / "c.safetensors"
    write_calibration(path, {f"blocks.0.fc.{suffix}": values.astype(np.float32)})
    with pytest.raises(QConvertError, match=line) as caught:
        convert(model_file, path, "out.safetensors")
    assert (caught.value.file, caught.value.layer) == (str(path), f"blocks.0.fc.{suffix}")
    assert not (model_file.parent / "out.safetensors").exists()


def to_modelopt(source: Path, calibration: Path | None, name: str, target: str = "modelopt_fp8") -> Outcome:
    with opened(source) as checkpoint:
        request = Request(source, target, output=source.parent / name, calibration=calibration)
        return run_job(request, checkpoint)


def payload(outcome: Outcome) -> dict[str, bytes]:
    with opened(Path(str(outcome.output))) as checkpoint:
        return {name: checkpoint.read(name).tobytes() for name in checkpoint.tensors}


@pytest.mark.parametrize("target", ["modelopt_fp8", "modelopt_nvfp4"])
@pytest.mark.parametrize("value", [np.inf, 0.0, -1.0, np.nan, 1e-43, 1e-36, -np.inf])
def test_maxima_that_give_no_scale(target: str, value: float, model_file: Path) -> None:
    path = model_file.parent / "c.safetensors"
    write_calibration(path, {"blocks.0.fc.input_amax": np.asarray(value, np.float32)})
    with pytest.raises(QConvertError, match="input_amax gives no input_scale") as caught:
        to_modelopt(model_file, path, "out", target)
    error = caught.value
    assert (error.file, error.layer) == (str(path), "blocks.0.fc.input_amax")
    assert error.found == f"{np.float32(value):.4g}" and str(error.expected).startswith(
        "a finite number from"
    )
    assert not (model_file.parent / "out").exists()


def test_the_least_maximum_gives_a_normal_scale(model_file: Path) -> None:
    path = model_file.parent / "c.safetensors"
    least = np.float32(np.finfo(np.float32).tiny * 448.0)
    write_calibration(path, {"blocks.0.fc.input_amax": np.asarray(least)})
    written = payload(to_modelopt(model_file, path, "out"))["blocks.0.fc.input_scale"]
    assert np.frombuffer(written, np.float32)[0] == np.finfo(np.float32).tiny
    write_calibration(path, {"blocks.0.fc.input_amax": np.asarray(np.nextafter(least, np.float32(0)))})
    with pytest.raises(QConvertError, match="input_amax gives no input_scale"):
        to_modelopt(model_file, path, "again")


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F16", ()), ("I32", ()), ("F64", ()), ("F32", (2,)), ("F32", (0,))]
)
def test_maxima_that_cannot_be_read(dtype: str, shape: tuple[int, ...], model_file: Path) -> None:
    path = model_file.parent / "c.safetensors"
    name, spec = "blocks.0.fc.input_amax", Spec(dtype, shape)
    path.write_bytes(layout([(name, spec)], {}).prefix + b"\x3c" * spec.nbytes)
    with pytest.raises(QConvertError, match="input_amax cannot be read") as caught:
        to_modelopt(model_file, path, "out")
    assert (caught.value.file, caught.value.layer) == (str(path), name)
    assert (caught.value.found, caught.value.expected) == (f"{dtype} {list(shape)}", "F32 []")


def test_maxima_alone_add_only_static_scales(model_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    write_calibration(path, {"blocks.0.fc.input_amax": np.asarray(56.0, np.float32)})
    plain, outcome = to_modelopt(model_file, None, "plain"), to_modelopt(model_file, path, "out")
    scale = {"blocks.0.fc.input_scale": np.float32(0.125).tobytes()}
    assert payload(outcome) == payload(plain) | scale
    notes = [note for note in outcome.plan.notes if note.startswith("calibration:")]
    assert notes == ["calibration: 1 layers get an input_scale from the largest input recorded"]
    # A target without static scales has no use for it, and says so.
    other, _ = convert(model_file, path, "comfy.safetensors")
    assert any("comfy_nvfp4 has no use for it" in note for note in other.plan.notes)
    write_calibration(path, {"elsewhere.input_amax": np.asarray(56.0, np.float32)})
    with pytest.raises(UsageError, match=r"none of the source's layers.*found elsewhere"):
        to_modelopt(model_file, path, "again")


@pytest.mark.parametrize("target", ["modelopt_fp8", "modelopt_nvfp4"])
def test_layers_already_in_the_format_get_their_scale(target: str, model_file: Path, tmp_path: Path) -> None:
    """Copied and retagged layers: the same codes, and a scale beside them; their own scale where they have one."""
    path = tmp_path / "c.safetensors"
    before = to_modelopt(model_file, None, "before", target)
    write_calibration(path, {"blocks.0.fc.input_amax": np.asarray(5376.0, np.float32)})
    span = {"modelopt_fp8": 448, "modelopt_nvfp4": 2688}[target]
    outcome = to_modelopt(Path(str(before.output)), path, "../after", target)
    scale = {"blocks.0.fc.input_scale": np.float32(5376 / span).tobytes()}
    assert payload(outcome) == payload(before) | scale
    assert all(verdict.accepted for verdict in outcome.verdicts)
    kinds = {action.prefix: action.kind for action in outcome.plan.actions}
    assert kinds["blocks.0.fc"] == "retag" and kinds["blocks.1.fc"] == "copy"
    line = "calibration: 1 layers get an input_scale from the largest input recorded, 1 of them beside codes taken over"
    assert any(note.startswith(line) for note in outcome.plan.notes)
    # Once there, a scale stays, whatever is recorded; a note names the layer.
    write_calibration(path, {"blocks.0.fc.input_amax": np.asarray(1.0, np.float32)})
    again = to_modelopt(Path(str(outcome.output)), path, "../again", target)
    assert payload(again) == payload(outcome)
    assert "calibration: 1 layers keep the input_scale that the source has: blocks.0.fc" in again.plan.notes


@pytest.mark.parametrize(
    ("first", "target"), [("comfyui:float8_e4m3fn", "modelopt_fp8"), ("comfy_nvfp4", "modelopt_nvfp4")]
)
def test_layers_moved_from_another_runtime_get_their_scale(
    first: str, target: str, model_file: Path, tmp_path: Path
) -> None:
    path, source = tmp_path / "c.safetensors", tmp_path / "first.safetensors"
    with opened(model_file) as checkpoint:
        run_job(Request(model_file, first, output=source), checkpoint)
    write_calibration(path, {"blocks.0.fc.input_amax": np.asarray(5376.0, np.float32)})
    plain, outcome = to_modelopt(source, None, "plain", target), to_modelopt(source, path, "out", target)
    added = payload(outcome).keys() - payload(plain).keys()
    assert added == {"blocks.0.fc.input_scale"}
    assert {k: v for k, v in payload(outcome).items() if k not in added} == payload(plain)
    line = "calibration: 1 layers get an input_scale from the largest input recorded, 1 of them beside codes taken over"
    assert any(note.startswith(line) for note in outcome.plan.notes)


def test_recorder_takes_the_moments_of_what_layers_are_given(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from qconvert.runtime.calibration_record import record

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.GELU(), torch.nn.Linear(6, 4))
    calls = [torch.randn(3, 5, 8), torch.randn(7, 8)]
    path = tmp_path / "c.safetensors"
    record(model, calls, path, full_up_to=7)
    x = torch.cat([c.reshape(-1, 8) for c in calls])
    inner = torch.nn.functional.gelu(model[0](x)).detach().numpy()
    calibration = Calibration(path)
    try:
        backend = get_backend("cpu")
        # Eight features are more than the limit: the diagonal only.
        assert np.allclose(calibration.moments("0", 8, backend), (x.numpy() ** 2).mean(0), rtol=1e-5)
        assert np.allclose(calibration.moments("2", 6, backend), inner.T @ inner / 22, atol=1e-6)
        assert calibration.input_scale("2", 1.0) == pytest.approx(float(np.abs(inner).max()))
        assert not model[0]._forward_pre_hooks
    finally:
        calibration.close()
