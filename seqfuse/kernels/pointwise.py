# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: RUF005
# Device functions are Triton's language: it has no types, and tuples in it are joined by +.
"""Chains of point-wise steps of any length in one kernel, in the direction of values or of gradients.

A chain is data: a kind, device functions and numbers for each step, all fixed at compile time, beside a tuple of
operand pointers. The kernel holds a tile of rows and columns in registers and walks the steps; what a step stores or
sums over rows leaves on the way. A packed [gate; up] input is two tiles that become one, its gradient one that becomes
two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import chains
from ._device import column_sums, dropped
from ._launch import cdiv, launch, processors, stops
from ._operators import TEXTS, Text, as_rows, bound, operator
from .activations import apply, entry, gradient, is_half
from .c import chain as c_chain
from .chains import (
    AGAIN,
    Chain,
    ChainStep,
    act,
    add,
    bias,
    column_sum,
    dact,
    dgated,
    dropout,
    emit,
    emit_gated,
    fit,
    gated,
    parse,
    scale,
    shift,
    store,
)

__all__ = [
    "Chain", "act", "add", "bias", "column_sum", "dact", "dgated", "dropout", "emit", "emit_gated", "gated", "parse",
    "pointwise", "pointwise_of", "scale", "shift", "store",
]  # fmt: skip

_ACT = tl.constexpr(chains.ACT)
_DACT = tl.constexpr(chains.DACT)
_GATED = tl.constexpr(chains.GATED)
_DGATED = tl.constexpr(chains.DGATED)
_BIAS = tl.constexpr(chains.BIAS)
_ADD = tl.constexpr(chains.ADD)
_SCALE = tl.constexpr(chains.SCALE)
_DROPOUT = tl.constexpr(chains.DROPOUT)
_STORE = tl.constexpr(chains.STORE)
_SUM = tl.constexpr(chains.SUM)
_EMIT = tl.constexpr(chains.EMIT)
_EMIT_GATED = tl.constexpr(chains.EMIT_GATED)
_SHIFT = tl.constexpr(chains.SHIFT)


@triton.jit
def _loaded(pointer, rows, cols, stride, width, mask, TILES: tl.constexpr, COMPUTE: tl.constexpr):
    """A tile of each of the equal parts that a row consists of."""
    tiles = ()
    for j in tl.static_range(TILES):
        at = rows[:, None] * stride + (cols + j * width)[None, :]
        tiles = tiles + (tl.load(pointer + at, mask=mask, other=0.0).to(COMPUTE),)
    return tiles


@triton.jit
def _stored(pointer, tiles, rows, cols, width, mask):
    for j in tl.static_range(len(tiles)):
        at = rows[:, None] * (width * len(tiles)) + (cols + j * width)[None, :]
        tl.store(pointer + at, tiles[j].to(pointer.dtype.element_ty), mask=mask)


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
def _gated(tiles, VALUE: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr):
    results = ()
    for j in tl.static_range(len(tiles) // 2):
        results = results + (apply(VALUE, tiles[j], P, HALF) * tiles[j + len(tiles) // 2],)
    return results


@triton.jit
def _dgated(
    tiles, saved, VALUE: tl.constexpr, DERIVATIVE: tl.constexpr, OF_OUTPUT: tl.constexpr, P: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    gates, ups = (), ()
    for j in tl.static_range(len(tiles)):
        gate, up = saved[j], saved[j + len(tiles)]
        activated = apply(VALUE, gate, P, HALF)
        if OF_OUTPUT:
            gate = activated
        gates = gates + (gradient(DERIVATIVE, tiles[j] * up, gate, P, HALF),)
        ups = ups + (tiles[j] * activated,)
    return gates + ups


@triton.jit
def _bias(tiles, bias, cols, width, columns, COMPUTE: tl.constexpr):
    results = ()
    for j in tl.static_range(len(tiles)):
        row = tl.load(bias + cols + j * width, mask=columns, other=0.0).to(COMPUTE)
        results = results + (tiles[j] + row[None, :],)
    return results


@triton.jit
def _shifted(
    pointer, bias, rows, cols, stride, width, mask, columns, TILES: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """What was saved before a bias was added, with the bias."""
    tiles = _loaded(pointer, rows, cols, stride, width, mask, TILES, COMPUTE)
    if bias is not None:
        tiles = _bias(tiles, bias, cols, width, columns, COMPUTE)
    return tiles


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
        kept = dropped(tiles[j], seed, rows, col + j * width, width * len(tiles), P, BLOCK_N, GROUPED)
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
):
    """One tile through all steps; returns what the sums over rows get from it."""
    # Where both ends have 16 bits: what is stored or summed on the way was made of numbers of 16 bits.
    HALF: tl.constexpr = is_half(x.dtype.element_ty) and (y is None or is_half(y.dtype.element_ty))  # pyright: ignore[reportAssignmentType]
    cols = col + tl.arange(0, BLOCK_N)
    columns = cols < width
    mask = (rows < M)[:, None] & columns[None, :]
    tiles = _loaded(x, rows, cols, x_stride, width, mask, TILES, COMPUTE)
    summed = ()
    shift = None
    for s in tl.static_range(len(KINDS)):
        if KINDS[s] == _ACT:
            tiles = _act(tiles, FNS[s][0], entry(PS, s), HALF)
        elif KINDS[s] == _DACT:
            if operands[s] is not None:  # else what the step before has read
                saved = _shifted(
                    operands[s], shift, rows, cols, strides[s], width, mask, columns, len(tiles), COMPUTE
                )  # fmt: skip
            tiles = _dact(tiles, saved, FNS[s][0], entry(PS, s), HALF)
        elif KINDS[s] == _GATED:
            tiles = _gated(tiles, FNS[s][0], entry(PS, s), HALF)
        elif KINDS[s] == _DGATED:
            if operands[s] is not None:
                saved = _shifted(
                    operands[s], shift, rows, cols, strides[s], width, mask, columns, 2 * len(tiles), COMPUTE
                )  # fmt: skip
            tiles = _dgated(tiles, saved, FNS[s][0], FNS[s][1], FNS[s][2], entry(PS, s), HALF)
        elif KINDS[s] == _BIAS:
            tiles = _bias(tiles, operands[s], cols, width, columns, COMPUTE)
        elif KINDS[s] == _ADD:
            tiles = _plus(tiles, _loaded(operands[s], rows, cols, strides[s], width, mask, len(tiles), COMPUTE))
        elif KINDS[s] == _SCALE:
            tiles = _times(tiles, PS[s][0])
        elif KINDS[s] == _DROPOUT:
            tiles = _dropout(tiles, operands[s], rows, col, width, entry(PS, s), BLOCK_N, GROUPED)
        elif KINDS[s] == _STORE:
            _stored(outputs[s], tiles, rows, cols, width, mask)
        elif KINDS[s] == _EMIT:
            saved = _shifted(
                operands[s], shift, rows, cols, strides[s], width, mask, columns, len(tiles), COMPUTE
            )  # fmt: skip
            _stored(outputs[s], _act(saved, FNS[s][0], entry(PS, s), HALF), rows, cols, width, mask)
        elif KINDS[s] == _EMIT_GATED:
            saved = _shifted(
                operands[s], shift, rows, cols, strides[s], width, mask, columns, 2 * len(tiles), COMPUTE
            )  # fmt: skip
            _stored(outputs[s], _gated(saved, FNS[s][0], entry(PS, s), HALF), rows, cols, width, mask)
        elif KINDS[s] == _SHIFT:
            shift = operands[s]
        elif KINDS[s] == _SUM:
            # Rows beyond the last hold what a step made of zeros.
            summed = summed + _masked(tiles, mask)
    if y is not None:
        _stored(y, tiles, rows, cols, width, mask)
    return summed


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
):
    """One tile per program."""
    width = tl.cast(width, tl.int64)
    across = tl.cdiv(width, BLOCK_N)
    pid = tl.program_id(0).to(tl.int64)
    rows = (pid // across) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (pid % across) * BLOCK_N
    _walk(
        x, y, operands, outputs, x_stride, strides, M, width, rows, col,
        KINDS, FNS, PS, TILES, BLOCK_N, GROUPED, COMPUTE,
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
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A column of tiles per program, and its sums over rows: partials[program down, sum, column]."""
    width = tl.cast(width, tl.int64)
    across = tl.cdiv(width, BLOCK_N)
    pid = tl.program_id(0).to(tl.int64)
    down = pid // across
    col = (pid % across) * BLOCK_N
    first = down * steps * BLOCK_M + tl.arange(0, BLOCK_M)
    # Summed element by element; one reduction over the tile's rows at the end.
    sums = _zeros(SUMS, BLOCK_M, BLOCK_N, COMPUTE)
    for step in tl.range(0, steps, num_stages=STAGES):
        rows = first + tl.cast(step, tl.int64) * BLOCK_M
        summed = _walk(
            x, y, operands, outputs, x_stride, strides, M, width, rows, col,
            KINDS, FNS, PS, TILES, BLOCK_N, GROUPED, COMPUTE,
        )  # fmt: skip
        sums = _plus(sums, summed)
    cols = col + tl.arange(0, BLOCK_N)
    for j in tl.static_range(SUMS):
        tl.store(partials + (down * SUMS + j) * width + cols, tl.sum(sums[j], 0), mask=cols < width)


