# pyright: basic, reportGeneralTypeIssues=false
# Device functions are Triton's language, which has no types.
"""Dropout on the device: the mask is a function of a seed and a position, made again wherever it is needed.

Element i of the contiguous order takes word i & 3 of Philox4x32-10 at counter i >> 2 under the seed as key, and is
kept iff that word is at least floor(p 2^32).
Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (SC'11).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl


def threshold_and_scale(p: float, upscale: bool = True) -> tuple[int, float, bool]:
    """What `dropped` takes as `P`: the least word kept, the factor of what is kept, and whether nothing is."""
    if not 0 <= p <= 1:
        raise ValueError(f"p must be between 0 and 1, got {p}")
    if p == 1:
        return 0, 0.0, True  # no word reaches 2^32, which does not fit in one either
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
def dropped(value, seed, rows, col, width, P: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr):
    """A tile after dropout, `P` from `threshold_and_scale`."""
    if P[2]:
        return value * 0.0
    return masked(value, keep_mask(seed, rows, col, width, P[0], BLOCK_N, GROUPED), P)


@triton.jit
def masked(value, keep, P: tl.constexpr):
    """A product with 0 or the scale, as torch's: it keeps the sign of what is dropped, and NaN and Inf become NaN.

    The products come before the choice: a sum after it is then no fused multiply-add, whose bits are others.
    """
    if P[2]:
        return value * 0.0
    return tl.where(keep, value * P[1], value * 0.0)
