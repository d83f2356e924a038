"""Sequential rounding after GPTQ (arXiv 2210.17323): each column's error is carried into the columns not yet rounded.

A layer's output error on inputs with second moments H = E[x x^T] is, per row, (w - q) H (w - q)^T. The paper rounds
the columns of W in turn and moves what remains of w so that the later columns make up for the error. With
Hinv = U^T U (U upper triangular), column j rounded to q leaves e = (w_j - q) / U_jj, and w_i loses e U_ji for i > j.

The columns of a block are rounded row by row, then what they leave is carried into all later columns, in one fixed
order (`qconvert.kernels.cpu.sequential`): no byte depends on threads or on how rows are split. The factor is LAPACK's,
so that codes can differ in a few places between machines.
"""

from __future__ import annotations

from collections.abc import Callable

from qconvert.kernels.arrays import F32, NDArray, np

#: Part of the mean of H's diagonal that is added to it (the paper's 1 %).
DAMPING = 0.01
#: Columns whose errors are carried among themselves first, then into all the rest.
BLOCK = 128
#: Triangles up to this size are inverted by LAPACK.
_SMALL = 256
#: Part of the largest mean square that rounding may have left where zero or symmetry belongs.
_SLACK = 1e-5

#: Rounds columns [a, a + B) of all rows. Given a, those columns w [R, B] as they stand and u [B, B]; leaves in w each
#: column's error over u's diagonal, and keeps the codes.
RoundBlock = Callable[[int, F32, F32], None]


class MomentsError(ValueError):
    """Second moments that no inputs have: what is wrong, what was found, what was expected."""

    def __init__(self, problem: str, found: str, expected: str) -> None:
        self.problem, self.found, self.expected = problem, found, expected
        super().__init__(f"{problem} (found {found}, expected {expected})")


def check_diagonal(diagonal: NDArray[np.floating]) -> None:
    """Mean squares [K] of inputs. Raises MomentsError when one is negative beyond rounding, or none is positive.

    Moments that were rotated have zeros that are a little less: a part in 10^5 of the largest is let pass.
    """
    largest = float(np.abs(diagonal).max(initial=0.0))
    worst = int(diagonal.argmin()) if diagonal.size else 0
    if diagonal.size and diagonal[worst] < -_SLACK * largest:
        raise MomentsError(
            "second moments are negative",
            f"a mean square of {float(diagonal[worst]):.4g} in column {worst}",
            "none below zero",
        )
    if not largest > 0:
        raise MomentsError(
            "second moments are all zero", f"{diagonal.size} mean squares of 0", "at least one above zero"
        )


def gptq_factor(moments: F32, damping: float = DAMPING) -> F32:
    """U [K, K], upper triangular, with U^T U the inverse of the damped moments [K, K].

    Raises MomentsError, a ValueError, when the moments are not symmetric, finite and (damped) positive definite.
    """
    h = moments.astype(np.float64)
    if h.ndim != 2 or h.shape[0] != h.shape[1]:
        raise MomentsError("second moments are not square", str(list(h.shape)), "[K, K]")
    bad = h.size - int(np.count_nonzero(np.isfinite(h)))
    if bad:
        raise MomentsError("second moments hold NaN or Inf", f"{bad} of {h.size} values", "finite numbers")
    diagonal = np.diag(h)
    check_diagonal(diagonal)
    slack = _SLACK * float(np.abs(diagonal).max(initial=0.0))
    uneven = np.abs(h - h.T) > slack + 1e-3 * np.abs(h)
    if uneven.any():
        i, j = (int(index) for index in np.unravel_index(int(uneven.argmax()), h.shape))
        raise MomentsError(
            "second moments are not symmetric",
            f"{h[i, j]:.4g} at [{i}, {j}] and {h[j, i]:.4g} at [{j}, {i}]",
            "the same number",
        )
    mean = float(diagonal.mean())
    h[np.diag_indices_from(h)] += damping * mean
    # H = V V^T with V upper triangular: the Cholesky factor of H with rows and columns in reverse, reversed back.
    try:
        v = np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError:
        raise MomentsError(
            "second moments are not positive definite",
            f"no Cholesky factor with {damping:.2g} of the mean diagonal added",
            "moments E[x x^T] of real inputs",
        ) from None
    return _inverse_upper(np.ascontiguousarray(v)).astype(np.float32)


def _inverse_upper(
    v: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Inverse of an upper triangle by halves: [[A, B], [0, C]]^-1 = [[A', -A' B C'], [0, C']]."""
    n = v.shape[0]
    if n <= _SMALL:
        return np.triu(np.linalg.inv(v))
    half = n // 2
    out = np.zeros_like(v)
    out[:half, :half] = _inverse_upper(v[:half, :half])
    out[half:, half:] = _inverse_upper(v[half:, half:])
    out[:half, half:] = -(out[:half, :half] @ v[:half, half:]) @ out[half:, half:]
    return out


def gptq_round(x: F32, factor: F32, round_block: RoundBlock, block: int = BLOCK) -> None:
    """Round x [R, K] column by column. `factor`: from `gptq_factor`; rows do not depend on each other."""
    from qconvert.kernels.cpu import sequential

    rest, factor = np.array(x, np.float32), np.ascontiguousarray(factor)
    k = rest.shape[1]
    for a in range(0, k, block):
        b = min(a + block, k)
        w = np.ascontiguousarray(rest[:, a:b])
        round_block(a, w, np.ascontiguousarray(factor[a:b, a:b]))
        sequential.carry_far(w, factor[a:b], b, rest)
