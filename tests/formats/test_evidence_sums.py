"""The sums that evidence rests on, against plain loops over the values they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qconvert.formats.evidence_nibbles import BLOCKS, _column_energy, _ranks
from qconvert.formats.evidence_scales import _explained, _levels, _swizzled_means
from qconvert.formats.reader import LayerReader
from qconvert.formats.sample import BAND, row_strengths, squared_scales
from qconvert.kernels.layout import swizzle, unswizzle

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
quick = settings(max_examples=25, deadline=None, database=None)


def e4m3(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return 0.0
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -size if code & 128 else size


SQUARES = np.array([e4m3(code) ** 2 for code in range(256)])


class Scales(LayerReader):
    """A layer of which there are block scales only."""

    def __init__(self, stored: np.ndarray[Any, Any], k: int) -> None:
        self.stored, self.k = stored, k

    def rows(self, suffix: str, a: int, b: int) -> np.ndarray[Any, Any]:
        assert suffix == "weight_scale"
        return self.stored[a:b].copy()


@quick
@given(
    bands=st.integers(1, 3),
    over=st.integers(0, BAND - 1),
    blocks=st.integers(1, 21),
    layout=st.sampled_from(["swizzled", "linear"]),
    seed=st.integers(0, 99),
)
def test_strength_of_rows_is_the_mean_square_of_their_scales(
    bands: int, over: int, blocks: int, layout: str, seed: int
) -> None:
    n = bands * BAND + over
    scales = np.random.default_rng(seed).integers(0, 256, (n, blocks)).astype(np.uint8)
    reader = Scales(swizzle(scales) if layout == "swizzled" else scales, blocks * 16)
    for a, b in ((0, n), ((bands - 1) * BAND, bands * BAND)):
        want = SQUARES[scales[a:b]]
        np.testing.assert_allclose(squared_scales(reader, a, b, {"scales": layout}), want, rtol=1e-6)
        got = row_strengths(reader, a, b, {"scales": layout})
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want.mean(axis=1), rtol=1e-5)


@pytest.mark.parametrize("blocks", [1, 4, BLOCKS - 1, BLOCKS, BLOCKS + 1, 2 * BLOCKS + 3])
@pytest.mark.parametrize("rows", [1, 5, BAND])
def test_energy_of_columns_is_the_weighted_sum_of_squares(rows: int, blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    packed = rng.integers(0, 256, (rows, blocks * 8)).astype(np.uint8)
    weights = rng.random((rows, blocks)).astype(np.float32)
    want = np.zeros(blocks * 16)
    for column in range(blocks * 16):
        codes = packed[:, column // 2] >> 4 if column % 2 == 0 else packed[:, column // 2]
        squares = np.array([E2M1[code & 7] ** 2 for code in codes.tolist()])
        want[column] = (squares * weights[:, column // 16]).sum()
    np.testing.assert_allclose(_column_energy(packed, weights), want, rtol=1e-5)


@quick
@given(blocks=st.integers(1, 17).map(lambda tiles: 4 * tiles), seed=st.integers(0, 99))
def test_means_of_swizzled_scales_are_those_after_moving_them(blocks: int, seed: int) -> None:
    raw = np.random.default_rng(seed).integers(0, 256, (BAND, blocks)).astype(np.uint8)
    rows, columns = _swizzled_means(_levels(raw, "mxfp8"))
    table = unswizzle(raw, BAND, blocks).astype(np.float64)
    np.testing.assert_allclose(rows, table.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(columns, table.mean(axis=0), rtol=1e-5)


def test_levels_are_logarithms() -> None:
    codes = np.arange(256, dtype=np.uint8)[None]
    want = np.log2(np.maximum(np.sqrt(SQUARES), 2.0**-9))
    np.testing.assert_allclose(_levels(codes, "nvfp4")[0], want, rtol=1e-6)


@quick
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), seed=st.integers(0, 99))
def test_explained_squares_are_those_of_the_additive_model(rows: int, columns: int, seed: int) -> None:
    table = np.random.default_rng(seed).standard_normal((rows, columns))
    table -= table.mean()
    by_row, by_column = table.mean(axis=1), table.mean(axis=0)
    # Least squares of rows and columns: each cell is the sum of its row's and its column's mean.
    want = ((by_row[:, None] + by_column) ** 2).sum()
    got = _explained(by_row.astype(np.float32), by_column.astype(np.float32))
    assert got == pytest.approx(want, rel=1e-4, abs=1e-9)


@quick
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=40, unique=True))
def test_ranks_count_what_is_smaller(values: list[int]) -> None:
    want = [sum(other < value for other in values) for value in values]
    both = np.array([values, values[::-1]], np.float64)
    np.testing.assert_array_equal(_ranks(both), [want, want[::-1]])
