# pyright: basic, reportGeneralTypeIssues=false, reportUnboundVariable=false
# Device functions are in Triton's language, which has no types; pyright does not evaluate constexpr branches.
"""GEMMs of groups of rows, each with its own weight, with group ends that are read on the device.

The host does not know how many rows or tiles a group has. It launches as many programs as there may be tiles; each
program finds its tile from the ends of the groups, or finds that it has none. Rows beyond the last end are one more
group, to which zeros are written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import INTERPRETED, architecture, cdiv, family, launch, next_power_of_2, stops
from ._operators import operator

_INTERPRETED = tl.constexpr(INTERPRETED)
_MOST_GROUPS = 4096  # each program reads all ends
_SUM_COLUMNS = 128
_FINISHED = 4  # rows


class Tile(NamedTuple):
    """Rows, columns and depth of a program's tile, warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# In 16 bits: with many rows per group, with few, and with unaligned rows. These are loaded number by number, and the
# threads of a large tile have no registers for so many addresses.
_ODD = Tile(64, 32, 32, 4, 3)
_TILES = {
    "sm_80": (Tile(128, 128, 64, 8, 3), Tile(32, 128, 64, 4, 3), _ODD),
    "sm_90": (Tile(128, 256, 64, 8, 3), Tile(64, 128, 64, 4, 4), _ODD),
    "sm_100": (Tile(128, 256, 64, 8, 3), Tile(64, 128, 64, 4, 4), _ODD),
    "gfx942": (Tile(128, 128, 32, 8, 2), Tile(32, 128, 32, 4, 2), Tile(64, 64, 32, 4, 2)),
    "interpreter": (Tile(32, 32, 32, 4, 1), Tile(16, 32, 32, 4, 1), Tile(16, 32, 32, 4, 1)),
}
# Without matrix instructions, a thread multiplies numbers in its registers.
_TILES_32 = (Tile(64, 64, 16, 4, 3), Tile(32, 64, 16, 4, 3), Tile(32, 64, 16, 4, 3))
_FEW = 64  # rows in a group


