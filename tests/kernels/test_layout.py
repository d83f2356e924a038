from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qconvert.kernels import layout


@settings(max_examples=40, deadline=None, database=None)
@given(rows=st.integers(1, 300), cols=st.integers(1, 23), signed=st.booleans(), seed=st.integers(0, 1000))
def test_swizzle_is_the_documented_formula(rows: int, cols: int, signed: bool, seed: int) -> None:
    dtype = np.int8 if signed else np.uint8
    scales = np.random.default_rng(seed).integers(1, 127, (rows, cols)).astype(dtype)
    stored = layout.swizzle(scales)
    tiles = layout.up(cols, 4) // 4
    assert stored.shape == (layout.up(rows, 128), tiles * 4)
    assert stored.dtype == dtype
    want = np.zeros(stored.size, dtype)
    for r in range(rows):
        for c in range(cols):
            at = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            want[at] = scales[r, c]
    np.testing.assert_array_equal(stored.reshape(-1), want)
    np.testing.assert_array_equal(layout.unswizzle(stored, rows, cols), scales)


def test_swizzle_by_row_chunks() -> None:
    """Chunks of 128 rows can be written one after the other."""
    scales = np.random.default_rng(0).integers(0, 255, (300, 9)).astype(np.uint8)
    parts = [layout.swizzle(scales[r : r + 128]) for r in (0, 128, 256)]
    np.testing.assert_array_equal(np.concatenate(parts), layout.swizzle(scales))


@pytest.mark.parametrize("rows", [0, 128, 256])
@pytest.mark.parametrize("cols", [0, 4, 12])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_swizzle_of_scales_anywhere_in_memory(rows: int, cols: int, at: int) -> None:
    """Whole tiles need no padding; what is given stays as it is, at odd addresses and as a cut of a larger array."""
    held = np.random.default_rng(4).integers(1, 127, rows * cols * 2 + at).astype(np.int8)
    wide = held[at:].reshape(rows, cols * 2)
    for scales in (held[at : at + rows * cols].reshape(rows, cols), wide[:, cols:], wide[:, ::2]):
        before = scales.copy()
        stored = layout.swizzle(scales)
        assert stored.shape == (rows, cols)
        assert stored.dtype == np.int8
        assert not np.shares_memory(stored, scales)
        np.testing.assert_array_equal(stored, layout.swizzle(before))
        back = layout.unswizzle(stored, rows, cols)
        np.testing.assert_array_equal(back, before)
        np.testing.assert_array_equal(scales, before)
        np.testing.assert_array_equal(layout.unswizzle(np.asfortranarray(stored), rows, cols), before)


def test_swizzle_refuses() -> None:
    with pytest.raises(ValueError, match="one-byte"):
        layout.swizzle(np.zeros((4, 4), np.float32))
    with pytest.raises(ValueError, match="one-byte"):
        layout.swizzle(np.zeros(4, np.uint8))
    with pytest.raises(ValueError, match="needs"):
        layout.unswizzle(np.zeros((128, 8), np.uint8), 128, 4)


def test_nibbles() -> None:
    codes = np.random.default_rng(1).integers(0, 16, (5, 14)).astype(np.uint8)
    high, low = (layout.pack_nibbles(codes, high_first=h) for h in (True, False))
    np.testing.assert_array_equal(high, codes[:, 0::2] * 16 + codes[:, 1::2])
    np.testing.assert_array_equal(low, codes[:, 1::2] * 16 + codes[:, 0::2])
    np.testing.assert_array_equal(layout.swap_nibbles(high), low)
    np.testing.assert_array_equal(layout.swap_nibbles(low), high)
    np.testing.assert_array_equal(layout.unpack_nibbles(high, high_first=True), codes)
    np.testing.assert_array_equal(layout.unpack_nibbles(low, high_first=False), codes)
    with pytest.raises(ValueError, match="odd"):
        layout.pack_nibbles(codes[:, :3], high_first=True)


@pytest.mark.parametrize("shape", [(0,), (1,), (8,), (7, 3), (5, 16), (3, 0), (2, 3, 4)])
def test_nibbles_of_any_number_of_bytes_are_swapped(shape: tuple[int, ...]) -> None:
    packed = np.random.default_rng(3).integers(0, 256, (*shape, 2)).astype(np.uint8)
    # Bytes that lie side by side, and every other one.
    for bytes_ in (np.ascontiguousarray(packed[..., 0]), packed[..., 0]):
        before = bytes_.copy()
        swapped = layout.swap_nibbles(bytes_)
        assert swapped.shape == shape
        np.testing.assert_array_equal(swapped, bytes_ % 16 * 16 + bytes_ // 16)
        np.testing.assert_array_equal(bytes_, before)


@settings(max_examples=40, deadline=None, database=None)
@given(size=st.integers(0, 70), at=st.integers(0, 9), step=st.integers(1, 3), seed=st.integers(0, 99))
def test_nibbles_at_any_address_are_swapped(size: int, at: int, step: int, seed: int) -> None:
    held = np.random.default_rng(seed).integers(0, 256, at + size * step).astype(np.uint8)
    bytes_ = held[at::step]
    want = [(byte & 15) * 16 + byte // 16 for byte in bytes_.tolist()]
    held.setflags(write=False)
    assert layout.swap_nibbles(bytes_).tolist() == want


def test_six_bits() -> None:
    codes = np.random.default_rng(2).integers(0, 64, (5, 32)).astype(np.uint8)
    packed = layout.pack_six_bits(codes)
    assert packed.shape == (5, 24)
    for c in range(32):
        low = (packed[:, c // 2] >> (4 * (c % 2))) & 15
        top = (packed[:, 16 + c // 4] >> (2 * (c % 4))) & 3
        np.testing.assert_array_equal(low + 16 * top, codes[:, c])
    np.testing.assert_array_equal(layout.unpack_six_bits(packed), codes)
    with pytest.raises(ValueError, match="multiple of 4"):
        layout.pack_six_bits(codes[:, :6])
    with pytest.raises(ValueError, match="multiple of 3"):
        layout.unpack_six_bits(packed[:, :7])


def test_up() -> None:
    assert [layout.up(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
