"""The autograd nodes of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..autograd import Batched, Once, executes
from ..maingrad import main_grads
from ._ask import How
from ._chunks import counted_rows, flat, reduced, walk, wide_dtype


class LinearCrossEntropyNode(torch.autograd.Function):
    """The reduced loss; its gradients are made with it."""

    @staticmethod
    def forward(
        ctx: Any, how: How, product: torch.dtype, targets: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        made = walk(how, product, flat(x), weight, targets, bias, ctx.needs_input_grad[3:])
        count = counted_rows(how, targets)
        ctx.save_for_backward(made.dx, made.dweight, made.dbias, count, made.unit)
        ctx.shape, ctx.how = x.shape, how
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return reduced(how, made.rows, count)

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        *grads, count, unit = ctx.saved_tensors
        with torch.no_grad():
            # Where no row counts every gradient is zero, as in torch.
            scale = douts[0] if count is None else (douts[0] / count).where(count > 0, 0)
            scales = scale if unit is None else scale * unit.unsqueeze(1), scale, scale
            # Out of place, for the next backward.
            scaled = [
                None if t is None else t.to(wide_dtype(t.dtype)) * of for t, of in zip(grads, scales, strict=True)
            ]
            grads = _delivered(ctx, scaled, ctx.dtypes)
        return _guarded(ctx, grads, douts)


class LinearCrossEntropyRows(torch.autograd.Function):
    """The loss of each row; the backward pass makes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, how: How, product: torch.dtype, targets: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Any:
        made = walk(how, product, flat(x), weight, targets, bias, (False, False, False))
        ctx.save_for_backward(x, weight, targets, bias, made.softmax)
        ctx.shape, ctx.how, ctx.product = x.shape, how, product
        return made.rows

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        x, weight, targets, bias, softmax = saved = ctx.saved_tensors

        def one(dloss: Tensor) -> tuple[Any, ...]:
            with torch.no_grad():
                args = (flat(x), weight, targets, bias, ctx.needs_input_grad[3:], dloss.contiguous(), softmax)
                made = walk(ctx.how, ctx.product, *args)
                dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
                grads = _delivered(ctx, (made.dx, made.dweight, made.dbias), dtypes)
            return _guarded(ctx, grads, (dloss, *saved))

        return tuple(Batched.run(one, douts)) if Batched.given(douts) else one(*douts)


def _delivered(ctx: Any, grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    """Gradients of x, weight and bias, rounded to their dtypes once; those with a `main_grad` are added to it as is."""
    dx, *sums = grads
    nodes = [fn for fn, _ in ctx.next_functions[2:]]  # those before are of targets and x
    buffers = main_grads(nodes, executes, lambda i: (("weight", "bias")[i], ctx.how.operation, None))
    if buffers is not None:
        buffers.settle(sums)
    return [None if t is None else t.to(dtype) for t, dtype in zip((dx, *sums), dtypes, strict=True)]


def _guarded(ctx: Any, grads: list[Any], read: tuple[Any, ...]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = tuple(grads)
    if found[0] is not None:
        found = (found[0].view(ctx.shape), *found[1:])
    if torch.is_grad_enabled():
        found = Once.guard(ctx, found, read)
    return (None, None, None, *found)
