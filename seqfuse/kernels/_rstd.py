# pyright: basic
# Device functions are Triton's language, which has no types.
"""The statistic of norms that each number of a row is multiplied by."""

import triton
import triton.language as tl


@triton.jit
def rstd_of(squares, count, EPS: tl.constexpr):
    """1 / sqrt(squares / count + eps), in float32 to 2 units in the last place.

    As they are compiled, quotients are off by 2 units and roots by 1: the statistic would be by 4, the same for all of
    a row, which the error bound of float32 takes for a wrong divisor. So what is approximated is corrected by what it
    is short of, without the calls that rounded quotients and roots make, around which registers are spilled.
    """
    if squares.dtype == tl.float64:
        rstd = 1.0 / tl.sqrt(squares / count + EPS)
    else:
        by = 1.0 / count
        mean = squares * by
        mean = _corrected(mean, tl.fma(-mean, count, squares) * by) + EPS
        rstd = tl.rsqrt(mean)
        rstd = _corrected(rstd, tl.fma(-(mean * rstd), rstd, 1.0) * (0.5 * rstd))
    return rstd


@triton.jit
def _corrected(value, short):
    return value + tl.where(short == short, short, 0.0)  # where the value is 0 or infinite, it is NaN
