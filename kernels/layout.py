"""Where bits lie: block-scale tiles and packed nibbles. numpy only, values are moved and never changed."""

from __future__ import annotations

from typing import Any, TypeVar

from qconvert.kernels.arrays import U8, NDArray, np

Byte = TypeVar("Byte", bound="np.generic")

#: Rows and columns of one scale tile (FORMATS: block-scale swizzle, cuBLAS 128x4 tiles).
TILE_ROWS, TILE_COLS = 128, 4


def up(x: int, m: int) -> int:
    """`x` rounded up to a multiple of `m`."""
    return -(-x // m) * m


def _one_byte(a: NDArray[Any], what: str) -> None:
    if a.dtype.itemsize != 1 or a.ndim != 2:
        raise ValueError(f"{what} must be 2-D with one-byte elements, got {a.dtype} {a.shape}")


def swizzle(scales: NDArray[Byte]) -> NDArray[Byte]:
    """Logical scales [R, C] -> stored [up(R,128), up(C,4)], zero padded.

    Element (r, c) lies at flat offset ((r//128)*T + c//4)*512 + (r%32)*16 + ((r%128)//32)*4 + c%4,
    with T = up(C,4)/4.
    Raises ValueError unless the array is 2-D with one-byte elements.
    """
    _one_byte(scales, "scales")
    rows, cols = scales.shape
    padded_rows, padded_cols = up(rows, TILE_ROWS), up(cols, TILE_COLS)
    padded = scales
    if (padded_rows, padded_cols) != scales.shape:
        padded = np.zeros((padded_rows, padded_cols), dtype=scales.dtype)
        padded[:rows, :cols] = scales
    # Axes: tile row, row // 32 in the tile, row % 32, tile column.
    tiles = _fours(padded).reshape(padded_rows // TILE_ROWS, 4, 32, padded_cols // TILE_COLS)
    return _moved(tiles, padded)


def _fours(scales: NDArray[Any]) -> NDArray[np.uint32]:
    """The columns of a tile, which stay together, as one element: numpy moves single bytes ten times slower."""
    return np.ascontiguousarray(scales).view(np.uint32)


def _moved(tiles: NDArray[np.uint32], like: NDArray[Byte]) -> NDArray[Byte]:
    """Second and fourth axis of tiles exchanged, which is the way there and the way back; as bytes again."""
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1)).view(like.dtype).reshape(like.shape)


def unswizzle(stored: NDArray[Byte], rows: int, cols: int) -> NDArray[Byte]:
    """The inverse of `swizzle`: stored [up(R,128), up(C,4)] -> logical [rows, cols].

    Raises ValueError when `stored` is not what `swizzle` makes of [rows, cols].
    """
    _one_byte(stored, "stored scales")
    want = (up(rows, TILE_ROWS), up(cols, TILE_COLS))
    if stored.shape != want:
        raise ValueError(f"stored scales are {stored.shape}, [{rows}, {cols}] needs {want}")
    tiles = _fours(stored).reshape(want[0] // TILE_ROWS, want[1] // TILE_COLS, 32, 4)
    return np.ascontiguousarray(_moved(tiles, stored)[:rows, :cols])


def swap_nibbles(packed: U8) -> U8:
    """High and low nibble of every byte exchanged."""
    out = np.ascontiguousarray(packed)
    # Eight bytes at a time: numpy's shifts of single bytes are not vectorised.
    wide = out.reshape(-1).view(np.uint64) if out.size % 8 == 0 else out
    low = wide.dtype.type(int.from_bytes(b"\x0f" * wide.itemsize, "little"))
    four = wide.dtype.type(4)
    swapped = wide >> four
    swapped &= low
    # Every step in a buffer that is there: a third one would push the first out of the cache.
    rest = wide & low
    rest <<= four
    swapped |= rest
    return np.asarray(swapped.view(np.uint8).reshape(packed.shape), np.uint8)


def pack_nibbles(codes: U8, *, high_first: bool) -> U8:
    """Codes 0..15 [..., K] -> bytes [..., K/2]; `high_first`: even columns in the high nibble.

    Raises ValueError when K is odd. Bits above the fourth are dropped.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"cannot pack an odd number of columns: {codes.shape[-1]}")
    even, odd = codes[..., 0::2] & np.uint8(15), codes[..., 1::2] & np.uint8(15)
    high, low = (even, odd) if high_first else (odd, even)
    return (high << np.uint8(4)) | low


def unpack_nibbles(packed: U8, *, high_first: bool) -> U8:
    """The inverse of `pack_nibbles`: bytes [..., K/2] -> codes 0..15 [..., K]."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.uint8)
    high, low = packed >> np.uint8(4), packed & np.uint8(15)
    codes[..., 0::2], codes[..., 1::2] = (high, low) if high_first else (low, high)
    return codes


def pack_six_bits(codes: U8) -> U8:
    """Codes 0..63 [..., K] -> [..., 3K/4]. FORMATS: asym_w4a8_int8, 6-bit.

    K/2 bytes of low nibbles (even column low), then K/4 bytes of the top two bits, column c in byte c//4 at bit
    2*(c%4). Raises ValueError unless K is a multiple of 4.
    """
    if codes.shape[-1] % 4:
        raise ValueError(f"six-bit packing needs a multiple of 4 columns, got {codes.shape[-1]}")
    top = (codes >> np.uint8(4)) & np.uint8(3)
    tops = top[..., 0::4] | (top[..., 1::4] << np.uint8(2)) | (top[..., 2::4] << np.uint8(4))
    tops |= top[..., 3::4] << np.uint8(6)
    return np.concatenate([pack_nibbles(codes, high_first=False), tops], axis=-1)


def unpack_six_bits(packed: U8) -> U8:
    """The inverse of `pack_six_bits`: [..., 3K/4] -> codes 0..63 [..., K]."""
    if packed.shape[-1] % 3:
        raise ValueError(f"six-bit rows have a multiple of 3 bytes, got {packed.shape[-1]}")
    half = packed.shape[-1] // 3 * 2
    codes = unpack_nibbles(packed[..., :half], high_first=False)
    for j in range(4):
        codes[..., j::4] |= ((packed[..., half:] >> np.uint8(2 * j)) & np.uint8(3)) << np.uint8(4)
    return codes
