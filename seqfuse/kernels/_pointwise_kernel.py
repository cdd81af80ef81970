# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: RUF005
# Device functions are in Triton's language: it has no types, and + joins tuples.
"""The kernels of chains: a tile of rows and columns passes through all steps in registers.

Steps may also store the tile, or sum it over rows. A packed [gate; up] input is two tiles, which become one; in its
gradient one tile becomes two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._device import drop_tile
from ._quantize_kernel import quantize_tile
from .activations import apply, entry, gradient, is_half


@triton.jit
def _placed(rows, col, M, width, BLOCK_N: tl.constexpr):
    """The position of a tile: rows, columns and mask; and columns and mask of two interleaved parts."""
    cols = col + tl.arange(0, BLOCK_N)
    pairs = 2 * col + tl.arange(0, 2 * BLOCK_N)
    inside = (rows < M)[:, None]
    mask, pair_mask = inside & (cols < width)[None, :], inside & (pairs < 2 * width)[None, :]
    return rows, cols, mask, pairs, pair_mask, width


@triton.jit
def _loaded(pointer, at, stride, TILES: tl.constexpr, COMPUTE: tl.constexpr, IN_TURN: tl.constexpr):
    """A tile of each of the equal parts of a row."""
    rows, cols, mask, pairs, pair_mask, width = at
    if IN_TURN and TILES == 2:
        both = tl.load(pointer + rows[:, None] * stride + pairs[None, :], mask=pair_mask, other=0.0).to(COMPUTE)
        one, two = tl.split(both.reshape(rows.shape[0], cols.shape[0], 2))
        tiles = (one, two)
    else:
        tiles = ()
        for j in tl.static_range(TILES):
            at_j = rows[:, None] * stride + (cols + j * width)[None, :]
            tiles = tiles + (tl.load(pointer + at_j, mask=mask, other=0.0).to(COMPUTE),)
    return tiles


@triton.jit
def _stored(pointer, tiles, at, IN_TURN: tl.constexpr):
    rows, cols, mask, pairs, pair_mask, width = at
    if IN_TURN and len(tiles) == 2:
        both = tl.interleave(tiles[0], tiles[1]).to(pointer.dtype.element_ty)
        tl.store(pointer + rows[:, None] * (width * 2) + pairs[None, :], both, mask=pair_mask)
    else:
        for j in tl.static_range(len(tiles)):
            at_j = rows[:, None] * (width * len(tiles)) + (cols + j * width)[None, :]
            tl.store(pointer + at_j, tiles[j].to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _act(tiles, VALUE: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr):
    results = ()
    for j in tl.static_range(len(tiles)):
        results = results + (apply(VALUE, tiles[j], P, HALF),)
    return results


@triton.jit
def _dact(tiles, saved, DERIVATIVE: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr):
    results = ()
    for j in tl.static_range(len(tiles)):
        results = results + (gradient(DERIVATIVE, tiles[j], saved[j], P, HALF),)
    return results


@triton.jit
def _gate_and_up(tiles, j: tl.constexpr, SWAPPED: tl.constexpr):
    """Tile j of the gate and of up."""
    if SWAPPED:
        return tiles[j + len(tiles) // 2], tiles[j]
    else:
        return tiles[j], tiles[j + len(tiles) // 2]


@triton.jit
def _gated(tiles, FNS: tl.constexpr, P: tl.constexpr, SWAPPED: tl.constexpr, HALF: tl.constexpr):
    results = ()
    for j in tl.static_range(len(tiles) // 2):
        gate, up = _gate_and_up(tiles, j, SWAPPED)
        results = results + (apply(FNS[0], gate, entry(P, 0), HALF) * apply(FNS[1], up, entry(P, 1), HALF),)
    return results


@triton.jit
def _dgated(tiles, saved, FNS: tl.constexpr, P: tl.constexpr, SWAPPED: tl.constexpr, HALF: tl.constexpr):
    gates, ups = (), ()
    for j in tl.static_range(len(tiles)):
        gate, up = _gate_and_up(saved, j, SWAPPED)
        activated, shifted = apply(FNS[0], gate, entry(P, 0), HALF), apply(FNS[1], up, entry(P, 1), HALF)
        if FNS[3]:  # the derivative reads the output
            gate = activated
        if FNS[5]:
            up = shifted
        gates = gates + (gradient(FNS[2], tiles[j] * shifted, gate, entry(P, 0), HALF),)
        ups = ups + (gradient(FNS[4], tiles[j] * activated, up, entry(P, 1), HALF),)
    if SWAPPED:
        return ups + gates
    else:
        return gates + ups


@triton.jit
def _bias(tiles, bias, at, COMPUTE: tl.constexpr, IN_TURN: tl.constexpr):
    _, cols, _, pairs, _, width = at
    if IN_TURN and len(tiles) == 2:
        both = tl.load(bias + pairs, mask=pairs < 2 * width, other=0.0).to(COMPUTE)
        one, two = tl.split(both.reshape(cols.shape[0], 2))
        results = (tiles[0] + one[None, :], tiles[1] + two[None, :])
    else:
        results = ()
        for j in tl.static_range(len(tiles)):
            row = tl.load(bias + cols + j * width, mask=cols < width, other=0.0).to(COMPUTE)
            results = results + (tiles[j] + row[None, :],)
    return results


@triton.jit
def _shifted(pointer, bias, at, stride, TILES: tl.constexpr, COMPUTE: tl.constexpr, IN_TURN: tl.constexpr):
    """An operand that was saved before a bias was added, plus that bias."""
    tiles = _loaded(pointer, at, stride, TILES, COMPUTE, IN_TURN)
    if bias is not None:
        tiles = _bias(tiles, bias, at, COMPUTE, IN_TURN)
    return tiles


@triton.jit
def _dotted(pointer, tiles, others, at, BLOCK_N: tl.constexpr):
    """Store this tile's part of a sum over columns: [*, tiles across]."""
    rows, cols, mask, _, _, width = at
    total = tl.zeros((rows.shape[0],), tiles[0].dtype)
    for j in tl.static_range(len(tiles)):
        total += tl.sum(tl.where(mask, tiles[j] * others[j], 0.0), 1)
    first = tl.min(cols, 0)
    # Only rows with a column inside the matrix exist.
    tl.store(
        pointer + rows * tl.cdiv(width, BLOCK_N) + first // BLOCK_N,
        total.to(pointer.dtype.element_ty),
        mask=tl.max(mask.to(tl.int32), 1) > 0,
    )


