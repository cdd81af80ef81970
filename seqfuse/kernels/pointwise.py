# pyright: basic
# Triton has no type annotations.
"""Chains of point-wise steps of any length in one kernel, forward or backward.

A chain is data: a kind, device functions and numbers for each step, all fixed at compile time. Operands are passed as a
tuple of pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._device import column_sums
from ._launch import architecture, cdiv, launch, processors, programs_of, register_limit, stops
from ._operators import TEXTS, Text, bound, operator, viewed_as_rows
from ._pointwise_kernel import _chain_codes_kernel, _chain_kernel, _chain_sums_kernel
from .c import chain as c_chain
from .chains import (
    READERS,
    Chain,
    act,
    add,
    bias,
    column_sum,
    dact,
    dgated,
    dot_gated,
    dropout,
    emit,
    emit_gated,
    fit_operand,
    gated,
    parse,
    scale,
    shift,
    store,
    token_scale,
)
from .quantize import As, Codes

__all__ = [
    "Chain", "act", "add", "bias", "column_sum", "dact", "dgated", "dot_gated", "dropout", "emit", "emit_gated",
    "gated", "parse", "pointwise", "pointwise_codes", "pointwise_of", "scale", "shift", "store", "token_scale",
]  # fmt: skip

_NUM_WARPS = 4
# Programs per multiprocessor, for a kernel with sums.
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
    """Run a chain of point-wise steps: the last value, and the extra results of steps, in order.

    x: [*, K], any floating dtype, one stride for all leading dimensions, last dimension contiguous.  operands: one per
    step that has one, in order.  Everything is computed in float32 (float64 for a float64 x) and rounded when stored.
    Sums over rows are computed in a fixed order: the same bits each time.

    Args:
        x: the input.
        chain: the steps.
        operands: in the order of the steps that have one.
        dtype: dtype of the last value; by default x's.
        dtypes: dtypes of extra results; by default that of the last value.
        result: whether the last value is needed; otherwise it is `None`.

    Raises:
        ValueError: for an operand of another shape, strides that require a copy, or a wrong number of operands.
    """
    made = _run(x, chain, _once(chain, operands), dtype=dtype, dtypes=dtypes, result=result)
    return made if len(made) > chain.outputs else (None, *made)  # a custom op returns only tensors


def pointwise_codes(
    x: Tensor,
    chain: Chain,
    operands: Sequence[Tensor],
    to: As,
    largest: Tensor | None = None,
    *,
    dtypes: Sequence[torch.dtype] = (),
) -> tuple[Codes, tuple[Tensor | None, ...]]:
    """`pointwise` in 16 bits with the last value only in 8 bits: the codes of the last value, and the extra results.

    Args:
        x: bfloat16 or float16.
        chain: the steps, none of them interleaved.
        operands: in the order of the steps that have one.
        to: how the last value is quantized. If it has two parts, each has a multiple of 128 columns.
        largest: float32 of one number, with a given scale: becomes max |y| if that is larger, or NaN.
        dtypes: dtypes of extra results; by default x's.

    Raises:
        ValueError: as `pointwise`, and for values that cannot be quantized in this way.
    """
    made = _run(x, chain, _once(chain, operands), dtypes=dtypes or (x.dtype,) * chain.outputs, to=to, largest=largest)
    return to.named([t for t in made[chain.outputs :] if t is not None]), made[: chain.outputs]


def _once(chain: Chain, operands: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Operands, with `None` for each that an earlier step has read."""
    if not chain.reads_again:
        return operands
    left, given, read = iter(operands), list[Tensor | None](), None
    for step, again in zip(chain.steps, chain.again, strict=True):
        operand = next(left, None) if step.operand else None
        if operand is not None:
            given.append(None if again and operand is read else operand)
            read = operand if step.kind in READERS else read
    return [*given, *left]


def pointwise_of(
    chain: Chain, dtype: torch.dtype | None = None, dtypes: Sequence[torch.dtype] = (), result: bool = True
) -> Callable[..., tuple[Tensor | None, ...]]:
    """`pointwise` as a function of x and the operands, which copies tensors in other layouts."""
    if chain.reads_again:  # not every operand is passed on
        return lambda x, *operands: pointwise(
            x.contiguous(), chain, [t.contiguous() for t in operands], dtype=dtype, dtypes=dtypes, result=result
        )

    def arguments(x: Tensor, *operands: Tensor) -> dict[str, Any]:
        return {"x": x, "chain": chain, "operands": operands, "dtype": dtype, "dtypes": dtypes, "result": result}

    return bound(_run, arguments, pointwise)


TEXTS[Chain] = Text(lambda chain: chain.text, parse)


