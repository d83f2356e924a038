"""Device functions: the ConvRot rotation as butterflies, in the order of `reference.rotate`.

Two forms. `rotate_flat` takes and gives a flat tile and serves any group up to 1024; every stage moves data between
threads. `rotated_parts` is for the groups that runtimes serve: it loads a tile so that the low digits of the column
are in one thread, exchanges once, and leaves the result apart as HI tensors (by the high digits), each of which a
caller handles and stores by itself. Compiled for sm_90 that is 6 barriers for a tile of 4096 instead of 60.
"""

from __future__ import annotations

import triton
import triton.language as tl
from qconvert.kernels.triton.bits import widen

#: group -> (HI, LO): group = HI * LO; the digits of LO are done before the exchange, those of HI after it.
SPLITS = {0: (1, 1), 4: (1, 4), 16: (1, 16), 64: (16, 4), 256: (16, 16)}


@triton.jit
def _h4(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    ab = a + b
    a_b = a - b
    cd = c + d
    c_d = c - d
    return ab + c_d, ab - c_d, a_b + cd, cd - a_b


@triton.jit
def _stage(flat: tl.tensor, STRIDE: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """One digit of the column number: its four values are STRIDE apart."""
    t = tl.permute(tl.reshape(flat, (SIZE // (4 * STRIDE), 2, 2, STRIDE)), (0, 3, 1, 2))
    even, odd = tl.split(t)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    a, b, c, d = _h4(a, b, c, d)
    t = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.permute(t, (0, 2, 3, 1)), (SIZE,))


@triton.jit
def rotate_flat(flat: tl.tensor, GROUP: tl.constexpr, FACTOR: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """[SIZE], SIZE a multiple of GROUP; FACTOR = 1/sqrt(GROUP). GROUP 0: unchanged."""
    if GROUP >= 4:
        flat = _stage(flat, 1, SIZE)
    if GROUP >= 16:
        flat = _stage(flat, 4, SIZE)
    if GROUP >= 64:
        flat = _stage(flat, 16, SIZE)
    if GROUP >= 256:
        flat = _stage(flat, 64, SIZE)
    if GROUP >= 1024:
        flat = _stage(flat, 256, SIZE)
    if GROUP >= 4:
        flat = flat * FACTOR
    return flat


@triton.jit
def _parts4(t: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """[P, 4] -> four [P]."""
    even, odd = tl.split(tl.reshape(t, (P, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _parts16(t: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """[P, 16] -> sixteen [P]. Split in one go: what is split stays in its thread."""
    b0, b1 = tl.split(tl.reshape(t, (P, 2, 2, 2, 2)))
    b00, b10 = tl.split(b0)
    b01, b11 = tl.split(b1)
    b000, b100 = tl.split(b00)
    b010, b110 = tl.split(b10)
    b001, b101 = tl.split(b01)
    b011, b111 = tl.split(b11)
    p0, p8 = tl.split(b000)
    p4, p12 = tl.split(b100)
    p2, p10 = tl.split(b010)
    p6, p14 = tl.split(b110)
    p1, p9 = tl.split(b001)
    p5, p13 = tl.split(b101)
    p3, p11 = tl.split(b011)
    p7, p15 = tl.split(b111)
    return p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15


@triton.jit
def _digits16(p: tl.tuple) -> tl.tuple:
    """Both base-4 digits of an index 0..15, over sixteen tensors."""
    p0, p1, p2, p3 = _h4(p[0], p[1], p[2], p[3])
    p4, p5, p6, p7 = _h4(p[4], p[5], p[6], p[7])
    p8, p9, p10, p11 = _h4(p[8], p[9], p[10], p[11])
    p12, p13, p14, p15 = _h4(p[12], p[13], p[14], p[15])
    p0, p4, p8, p12 = _h4(p0, p4, p8, p12)
    p1, p5, p9, p13 = _h4(p1, p5, p9, p13)
    p2, p6, p10, p14 = _h4(p2, p6, p10, p14)
    p3, p7, p11, p15 = _h4(p3, p7, p11, p15)
    return p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15


@triton.jit
def _join16(p: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """Sixteen [P] -> [P, 16]."""
    b000 = tl.join(p[0], p[8])
    b100 = tl.join(p[4], p[12])
    b010 = tl.join(p[2], p[10])
    b110 = tl.join(p[6], p[14])
    b001 = tl.join(p[1], p[9])
    b101 = tl.join(p[5], p[13])
    b011 = tl.join(p[3], p[11])
    b111 = tl.join(p[7], p[15])
    b0 = tl.join(tl.join(b000, b100), tl.join(b010, b110))
    b1 = tl.join(tl.join(b001, b101), tl.join(b011, b111))
    return tl.reshape(tl.join(b0, b1), (P, 16))


@triton.jit
def load_values(
    row: tl.tensor, col: tl.tensor, k: tl.tensor, scale: tl.tensor, KIND: tl.constexpr
) -> tl.tensor:
    """Columns `col` of a stored row as float32, 0 from k on; KIND int4: signed nibbles, even column low.

    Codes (int4, I8 and fp8) are multiplied by `scale`.
    """
    if KIND == "int4":
        byte = tl.load(row + col // 2, mask=col < k, other=0).to(tl.int32)
        value = ((((byte >> ((col & 1) * 4)) & 15) ^ 8) - 8).to(tl.float32) * scale
    elif KIND == "F32" or KIND == "F16" or KIND == "BF16" or KIND == "F64":
        value = widen(tl.load(row + col, mask=col < k, other=0), KIND)
    else:
        value = widen(tl.load(row + col, mask=col < k, other=0), KIND) * scale
    return value


@triton.jit
def _four(
    row: tl.tensor,
    start: tl.tensor,
    k: tl.tensor,
    scale: tl.tensor,
    KIND: tl.constexpr,
    STEP: tl.constexpr,
    P: tl.constexpr,
) -> tl.tuple:
    """Columns start + STEP*p + 0..3 as four tensors [P]. A thread loads all four, so that nothing moves."""
    col = start + tl.arange(0, P)[:, None] * STEP + tl.arange(0, 4)[None, :]
    return _parts4(load_values(row, col, k, scale, KIND), P)


@triton.jit
def _low16(
    row: tl.tensor,
    start: tl.tensor,
    k: tl.tensor,
    scale: tl.tensor,
    KIND: tl.constexpr,
    P: tl.constexpr,
) -> tl.tensor:
    """Runs of 16 columns with their two low digits done, [P, 16]."""
    a = _four(row, start, k, scale, KIND, 16, P)
    b = _four(row, start + 4, k, scale, KIND, 16, P)
    c = _four(row, start + 8, k, scale, KIND, 16, P)
    d = _four(row, start + 12, k, scale, KIND, 16, P)
    return _join16(_digits16(a + b + c + d), P)


@triton.jit
def _high16(low: tl.tensor, FACTOR: tl.constexpr, GROUPS: tl.constexpr, LO: tl.constexpr) -> tl.tuple:
    """[GROUPS * 16, LO] -> the two high digits done: sixteen [GROUPS * LO]."""
    high = tl.permute(tl.reshape(low, (GROUPS, 16, LO)), (0, 2, 1))
    p = _digits16(_parts16(tl.reshape(high, (GROUPS * LO, 16)), GROUPS * LO))
    return (
        p[0] * FACTOR,
        p[1] * FACTOR,
        p[2] * FACTOR,
        p[3] * FACTOR,
        p[4] * FACTOR,
        p[5] * FACTOR,
        p[6] * FACTOR,
        p[7] * FACTOR,
        p[8] * FACTOR,
        p[9] * FACTOR,
        p[10] * FACTOR,
        p[11] * FACTOR,
        p[12] * FACTOR,
        p[13] * FACTOR,
        p[14] * FACTOR,
        p[15] * FACTOR,
    )


@triton.jit
def rotated_parts(
    row: tl.tensor,
    tile: tl.tensor,
    k: tl.tensor,
    scale: tl.tensor,
    KIND: tl.constexpr,
    HI: tl.constexpr,
    LO: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tuple:
    """One tile of GROUPS * HI * LO columns of a stored row, loaded and rotated, as a tuple of tensors.

    FACTOR = 1/sqrt(HI * LO); HI = LO = 1: no rotation. Element (g, l) of part h [GROUPS * LO] is column
    (tile * GROUPS + g) * HI*LO + h*LO + l. PAIRS: even columns in the first HI parts, odd ones in the next HI, each
    [GROUPS * LO / 2].
    """
    start = tile * (GROUPS * HI * LO)
    if LO == 16:
        low = _low16(row, start, k, scale, KIND, GROUPS * HI)
    elif LO == 4:
        a, b, c, d = _four(row, start, k, scale, KIND, 4, GROUPS * HI)
        a, b, c, d = _h4(a, b, c, d)
        low = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (GROUPS * HI, 4))
    else:
        low = load_values(row, start + tl.arange(0, GROUPS), k, scale, KIND)
    if PAIRS:
        even, odd = tl.split(tl.reshape(low, (GROUPS * HI * LO // 2, 2)))
        if HI == 16:
            parts = _high16(even, FACTOR, GROUPS, LO // 2) + _high16(odd, FACTOR, GROUPS, LO // 2)
        elif LO == 1:
            parts = (even, odd)
        else:
            parts = (even * FACTOR, odd * FACTOR)
    elif HI == 16:
        parts = _high16(low, FACTOR, GROUPS, LO)
    elif LO == 1:
        parts = (low,)
    else:
        parts = (tl.reshape(low, (GROUPS * LO,)) * FACTOR,)
    return parts


@triton.jit
def part_columns(
    tile: tl.tensor,
    part: tl.constexpr,
    HI: tl.constexpr,
    LO: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """Column numbers of one of `rotated_parts`; with PAIRS of its even columns, for part < HI."""
    WIDTH: tl.constexpr = LO // 2 if PAIRS and LO > 1 else LO
    COUNT: tl.constexpr = GROUPS * LO // 2 if PAIRS else GROUPS * LO
    i = tl.arange(0, COUNT)
    if PAIRS and HI * LO == 1:
        col = i * 2
    elif PAIRS:
        col = (i // WIDTH) * (HI * LO) + part * LO + (i % WIDTH) * 2
    else:
        col = (i // WIDTH) * (HI * LO) + part * LO + i % WIDTH
    return tile * (GROUPS * HI * LO) + col