@triton.jit
def _group_of(tile, offsets, rows, groups, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Group, first row and end of a tile of rows; rows beyond the last end are an additional last group."""
    g = tl.arange(0, GROUPS)
    ends = tl.load(offsets + g, mask=g < groups, other=0).to(tl.int64)
    starts = tl.load(offsets + g - 1, mask=(g > 0) & (g <= groups), other=0).to(tl.int64)
    ends = tl.where(g < groups, tl.minimum(ends, rows), rows)
    starts = tl.where(g <= groups, tl.minimum(starts, rows), rows)
    tiles = tl.cdiv(tl.maximum(ends - starts, 0), BLOCK_M)
    before = tl.cumsum(tiles, 0) - tiles
    group = tl.sum((before + tiles <= tile).to(tl.int32), 0)
    mine = g == group
    first = tl.sum(tl.where(mine, starts + (tile - before) * BLOCK_M, 0), 0)
    return group, first, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def _multiplied(a, b, acc, PRECISION: tl.constexpr):
    if _INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    if PRECISION == "ieee":
        # Sums of sums: over thousands of rows, one running sum has three times the error of cuBLAS. The compiler would
        # merge an addition into one sum, but not this subtraction.
        return acc - tl.dot(-a, b, input_precision=PRECISION)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _grouped_gemm_kernel(
    x, weight, offsets, bias, order, y, rows, columns, depth, groups, x_stride, group_stride, column_stride,
    depth_stride, bias_stride,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    GROUPS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of y = x weight_g^T + bias_g. WIDE tiles of rows share tiles of columns in the cache."""
    across = tl.cdiv(columns, BLOCK_N)
    in_band = across.to(tl.int64) * WIDE
    band = tl.program_id(0) // in_band
    inner = tl.program_id(0) - band * in_band
    left = tl.minimum(tl.num_programs(0) // across - band * WIDE, WIDE)
    group, first, end = _group_of(band * WIDE + inner % left, offsets, rows, groups, GROUPS, BLOCK_M)
    if first >= end:
        return
    m = first + tl.arange(0, BLOCK_M)
    n = inner // left * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_inside, n_inside = (m < end)[:, None], (n < columns)[None, :]
    source = m
    if order is not None:
        source = tl.load(order + m, mask=m < end, other=0).to(tl.int64) // TOP_K
    a_at = x + (source[:, None] * x_stride + k[None, :])
    own = weight + group.to(tl.int64) * group_stride
    b_at = own + (n[None, :] * column_stride + k[:, None].to(tl.int64) * depth_stride)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in tl.range(0, tl.where(group < groups, depth, 0), BLOCK_K):
        if EVEN_K:
            a = tl.load(a_at, mask=m_inside, other=0.0)
        else:
            a = tl.load(a_at, mask=m_inside & (k[None, :] < depth - at), other=0.0)
        if EVEN_K and EVEN_N:
            b = tl.load(b_at)
        elif EVEN_K:
            b = tl.load(b_at, mask=n_inside, other=0.0)
        else:
            b = tl.load(b_at, mask=n_inside & (k[:, None] < depth - at), other=0.0)
        total = _multiplied(a, b, total, PRECISION)
        a_at += BLOCK_K
        b_at += tl.cast(depth_stride, tl.int64) * BLOCK_K
    if bias is not None:
        known = (n < columns) & (group < groups)
        total += tl.load(bias + group.to(tl.int64) * bias_stride + n, mask=known, other=0.0).to(tl.float32)[None, :]
    if EVEN_N:
        inside = m_inside
    else:
        inside = m_inside & n_inside
    tl.store(y + (m[:, None] * columns + n[None, :]), total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _grouped_outer_kernel(
    dy, x, offsets, order, out, rows, columns, depth, dy_stride, x_stride,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of dy_g^T x_g, [columns, depth]: tiles of rows of a group are multiplied one after the other."""
    down, across = tl.cdiv(columns, BLOCK_N), tl.cdiv(depth, BLOCK_K)
    inner = tl.program_id(0) // across
    group = inner // down
    end = tl.minimum(tl.load(offsets + group).to(tl.int64), rows)
    start = tl.load(offsets + group - 1, mask=group > 0, other=0).to(tl.int64)
    n = (inner % down).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = (tl.program_id(0) % across).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    m = tl.arange(0, BLOCK_M)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in tl.range(start, end, BLOCK_M):
        row = tl.cast(first, tl.int64) + m
        if EVEN_N:
            a = tl.load(dy + row * dy_stride + n, mask=row < end, other=0.0)
        else:
            a = tl.load(dy + row * dy_stride + n, mask=(row < end) & (n < columns), other=0.0)
        source = row
        if order is not None:
            source = tl.load(order + row, mask=row < end, other=0).to(tl.int64) // TOP_K
        if EVEN_K:
            b = tl.load(x + source * x_stride + k, mask=row < end, other=0.0)
        else:
            b = tl.load(x + source * x_stride + k, mask=(row < end) & (k < depth), other=0.0)
        total = _multiplied(tl.trans(a), b, total, PRECISION)
    line = tl.trans(n)
    at = (group.to(tl.int64) * columns + line) * depth + k
    if EVEN_N and EVEN_K:
        tl.store(out + at, total.to(out.dtype.element_ty))
    else:
        tl.store(out + at, total.to(out.dtype.element_ty), mask=(line < columns) & (k < depth))


@triton.jit
def _group_sums_kernel(
    x, offsets, out, rows, columns, x_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The sum of the rows of a group, for a block of columns."""
    across = tl.cdiv(columns, BLOCK_N)
    group = tl.program_id(0) // across
    end = tl.minimum(tl.load(offsets + group).to(tl.int64), rows)
    start = tl.load(offsets + group - 1, mask=group > 0, other=0).to(tl.int64)
    n = (tl.program_id(0) % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(start, end, BLOCK_M):
        row = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_M)[:, None]
        total += tl.load(x + row * x_stride + n, mask=(row < end) & (n < columns), other=0.0).to(tl.float32)
    at = group.to(tl.int64) * columns + n
    tl.store(out + at, tl.sum(total, 0)[None, :].to(out.dtype.element_ty), mask=n < columns)


@triton.jit
def _finish_rows_kernel(
    y, offsets, bias, rows, columns, groups, y_stride, bias_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Add each group's bias to its rows, and set rows without a group to zero; other values are unchanged."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    last = tl.load(offsets + groups - 1).to(tl.int64)
    own = m < last
    if bias is None:
        if tl.program_id(0).to(tl.int64) * BLOCK_M + BLOCK_M <= last:
            return
        written = (m < rows) & ~own
    else:
        g = tl.arange(0, GROUPS)
        ends = tl.load(offsets + g, mask=g < groups, other=0).to(tl.int64)
        group = tl.sum(((ends[None, :] <= m[:, None]) & (g < groups)[None, :]).to(tl.int64), 1)
        written = m < rows
    for first in tl.range(0, columns, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)[None, :]
        at = y + m[:, None] * y_stride + n
        inside = written[:, None] & (n < columns)
        known = inside & own[:, None]
        if bias is None:
            value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        else:
            value = tl.load(at, mask=known, other=0.0).to(tl.float32)
            value += tl.load(bias + group[:, None] * bias_stride + n, mask=known, other=0.0).to(tl.float32)
        tl.store(at, value.to(y.dtype.element_ty), mask=inside)


def _tile(x: Tensor, rows: int, groups: int, *sizes: int) -> Tile:
    tiles = _TILES[family(architecture(x.device))]
    if x.element_size() == 4 and not INTERPRETED:
        tiles = _TILES_32
    if any(n * x.element_size() % 16 for n in sizes):
        return tiles[2]
    return tiles[rows <= _FEW * groups]


def _precision(x: Tensor, tf32: bool) -> str:
    return "tf32" if tf32 or x.element_size() == 2 else "ieee"


def multiplies(*operands: Tensor) -> bool:
    """Whether the kernels support matrices of these dtypes."""
    first = operands[0].dtype
    return first in (torch.float32, torch.bfloat16, torch.float16) and all(t.dtype is first for t in operands)


def _checked(offsets: Tensor, **matrices: Tensor) -> None:
    if offsets.ndim != 1 or not 0 < len(offsets) <= _MOST_GROUPS:
        raise ValueError(f"expects the ends of 1 to {_MOST_GROUPS} groups, got {tuple(offsets.shape)}")
    if not multiplies(*matrices.values()):
        raise ValueError(f"expects matrices of one dtype, got {[str(t.dtype) for t in matrices.values()]}")
    for name, t in matrices.items():
        if t.ndim == 2 and t.stride(1) != 1 and t.shape[1] > 1 and len(t):
            raise ValueError(f"{name} must have contiguous rows, got strides {t.stride()}")


def _token_rows(x: Tensor, order: Tensor | None, top_k: int) -> int:
    """The number of rows that are multiplied."""
    if order is None:
        return len(x)
    if order.ndim != 1 or not order.is_contiguous() or len(order) != len(x) * top_k:
        raise ValueError(f"order must be contiguous [{len(x) * top_k}], got {tuple(order.shape)}")
    return len(order)


@operator("grouped_gemm", flops=lambda x, weight, *_, out_val, **__: 2 * out_val.numel() * weight.shape[2])
def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    order: Tensor | None = None,
    top_k: int = 1,
    tf32: bool = False,
) -> Tensor:
    """Return y_i = x_i weight_g^T + bias_g for row i of group g, and zeros for rows from the last of offsets on.

    x: [R, K], any row stride; weight: [G, N, K], any strides; offsets: [G] integers, non-decreasing; bias: [G, N]; y:
    [R, N] in the dtype of x, summed in float32 and rounded once. With an `order`, [R] integers, row i is token
    order[i] // top_k of x [R / top_k, K]. Source: Gale et al. 2022, arXiv:2211.15841.

    Args:
        x: rows of all groups, in order of groups.
        weight: weights of the groups.
        offsets: the end of each group's rows, clamped to the number of rows.
        bias: biases of the groups.
        order: the (token, expert) pair of each row.
        top_k: experts per token.
        tf32: whether operands in float32 are rounded to 19 bits.

    Raises:
        ValueError: for shapes that differ, dtypes other than 16 bits and float32, and rows that are not contiguous.
    """
    _checked(offsets, x=x, weight=weight)
    rows, depth = _token_rows(x, order, top_k), x.shape[1]
    groups, columns = weight.shape[:2]
    if weight.shape != (len(offsets), columns, depth) or (bias is not None and bias.shape != (groups, columns)):
        raise ValueError(f"expects weights [{len(offsets)}, N, {depth}] and biases [G, N], got {tuple(weight.shape)}")
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if stops():
        return y
    bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
    tile = _tile(x, rows, groups, columns, depth)
    launch(
        _grouped_gemm_kernel,
        (cdiv(rows, tile.rows) + groups + 1) * cdiv(columns, tile.columns) if rows else 0,
        (
            x, weight, offsets, bias, order, y, rows, columns, depth, groups, x.stride(0), *weight.stride(),
            1 if bias is None else bias.stride(0),
        ),
        {
            "TOP_K": top_k, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "WIDE": 8,
            "GROUPS": next_power_of_2(groups + 1), "EVEN_N": columns % tile.columns == 0,
            "EVEN_K": depth % tile.depth == 0, "PRECISION": _precision(x, tf32),
        },
        tile.warps,
        tile.stages,
    )  # fmt: skip
    return y


@operator("grouped_outer", flops=lambda dy, x, *_, **__: 2 * dy.numel() * x.shape[1])
def grouped_outer(
    dy: Tensor, x: Tensor, offsets: Tensor, *, order: Tensor | None = None, top_k: int = 1, tf32: bool = False
) -> Tensor:
    """Return dy_g^T x_g for each group, exact zeros for a group without rows: the gradients of the weights.

    dy: [R, N], x: [R, K], any row stride; offsets: [G] integers, non-decreasing; the result is [G, N, K] in the dtype
    of x, summed in float32, in the order of rows, and rounded once. Other arguments are those of `grouped_gemm`.

    Args:
        dy: rows of all groups, in order of groups.
        x: rows in the same order, or tokens.
        order: the (token, expert) pair of each row of dy.

    Raises:
        ValueError: for shapes that differ, dtypes other than 16 bits and float32, and rows that are not contiguous.
    """
    _checked(offsets, dy=dy, x=x)
    (rows, columns), depth, groups = dy.shape, x.shape[1], len(offsets)
    if _token_rows(x, order, top_k) != rows:
        raise ValueError(f"expects as many rows of dy as of x, got {rows} and {len(x)}")
    out = torch.empty((groups, columns, depth), dtype=x.dtype, device=x.device)
    if stops():
        return out
    tile = _tile(x, rows, 0, columns, depth)
    launch(
        _grouped_outer_kernel,
        groups * cdiv(columns, tile.rows) * cdiv(depth, tile.columns),
        (dy, x, offsets, order, out, rows, columns, depth, dy.stride(0), x.stride(0)),
        {
            "TOP_K": top_k, "BLOCK_M": tile.depth, "BLOCK_N": tile.rows, "BLOCK_K": tile.columns,
            "EVEN_N": columns % tile.rows == 0, "EVEN_K": depth % tile.columns == 0, "PRECISION": _precision(x, tf32),
        },
        tile.warps,
        tile.stages,
    )  # fmt: skip
    return out


@operator("group_sums")
def group_sums(x: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of the rows of each group, exact zeros for a group without rows: the gradients of the biases.

    x: [R, N], any row stride; offsets as in `grouped_gemm`; the result is [G, N] in the dtype of x, summed in float32
    and rounded once.

    Raises:
        ValueError: for dtypes other than 16 bits and float32, and rows that are not contiguous.
    """
    _checked(offsets, x=x)
    rows, columns = x.shape
    out = torch.empty((len(offsets), columns), dtype=x.dtype, device=x.device)
    if stops():
        return out
    launch(
        _group_sums_kernel,
        len(offsets) * cdiv(columns, _SUM_COLUMNS),
        (x, offsets, out, rows, columns, x.stride(0)),
        {"BLOCK_M": 16, "BLOCK_N": _SUM_COLUMNS},
    )
    return out


@operator("finish_rows", written=("y",))
def finish_rows_(y: Tensor, offsets: Tensor, bias: Tensor | None = None) -> None:
    """Add bias_g to the rows of group g, in place, and set rows from the last of offsets on to zero.

    y: [R, N], any row stride; offsets as in `grouped_gemm`; bias: [G, N].

    Args:
        y: rows of all groups, as written by a grouped GEMM without biases.
        bias: biases of the groups; without them the rows of groups are not read.

    Raises:
        ValueError: for shapes that differ, dtypes other than 16 bits and float32, and rows that are not contiguous.
    """
    _checked(offsets, y=y)
    (rows, columns), groups = y.shape, len(offsets)
    if bias is not None and bias.shape != (groups, columns):
        raise ValueError(f"expects biases {(groups, columns)}, got {tuple(bias.shape)}")
    if stops():
        return
    bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
    block = min(1024, next_power_of_2(columns))
    launch(
        _finish_rows_kernel,
        cdiv(rows, _FINISHED),
        (y, offsets, bias, rows, columns, groups, y.stride(0), 1 if bias is None else bias.stride(0)),
        {"BLOCK_M": _FINISHED, "BLOCK_N": block, "GROUPS": 1 if bias is None else next_power_of_2(groups)},
    )