@triton.jit
def _plus(tiles, others):
    results = ()
    for j in tl.static_range(len(tiles)):
        results = results + (tiles[j] + others[j],)
    return results


@triton.jit
def _times(tiles, factor):
    results = ()
    for j in tl.static_range(len(tiles)):
        results = results + (tiles[j] * factor,)
    return results


@triton.jit
def _dropout(tiles, seed, rows, col, width, P: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr):
    results = ()
    for j in tl.static_range(len(tiles)):
        kept = drop_tile(tiles[j], seed, rows, col + j * width, width * len(tiles), P, BLOCK_N, GROUPED)
        results = results + (kept,)
    return results


@triton.jit
def _zeros(COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros((BLOCK_M, BLOCK_N), COMPUTE),)
    return tiles


@triton.jit
def _walk(
    x,
    y,
    operands,
    outputs,
    x_stride,
    strides,
    M,
    width,
    rows,
    col,
    KINDS: tl.constexpr,
    FNS: tl.constexpr,
    PS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPED: tl.constexpr,
    COMPUTE: tl.constexpr,
    IN_TURN: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """One tile through all steps; returns the last value, and its terms of the sums over rows."""
    # If both ends have 16 bits, all values stored or summed in between are computed from 16-bit values.
    HALF: tl.constexpr = is_half(x.dtype.element_ty) and (y is None or is_half(y.dtype.element_ty))  # pyright: ignore[reportAssignmentType]
    at = _placed(rows, col, M, width, BLOCK_N)
    tiles = _loaded(x, at, x_stride, TILES, COMPUTE, IN_TURN)
    summed = ()
    shift = None
    factors = None
    for s in tl.static_range(len(KINDS)):
        if KINDS[s] == "act":
            tiles = _act(tiles, FNS[s][0], entry(PS, s), HALF)
        elif KINDS[s] == "dact":
            if operands[s] is not None:  # else the operand that the step before has read
                saved = _shifted(operands[s], shift, at, strides[s], len(tiles), COMPUTE, IN_TURN)
            tiles = _dact(tiles, saved, FNS[s][0], entry(PS, s), HALF)
        elif KINDS[s] == "gated":
            tiles = _gated(tiles, entry(FNS, s), entry(PS, s), SWAPPED[s], HALF)
        elif KINDS[s] == "dgated":
            if operands[s] is not None:
                saved = _shifted(operands[s], shift, at, strides[s], 2 * len(tiles), COMPUTE, IN_TURN)
            tiles = _dgated(tiles, saved, entry(FNS, s), entry(PS, s), SWAPPED[s], HALF)
        elif KINDS[s] == "bias":
            tiles = _bias(tiles, operands[s], at, COMPUTE, IN_TURN)
        elif KINDS[s] == "add":
            tiles = _plus(tiles, _loaded(operands[s], at, strides[s], len(tiles), COMPUTE, IN_TURN))
        elif KINDS[s] == "scale":
            tiles = _times(tiles, PS[s][0])
        elif KINDS[s] == "token_scale":
            factors = tl.load(operands[s] + rows, mask=rows < M, other=0.0).to(COMPUTE)[:, None]
            tiles = _times(tiles, factors)
        elif KINDS[s] == "dropout":
            tiles = _dropout(tiles, operands[s], rows, col, width, entry(PS, s), BLOCK_N, GROUPED)
        elif KINDS[s] == "store":
            _stored(outputs[s], tiles, at, IN_TURN)
        elif KINDS[s] == "emit":
            saved = _shifted(operands[s], shift, at, strides[s], len(tiles), COMPUTE, IN_TURN)
            _stored(outputs[s], _act(saved, FNS[s][0], entry(PS, s), HALF), at, IN_TURN)
        elif KINDS[s] == "emit_gated" or KINDS[s] == "dot_gated":
            if operands[s] is not None:
                saved = _shifted(operands[s], shift, at, strides[s], 2 * len(tiles), COMPUTE, IN_TURN)
            made = _gated(saved, entry(FNS, s), entry(PS, s), SWAPPED[s], HALF)
            if KINDS[s] == "emit_gated":
                if factors is not None:
                    made = _times(made, factors)
                _stored(outputs[s], made, at, IN_TURN)
            else:
                _dotted(outputs[s], tiles, made, at, BLOCK_N)
        elif KINDS[s] == "shift":
            shift = operands[s]
        elif KINDS[s] == "sum":
            # Beyond the last row, steps have computed values from zeros.
            summed = summed + _masked(tiles, at[2])
    if y is not None:
        _stored(y, tiles, at, IN_TURN)
    return tiles, summed


@triton.jit
def _masked(tiles, mask):
    results = ()
    for j in tl.static_range(len(tiles)):
        results = results + (tl.where(mask, tiles[j], 0.0),)
    return results


@triton.jit
def _chain_kernel(
    x,
    y,
    operands,
    outputs,
    x_stride,
    strides,
    M,
    width,
    KINDS: tl.constexpr,
    FNS: tl.constexpr,
    PS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPED: tl.constexpr,
    COMPUTE: tl.constexpr,
    IN_TURN: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """One tile per program."""
    width = tl.cast(width, tl.int64)
    across = tl.cdiv(width, BLOCK_N)
    pid = tl.program_id(0).to(tl.int64)
    rows = (pid // across) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (pid % across) * BLOCK_N
    _walk(
        x, y, operands, outputs, x_stride, strides, M, width, rows, col,
        KINDS, FNS, PS, TILES, BLOCK_N, GROUPED, COMPUTE, IN_TURN, SWAPPED,
    )  # fmt: skip


@triton.jit
def _chain_codes_kernel(
    x,
    operands,
    outputs,
    codes,
    scale,
    largest,
    partials,
    x_stride,
    strides,
    M,
    width,
    KINDS: tl.constexpr,
    FNS: tl.constexpr,
    PS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPED: tl.constexpr,
    COMPUTE: tl.constexpr,
    IN_TURN: tl.constexpr,
    SWAPPED: tl.constexpr,
    SCALING: tl.constexpr,
    EXPONENT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROUNDED: tl.constexpr,
    PARTS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """A tile per program; each part of the result is computed and quantized by itself, to use fewer registers."""
    width = tl.cast(width, tl.int64)
    across = tl.cdiv(width, BLOCK_N)
    pid = tl.program_id(0).to(tl.int64)
    down = pid // across
    row, col = down * BLOCK_M, (pid % across) * BLOCK_N
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    for j in tl.static_range(PARTS):
        tiles, summed = _walk(
            x, None, operands, outputs, x_stride, strides, M, width, rows, col,
            KINDS, FNS, PS, TILES, BLOCK_N, GROUPED, COMPUTE, IN_TURN, SWAPPED,
        )  # fmt: skip
        for s in tl.static_range(SUMS):
            if s % PARTS == j:
                tl.store(partials + (down * SUMS + s) * width + cols, tl.sum(summed[s], 0), mask=cols < width)
        tile = tl.where((rows < M)[:, None] & (cols < width)[None, :], tiles[j], 0.0).to(x.dtype.element_ty)
        quantize_tile(
            tile, scale, largest, None, None, codes[0], codes[1], codes[2], codes[3], row, col + j * width, M,
            width * PARTS, SCALING, EXPONENT, POWER_OF_TWO, ROUNDED, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _chain_sums_kernel(
    x,
    y,
    operands,
    outputs,
    partials,
    x_stride,
    strides,
    M,
    width,
    steps,
    KINDS: tl.constexpr,
    FNS: tl.constexpr,
    PS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPED: tl.constexpr,
    COMPUTE: tl.constexpr,
    IN_TURN: tl.constexpr,
    SWAPPED: tl.constexpr,
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
    SUMS_IN_TURN: tl.constexpr,
):
    """A column of tiles per program, and its sums over rows: partials[program down, sum, column]."""
    width = tl.cast(width, tl.int64)
    across = tl.cdiv(width, BLOCK_N)
    pid = tl.program_id(0).to(tl.int64)
    down = pid // across
    col = (pid % across) * BLOCK_N
    first = down * steps * BLOCK_M + tl.arange(0, BLOCK_M)
    # Summed element by element, with one reduction over the tile's rows at the end.
    sums = _zeros(SUMS, BLOCK_M, BLOCK_N, COMPUTE)
    for step in tl.range(0, steps, num_stages=STAGES):
        rows = first + tl.cast(step, tl.int64) * BLOCK_M
        _, summed = _walk(
            x, y, operands, outputs, x_stride, strides, M, width, rows, col,
            KINDS, FNS, PS, TILES, BLOCK_N, GROUPED, COMPUTE, IN_TURN, SWAPPED,
        )  # fmt: skip
        sums = _plus(sums, summed)
    cols = col + tl.arange(0, BLOCK_N)
    for j in tl.static_range(SUMS):
        if SUMS_IN_TURN:
            place = down * SUMS * width + 2 * cols + j
        else:
            place = (down * SUMS + j) * width + cols
        tl.store(partials + place, tl.sum(sums[j], 0), mask=cols < width)
