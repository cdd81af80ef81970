# pyright: basic, reportGeneralTypeIssues=false
# Device functions are in Triton's language, which has no types.
"""Rows of tokens and experts: copied in order of experts, and summed for each token, with a factor for each row.

A pair is a token and one of its experts: number t top_k + j for expert j of token t. Pair p has row rows[p]; rows are a
permutation of pairs. Rows from the last of `offsets` on belong to no expert: zeros are written there, and nothing is
read. Sums are in float32 (float64 for float64), one after the other, without atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import cdiv, launch, next_power_of_2, stops
from ._operators import operator, viewed_as_rows
from .c.permute import decide_gather, decide_spread, sorted_pairs

__all__ = ["Pairs", "gather_rows", "sorted_pairs", "spread_rows"]


class Pairs(NamedTuple):
    """Where the rows of the experts of each token are.

    Args:
        rows: [T, top_k], contiguous, a permutation of 0 to T top_k - 1.
        offsets: [G] integers, the end of each expert's rows; only the last one is read.
        factors: [T, top_k], contiguous; one by default.
    """

    rows: Tensor
    offsets: Tensor
    factors: Tensor | None = None


_ELEMENTS = 2048  # that a program holds at a time
_COLUMNS = 1024  # of a row at a time, at most


@triton.jit
def _spread_kernel(
    x, rows, offsets, factors, other, y, sums, pairs, columns, last, x_stride, other_stride,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Some pairs: y[rows] = x[token] factors, and sums = the sum over columns of x[token] other[rows]."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pair < pairs
    row = tl.load(rows + pair, mask=inside, other=0).to(tl.int64)
    kept = inside & (row < tl.load(offsets + last))
    token = pair // TOP_K
    if factors is not None:
        factor = tl.load(factors + pair, mask=kept, other=0.0).to(COMPUTE)
    if sums is not None:
        total = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for first in tl.range(0, columns, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)[None, :]
        there = (column < columns) & inside[:, None]
        value = tl.load(x + token[:, None] * x_stride + column, mask=there & kept[:, None], other=0.0)
        if sums is not None:
            seen = tl.load(other + row[:, None] * other_stride + column, mask=there & kept[:, None], other=0.0)
            total += value.to(COMPUTE) * seen.to(COMPUTE)
        if y is not None:
            if factors is not None:
                value = tl.where(kept[:, None], value.to(COMPUTE) * factor[:, None], 0.0)
            tl.store(y + row[:, None] * tl.cast(columns, tl.int64) + column, value.to(y.dtype.element_ty), mask=there)
    if sums is not None:
        tl.store(sums + pair, tl.sum(total, 1).to(sums.dtype.element_ty), mask=inside)


@triton.jit
def row_of(rows, token, j, inside, end, TOP_K: tl.constexpr):
    """The pair of each token and its expert j, its row, and whether it was not dropped."""
    pair = token * TOP_K + j
    row = tl.load(rows + pair, mask=inside, other=0).to(tl.int64)
    return pair, row, inside & (row < end)


@triton.jit
def gather_tile(
    x, rows, factors, token, column, inside, there, end, x_stride, BLOCK_N: tl.constexpr, TOP_K: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """The sum over each token's pairs of x[rows] factors, in the columns of the mask `there`."""
    total = tl.zeros((token.shape[0], BLOCK_N), COMPUTE)
    for j in tl.static_range(TOP_K):
        pair, row, kept = row_of(rows, token, j, inside, end, TOP_K)
        value = tl.load(x + row[:, None] * x_stride + column, mask=there & kept[:, None], other=0.0).to(COMPUTE)
        if factors is not None:
            value = value * tl.load(factors + pair, mask=kept, other=0.0).to(COMPUTE)[:, None]
        total += tl.where(kept[:, None], value, 0.0)
    return total