_NUM_WARPS = 4
# Per multiprocessor, of a kernel with sums.
_PROGRAMS = 8


def pointwise(
    x: Tensor,
    chain: Chain,
    operands: Sequence[Tensor] = (),
    *,
    dtype: torch.dtype | None = None,
    dtypes: Sequence[torch.dtype] = (),
    result: bool = True,
) -> tuple[Tensor | None, ...]:
    """Run a chain of point-wise steps: the last value, and what each step gives, in order.

    x: [*, K], any floating dtype, one stride for all leading dimensions, last dimension contiguous.  operands: one per
    step that takes one, in order.  Everything is computed in float32 (float64 for a float64 x) and rounded when stored.
    Sums over rows are made in a fixed order: the same bits each time.

    Args:
        x: the input.
        chain: the steps.
        operands: in the order of the steps that take one.
        dtype: of the result; x's by default.
        dtypes: of what steps give; the result's by default.
        result: whether the last value is wanted; `None` takes its place otherwise.

    Raises:
        ValueError: for an operand of another shape, strides that have to be copied first, or a wrong number of them.
    """
    given: Sequence[Tensor | None] = operands
    if chain.reads_again:  # `None` stands for the operand before it
        given = [None if i and t is operands[i - 1] else t for i, t in enumerate(operands)]
    made = _run(x, chain, given, dtype=dtype, dtypes=dtypes, result=result)
    return made if len(made) > chain.outputs else (None, *made)  # an operator's results are all tensors


