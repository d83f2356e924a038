"""Every kernel in the forms that launchers choose, as launches on small tensors: what is compiled ahead of time.

The launches are those of real work: integer arguments and pointers have the divisibility that weights have. Nothing is
computed, so the tensors hold zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from qconvert.kernels.triton import launch, launch_blocks, launch_grid, launch_rows
from qconvert.kernels.triton.launch_linear import Operand, multiply
from torch import Tensor

#: Rows, columns, and columns of rows that no longer fit one tile.
R, K, LONG = 256, 512, 3 * launch_rows.ROW_TILE
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Sample(NamedTuple):
    """A launch by name: `run` calls the launcher. `core`: compiled for every class of chips on every change.

    Together the core samples hold every kernel, and every type of product.
    """

    name: str
    run: Callable[[], object]
    core: bool = False


def samples() -> Iterator[Sample]:
    """All of them."""
    yield from _values()
    yield from _rows()
    yield from _blocks()
    yield from _grids()
    yield from _products()


def _floats(kind: str = "BF16", k: int = K) -> Tensor:
    return torch.zeros(R, k, dtype=FLOATS[kind])


def _bytes(k: int = K, r: int = R) -> Tensor:
    return torch.zeros(r, k, dtype=torch.uint8)


def _values() -> Iterator[Sample]:
    run: Callable[[], object]
    for out in ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"):
        run = partial(launch.cast, _floats("F32"), "F32", out)
        yield Sample(f"cast F32 to {out}", run, core=out == "F8_E4M3")
    stored = {
        "F64": torch.zeros(R, K, dtype=torch.float64),
        "F16": _floats("F16"),
        "BF16": _floats().view(torch.int16),
        "F8_E4M3": _bytes(),
        "F8_E5M2": _bytes(),
        "F8_E8M0": _bytes(),
        "I8": _bytes().view(torch.int8),
    }
    for kind, x in stored.items():
        yield Sample(f"cast {kind} to F32", partial(launch.cast, x, kind, "F32"))
    one = torch.ones(1)
    for kind in FLOATS:
        x, bf16 = _floats(kind), kind == "BF16"
        yield Sample(f"amax {kind}", partial(launch.amax, x), core=bf16)
        yield Sample(f"rotate 256 {kind}", partial(launch.rotate, x, 256), core=bf16)
        yield Sample(f"encode F8_E4M3 {kind}", partial(launch.encode_fp8, x, one, "F8_E4M3"), core=bf16)
        run = partial(launch.decode_fp8, _bytes(), one, "F8_E5M2", kind)
        yield Sample(f"decode F8_E5M2 to {kind}", run)
    for group in (4, 16, 64, 1024):
        yield Sample(f"rotate {group} BF16", partial(launch.rotate, _floats(), group))


def _rows() -> Iterator[Sample]:
    run: Callable[[], object]
    for code in ("int8", "int7", "int4", "e4m3", "e5m2"):
        yield Sample(f"quantise_rows {code} BF16", partial(launch_rows.quantise_rows, _floats(), code))
    for kind in ("F32", "F16"):
        run = partial(launch_rows.quantise_rows, _floats(kind), "int8", 256)
        yield Sample(f"quantise_rows int8 {kind} ConvRot 256", run)
    given = torch.ones(R)
    for code in ("int8", "int4"):
        for rotation in (4, 16, 64, 256):
            run = partial(launch_rows.quantise_rows, _floats(), code, rotation)
            core = (code, rotation) == ("int8", 256)
            yield Sample(f"quantise_rows {code} BF16 ConvRot {rotation}", run, core)
        run = partial(launch_rows.quantise_rows, _floats(k=LONG), code, 256)
        yield Sample(f"quantise_rows {code} BF16 ConvRot 256, long rows", run)
        run = partial(launch_rows.quantise_rows, _floats("F32"), code, scale=given)
        yield Sample(f"quantise_rows {code} F32, given scales", run)
        run = partial(launch_rows.row_scale, _floats("F32"), code, "best")
        yield Sample(f"row_scale {code}", run, core=code == "int8")
    for kind in ("F8_E4M3", "F8_E5M2"):
        run = partial(launch_rows.fp8_fitted_scale, _floats("F32"), given, kind)
        yield Sample(f"fp8_fitted_scale {kind}", run, core=kind == "F8_E4M3")
    index = torch.zeros(8, dtype=torch.int64)
    stored = {"I8": _bytes().view(torch.int8), "int4": _bytes(K // 2), "F8_E4M3": _bytes()}
    for kind, q in stored.items():
        for rotation in (0, 4, 16, 64, 256) if kind == "int4" else (0, 256) if kind == "I8" else (0,):
            run = partial(launch_rows.dequantise_rows, q, given, kind, rotation, "BF16")
            yield Sample(f"dequantise_rows {kind} to BF16 ConvRot {rotation}", run, core=kind == "F8_E4M3")
        run = partial(launch_rows.dequantise_rows, q, given, kind, 0, "BF16", index)
        yield Sample(f"gather {kind} to BF16", run)
    for kind in FLOATS:
        run = partial(launch_rows.dequantise_rows, _floats(kind), torch.ones(()), kind, 0, kind, index)
        yield Sample(f"gather {kind}", run)


def _blocks() -> Iterator[Sample]:
    run: Callable[[], object]
    one, fours, bytes_ = torch.ones(()), _bytes(K // 2), _bytes()
    for kind in FLOATS:
        x, bf16 = _floats(kind), kind == "BF16"
        for swizzle in (False, True) if bf16 else (False,):
            where = "swizzled" if swizzle else "in rows"
            run = partial(launch_blocks.quantise_nvfp4, x, one, "fast", swizzle)
            yield Sample(f"quantise_nvfp4 fast {kind}, scales {where}", run)
            if kind == "F16":
                continue
            run = partial(launch_blocks.quantise_nvfp4, x, one, "best", swizzle)
            yield Sample(f"quantise_nvfp4 best {kind}, scales {where}", run, core=swizzle)
            mx = partial(launch_blocks.quantise_mxfp8, x, swizzle)
            yield Sample(f"quantise_mxfp8 {kind}, scales {where}", mx, core=swizzle)
            four = partial(
                launch_blocks.dequantise_nvfp4, fours, _bytes(K // 16), one, swizzled=swizzle, out=kind
            )
            yield Sample(f"dequantise_nvfp4 to {kind}, scales {where}", four, core=swizzle)
            back = partial(
                launch_blocks.dequantise_mxfp8, bytes_, _bytes(K // 32), swizzled=swizzle, out=kind
            )
            yield Sample(f"dequantise_mxfp8 to {kind}, scales {where}", back, core=swizzle)


def _grids() -> Iterator[Sample]:
    table = torch.linspace(-1, 1, 16)
    for bits, levels in ((4, table), (4, None), (6, None)):
        form, core = f"{bits} bit" + (", codebook" if levels is not None else ""), levels is not None
        run = partial(launch_grid.quantise_grid, _floats(), 16, levels, bits, "fast", 256)
        yield Sample(f"quantise_grid {form} BF16 ConvRot 256", run)
        for group in (16, 4, 64) if core else (16,):
            best = partial(launch_grid.quantise_grid, _floats("F32"), group, levels, bits, "best")
            yield Sample(f"search_grid {form}, groups of {group}", best, core=core and group == 16)
        codes = _bytes(K * bits // 8)
        for out, rotation, channel in (("I8", 0, None), ("BF16", 256, torch.ones(R))):
            back = partial(
                launch_grid.dequantise_grid,
                codes,
                _bytes(K // 16),
                channel,
                levels,
                16,
                bits,
                rotation=rotation,
                out=out,
            )
            yield Sample(
                f"dequantise_grid {form} to {out} ConvRot {rotation}", back, core=core and out == "I8"
            )
    corrected = partial(
        launch_grid.dequantise_grid,
        _bytes(K // 2),
        torch.zeros(R, K // 16),
        torch.ones(R),
        table,
        16,
        4,
        correction=torch.zeros(R, K // 16),
        signed=True,
        rotation=256,
        out="BF16",
    )
    yield Sample("dequantise_grid 4 bit, signed, float32 group scales, correction", corrected)


#: What each kind of weight is multiplied with.
PAIRS = {
    "int8": ("int8",),
    "int4": ("int8",),
    "w4a8": ("int8",),
    "w4a8 codebook": ("int8",),
    "w6a8": ("int8",),
    "e4m3": ("e4m3", "BF16", "F16", "F32"),
    "e5m2": ("BF16",),
    "nvfp4": ("BF16",),
    "nvfp4 swizzled": ("nvfp4", "BF16", "F16", "F32"),
    "mxfp8 swizzled": ("mxfp8", "BF16"),
}
_CORE = {("int8", "int8"), ("int8", "w4a8 codebook"), ("e4m3", "e4m3"), ("BF16", "nvfp4 swizzled")}
_CORE |= {("nvfp4", "nvfp4 swizzled"), ("mxfp8", "mxfp8 swizzled")}


def _weights() -> Iterator[tuple[str, Operand]]:
    rows, one, blocks = torch.ones(R), torch.ones(1), _bytes(K // 16)
    yield "int8", Operand(_bytes().view(torch.int8), "I8", factor=rows)
    yield "int4", Operand(_bytes(K // 2), "int4", factor=rows)
    yield "w4a8", Operand(_bytes(K // 2), "grid4", blocks, rows)
    yield "w4a8 codebook", Operand(_bytes(K // 2), "table4", blocks, rows, torch.zeros(16))
    yield "w6a8", Operand(_bytes(K * 3 // 4), "grid6", blocks, rows)
    yield "e4m3", Operand(_bytes(), "F8_E4M3", factor=one)
    yield "e5m2", Operand(_bytes(), "F8_E5M2", factor=one)
    yield "nvfp4", Operand(_bytes(K // 2), "nvfp4", blocks, one, high_first=False)
    yield "nvfp4 swizzled", Operand(_bytes(K // 2), "nvfp4", blocks, one, swizzled=True)
    yield "mxfp8 swizzled", Operand(_bytes(), "mxfp8", _bytes(K // 32), swizzled=True)


def _inputs(m: int) -> dict[str, Operand]:
    rows = torch.ones(m)
    return {
        "int8": Operand(_bytes(r=m).view(torch.int8), "I8", factor=rows),
        "e4m3": Operand(_bytes(r=m), "F8_E4M3", factor=rows),
        "nvfp4": Operand(_bytes(K // 2, m), "nvfp4", _bytes(K // 16, m), torch.ones(1)),
        "mxfp8": Operand(_bytes(r=m), "mxfp8", _bytes(K // 32, m)),
        **{kind: Operand(launch.bits_of(torch.zeros(m, K, dtype=d)), kind) for kind, d in FLOATS.items()},
    }


def _products() -> Iterator[Sample]:
    bias = torch.zeros(R)
    for m in (16, 4096):
        inputs = _inputs(m)
        for weight, w in _weights():
            for x in PAIRS[weight]:
                core = (x, weight) in _CORE
                # Many rows differ by the tile alone: not every product is compiled again.
                if m > 16 and not core:
                    continue
                run = partial(multiply, inputs[x], w, K, bias, x if x in FLOATS else "BF16")
                yield Sample(f"matmul {x} x {weight}, M={m}", run, core=core and m == 16)
