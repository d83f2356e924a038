"""Stored values to float32 and back, and the two statistics. All arrays are flat."""

from __future__ import annotations

from typing import Any

import numpy as np
from qconvert.kernels.cpu import bits
from qconvert.kernels.cpu.jit import (
    F32_1,
    OUT_F32_1,
    OUT_F64_1,
    OUT_U16_1,
    U8_1,
    U16_1,
    kernel,
)

#: Partial sums of `error`. Many, so that LLVM keeps the loop over them and vectorises it.
LANES = 256


@kernel(U16_1, OUT_F32_1)
def widen_bf16(raw: Any, out: Any) -> None:
    for i in range(raw.size):
        out[i] = bits.float_of(np.int32(raw[i]) << np.int32(16))


@kernel(U16_1, OUT_F32_1)
def widen_f16(raw: Any, out: Any) -> None:
    for i in range(raw.size):
        out[i] = bits.decode_f16(raw[i])


@kernel(U8_1, OUT_F32_1)
def widen_e4m3(raw: Any, out: Any) -> None:
    for i in range(raw.size):
        out[i] = bits.decode_e4m3(raw[i])


@kernel(U8_1, OUT_F32_1)
def widen_e5m2(raw: Any, out: Any) -> None:
    for i in range(raw.size):
        out[i] = bits.decode_e5m2(raw[i])


@kernel(U8_1, OUT_F32_1)
def widen_e8m0(raw: Any, out: Any) -> None:
    for i in range(raw.size):
        out[i] = bits.decode_e8m0(raw[i])


@kernel(F32_1, OUT_U16_1)
def narrow_bf16(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = bits.encode_bf16(x[i])


@kernel(F32_1, OUT_U16_1)
def narrow_f16(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = bits.encode_f16(x[i])


@kernel(F32_1, OUT_F32_1)
def amax(x: Any, out: Any) -> None:
    """out[0]: the largest magnitude. As integers, NaN > infinity > finite magnitudes."""
    largest = np.int32(0)
    for i in range(x.size):
        largest = max(largest, bits.bits_of(x[i]) & np.int32(0x7FFFFFFF))
    out[0] = bits.float_of(largest)


@kernel(F32_1, F32_1, OUT_F64_1)
def error(x: Any, y: Any, out: Any) -> None:
    """out[0] = sum x^2, out[1] = sum (x-y)^2, in float64."""
    power, noise = np.zeros(LANES), np.zeros(LANES)
    whole = x.size // LANES
    xs, ys = x[: whole * LANES].reshape(whole, LANES), y[: whole * LANES].reshape(whole, LANES)
    for i in range(whole):
        a, b = xs[i], ys[i]
        for lane in range(LANES):
            v = np.float64(a[lane])
            d = v - np.float64(b[lane])
            power[lane] += v * v
            noise[lane] += d * d
    a, b = x[whole * LANES :], y[whole * LANES :]
    for i in range(a.size):
        v = np.float64(a[i])
        d = v - np.float64(b[i])
        power[i] += v * v
        noise[i] += d * d
    out[0] = power.sum()
    out[1] = noise.sum()
