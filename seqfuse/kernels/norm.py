# pyright: basic, reportGeneralTypeIssues=false, reportUnboundVariable=false
# Device functions are Triton's language: it has no types, and what a constexpr decides is not seen.
"""LayerNorm and RMSNorm, forward and backward, with the residual stream around them and an activation after them.

A row is normalized in registers where it fits, else read twice in chunks. The backward grid is persistent: a program
keeps its part of the parameters' gradients in registers from row to row and writes it once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._columns import column_sums
from ._launch import (
    architecture,
    as_rows,
    cdiv,
    columns_of,
    launch,
    next_power_of_2,
    processors,
    register_limit,
    stops,
)
from ._operators import bound, operator
from ._philox import dropped, threshold_and_scale
from ._rstd import rstd_of
from .activations import Activation, apply, gradient, is_composed, is_half
from .c import norm as c_norm


@triton.jit
def _prologue(
    x, residual, bias, seed, stream, rows, col, x_stride, residual_stride, M, N,
    P: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """What is normalized, of one chunk of columns, and where it is."""
    cols = col + tl.arange(0, BLOCK_N)
    columns = cols < N
    mask = (rows < M)[:, None] & columns[None, :]
    z = tl.load(x + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    if bias is not None:
        z += tl.load(bias + cols, mask=columns, other=0.0).to(COMPUTE)[None, :]
    if seed is not None:
        z = dropped(z, seed, rows, col, N, P, BLOCK_N, GROUPED)
    if residual is not None:
        z += tl.load(residual + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    if stream is not None:
        # The backward pass reads the stream as it is stored, so the statistics are those of the stored one.
        z = z.to(stream.dtype.element_ty).to(COMPUTE)
    return tl.where(mask, z, 0.0), mask, cols, columns


@triton.jit
def _moments(z, mask, count, CENTERED: tl.constexpr):
    """Mean and sum of squared deviations of `count` columns; without CENTERED, 0 and the sum of squares."""
    if CENTERED:
        mean = tl.sum(z, 1) / count
        d = tl.where(mask, z - mean[:, None], 0.0)
        # What rounding left in the mean is taken out again: of a constant row it is all there is.
        rest = tl.sum(d, 1) / count
        mean += rest
        left = rest * rest * count
        squares = tl.sum(d * d, 1) - tl.where(left == float("inf"), 0.0, left)
    else:
        mean = tl.zeros((z.shape[0],), z.dtype)
        squares = tl.sum(z * z, 1)
    return mean, squares


@triton.jit
def _gain(weight, cols, columns, ZERO_CENTERED: tl.constexpr, COMPUTE: tl.constexpr):
    gain = tl.load(weight + cols, mask=columns, other=0.0).to(COMPUTE)
    if ZERO_CENTERED:
        gain += 1.0
    return gain[None, :]


@triton.jit
def _finish(
    z, mean, rstd, weight, beta, y, stream, rows, cols, columns, mask, N,
    ZERO_CENTERED: tl.constexpr, VALUE: tl.constexpr, ACT_P: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    at = rows[:, None] * N + cols[None, :]
    if stream is not None:
        tl.store(stream + at, z.to(stream.dtype.element_ty), mask=mask)
    out = (z - mean[:, None]) * rstd[:, None]
    if weight is not None:
        out *= _gain(weight, cols, columns, ZERO_CENTERED, COMPUTE)
    if beta is not None:
        out += tl.load(beta + cols, mask=columns, other=0.0).to(COMPUTE)[None, :]
    if VALUE is not None:
        out = apply(VALUE, out, ACT_P, is_half(y.dtype.element_ty))
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _norm_fwd_kernel(
    x, residual, bias, seed, weight, beta, y, stream, mean_out, rstd_out, x_stride, residual_stride, M, N,
    EPS: tl.constexpr, CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, P: tl.constexpr, VALUE: tl.constexpr,
    ACT_P: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    N = tl.cast(N, tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    if CHUNKS == 1:
        z, mask, cols, columns = _prologue(
            x, residual, bias, seed, stream, rows, N * 0, x_stride, residual_stride, M, N, P, BLOCK_N, GROUPED, COMPUTE
        )
        mean, squares = _moments(z, mask, N.to(COMPUTE), CENTERED)
    else:
        mean = tl.zeros((BLOCK_M,), COMPUTE)
        squares = tl.zeros((BLOCK_M,), COMPUTE)
        for chunk in tl.range(0, CHUNKS):
            col = tl.cast(chunk, tl.int64) * BLOCK_N
            z, mask, cols, columns = _prologue(
                x, residual, bias, seed, stream, rows, col, x_stride, residual_stride, M, N, P, BLOCK_N, GROUPED,
                COMPUTE,
            )  # fmt: skip
            count = tl.minimum(N - col, BLOCK_N).to(COMPUTE)
            chunk_mean, chunk_squares = _moments(z, mask, count, CENTERED)
            squares += chunk_squares
            if CENTERED:
                # Chan, Golub and LeVeque 1979: no difference of large sums.
                seen = col.to(COMPUTE)
                delta = chunk_mean - mean
                squares += delta * delta * (seen * count / (seen + count))
                mean += delta * (count / (seen + count))
    rstd = rstd_of(squares, N.to(COMPUTE), EPS)
    if mean_out is not None:
        tl.store(mean_out + rows, mean, mask=rows < M)
    tl.store(rstd_out + rows, rstd, mask=rows < M)
    if CHUNKS == 1:
        _finish(
            z, mean, rstd, weight, beta, y, stream, rows, cols, columns, mask, N, ZERO_CENTERED, VALUE, ACT_P, COMPUTE
        )
    else:
        for chunk in tl.range(0, CHUNKS):
            col = tl.cast(chunk, tl.int64) * BLOCK_N
            z, mask, cols, columns = _prologue(
                x, residual, bias, seed, stream, rows, col, x_stride, residual_stride, M, N, P, BLOCK_N, GROUPED,
                COMPUTE,
            )  # fmt: skip
            _finish(
                z, mean, rstd, weight, beta, y, stream, rows, cols, columns, mask, N, ZERO_CENTERED, VALUE, ACT_P,
                COMPUTE,
            )  # fmt: skip


@triton.jit
def _gradients(
    dy, x, mean, rstd, weight, beta, rows, cols, columns, mask, dy_stride, x_stride,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, VALUE: tl.constexpr, DERIVATIVE: tl.constexpr,
    OF_OUTPUT: tl.constexpr, ACT_P: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The gradient of what the activation took, the normalized row, and the gradient of that."""
    d = tl.load(dy + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    xhat = tl.load(x + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    if CENTERED:
        xhat -= mean[:, None]
    xhat = tl.where(mask, xhat * rstd[:, None], 0.0)
    if weight is not None:
        gain = _gain(weight, cols, columns, ZERO_CENTERED, COMPUTE)
    if VALUE is not None:
        HALF: tl.constexpr = is_half(dy.dtype.element_ty, x.dtype.element_ty)
        pre = xhat
        if weight is not None:
            pre *= gain
        if beta is not None:
            pre += tl.load(beta + cols, mask=columns, other=0.0).to(COMPUTE)[None, :]
        if OF_OUTPUT:
            pre = apply(VALUE, pre, ACT_P, HALF)
        d = tl.where(mask, gradient(DERIVATIVE, d, pre, ACT_P, HALF), 0.0)
    g = d
    if weight is not None:
        g = d * gain
    return d, xhat, g


@triton.jit
def _spread(
    g, xhat, by_xhat, plain, rstd, dstream, seed, dx, dbranch, rows, col, cols, mask, dstream_stride, N,
    CENTERED: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the normalized row and of what dropout took; returns the latter."""
    out = g - xhat * by_xhat[:, None]
    if CENTERED:
        out -= plain[:, None]
    out *= rstd[:, None]
    if dstream is not None:
        at = rows[:, None] * dstream_stride + cols[None, :]
        out += tl.load(dstream + at, mask=mask, other=0.0).to(COMPUTE)
    at = rows[:, None] * N + cols[None, :]
    if dx is not None:
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
    if seed is not None:
        out = dropped(out, seed, rows, col, N, P, BLOCK_N, GROUPED)
    if dbranch is not None:
        tl.store(dbranch + at, out.to(dbranch.dtype.element_ty), mask=mask)
    return out


@triton.jit
def _norm_bwd_kernel(
    dy, x, mean, rstd, weight, beta, dstream, seed, dx, dbranch, partials, dy_stride, x_stride, dstream_stride, M, N,
    steps,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, P: tl.constexpr, VALUE: tl.constexpr,
    DERIVATIVE: tl.constexpr, OF_OUTPUT: tl.constexpr, ACT_P: tl.constexpr, DWEIGHT: tl.constexpr,
    DBETA: tl.constexpr, DBIAS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPED: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of one program, one after the other: dx = rstd (g - E[g] - xhat E[g xhat]) + dstream."""
    N = tl.cast(N, tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    zero = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    dweight, dbeta, dbias = zero, zero, zero
    for step in tl.range(0, steps, num_stages=STAGES):
        rows = (pid * steps + tl.cast(step, tl.int64)) * BLOCK_M + tl.arange(0, BLOCK_M)
        r = tl.load(rstd + rows, mask=rows < M, other=0.0)
        m = r
        if CENTERED:
            m = tl.load(mean + rows, mask=rows < M, other=0.0)
        if CHUNKS == 1:
            cols = N * 0 + tl.arange(0, BLOCK_N)
            columns = cols < N
            mask = (rows < M)[:, None] & columns[None, :]
            d, xhat, g = _gradients(
                dy, x, m, r, weight, beta, rows, cols, columns, mask, dy_stride, x_stride,
                CENTERED, ZERO_CENTERED, VALUE, DERIVATIVE, OF_OUTPUT, ACT_P, COMPUTE,
            )  # fmt: skip
            by_xhat = tl.sum(g * xhat, 1) / N.to(COMPUTE)
            plain = tl.sum(g, 1) / N.to(COMPUTE)
            out = _spread(
                g, xhat, by_xhat, plain, r, dstream, seed, dx, dbranch, rows, N * 0, cols, mask, dstream_stride, N,
                CENTERED, P, BLOCK_N, GROUPED, COMPUTE,
            )  # fmt: skip
            if DWEIGHT:
                dweight += d * xhat
            if DBETA:
                dbeta += d
            if DBIAS:
                dbias += tl.where(mask, out, 0.0)
        else:
            by_xhat = tl.zeros((BLOCK_M,), COMPUTE)
            plain = tl.zeros((BLOCK_M,), COMPUTE)
            for chunk in tl.range(0, CHUNKS):
                cols = tl.cast(chunk, tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
                columns = cols < N
                mask = (rows < M)[:, None] & columns[None, :]
                d, xhat, g = _gradients(
                    dy, x, m, r, weight, beta, rows, cols, columns, mask, dy_stride, x_stride,
                    CENTERED, ZERO_CENTERED, VALUE, DERIVATIVE, OF_OUTPUT, ACT_P, COMPUTE,
                )  # fmt: skip
                by_xhat += tl.sum(g * xhat, 1)
                plain += tl.sum(g, 1)
            by_xhat = by_xhat / N.to(COMPUTE)
            plain = plain / N.to(COMPUTE)
            for chunk in tl.range(0, CHUNKS):
                col = tl.cast(chunk, tl.int64) * BLOCK_N
                cols = col + tl.arange(0, BLOCK_N)
                columns = cols < N
                mask = (rows < M)[:, None] & columns[None, :]
                d, xhat, g = _gradients(
                    dy, x, m, r, weight, beta, rows, cols, columns, mask, dy_stride, x_stride,
                    CENTERED, ZERO_CENTERED, VALUE, DERIVATIVE, OF_OUTPUT, ACT_P, COMPUTE,
                )  # fmt: skip
                _spread(
                    g, xhat, by_xhat, plain, r, dstream, seed, dx, dbranch, rows, col, cols, mask, dstream_stride, N,
                    CENTERED, P, BLOCK_N, GROUPED, COMPUTE,
                )  # fmt: skip
    cols = tl.arange(0, BLOCK_N).to(tl.int64)
    place = partials
    if partials is not None:
        place = partials + pid * (DWEIGHT + DBETA + DBIAS) * N + cols
    if DWEIGHT:
        tl.store(place, tl.sum(dweight, 0), mask=cols < N)
        place += N
    if DBETA:
        tl.store(place, tl.sum(dbeta, 0), mask=cols < N)
        place += N
    if DBIAS:
        tl.store(place, tl.sum(dbias, 0), mask=cols < N)


@triton.jit
def _norm_sums_kernel(
    dy, x, mean, rstd, weight, beta, dbranch, partials, dy_stride, x_stride, M, N, steps,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, VALUE: tl.constexpr, DERIVATIVE: tl.constexpr,
    OF_OUTPUT: tl.constexpr, ACT_P: tl.constexpr, DWEIGHT: tl.constexpr, DBETA: tl.constexpr, DBIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sums over rows alone, a block of columns per program: for rows too wide to keep them while making dx."""
    N = tl.cast(N, tl.int64)
    across = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0).to(tl.int64)
    down = pid // across
    cols = (pid % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = cols < N
    zero = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    dweight, dbeta, dbias = zero, zero, zero
    for step in tl.range(0, steps, num_stages=STAGES):
        rows = (down * steps + tl.cast(step, tl.int64)) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & columns[None, :]
        r = tl.load(rstd + rows, mask=rows < M, other=0.0)
        m = r
        if CENTERED:
            m = tl.load(mean + rows, mask=rows < M, other=0.0)
        d, xhat, _ = _gradients(
            dy, x, m, r, weight, beta, rows, cols, columns, mask, dy_stride, x_stride,
            CENTERED, ZERO_CENTERED, VALUE, DERIVATIVE, OF_OUTPUT, ACT_P, COMPUTE,
        )  # fmt: skip
        if DWEIGHT:
            dweight += d * xhat
        if DBETA:
            dbeta += d
        if DBIAS:
            dbias += tl.load(dbranch + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    place = partials + down * (DWEIGHT + DBETA + DBIAS) * N + cols
    if DWEIGHT:
        tl.store(place, tl.sum(dweight, 0), mask=columns)
        place += N
    if DBETA:
        tl.store(place, tl.sum(dbeta, 0), mask=columns)
        place += N
    if DBIAS:
        tl.store(place, tl.sum(dbias, 0), mask=columns)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A launch: rows and columns at a time, chunks of a row, warps, stages of the pipeline.

    A persistent grid has `per_processor` programs for each processor; `registers` as in `register_limit`.
    """

    m: int
    n: int
    chunks: int
    num_warps: int
    stages: int = 1
    per_processor: int = 1
    registers: int | None = None


def forward_tile(columns: int, itemsize: int) -> Tile:
    """A row in registers, 16 or 32 numbers per thread, up to 16,384 columns; chunks of a quarter beyond.

    Where rows are not aligned each number has an address of its own, which costs two registers, and half as many fit.
    """
    widest = (4096 if itemsize == 8 else 16384) // (2 if columns % 16 else 1)
    n = next_power_of_2(columns)
    chunk = n if n <= widest else widest // 4
    m = max(1, (1024 if columns % 16 else 2048) // chunk)
    warps, limited = max(4, min(16, m * chunk // 512)), chunk < n and columns % 16 == 0 and itemsize < 8
    return Tile(m, chunk, cdiv(columns, chunk), warps, registers=128 if limited else None)


def backward_tile(columns: int, itemsize: int, heavy: bool) -> Tile:
    """As forward, with two tensors and two or three running sums in registers up to 8,192 columns.

    Up to half of it where an activation or dropout, `heavy`, needs registers as well, and again where rows are not
    aligned, of which both need twice as many threads. What is light and small has as many programs as a processor's
    registers hold at a time, 24 warps of 80.
    """
    widest = (2048 if itemsize == 8 else 8192) // (2 if heavy else 1) // (2 if columns % 16 else 1)
    n = next_power_of_2(columns)
    chunk = n if n <= widest else widest // 2
    m = max(1, 1024 // chunk)
    stages = 1 if heavy or itemsize == 8 or columns % 16 or chunk * itemsize > 16384 else 2
    crowded = heavy and columns % 16 > 0
    warps = max(4, min(16, m * chunk // (128 if crowded else 256)))
    if stages == 2 and m * chunk <= 2048:
        return Tile(m, chunk, cdiv(columns, chunk), warps, stages, 24 // warps, 80)
    parts = cdiv(columns, chunk)
    # With fewer than all registers, or room for more programs than there are, the compiler spills.
    if crowded and parts > 1 and warps == 8:
        return Tile(m, chunk, parts, warps, stages, 1, 255)
    limited = crowded or (heavy and (warps == 16 or (parts > 1 and itemsize < 8)))
    return Tile(m, chunk, parts, warps, stages, max(1, min(8, 8192 // columns)), 128 if limited else None)


def sums_tile(itemsize: int, act: Any = None) -> Tile:
    """16 bytes per thread and tensor, half as many behind several activations, which need registers."""
    rows = 16 // itemsize // (2 if act is not None and is_composed(act) else 1)
    return Tile(max(1, rows), 128, 1, 4, 1 if itemsize == 8 else 2)


def _compute(x: Tensor) -> tuple[torch.dtype, Any]:
    return (torch.float64, tl.float64) if x.dtype is torch.float64 else (torch.float32, tl.float32)


def _same(name: str, tensor: Tensor | None, x: Tensor) -> Tensor | None:
    if tensor is None:
        return None
    if tensor.shape != x.shape:
        raise ValueError(f"{name} must have shape {tuple(x.shape)}, got {tuple(tensor.shape)}")
    return as_rows(name, tensor, x.shape[-1])


class Normed(NamedTuple):
    """Results of a forward pass; `stream` is what was normalized, where a prologue made it."""

    y: Tensor  # [*, N]
    stream: Tensor | None  # [*, N]
    mean: Tensor | None  # [*] float32
    rstd: Tensor  # [*] float32


class NormGradients(NamedTuple):
    """Results of a backward pass; `None` for what was not asked for.

    `dx` is the gradient of what was normalized, and so of the residual; `dbranch` that of what dropout took.
    """

    dx: Tensor | None  # [*, N]
    dweight: Tensor | None  # [N]
    dbias: Tensor | None  # [N]
    dbranch: Tensor | None  # [*, N]
    dpre_bias: Tensor | None  # [N]


@operator("norm", in_c=c_norm.decide_forward)
def norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool = True,
    zero_centered: bool = False,
    pre_bias: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    residual: Tensor | None = None,
    act: Activation | None = None,
    dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
) -> Normed:
    """LayerNorm: y = act((z - E[z]) rstd gain + bias), rstd = (Var[z] + eps)^-1/2; RMSNorm has 0 for E[z].

    z = x, or dropout(x + pre_bias) + residual as far as these are given. x, residual, y, stream: [*, N]; parameters:
    [N]; statistics: [*] float32, float64 for a float64 x. Everything is computed in that dtype.
    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.

    Args:
        x: what is normalized, or what the prologue starts from.
        weight: gain, `None` for one.
        bias: added to the product, or `None`.
        eps: added to the variance, or the mean square.
        centered: whether it is LayerNorm.
        zero_centered: whether the gain is 1 + weight.
        pre_bias: added to x first.
        seed: of dropout after that, int64, on the device.
        p: probability of dropping.
        residual: added last; with any of these the sum is returned as `stream`.
        act: an activation of the result.
        dtype: of y; x's by default.
        stream_dtype: of the stream; x's by default.

    Raises:
        ValueError: for rows of more than 65,536 columns, shapes that differ, or strides that need a copy.
    """
    N = columns_of(x, weight=weight, bias=bias, pre_bias=pre_bias)
    compute, triton_compute = _compute(x)
    prologue = pre_bias is not None or seed is not None or residual is not None
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    stream = torch.empty(x.shape, dtype=stream_dtype or x.dtype, device=x.device) if prologue else None
    mean = torch.empty(x.shape[:-1], dtype=compute, device=x.device) if centered else None
    rstd = torch.empty(x.shape[:-1], dtype=compute, device=x.device)
    if stops():
        return Normed(y, stream, mean, rstd)
    source, other = as_rows("x", x, N), _same("residual", residual, x)
    M = source.shape[0]
    tile = forward_tile(N, x.element_size())
    launch(
        _norm_fwd_kernel,
        cdiv(M, tile.m),
        (
            source, other, pre_bias, None if seed is None else seed.view(1), weight, bias, y, stream, mean, rstd,
            source.stride(0), 0 if other is None else other.stride(0), M, N,
        ),
        {
            "EPS": float(eps), "CENTERED": centered, "ZERO_CENTERED": zero_centered,
            "P": None if seed is None else threshold_and_scale(p), "VALUE": None if act is None else act.value,
            "ACT_P": () if act is None else tuple(act.P), "CHUNKS": tile.chunks, "BLOCK_M": tile.m, "BLOCK_N": tile.n,
            "GROUPED": N % 4 == 0, "COMPUTE": triton_compute,
        },
        tile.num_warps,
        **register_limit(tile.registers, architecture(x.device)),
    )  # fmt: skip
    return Normed(y, stream, mean, rstd)


@operator("norm_backward", in_c=c_norm.decide_backward)
def norm_bwd(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    zero_centered: bool = False,
    dstream: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    act: Activation | None = None,
    dx: bool = True,
    dweight: torch.dtype | None = None,
    dbias: torch.dtype | None = None,
    dbranch: bool = False,
    dpre_bias: torch.dtype | None = None,
    branch_dtype: torch.dtype | None = None,
) -> NormGradients:
    """LayerNorm's gradients: dx = rstd (g - E[g] - xhat E[g xhat]) + dstream; RMSNorm has 0 for E[g].

    g = dy act' gain, xhat the normalized row. Sums over rows are made in a fixed order: the same bits each time.
    Beyond 8,192 columns they take a second pass over dy and x; half of that with an activation or dropout, and half
    again for rows that are not aligned.

    Args:
        dy: gradient of the result.
        x: what was normalized: the stream, where there was a prologue.
        mean: as saved; `None` for RMSNorm.
        rstd: as saved.
        weight: gain, `None` for one.
        bias: read where there is an activation.
        zero_centered: as in the forward.
        dstream: gradient of the stream itself, added to dx.
        seed: of the prologue's dropout.
        p: as in the forward.
        act: as in the forward.
        dx: whether dx is wanted.
        dweight: dtype of the weight's gradient, `None` where it is not wanted.
        dbias: dtype of the bias's gradient, `None` where it is not wanted.
        dbranch: whether the gradient of what dropout took is wanted.
        dpre_bias: dtype of the gradient of the prologue's bias, the sum of dbranch over rows.
        branch_dtype: of dbranch; that of dx by default.

    Raises:
        ValueError: for rows of more than 65,536 columns, shapes that differ, or strides that need a copy.
    """
    N = columns_of(x, weight=weight, bias=bias)
    centered, device = mean is not None, x.device
    wanted = (dweight, dbias, dpre_bias)
    out = torch.empty(x.shape, dtype=x.dtype, device=device) if dx else None
    branch = torch.empty(x.shape, dtype=branch_dtype or x.dtype, device=device) if dbranch else None
    totals = [None if kind is None else torch.empty(N, dtype=kind, device=device) for kind in wanted]
    results = NormGradients(out, totals[0], totals[1], branch, totals[2])
    if stops():
        return results
    summed = [total for total in totals if total is not None]
    d, source, added = _same("dy", dy, x), as_rows("x", x, N), _same("dstream", dstream, x)
    assert d is not None
    M = source.shape[0]
    if M == 0:
        for total in summed:
            total.zero_()
        return results
    compute, triton_compute = _compute(x)
    tile = backward_tile(N, x.element_size(), act is not None or seed is not None)
    wide = tile.chunks > 1
    if wide and dpre_bias is not None and branch is None:
        # A wide row's bias gradient is summed from the branch's gradient, so that one has to be written.
        branch = torch.empty(x.shape, dtype=branch_dtype or x.dtype, device=device)
    shared = (d, source, None if mean is None else mean.reshape(-1), rstd.reshape(-1), weight, bias)
    of_norm = {"CENTERED": centered, "ZERO_CENTERED": zero_centered}
    of_act = {
        "VALUE": None if act is None else act.value, "DERIVATIVE": None if act is None else act.derivative,
        "OF_OUTPUT": act is not None and act.reads == "output", "ACT_P": () if act is None else tuple(act.P),
    }  # fmt: skip
    flags = {name: kind is not None for name, kind in zip(("DWEIGHT", "DBETA", "DBIAS"), wanted, strict=True)}
    programs = min(cdiv(M, tile.m), processors(device) * tile.per_processor)
    steps = cdiv(cdiv(M, tile.m), programs)
    programs = cdiv(cdiv(M, tile.m), steps)
    partials: Tensor | None = None
    in_rows = flags if not wide else dict.fromkeys(flags, False)
    sums = len(summed)
    if not wide and sums:
        partials = torch.empty(programs * sums * N, dtype=compute, device=device)
    if dx or branch is not None or (sums and not wide):
        launch(
            _norm_bwd_kernel,
            programs,
            (
                *shared, added, None if seed is None else seed.view(1), out, branch, partials, d.stride(0),
                source.stride(0), 0 if added is None else added.stride(0), M, N, steps,
            ),
            {
                **of_norm, "P": None if seed is None else threshold_and_scale(p), **of_act, **in_rows,
                "CHUNKS": tile.chunks, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "GROUPED": N % 4 == 0,
                "COMPUTE": triton_compute, "STAGES": tile.stages,
            },
            tile.num_warps,
            **register_limit(tile.registers, architecture(device)),
        )  # fmt: skip
    if wide and sums:
        s = sums_tile(x.element_size(), act)
        across = cdiv(N, s.n)
        programs = max(1, min(cdiv(M, s.m), 8 * processors(device) // across))
        steps = cdiv(cdiv(M, s.m), programs)
        programs = cdiv(cdiv(M, s.m), steps)
        partials = torch.empty(programs * sums * N, dtype=compute, device=device)
        launch(
            _norm_sums_kernel,
            programs * across,
            (*shared, branch, partials, d.stride(0), source.stride(0), M, N, steps),
            {
                **of_norm, **of_act, **flags, "BLOCK_M": s.m, "BLOCK_N": s.n, "COMPUTE": triton_compute,
                "STAGES": s.stages,
            },
            s.num_warps,
        )  # fmt: skip
    if partials is not None:
        column_sums(partials[: programs * sums * N].view(programs, sums * N), N, *summed)
    return results


def backward_of(
    centered: bool,
    zero_centered: bool,
    dx: bool,
    dweight: torch.dtype | None,
    dbias: torch.dtype | None,
    weighted: bool,
    added: bool,
) -> Callable[..., NormGradients]:
    """A norm's backward, with nothing around the norm, of everything but tensors.

    It is a function of dy, x, the mean of one that is `centered`, rstd, the weight of a `weighted` one and dstream if
    it is `added`, and copies those that do not fit.
    """
    names = ["dy", "x", *["mean"] * centered, "rstd", *["weight"] * weighted, *["dstream"] * added]
    rest: dict[str, Any] = {"mean": None, "weight": None, "zero_centered": zero_centered, "dx": dx}
    rest |= {"dweight": dweight, "dbias": dbias}
    return bound(norm_bwd, lambda *given: rest | dict(zip(names, given, strict=True)))