def pointwise_of(
    chain: Chain, dtype: torch.dtype | None = None, dtypes: Sequence[torch.dtype] = (), result: bool = True
) -> Callable[..., tuple[Tensor | None, ...]]:
    """`pointwise` of everything but tensors: a function of x and the operands, which copies those that do not fit."""
    if chain.reads_again:  # not each operand is handed on
        return lambda x, *operands: pointwise(
            x.contiguous(), chain, [t.contiguous() for t in operands], dtype=dtype, dtypes=dtypes, result=result
        )

    def arguments(x: Tensor, *operands: Tensor) -> dict[str, Any]:
        return {"x": x, "chain": chain, "operands": operands, "dtype": dtype, "dtypes": dtypes, "result": result}

    return bound(_run, arguments, pointwise)


TEXTS[Chain] = Text(lambda chain: chain.text, parse)


@operator("pointwise", in_c=c_chain.decide)
def _run(
    x: Tensor,
    chain: Chain,
    operands: Sequence[Tensor | None],
    *,
    dtype: torch.dtype | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    result: bool = True,
) -> tuple[Tensor | None, ...]:
    """`pointwise`, where `None` stands for the operand before it."""
    dtype = dtype or x.dtype
    width, made = chain.results(x.shape, dtype, dtypes)
    made = made if result else made[:-1]
    results = [torch.empty(shape, dtype=of, device=x.device) for shape, of in made]
    y = results.pop() if result else None
    if stops():
        return (y, *results)
    lead, source = tuple(x.shape[:-1]), as_rows("x", x, x.shape[-1] if x.ndim else 1)
    M = source.shape[0]
    given: Iterator[Tensor | None] = itertools.accumulate(operands, lambda before, t: before if t is None else t)
    left = iter(results)
    taken: list[Tensor | None] = []
    outputs: list[Tensor | None] = []
    sums: list[Tensor] = []
    strides: list[int] = []
    before: ChainStep | None = None
    operand: Tensor | None = None
    try:
        for step, parts in zip(chain.steps, chain.parts, strict=False):
            read, operand = operand, next(given) if step.operand else None
            if operand is not None:
                operand = fit(step, operand, lead, parts * width)
            taken.append(None if _read_again(step, operand, before, read) else operand)
            before = step
            strides.append(operand.stride(0) if operand is not None and operand.ndim == 2 else 0)
            outputs.append(next(left) if step.output == "matrix" else None)
            sums += [next(left)] if step.output == "row" else []
    except StopIteration:
        raise ValueError(f"{chain}: too few operands or dtypes") from None
    if next(given, None) is not None:
        raise ValueError(f"{chain}: more operands than steps that take one")
    block_m, block_n, constexprs = chain.tile(width, x.element_size())
    head = (source, y, tuple(taken), tuple(outputs))
    sizes = (source.stride(0), tuple(strides), M, width)
    if M == 0 or width == 0:
        for total in sums:
            total.zero_()
    elif sums:
        across = cdiv(width, block_n)
        down = max(1, min(cdiv(M, block_m), _PROGRAMS * processors(x.device) // across))
        steps = cdiv(cdiv(M, block_m), down)
        down = cdiv(cdiv(M, block_m), steps)
        compute = torch.float64 if x.dtype is torch.float64 else torch.float32
        partials = torch.empty(down * chain.sums * width, dtype=compute, device=x.device)
        launch(_chain_sums_kernel, down * across, (*head, partials, *sizes, steps), constexprs, _NUM_WARPS)
        column_sums(partials[: down * chain.sums * width].view(down, chain.sums * width), width, *sums)
    elif results or result:
        launch(_chain_kernel, cdiv(M, block_m) * cdiv(width, block_n), head + sizes, constexprs, _NUM_WARPS)
    return (y, *results)


def _read_again(step: ChainStep, operand: Tensor | None, before: ChainStep | None, read: Tensor | None) -> bool:
    """Whether a gradient takes just what the step before it, which gives the value, has read."""
    if before is None or (before.kind, step.kind) not in AGAIN or operand is None or read is None:
        return False
    return operand.data_ptr() == read.data_ptr() and operand.dtype is read.dtype and operand.stride() == read.stride()
