"""Every Triton kernel gives the reference's bits, on awkward shapes and values, from every type that sources have."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.7")

from qconvert.kernels import reference as ref  # noqa: E402
from qconvert.kernels import reference_w4a8 as ref_w4a8  # noqa: E402
from qconvert.kernels.codebook import USUAL  # noqa: E402
from qconvert.kernels.layout import swizzle  # noqa: E402
from qconvert.kernels.select import get_backend  # noqa: E402
from qconvert.kernels.triton import launch, launch_blocks, launch_grid, launch_rows  # noqa: E402
from qconvert.kernels.triton.backend import TritonBackend  # noqa: E402

# Inputs at the edge of float32 overflow on purpose; the interpreter's numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Tensor = Any
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def load_ops() -> ModuleType:
    """The operations and fillings that the CPU backend is tested with."""
    spec = spec_from_file_location("equal_bits", Path(__file__).with_name("test_equal_bits.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bits = load_ops()
REFERENCE = get_backend("reference")
KINDS = ("outliers", "zero rows", "special", "ties", "any magnitude", "huge")
#: Interpreted, the searches of w4a8 take seconds.
SLOW = tuple(name for name in bits.OPS if "a8" in name or name == "w4a4 best")


@pytest.mark.parametrize("name", bits.OPS)
def test_backend_equals_reference(device: Any, name: str) -> None:
    """Every operation of a backend, numpy in and out: ties, subnormals, huge values, zero rows, outliers."""
    multiple, op = bits.OPS[name]
    triton = TritonBackend()
    kinds = ("outliers",) if name in SLOW else KINDS
    for seed, kind in enumerate(kinds):
        cols = multiple * (2 if name in SLOW else 3) if multiple > 2 else 74
        x = bits.fill(np.random.default_rng(seed), 1 + seed % 3, cols, kind)
        before = x.copy()
        for ours, theirs in zip(op(triton, x), op(REFERENCE, x), strict=True):
            bits.assert_same_bits(ours, theirs)
        bits.assert_same_bits(x, before)


def test_statistics_and_nothing(device: Any) -> None:
    triton = TritonBackend()
    x = bits.fill(np.random.default_rng(3), 7, 301, "outliers")
    y = x + bits.fill(np.random.default_rng(4), 7, 301, "normal")
    assert triton.error(x, y) == pytest.approx(REFERENCE.error(x, y), rel=1e-12)
    assert triton.amax(x) == float(np.abs(x).max())
    assert triton.amax(np.zeros((0, 4), np.float32)) == 0.0
    assert np.isnan(triton.amax(np.array([1.0, np.nan, np.inf], np.float32)))
    none = np.zeros((0, 256), np.float32)
    for name in ("cast BF16", "rotate 256", "mxfp8", "w4a4 fast", "nvfp4 fast 1.0", "w4a8 fast 16"):
        for result in bits.OPS[name][1](triton, none):
            assert np.asarray(result).size in (0, 1)


def same(ours: Tensor, theirs: Tensor) -> None:
    """Equal types, shapes and bits."""
    ours = ours.cpu()
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    a, b = ours.contiguous().reshape(-1).view(size), theirs.contiguous().reshape(-1).view(size)
    wrong = (a != b).nonzero().flatten()
    assert not wrong.numel(), f"{wrong.numel()} of {a.numel()} differ, the first at {int(wrong[0])}"


def source(dtype: Any, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Outliers, a row of zeros, and values of every magnitude that the type has."""
    x = torch.from_numpy(bits.fill(np.random.default_rng(seed), rows, cols, "outliers"))
    x[:, 5::7] *= 2.0 ** torch.arange(-14, 10)[torch.arange(len(x[0, 5::7])) % 24]
    if rows > 2:
        x[1] = 0.0
    return x.to(dtype)


DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])


def codes_of(x: Tensor, code: str) -> tuple[Tensor, Tensor]:
    """What `quantise_rows` has to give for float32 rows, by the reference."""
    if code in ("e4m3", "e5m2"):
        dtype = f"F8_{code.upper()}"
        scale = torch.stack([ref.scalar_scale(float(row.abs().max()), ref.FP8_MAX[dtype]) for row in x])
        return ref.fp8_encode(x, scale, dtype), scale
    if code == "int4":
        return ref.w4a4_encode(x, "fast")
    levels = 127 if code == "int8" else 7
    scale = (x.abs().amax(dim=1) / levels).clamp(min=1e-30)
    return (x / scale[:, None]).round().clamp(-levels, levels).to(torch.int8), scale


