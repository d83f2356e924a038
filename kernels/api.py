"""What a backend computes: the one list of operations that formats may ask for.

Arrays cross this border as C-contiguous numpy arrays. Types numpy has no name for travel as their bits:
bf16 as uint16, every fp8 kind and e8m0 as uint8. `R` is the number of rows of the chunk at hand, `K` the in
features. All arithmetic is float32 with IEEE division and round-half-to-even, in the order of operations that
`reference.py` fixes: codes and scales are the same bits on every backend.

Weights handed to an encoder are finite (the caller checks with `amax`, which propagates NaN). Encoders never
return a non-finite scale; an all-zero row or block decodes to zeros.
"""

from __future__ import annotations

from typing import Literal, Protocol

from qconvert.kernels.arrays import F32, I8, U8, Raw, np

Quality = Literal["fast", "best"]

#: Largest finite magnitude of each fp8 kind.
FP8_MAX = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0}


class Backend(Protocol):
    """Operations on chunks of rows. Every method is pure: arguments are never changed."""

    name: str

    def to_f32(self, raw: Raw, dtype: str) -> F32:
        """Widen stored values (F64, F32, F16, BF16, F8_E4M3, F8_E5M2, F8_E8M0, I8, U8 bits) to float32."""
        ...

    def from_f32(self, x: F32, dtype: str) -> Raw:
        """Round float32 (half to even) to F32, F16, BF16 (overflow becomes inf), or saturating F8_E4M3, F8_E5M2."""
        ...

    def amax(self, x: F32) -> float:
        """Largest magnitude, 0.0 for an empty array; NaN if any element is NaN, inf if any is infinite."""
        ...

    def error(self, x: F32, y: F32) -> tuple[float, float]:
        """(sum x^2, sum (x-y)^2), accumulated in float64."""
        ...

    def rotate(self, x: F32, group: int) -> F32:
        """ConvRot: each run of `group` (a power of 4) columns times the regular Hadamard H_g/sqrt(g).

        Butterflies of H4 in float32, stage by stage (strides 1, 4, 16, ...), one multiplication by 1/sqrt(g)
        at the end (exact, a power of two). The same call undoes it. FORMATS: ConvRot rotation. Raises ValueError
        unless the group is a power of 4 (from 4) that divides K.
        """
        ...

    def fp8_scale(self, amax: float, dtype: str) -> np.float32:
        """float32(amax)/M, never below the least normal float32; 1.0 when amax is 0."""
        ...

    def fp8_fitted_scale(self, x: F32, scale: F32, dtype: str) -> F32:
        """[R]: of `scale` [R] and its multiples up to 31/16, in sixteenths, the one with the least squared error of x.

        The absmax scale clips nothing, nor do its multiples; they only move the grid within its octave. Never
        worse than 1.
        """
        ...

    def fp8_encode(self, x: F32, scale: F32, dtype: str) -> U8:
        """RNE(clamp(x / scale, +-M)); scale [] or [R] float32."""
        ...

    def fp8_decode(self, q: U8, scale: F32, dtype: str) -> F32:
        """float32(q) * scale; scale [] or [R]."""
        ...

    def int8_row_scale(self, x: F32, quality: Quality) -> F32:
        """[R]: max(amax_row/127, 1e-30), for x [R, K].

        `best`: the multiple of it, of nine from 0.96 to 1, with the least squared error; never worse than 1.
        """
        ...

    def int8_encode(self, x: F32, scale: F32) -> I8:
        """clamp(round_half_even(x / scale), -127, 127); scale [] or [R]."""
        ...

    def int8_decode(self, q: I8, scale: F32) -> F32:
        """float32(q) * scale; scale [] or [R]."""
        ...

    def nvfp4_tensor_scale(self, amax: float) -> np.float32:
        """float32(amax)/2688 (448 * 6), never below the least normal float32; 1.0 when amax is 0."""
        ...

    def nvfp4_encode(self, x: F32, tensor_scale: np.float32, quality: Quality) -> tuple[U8, U8]:
        """x [R,K], K % 16 == 0 -> codes [R,K/2] (even column in the HIGH nibble), block scales e4m3 [R,K/16].

        `fast`: b = e4m3(min(amax/6/t, 448)), what comfy-kitchen does with a float32 source. `best`: least
        squared error over the e4m3 codes from two below b to six above. Raises ValueError unless K % 16 == 0 and
        the tensor scale is a normal positive float32.
        """
        ...

    def nvfp4_decode(self, codes: U8, scales: U8, tensor_scale: np.float32) -> F32:
        """lut[code] * (t * b), in this order."""
        ...

    def mxfp8_encode(self, x: F32, quality: Quality) -> tuple[U8, U8]:
        """x [R,K], K % 32 == 0 -> e4m3 [R,K], e8m0 [R,K/32]: amax/448 rounded up to a power of two.

        `quality` makes no difference: e4m3 is a float, so a neighbouring exponent rounds every value the same way,
        except that one lower clips the largest and one higher loses subnormals. (Trying both changed no block of
        100,000 on Gaussian, Student-t and outlier weights.) Raises ValueError unless K % 32 == 0.
        """
        ...

    def mxfp8_decode(self, q: U8, scales: U8) -> F32:
        """float32(q) * 2^(e-127); byte 0 decodes to 0.0 as comfy-kitchen does."""
        ...

    def w4a4_encode(self, x: F32, quality: Quality) -> tuple[U8, F32]:
        """x [R,K] already rotated -> signed nibbles [R,K/2] (even column in the LOW nibble), scale [R].

        Scale max(amax_row/7, 1e-30), codes clamp(round_half_even(x/scale), -7, 7). `best`: the multiple of that
        scale, between 0.2 and 1.05, with the least squared error; never worse than 1. Raises ValueError for odd K.
        """
        ...

    def w4a4_decode(self, codes: U8, scale: F32) -> F32:
        """q * scale, still rotated."""
        ...

    def w4a8_codebook(self, sample: F32, group: int, quality: Quality) -> F32:
        """One ascending table [16] for a tensor, from sampled (rotated) rows [S,K]. Deterministic.

        `fast`: the usual table, made for Gaussian weights. `best`: a fit to the sample, where that is clearly
        better. A few dozen rows are enough (2^17 values are looked at).
        """
        ...

    def w4a8_encode(self, x: F32, group: int, codebook: F32 | None, quality: Quality) -> tuple[U8, U8, F32]:
        """x [R,K] rotated -> codes [R,K/2] (low nibble first), s_rel e4m3 [R,K/G], s_channel [R].

        Codes are the nearest value of the grid that the runtime computes, round(level*s_rel) clamped to +-127.
        Without a codebook the levels are -8..7. s_rel has a sign: a negative one mirrors the table's grid. Of both
        signs and the e4m3 codes from two below the absmax one to five above, each group takes the one with the
        least squared error through that grid; `best` also tries a second channel scale for each row. Raises
        ValueError unless K % 16 == 0, K % G == 0, G is 4, 8 or a multiple of 16, and the codebook is finite and
        ascending.
        """
        ...

    def w4a8_decode(
        self,
        codes: U8,
        s_rel: F32,
        s_channel: F32,
        codebook: F32 | None,
        group: int,
        bits: int,
        correction: F32 | None,
    ) -> F32:
        """clamp(round(v*s_rel), +-127) * s_channel (+ correction [R,K/G]), still rotated; bits 4 or 6.

        v = codebook[c], c-8 (4 bit without codebook) or c-32 (6 bit). codes: [R,K/2] or [R,3K/4] (K/2 bytes
        of low nibbles, then K/4 bytes of top two bits, column c in byte c//4 at bit 2*(c%4)).
        """
        ...

    def w6a8_encode(self, x: F32, group: int, quality: Quality) -> tuple[U8, U8, F32]:
        """The 6-bit form: codes [R,3K/4], s_rel e4m3 [R,K/G], s_channel [R]; levels -31..31.

        Searched as `w4a8_encode`. Raises ValueError unless K % 32 == 0, K % G == 0 and G is a multiple of 16.
        """
        ...
