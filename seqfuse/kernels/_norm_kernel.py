# pyright: basic, reportGeneralTypeIssues=false, reportUnboundVariable=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportOptionalOperand=false
# Device functions are in Triton's language, which has no types; pyright does not evaluate constexpr branches.
"""The kernels of both norms: forward, backward, and sums over rows for rows too wide for the backward kernel.

In kernels that quantize their result, each program has a block of rows, and reads their columns in chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._device import drop_tile, rstd_of, two_sums
from ._quantize_kernel import quantize_tile
from .activations import apply, gradient, is_half
from .permute import gather_tile, row_of


@triton.jit
def _prologue(
    x, residual, bias, seed, stream, rows, col, x_stride, residual_stride, M, N,
    P: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr, COMPUTE: tl.constexpr,
    pairs=None, offsets=None, factors=None, last=0, TOP_K: tl.constexpr = 1,
):  # fmt: skip
    """A chunk of columns of the norm's input, its mask and columns; with `pairs`, sums rows of experts in x."""
    cols = col + tl.arange(0, BLOCK_N)
    columns = cols < N
    mask = (rows < M)[:, None] & columns[None, :]
    if pairs is not None:
        end = tl.load(offsets + last)
        z = gather_tile(x, pairs, factors, rows, cols[None, :], rows < M, mask, end, x_stride, BLOCK_N, TOP_K, COMPUTE)
    else:
        z = tl.load(x + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    if bias is not None:
        z += tl.load(bias + cols, mask=columns, other=0.0).to(COMPUTE)[None, :]
    if seed is not None:
        z = drop_tile(z, seed, rows, col, N, P, BLOCK_N, GROUPED)
    if residual is not None:
        z += tl.load(residual + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    if stream is not None:
        # The backward pass reads the stored stream, so the statistics are computed from it as well.
        z = z.to(stream.dtype.element_ty).to(COMPUTE)
    return tl.where(mask, z, 0.0), mask, cols, columns


@triton.jit
def _moments(z, mask, count, CENTERED: tl.constexpr):
    """Mean and sum of squared deviations of `count` columns; without CENTERED, 0 and the sum of squares."""
    if CENTERED:
        mean = tl.sum(z, 1) / count
        d = tl.where(mask, z - mean[:, None], 0.0)
        # Removes the rounding error of the mean: in a constant row it is all there is. If numbers are further from the
        # mean than the mean is from 0, it is less than the rounding error of their differences.
        rest, squares = two_sums(d, d * d)
        rest = rest / count
        left = rest * rest * count
        squares -= tl.where(left == float("inf"), 0.0, left)
        mean += tl.where(mean * mean * count < squares, 0.0, rest)
    else:
        mean = tl.zeros((z.shape[0],), z.dtype)
        squares = tl.sum(z * z, 1)
    return mean, squares


@triton.jit
def _moments_in_chunks(
    x, residual, bias, seed, stream, rows, x_stride, residual_stride, M, N,
    CENTERED: tl.constexpr, P: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPED: tl.constexpr, COMPUTE: tl.constexpr,
    pairs=None, offsets=None, factors=None, last=0, TOP_K: tl.constexpr = 1,
):  # fmt: skip
    """`_moments` of whole rows, a chunk of columns at a time."""
    mean = tl.zeros((BLOCK_M,), COMPUTE)
    squares = tl.zeros((BLOCK_M,), COMPUTE)
    for chunk in tl.range(0, CHUNKS):
        col = tl.cast(chunk, tl.int64) * BLOCK_N
        z, mask, _, _ = _prologue(
            x, residual, bias, seed, stream, rows, col, x_stride, residual_stride, M, N, P, BLOCK_N, GROUPED, COMPUTE,
            pairs, offsets, factors, last, TOP_K,
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
    return mean, squares


@triton.jit
def _gain(weight, cols, columns, ZERO_CENTERED: tl.constexpr, COMPUTE: tl.constexpr):
    gain = tl.load(weight + cols, mask=columns, other=0.0).to(COMPUTE)
    if ZERO_CENTERED:
        gain += 1.0
    return gain[None, :]


@triton.jit
def _normalized(
    z, mean, rstd, weight, beta, stream, at, cols, columns, mask, ZERO_CENTERED: tl.constexpr, COMPUTE: tl.constexpr
):
    """The norm's output; also writes the norm's input if it is a stream."""
    if stream is not None:
        tl.store(stream + at, z.to(stream.dtype.element_ty), mask=mask)
    out = (z - mean[:, None]) * rstd[:, None]
    if weight is not None:
        out *= _gain(weight, cols, columns, ZERO_CENTERED, COMPUTE)
    if beta is not None:
        out += tl.load(beta + cols, mask=columns, other=0.0).to(COMPUTE)[None, :]
    return out


@triton.jit
def _finish(
    z, mean, rstd, weight, beta, y, stream, rows, cols, columns, mask, N,
    ZERO_CENTERED: tl.constexpr, VALUE: tl.constexpr, ACT_P: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    at = rows[:, None] * N + cols[None, :]
    out = _normalized(z, mean, rstd, weight, beta, stream, at, cols, columns, mask, ZERO_CENTERED, COMPUTE)
    if VALUE is not None:
        out = apply(VALUE, out, ACT_P, is_half(y.dtype.element_ty))
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _norm_fwd_kernel(
    x, residual, bias, seed, pairs, offsets, factors, weight, beta, y, stream, mean_out, rstd_out, x_stride,
    residual_stride, last, M, N,
    EPS: tl.constexpr, CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, P: tl.constexpr, VALUE: tl.constexpr,
    ACT_P: tl.constexpr, TOP_K: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    N = tl.cast(N, tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    if CHUNKS == 1:
        z, mask, cols, columns = _prologue(
            x, residual, bias, seed, stream, rows, N * 0, x_stride, residual_stride, M, N, P, BLOCK_N, GROUPED, COMPUTE,
            pairs, offsets, factors, last, TOP_K,
        )  # fmt: skip
        mean, squares = _moments(z, mask, N.to(COMPUTE), CENTERED)
    else:
        mean, squares = _moments_in_chunks(
            x, residual, bias, seed, stream, rows, x_stride, residual_stride, M, N,
            CENTERED, P, CHUNKS, BLOCK_M, BLOCK_N, GROUPED, COMPUTE, pairs, offsets, factors, last, TOP_K,
        )  # fmt: skip
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
                COMPUTE, pairs, offsets, factors, last, TOP_K,
            )  # fmt: skip
            _finish(
                z, mean, rstd, weight, beta, y, stream, rows, cols, columns, mask, N, ZERO_CENTERED, VALUE, ACT_P,
                COMPUTE,
            )  # fmt: skip


@triton.jit
def _norm_codes_kernel(
    x, residual, bias, seed, weight, beta, stream, mean_out, rstd_out, codes, scale, largest, x_stride, residual_stride,
    M, N, own,
    EPS: tl.constexpr, CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, P: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr, KIND: tl.constexpr, SCALING: tl.constexpr,
    EXPONENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """A program's rows and `own` chunks of their columns: the result, rounded to `KIND`, is only written in 8 bits.

    Each program with the same rows computes their statistics.
    """
    N = tl.cast(N, tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(CHUNKS, own)
    part = pid % across
    row = pid // across * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    mean, squares = _moments_in_chunks(
        x, residual, bias, seed, stream, rows, x_stride, residual_stride, M, N,
        CENTERED, P, CHUNKS, BLOCK_M, BLOCK_N, GROUPED, tl.float32,
    )  # fmt: skip
    rstd = rstd_of(squares, N.to(tl.float32), EPS)
    if mean_out is not None:
        tl.store(mean_out + rows, mean, mask=(rows < M) & (part == 0))
    tl.store(rstd_out + rows, rstd, mask=(rows < M) & (part == 0))
    for i in tl.range(0, own):
        col = (part * own + i) * BLOCK_N
        z, mask, cols, columns = _prologue(
            x, residual, bias, seed, stream, rows, col, x_stride, residual_stride, M, N, P, BLOCK_N, GROUPED, tl.float32
        )
        at = rows[:, None] * N + cols[None, :]
        out = _normalized(z, mean, rstd, weight, beta, stream, at, cols, columns, mask, ZERO_CENTERED, tl.float32)
        quantize_tile(
            tl.where(mask, out, 0.0).to(KIND), scale, largest, None, None, codes[0], codes[1], codes[2], codes[3],
            row, col, M, N, SCALING, EXPONENT, POWER_OF_TWO, ROUNDED, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _gradients(
    dy, x, mean, rstd, weight, beta, rows, col, M, N, dy_stride, x_stride,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, VALUE: tl.constexpr, DERIVATIVE: tl.constexpr,
    OF_OUTPUT: tl.constexpr, ACT_P: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """For columns from `col` on: the gradient of the activation's input, the normalized row, and its gradient.

    Also returns the columns and the mask.
    """
    cols = col + tl.arange(0, BLOCK_N)
    columns = cols < N
    mask = (rows < M)[:, None] & columns[None, :]
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
    return d, xhat, g, cols, mask


@triton.jit
def _sums(a, b, CENTERED: tl.constexpr):
    """The sums along rows; only LayerNorm needs the second one."""
    if CENTERED:
        return two_sums(a, b)
    else:
        total = tl.sum(a, 1)
        return total, tl.zeros_like(total)


@triton.jit
def _means_in_chunks(
    dy, x, mean, rstd, weight, beta, rows, M, N, dy_stride, x_stride,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, VALUE: tl.constexpr, DERIVATIVE: tl.constexpr,
    OF_OUTPUT: tl.constexpr, ACT_P: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """E[g xhat] and E[g] of whole rows, a chunk of columns at a time."""
    by_xhat = tl.zeros((BLOCK_M,), COMPUTE)
    plain = tl.zeros((BLOCK_M,), COMPUTE)
    for chunk in tl.range(0, CHUNKS):
        _, xhat, g, _, _ = _gradients(
            dy, x, mean, rstd, weight, beta, rows, tl.cast(chunk, tl.int64) * BLOCK_N, M, N, dy_stride, x_stride,
            CENTERED, ZERO_CENTERED, VALUE, DERIVATIVE, OF_OUTPUT, ACT_P, BLOCK_N, COMPUTE,
        )  # fmt: skip
        one, other = _sums(g * xhat, g, CENTERED)
        by_xhat += one
        plain += other
    return by_xhat / N.to(COMPUTE), plain / N.to(COMPUTE)


@triton.jit
def _spread(
    g, xhat, by_xhat, plain, rstd, dstream, seed, dx, dbranch, rows, col, cols, mask, dstream_stride, N,
    CENTERED: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the norm's input and of dropout's input; returns the latter."""
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
        out = drop_tile(out, seed, rows, col, N, P, BLOCK_N, GROUPED)
    if dbranch is not None:
        tl.store(dbranch + at, out.to(dbranch.dtype.element_ty), mask=mask)
    return out


@triton.jit
def _spread_to_pairs(
    out, pairs, offsets, factors, source, dpairs, dots, rows, cols, mask, source_stride, last, M, N,
    TOP_K: tl.constexpr, PAIRS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the gathered rows, `out` times their factors.

    Returns `dots` plus the sums over these columns of `out` times each row of `source`.
    """
    end = tl.load(offsets + last)
    for j in tl.static_range(TOP_K):
        pair, row, kept = row_of(pairs, rows, j, rows < M, end, TOP_K)
        if source is not None:
            at = row[:, None] * source_stride + cols[None, :]
            seen = tl.load(source + at, mask=mask & kept[:, None], other=0.0).to(COMPUTE)
            sums = tl.sum(tl.where(mask & kept[:, None], out * seen, 0.0), 1)
            dots += tl.where(tl.arange(0, PAIRS)[None, :] == j, sums[:, None], 0.0)
        if dpairs is not None:
            value = out
            if factors is not None:
                value = out * tl.load(factors + pair, mask=kept, other=0.0).to(COMPUTE)[:, None]
            value = tl.where(kept[:, None], value, 0.0)
            tl.store(dpairs + row[:, None] * N + cols[None, :], value.to(dpairs.dtype.element_ty), mask=mask)
    return dots


@triton.jit
def _norm_bwd_kernel(
    dy, x, mean, rstd, weight, beta, dstream, seed, pairs, offsets, factors, source, dx, dbranch, dpairs, dfactors,
    partials, dy_stride, x_stride, dstream_stride, source_stride, last, M, N, steps,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, P: tl.constexpr, VALUE: tl.constexpr,
    DERIVATIVE: tl.constexpr, OF_OUTPUT: tl.constexpr, ACT_P: tl.constexpr, TOP_K: tl.constexpr, PAIRS: tl.constexpr,
    DWEIGHT: tl.constexpr, DBETA: tl.constexpr, DBIAS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUPED: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program's rows, block by block: dx = rstd (g - E[g] - xhat E[g xhat]) + dstream."""
    N = tl.cast(N, tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    # Sums over rows are kept per chunk, which requires an unrolled loop.
    KEPT: tl.constexpr = CHUNKS if DWEIGHT or DBETA or DBIAS else 1
    zeros = (tl.zeros((BLOCK_M, BLOCK_N), COMPUTE),) * KEPT
    dweight, dbeta, dbias = zeros, zeros, zeros
    for step in tl.range(0, steps, num_stages=STAGES):
        rows = (pid * steps + tl.cast(step, tl.int64)) * BLOCK_M + tl.arange(0, BLOCK_M)
        r = tl.load(rstd + rows, mask=rows < M, other=0.0)
        m = r
        if CENTERED:
            m = tl.load(mean + rows, mask=rows < M, other=0.0)
        by_xhat = tl.zeros((BLOCK_M,), COMPUTE)
        plain = tl.zeros((BLOCK_M,), COMPUTE)
        dots = tl.zeros((BLOCK_M, PAIRS), COMPUTE)
        if CHUNKS == KEPT:
            for chunk in tl.static_range(CHUNKS):
                d, xhat, g, cols, mask = _gradients(
                    dy, x, m, r, weight, beta, rows, N * 0 + chunk * BLOCK_N, M, N, dy_stride, x_stride,
                    CENTERED, ZERO_CENTERED, VALUE, DERIVATIVE, OF_OUTPUT, ACT_P, BLOCK_N, COMPUTE,
                )  # fmt: skip
                one, other = _sums(g * xhat, g, CENTERED)
                by_xhat += one
                plain += other
            by_xhat /= N.to(COMPUTE)
            plain /= N.to(COMPUTE)
            weights, betas, biases = (), (), ()
            for chunk in tl.static_range(CHUNKS):
                if CHUNKS > 1:  # read again from the cache, because it would not fit in registers
                    d, xhat, g, cols, mask = _gradients(
                        dy, x, m, r, weight, beta, rows, N * 0 + chunk * BLOCK_N, M, N, dy_stride, x_stride,
                        CENTERED, ZERO_CENTERED, VALUE, DERIVATIVE, OF_OUTPUT, ACT_P, BLOCK_N, COMPUTE,
                    )  # fmt: skip
                out = _spread(
                    g, xhat, by_xhat, plain, r, dstream, seed, dx, dbranch, rows, N * 0 + chunk * BLOCK_N, cols, mask,
                    dstream_stride, N, CENTERED, P, BLOCK_N, GROUPED, COMPUTE,
                )  # fmt: skip
                if pairs is not None:
                    dots = _spread_to_pairs(
                        out, pairs, offsets, factors, source, dpairs, dots, rows, cols, mask, source_stride, last, M, N,
                        TOP_K, PAIRS, COMPUTE,
                    )  # fmt: skip
                weights += (dweight[chunk] + d * xhat if DWEIGHT else dweight[chunk],)
                betas += (dbeta[chunk] + d if DBETA else dbeta[chunk],)
                biases += (dbias[chunk] + tl.where(mask, out, 0.0) if DBIAS else dbias[chunk],)
            dweight, dbeta, dbias = weights, betas, biases
        else:
            by_xhat, plain = _means_in_chunks(
                dy, x, m, r, weight, beta, rows, M, N, dy_stride, x_stride,
                CENTERED, ZERO_CENTERED, VALUE, DERIVATIVE, OF_OUTPUT, ACT_P, CHUNKS, BLOCK_M, BLOCK_N, COMPUTE,
            )  # fmt: skip
            for chunk in tl.range(0, CHUNKS):
                col = tl.cast(chunk, tl.int64) * BLOCK_N
                d, xhat, g, cols, mask = _gradients(
                    dy, x, m, r, weight, beta, rows, col, M, N, dy_stride, x_stride,
                    CENTERED, ZERO_CENTERED, VALUE, DERIVATIVE, OF_OUTPUT, ACT_P, BLOCK_N, COMPUTE,
                )  # fmt: skip
                out = _spread(
                    g, xhat, by_xhat, plain, r, dstream, seed, dx, dbranch, rows, col, cols, mask, dstream_stride, N,
                    CENTERED, P, BLOCK_N, GROUPED, COMPUTE,
                )  # fmt: skip
                if pairs is not None:
                    dots = _spread_to_pairs(
                        out, pairs, offsets, factors, source, dpairs, dots, rows, cols, mask, source_stride, last, M, N,
                        TOP_K, PAIRS, COMPUTE,
                    )  # fmt: skip
        if dfactors is not None:
            expert = tl.arange(0, PAIRS)[None, :]
            at = rows[:, None] * TOP_K + expert
            tl.store(dfactors + at, dots.to(dfactors.dtype.element_ty), mask=(rows < M)[:, None] & (expert < TOP_K))
    for chunk in tl.static_range(KEPT):
        cols = chunk * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
        place = partials
        if partials is not None:
            place = partials + pid * (DWEIGHT + DBETA + DBIAS) * N + cols
        if DWEIGHT:
            tl.store(place, tl.sum(dweight[chunk], 0), mask=cols < N)
            place += N
        if DBETA:
            tl.store(place, tl.sum(dbeta[chunk], 0), mask=cols < N)
            place += N
        if DBIAS:
            tl.store(place, tl.sum(dbias[chunk], 0), mask=cols < N)


@triton.jit
def _norm_codes_bwd_kernel(
    dy, x, mean, rstd, weight, dstream, seed, dx, partials, codes, scale, largest, dy_stride, x_stride, dstream_stride,
    M, N, own,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, P: tl.constexpr, DWEIGHT: tl.constexpr, DBETA: tl.constexpr,
    DBIAS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr,
    KIND: tl.constexpr, SCALING: tl.constexpr, EXPONENT: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """As `_norm_codes_kernel`: the branch's gradient in 8 bits, the stream's unquantized, and sums of these rows.

    partials: [blocks of rows, sums, N].
    """
    N = tl.cast(N, tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(CHUNKS, own)
    part = pid % across
    block = pid // across
    row = block * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    r = tl.load(rstd + rows, mask=rows < M, other=0.0)
    m = r
    if CENTERED:
        m = tl.load(mean + rows, mask=rows < M, other=0.0)
    by_xhat, plain = _means_in_chunks(
        dy, x, m, r, weight, None, rows, M, N, dy_stride, x_stride,
        CENTERED, ZERO_CENTERED, None, None, False, (), CHUNKS, BLOCK_M, BLOCK_N, tl.float32,
    )  # fmt: skip
    for i in tl.range(0, own):
        col = (part * own + i) * BLOCK_N
        d, xhat, g, cols, mask = _gradients(
            dy, x, m, r, weight, None, rows, col, M, N, dy_stride, x_stride,
            CENTERED, ZERO_CENTERED, None, None, False, (), BLOCK_N, tl.float32,
        )  # fmt: skip
        place = partials
        if partials is not None:
            place = partials + block * (DWEIGHT + DBETA + DBIAS) * N + cols
        if DWEIGHT:
            tl.store(place, tl.sum(d * xhat, 0), mask=cols < N)
            place += N
        if DBETA:
            tl.store(place, tl.sum(d, 0), mask=cols < N)
            place += N
        out = _spread(
            g, xhat, by_xhat, plain, r, dstream, seed, dx, None, rows, col, cols, mask, dstream_stride, N,
            CENTERED, P, BLOCK_N, GROUPED, tl.float32,
        )  # fmt: skip
        out = tl.where(mask, out, 0.0)
        if DBIAS:
            tl.store(place, tl.sum(out, 0), mask=cols < N)
        quantize_tile(
            out.to(KIND), scale, largest, None, None, codes[0], codes[1], codes[2], codes[3], row, col, M, N,
            SCALING, EXPONENT, POWER_OF_TWO, ROUNDED, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _norm_sums_kernel(
    dy, x, mean, rstd, weight, beta, dbranch, partials, dy_stride, x_stride, M, N, steps,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, VALUE: tl.constexpr, DERIVATIVE: tl.constexpr,
    OF_OUTPUT: tl.constexpr, ACT_P: tl.constexpr, DWEIGHT: tl.constexpr, DBETA: tl.constexpr, DBIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Only the sums over rows, a block of columns per program: for rows too wide to keep sums while computing dx."""
    N = tl.cast(N, tl.int64)
    across = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0).to(tl.int64)
    down = pid // across
    col = (pid % across) * BLOCK_N
    zero = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    dweight, dbeta, dbias = zero, zero, zero
    for step in tl.range(0, steps, num_stages=STAGES):
        rows = (down * steps + tl.cast(step, tl.int64)) * BLOCK_M + tl.arange(0, BLOCK_M)
        r = tl.load(rstd + rows, mask=rows < M, other=0.0)
        m = r
        if CENTERED:
            m = tl.load(mean + rows, mask=rows < M, other=0.0)
        d, xhat, _, cols, mask = _gradients(
            dy, x, m, r, weight, beta, rows, col, M, N, dy_stride, x_stride,
            CENTERED, ZERO_CENTERED, VALUE, DERIVATIVE, OF_OUTPUT, ACT_P, BLOCK_N, COMPUTE,
        )  # fmt: skip
        if DWEIGHT:
            dweight += d * xhat
        if DBETA:
            dbeta += d
        if DBIAS:
            dbias += tl.load(dbranch + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    cols = col + tl.arange(0, BLOCK_N)
    place = partials + down * (DWEIGHT + DBETA + DBIAS) * N + cols
    if DWEIGHT:
        tl.store(place, tl.sum(dweight, 0), mask=cols < N)
        place += N
    if DBETA:
        tl.store(place, tl.sum(dbeta, 0), mask=cols < N)
        place += N
    if DBIAS:
        tl.store(place, tl.sum(dbias, 0), mask=cols < N)