@DTYPES
@pytest.mark.parametrize("rotation", [0, 4, 16, 64, 256])
def test_quantise_rows(device: Any, dtype: Any, rotation: int) -> None:
    """Amax, scale, rounding and packing in one launch, the rotation inside; rows that are no multiple of a tile."""
    x = source(dtype, 3, rotation * 3 if rotation else 74)
    wide = ref.rotate(x.to(F32), rotation) if rotation else x.to(F32)
    # The type of the source and the code meet nowhere: not every pair of them is run.
    for code in ("int8", "int7", "int4", "e4m3", "e5m2") if dtype == BF16 else ("int8",):
        q, scale = launch_rows.quantise_rows(x.to(device), code, rotation)
        want_q, want_scale = codes_of(wide, code)
        same(scale, want_scale)
        same(q, want_q)


@pytest.mark.parametrize("rotation", [0, 256])
@pytest.mark.parametrize("code", ["int8", "int4"])
def test_rows_longer_than_a_tile(
    device: Any, code: str, rotation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_rows, "ROW_TILE", 512)
    x = source(BF16, 3, 512 + 256)
    q, scale = launch_rows.quantise_rows(x.to(device), code, rotation)
    want_q, want_scale = codes_of(ref.rotate(x.to(F32), rotation) if rotation else x.to(F32), code)
    same(scale, want_scale)
    same(q, want_q)


def test_rows_of_a_view(device: Any) -> None:
    """Rows that are farther apart than they are long."""
    x = source(F32, 5, 200)
    view = x.to(device)[:, 30:94]
    same(launch_rows.quantise_rows(view, "int8")[0], codes_of(x[:, 30:94].contiguous(), "int8")[0])
    codes, scales = launch_blocks.quantise_nvfp4(view, torch.tensor(0.01, device=device))
    want = ref.nvfp4_encode(x[:, 30:94].contiguous(), torch.tensor(0.01), "fast")
    same(codes, want[0])
    same(scales, want[1])


OUTS = {"F32": F32, "F16": F16, "BF16": BF16}


def narrowed(x: Tensor, out: str) -> Tensor:
    return ref.from_f32(x, out).view(BF16) if out == "BF16" else ref.from_f32(x, out)


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("rotation", [0, 4, 16, 64, 256])
def test_dequantise_rows_and_gather(device: Any, rotation: int, out: str) -> None:
    k = rotation * 3 if rotation else 74
    x = source(F32, 3, k)
    index = torch.tensor([2, 0])
    stored: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    q, scale = codes_of(x, "int8")
    stored["I8"] = q, scale, ref.int8_decode(q, scale)
    stored["I8 scalar"] = q, scale[2], ref.int8_decode(q, scale[2])
    q, scale = codes_of(x, "int4")
    stored["int4"] = q, scale, ref.w4a4_decode(q, scale)
    for kind in ("F8_E4M3", "F8_E5M2"):
        q, scale = codes_of(x, kind.lower()[3:])
        stored[kind] = q, scale, ref.fp8_decode(q, scale, kind)
    for dtype in (F32, F16, BF16):
        plain = x.to(dtype)
        stored[launch.kind_of(plain)] = plain, torch.ones(()), plain.to(F32)
    # Stored and written types meet nowhere: not every pair of them is run.
    few = stored if out == "BF16" else ("I8", "F8_E4M3")
    for name, (q, scale, values) in stored.items():
        if name not in few:
            continue
        want = narrowed(ref.rotate(values, rotation) if rotation else values, out)
        args = q.to(device), scale.to(device), name.split()[0], rotation, out
        same(launch_rows.dequantise_rows(*args), want)
        same(launch_rows.dequantise_rows(*args, index.to(device)), want[index])


@DTYPES
@pytest.mark.parametrize("tiles", [False, True], ids=["rows", "swizzled"])
def test_blocks(device: Any, dtype: Any, tiles: bool) -> None:
    """nvfp4 and mxfp8 from every type, scales in rows and in tiles, rows and blocks that fill no tile."""

    def laid(scales: Tensor) -> Tensor:
        return torch.from_numpy(swizzle(scales.numpy())) if tiles else scales

    for rows, blocks in ((1, 1), (5, 7), (131, 3)) if dtype == BF16 else ((5, 3),):
        x = source(dtype, rows, 32 * blocks, seed=rows)
        total = ref.nvfp4_tensor_scale(float(x.abs().max()))
        for quality in ("fast", "best"):
            codes, scales = launch_blocks.quantise_nvfp4(x.to(device), total.to(device), quality, tiles)
            want_codes, want_scales = ref.nvfp4_encode(x.to(F32), total, quality)
            same(codes, want_codes)
            same(scales, laid(want_scales))
            for out in OUTS:
                back = launch_blocks.dequantise_nvfp4(
                    codes, scales, total.to(device), swizzled=tiles, out=out
                )
                same(back, narrowed(ref.nvfp4_decode(want_codes, want_scales, total), out))
        low = launch_blocks.dequantise_nvfp4(
            (codes << 4) | (codes >> 4), scales, total.to(device), swizzled=tiles, high_first=False
        )
        same(low, ref.nvfp4_decode(want_codes, want_scales, total))
        q, powers = launch_blocks.quantise_mxfp8(x.to(device), tiles)
        want_q, want_powers = ref.mxfp8_encode(x.to(F32))
        same(q, want_q)
        same(powers, laid(want_powers))
        for out in OUTS:
            back = launch_blocks.dequantise_mxfp8(q, powers, swizzled=tiles, out=out)
            same(back, narrowed(ref.mxfp8_decode(want_q, want_powers), out))