@triton.jit
def _gather_kernel(
    x, rows, offsets, factors, y, tokens, columns, last, x_stride,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """A tile of tokens and columns: y = the sum over a token's pairs of x[rows] factors."""
    blocks = tl.cdiv(columns, BLOCK_N)
    token = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = token < tokens
    there = inside[:, None] & (column < columns)
    end = tl.load(offsets + last)
    total = gather_tile(
        x, rows, factors, token, column, inside, there, end, x_stride, BLOCK_N, TOP_K, COMPUTE
    )  # fmt: skip
    tl.store(y + token[:, None] * tl.cast(columns, tl.int64) + column, total.to(y.dtype.element_ty), mask=there)


def check_pairs(rows: Tensor, offsets: Tensor, factors: Tensor | None) -> None:
    """Raise ValueError unless the kernels support these pairs."""
    if not rows.is_contiguous() or rows.ndim != 2 or offsets.ndim != 1 or not offsets.numel():
        raise ValueError(f"rows must be contiguous [T, top_k] and offsets [G], got {rows.shape} and {offsets.shape}")
    if factors is not None and (factors.shape != rows.shape or not factors.is_contiguous()):
        raise ValueError(f"factors must be contiguous {tuple(rows.shape)}, got {tuple(factors.shape)}")


def _options(columns: int, top_k: int, dtype: torch.dtype) -> dict[str, Any]:
    block = min(_COLUMNS, next_power_of_2(columns))
    return {
        "TOP_K": top_k,
        "BLOCK_M": max(1, _ELEMENTS // block // (2 if dtype.itemsize > 2 else 1)),
        "BLOCK_N": block,
        "COMPUTE": tl.float64 if dtype is torch.float64 else tl.float32,
    }


@operator("spread_rows", in_c=decide_spread)
def spread_rows(
    x: Tensor,
    rows: Tensor,
    offsets: Tensor,
    *,
    factors: Tensor | None = None,
    other: Tensor | None = None,
    spread: bool = True,
    sums: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return y[rows[t, j]] = x[t] factors[t, j], zeros for dropped pairs; and sums over columns of x[t] other[row].

    x: [T, N], any row stride; rows: [T, top_k], a permutation of 0 to T top_k - 1; offsets: [G] integers; factors:
    [T, top_k]; other: [T top_k, N], any row stride; y: [T top_k, N] in the dtype of x; sums: [T, top_k], 0 for dropped
    pairs. Each value is multiplied in float32 (float64 for float64) and rounded once.

    Args:
        x: a row per token.
        rows: the row of each pair.
        offsets: the end of each expert's rows; only the last one is read.
        factors: factor of each pair, one by default.
        other: a row per pair, for the sums.
        spread: whether y is needed.
        sums: dtype of the sums, `None` if they are not needed.

    Raises:
        ValueError: for shapes that differ, or tensors that are not contiguous as required.
    """
    check_pairs(rows, offsets, factors)
    columns, (tokens, top_k) = x.shape[-1], rows.shape
    if len(x) != tokens or (sums is not None and (other is None or other.shape != (rows.numel(), columns))):
        raise ValueError(f"expects {tokens} rows of x and {rows.numel()} of what is summed, got {tuple(x.shape)}")
    y = torch.empty((rows.numel(), columns), dtype=x.dtype, device=x.device) if spread else None
    made = torch.empty((tokens, top_k), dtype=sums, device=x.device) if sums is not None else None
    if stops() or (y is None and made is None):
        return y, made
    x = viewed_as_rows("x", x, columns)
    other = viewed_as_rows("other", other, columns) if other is not None and sums is not None else None
    options = _options(columns, top_k, x.dtype)
    launch(
        _spread_kernel,
        cdiv(rows.numel(), options["BLOCK_M"]),
        (
            x, rows, offsets, factors, other, y, made, rows.numel(), columns, len(offsets) - 1, x.stride(0),
            1 if other is None else other.stride(0),
        ),
        options,
    )  # fmt: skip
    return y, made


@operator("gather_rows", in_c=decide_gather)
def gather_rows(x: Tensor, rows: Tensor, offsets: Tensor, *, factors: Tensor | None = None) -> Tensor:
    """Return y[t] = sum over j of factors[t, j] x[rows[t, j]], without dropped pairs, in the order of j.

    x: [T top_k, N], any row stride; y: [T, N] in the dtype of x, summed in float32 (float64 for float64) and rounded
    once. Other arguments are those of `spread_rows`.

    Raises:
        ValueError: for shapes that differ, or tensors that are not contiguous as required.
    """
    check_pairs(rows, offsets, factors)
    columns, (tokens, top_k) = x.shape[-1], rows.shape
    if len(x) != rows.numel():
        raise ValueError(f"expects {rows.numel()} rows of x, got {tuple(x.shape)}")
    y = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    if stops():
        return y
    x = viewed_as_rows("x", x, columns)
    options = _options(columns, top_k, x.dtype)
    launch(
        _gather_kernel,
        cdiv(tokens, options["BLOCK_M"]) * cdiv(columns, options["BLOCK_N"]),
        (x, rows, offsets, factors, y, tokens, columns, len(offsets) - 1, x.stride(0)),
        options,
    )
    return y