# It writes to `largest` without declaring it, because a custom op that declares a write cannot return a list. Only
# compilers need the declaration, and they reject recipes that keep scales.
@operator("pointwise", in_c=c_chain.decide_chain)
def _run(
    x: Tensor,
    chain: Chain,
    operands: Sequence[Tensor | None],
    *,
    dtype: torch.dtype | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    result: bool = True,
    to: As | None = None,
    largest: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """`pointwise`, with `None` for each operand that a step has read before; codes are last."""
    dtype = dtype or x.dtype
    width, made = chain.results(x.shape, dtype, dtypes)
    parts_made = chain.parts[-1]
    if to is not None:
        _check_codes(x, chain, width)
    made = made if result and to is None else made[:-1]
    results = [torch.empty(shape, dtype=of, device=x.device) for shape, of in made]
    y = results.pop() if result and to is None else None
    lead, columns = tuple(x.shape[:-1]), x.shape[-1] if x.ndim else 1
    M = x.numel() // columns if columns else 0
    codes = None if to is None else to.made(M, width * parts_made, x.device)
    every = (y, *results) if codes is None else (*results, *[t for t in codes if t is not None])
    if stops():
        return every
    source, given = viewed_as_rows("x", x, columns), iter(operands)
    left = iter(results)
    taken: list[Tensor | None] = []
    outputs: list[Tensor | None] = []
    sums: list[Tensor] = []
    dots: list[tuple[Tensor, Tensor]] = []  # sums over columns, and the partial sums of tiles
    block_m, block_n, constexprs = chain.tile(width, x.element_size())
    across = cdiv(width, block_n)
    compute = torch.float64 if x.dtype is torch.float64 else torch.float32
    strides: list[int] = []
    read: Tensor | None = None
    try:
        for step, parts, again in zip(chain.steps, chain.parts, chain.again, strict=False):
            operand = next(given) if step.operand else None
            if operand is not None:
                operand = fit_operand(step, operand, lead, parts * width)
            elif again:
                operand = read
            taken.append(None if again and _alike(operand, read) else operand)
            read = operand if step.kind in READERS else read
            strides.append(operand.stride(0) if operand is not None and operand.ndim == 2 else 0)
            made_here = next(left) if step.output else None
            if step.output == "tokens" and made_here is not None:
                dots.append((made_here, torch.empty((M, across), dtype=compute, device=x.device)))
            sums += [made_here] if step.output == "row" and made_here is not None else []
            outputs.append(dots[-1][1] if step.output == "tokens" else made_here if step.output == "matrix" else None)
    except StopIteration:
        raise ValueError(f"{chain}: too few operands or dtypes") from None
    if next(given, None) is not None:
        raise ValueError(f"{chain}: more operands than steps that take one")
    head = (source, y, tuple(taken), tuple(outputs))
    sizes = (source.stride(0), tuple(strides), M, width)
    if M == 0 or width == 0:
        for total in sums:
            total.zero_()
    elif to is not None and codes is not None:
        tile = to.tile(parts_made)
        down, across = cdiv(M, tile.m), cdiv(width, tile.n)
        partials = torch.empty(down * chain.sums * width, dtype=compute, device=x.device) if sums else None
        given_largest = None if largest is None else largest.view(torch.int32)
        fixed = {name: value for name, value in constexprs.items() if name not in ("SUMS", "STAGES", "SUMS_IN_TURN")}
        how = to.constexprs(x.device)
        fixed |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, **how, "PARTS": parts_made, "SUMS": chain.sums}
        launch(
            _chain_codes_kernel,
            down * across,
            (
                source, tuple(taken), tuple(outputs), tuple(codes), to.given_scale, given_largest, partials,
                source.stride(0), tuple(strides), M, width,
            ),
            fixed,
            tile.num_warps,
            # Otherwise the compiler of Triton 3.6 spills to make room for more programs.
            **register_limit(255 if tile.num_warps == 8 else None, architecture(x.device)),
        )  # fmt: skip
        if partials is not None:
            column_sums(partials.view(down, chain.sums * width), width, *sums)
    elif sums:
        down, steps = programs_of(cdiv(M, block_m), _PROGRAMS * processors(x.device) // across)
        partials = torch.empty((down, chain.sums * width), dtype=compute, device=x.device)
        launch(_chain_sums_kernel, down * across, (*head, partials, *sizes, steps), constexprs, _NUM_WARPS)
        column_sums(partials, width, *sums)
    elif results or result:
        launch(_chain_kernel, cdiv(M, block_m) * across, head + sizes, constexprs, _NUM_WARPS)
    for total, parts in dots:
        total.copy_(parts.sum(1).view(total.shape))
    return every


def _check_codes(x: Tensor, chain: Chain, width: int) -> None:
    """Raise `ValueError` if the chain's kernel cannot quantize the last value."""
    if x.dtype not in (torch.bfloat16, torch.float16) or chain.interleaved or not x.numel():
        raise ValueError(f"{chain}: quantized are numbers of bfloat16 and float16 that do not lie in turn")
    parts = chain.parts[-1]
    if width * parts % 16 or (parts > 1 and width % 128):
        raise ValueError(f"{chain}: {parts} parts of {width} columns are not quantized by its kernel")


def _alike(operand: Tensor | None, read: Tensor | None) -> bool:
    """Whether an operand is the same as the last one that a step has read."""
    if operand is None or read is None:
        return False
    return operand.data_ptr() == read.data_ptr() and operand.dtype is read.dtype and operand.stride() == read.stride()
