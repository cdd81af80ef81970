# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
# Device functions are in Triton's language, which has no types.
"""Device functions that several kernels call, and the kernel that adds partial sums of other kernels' programs.

Dropout: the mask is a function of a seed and a position, recomputed in each kernel. Element i of the contiguous
order reads word i & 3 of Philox4x32-10 at counter i >> 2 with the seed as key, and is kept iff that word is at least
floor(p 2^32). Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (SC'11).

Sums over rows: each program of a kernel writes partial sums, and one launch after it adds them.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ._launch import INTERPRETED, cdiv, launch, next_power_of_2
from .activations import tanh

_HALF_LN_2 = tl.constexpr(math.log(2) / 2)
_BLOCK_N = 64
# The interpreter runs reductions with other functions than its built-in ones element by element.
_INTERPRETED = tl.constexpr(INTERPRETED)


def threshold_and_scale(p: float, upscale: bool = True) -> tuple[int, float, bool]:
    """The argument `P` of `drop_tile`: the least word kept, the factor of kept elements, and whether none is kept."""
    if not 0 <= p <= 1:
        raise ValueError(f"p must be between 0 and 1, got {p}")
    if p == 1:
        return 0, 0.0, True  # the threshold would be 2^32, which does not fit in a word
    return math.floor(p * 2**32), 1 / (1 - p) if upscale else 1.0, False


@triton.jit
def keep_mask(seed, rows, col, width, THRESHOLD: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr):
    """Whether to keep each element of a tile of a matrix of `width` columns, bool [BLOCK_M, BLOCK_N].

    seed: a pointer to one int64; rows: int64 [BLOCK_M]; col: the tile's first column, int64. GROUPED needs `width` and
    `col` to be multiples of 4: four neighbors then share one counter, a quarter of the work.
    """
    key = tl.load(seed)
    if GROUPED:
        quads = rows[:, None] * (width // 4) + (col // 4 + tl.arange(0, BLOCK_N // 4))[None, :]
        w0, w1, w2, w3 = tl.randint4x(key, quads)
        even = tl.join(w0.to(tl.uint32, bitcast=True), w2.to(tl.uint32, bitcast=True))
        odd = tl.join(w1.to(tl.uint32, bitcast=True), w3.to(tl.uint32, bitcast=True))
        word = tl.reshape(tl.join(even, odd), (rows.shape[0], BLOCK_N))
    else:
        index = rows[:, None] * width + (col + tl.arange(0, BLOCK_N))[None, :]
        w0, w1, w2, w3 = tl.randint4x(key, index >> 2)
        lane = index & 3
        word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
        word = word.to(tl.uint32, bitcast=True)
    return word >= THRESHOLD


@triton.jit
def drop_tile(value, seed, rows, col, width, P: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr):
    """A tile after dropout, with `P` from `threshold_and_scale`."""
    if P[2]:
        return value * 0.0
    return mask_tile(value, keep_mask(seed, rows, col, width, P[0], BLOCK_N, GROUPED), P)


@triton.jit
def mask_tile(value, keep, P: tl.constexpr):
    """Multiply by 0 or the scale, as torch does: dropped elements keep their sign, and NaN and Inf become NaN.

    Both multiplications come before the selection, so that a following sum is not fused with one, which changes bits.
    """
    if P[2]:
        return value * 0.0
    return tl.where(keep, value * P[1], value * 0.0)


@triton.jit
def rstd_of(squares, count, EPS: tl.constexpr):
    """1 / sqrt(squares / count + eps), in float32 to 2 units in the last place.

    Compiled quotients are off by up to 2 units and roots by 1. The statistic would be off by 4, in the same way for a
    whole row, which the error bound of float32 rejects as a wrong divisor. So approximations are corrected by their
    residual, without the calls of exactly rounded division and square root, around which registers are spilled.
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
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def two_sums(a, b):
    """The sums of two tiles along their rows, in one reduction, so that warps synchronize once."""
    if _INTERPRETED:
        return tl.sum(a, 1), tl.sum(b, 1)
    else:
        return tl.reduce((a, b), 1, _both)


@triton.jit
def _corrected(value, short):
    return value + tl.where(short == short, short, 0.0)  # `short` is NaN where the value is 0 or infinite


@triton.jit
def bend(twice, FULL: tl.constexpr):
    """tanh(x), given 2 x log2(e): to all digits of float32 if FULL, otherwise to an absolute error of 6e-8.

    Scores are then off by 6e-8 of the soft-cap, which is visible in 16 bits from soft-caps of some ten thousand on.
    """
    if FULL:
        return tanh(twice * _HALF_LN_2)
    # tanh x = 1 - 2 / (e^2x + 1)
    return 1.0 - 2.0 / (tl.exp2(twice) + 1.0)


@triton.jit
def _column_sums_kernel(
    partials, outs, R, N, stride, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Sums of a block of columns, stored in their outputs: output i has PARTS[i] N columns, one after the other."""
    N = tl.cast(N, tl.int64)
    block = tl.program_id(0).to(tl.int64)
    first = N * 0
    begin, end, which = first, first, first
    for i in tl.static_range(len(PARTS)):
        width = N * PARTS[i]
        blocks = tl.cdiv(width, BLOCK_N)
        here = (block >= 0) & (block < blocks)
        begin = tl.where(here, first + block * BLOCK_N, begin)
        end = tl.where(here, first + width, end)
        which = tl.where(here, i, which)
        block -= blocks
        first += width
    cols = begin + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_R, BLOCK_N), partials.dtype.element_ty)
    for row in tl.range(0, R, BLOCK_R):
        rows = row + tl.arange(0, BLOCK_R)
        at = rows.to(tl.int64)[:, None] * stride + cols[None, :]
        total += tl.load(partials + at, mask=(rows < R)[:, None] & (cols < end)[None, :], other=0.0)
    sums = tl.sum(total, 0)
    first = N * 0
    for i in tl.static_range(len(PARTS)):
        if which == i:
            tl.store(outs[i] + (cols - first), sums.to(outs[i].dtype.element_ty), mask=cols < end)
        first += N * PARTS[i]


def column_sums(partials: Tensor, columns: int, *outs: Tensor) -> None:
    """Sum the rows of partial sums in a fixed order and round once, in one launch.

    Args:
        partials: [R, N] float32 or float64, any row stride.
        columns: a common divisor of the lengths of the outputs.
        outs: the outputs; the first one gets the first columns of N, the second one the next columns, and so on.
    """
    rows = partials.shape[0]
    launch(
        _column_sums_kernel,
        sum(cdiv(out.numel(), _BLOCK_N) for out in outs),
        (partials, outs, rows, columns, partials.stride(0)),
        {
            "PARTS": tuple(out.numel() // columns for out in outs),
            "BLOCK_R": min(64, next_power_of_2(rows)),
            "BLOCK_N": _BLOCK_N,
        },
    )