@DTYPES
@pytest.mark.parametrize("form", ["codebook", "uniform", "6 bit"])
def test_grid(device: Any, dtype: Any, form: str) -> None:
    """w4a8 and w6a8 with the rotation inside, and back to every type and to the int8 grid."""
    table = torch.from_numpy(USUAL) if form == "codebook" else None
    width, rotation, group = (6 if form == "6 bit" else 4), 64, 32
    # Interpreted, the search of group scales takes seconds: few rows, and one form from every type.
    if dtype != BF16 and form != "codebook":
        return
    x = source(dtype, 2, 128)
    wide = ref.rotate(x.to(F32), rotation)
    six = width == 6
    encode = ref_w4a8.w6a8_encode if six else lambda *a: ref_w4a8.w4a8_encode(*a[:2], table, a[2])
    want = encode(wide, group, "fast")
    there = None if table is None else table.to(device)
    found = launch_grid.quantise_grid(x.to(device), group, there, width, "fast", rotation)
    for ours, theirs in zip(found, want, strict=True):
        same(ours, theirs)
    codes, s_rel, channel = found
    scales, correction = ref.decode_e4m3(want[1]), ref.decode_e4m3(want[1]) * 0.125
    if dtype != BF16:
        return
    for corrected, back, out in itertools.product((None, correction), (0, rotation), OUTS):
        values = ref_w4a8.w4a8_decode(want[0], scales, want[2], table, group, width, corrected)
        values = ref.rotate(values, back) if back else values
        ours = launch_grid.dequantise_grid(
            codes,
            s_rel if out == "BF16" else scales.to(device),
            channel,
            there,
            group,
            width,
            correction=None if corrected is None else corrected.to(device),
            rotation=back,
            out=out,
        )
        same(ours, narrowed(values, out))
    grid = ref_w4a8.w4a8_decode(want[0], scales, torch.ones(2), table, group, width, None).to(torch.int8)
    same(launch_grid.dequantise_grid(codes, s_rel, None, there, group, width, out="I8"), grid)
    if width == 4:
        signed = launch_grid.dequantise_grid(
            codes ^ 0x88, s_rel, None, there, group, 4, signed=True, out="I8"
        )
        same(signed, grid)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "BF16", "F16", "F64"])
def test_every_code_and_many_values_widen(device: Any, kind: str) -> None:
    numpy: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
        "BF16": lambda: np.arange(1 << 16, dtype=np.uint16)[::3].view(np.int16),
        "F16": lambda: np.arange(1 << 16, dtype=np.uint16)[::3].view(np.float16),
        "F64": lambda: (
            np.random.default_rng(0).standard_normal(999) * 10.0 ** np.arange(-45, 39).repeat(12)[:999]
        ),
        "I8": lambda: np.arange(-128, 128, dtype=np.int8),
    }
    raw = numpy.get(kind, lambda: np.arange(256, dtype=np.uint8))()
    with np.errstate(over="ignore"):
        want = ref.to_f32(torch.from_numpy(raw.copy()), kind).numpy()
    ours = launch.cast(torch.from_numpy(raw.copy()).to(device), kind, "F32").cpu().numpy()
    # The payload of a NaN is nobody's business, that it is one is.
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(want))
    np.testing.assert_array_equal(
        np.where(np.isnan(ours), 0, ours).view(np.int32), np.where(np.isnan(want), 0, want).view(np.int32)
    )


@pytest.mark.parametrize("out", ["F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_every_tie_narrows_to_even(device: Any, out: str) -> None:
    """Every value of the type, every middle between two of them, and what lies right beside the middles."""
    size = 8 if out.startswith("F8") else 16
    codes = torch.arange(1 << (size - 1), dtype=torch.int32).to(torch.uint8 if size == 8 else torch.int16)
    values = ref.to_f32(codes.view(F16) if out == "F16" else codes, out)
    values = values[values.isfinite()][:: 1 if size == 8 else 5]
    middles = ((values[:-1].double() + values[1:].double()) / 2).to(F32)
    around = [middles, middles.nextafter(torch.tensor(1e38)), middles.nextafter(torch.tensor(-1.0))]
    x = torch.cat([values, *around, torch.tensor([3e38, torch.inf, 1e-45, 0.0])])
    x = torch.cat([x, -x])
    ours = launch.cast(x.to(device), "F32", out).cpu()
    want = ref.from_f32(x, out)
    assert torch.equal(
        ours.view(torch.int16) if out == "F16" else ours, want.view(torch.int16) if out == "F16" else want
    )
