# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
# Device functions are Triton's language, which has no types.
"""Sums over rows in two launches: partial sums per program by whichever kernel has the rows, and this one after it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._launch import cdiv, launch, next_power_of_2

_BLOCK_N = 64


@triton.jit
def _column_sums_kernel(
    partials, outs, R, N, stride, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Sums of a block of columns, stored where they belong: output i has PARTS[i] N columns, one after the other."""
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
        columns: what the lengths of the results are multiples of.
        outs: written with the first columns of N, the next ones and so on.
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
