# pyright: basic
# Device functions are Triton's language, which has no types.
"""The statistic of norms that each number of a row is multiplied by."""

import triton
import triton.language as tl


@triton.jit
def rstd_of(squares, count, EPS: tl.constexpr):
    """1 / sqrt(squares / count + eps), each step of float32 rounded to nearest.

    Compiled without, quotients are off by 2 units in the last place and roots by 1: the statistic would be by 4, the
    same for all of a row, which the error bound of float32 takes for a wrong divisor. It is one number for a row.
    """
    if squares.dtype == tl.float64:
        rstd = 1.0 / tl.sqrt(squares / count + EPS)
    else:
        deviation = tl.math.sqrt_rn(tl.math.div_rn(squares, count) + EPS)
        rstd = tl.math.div_rn(tl.full(deviation.shape, 1.0, tl.float32), deviation)
    return rstd
