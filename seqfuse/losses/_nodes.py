"""The autograd nodes of the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd import _Once  # pyright: ignore[reportPrivateUsage]
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
        ctx.save_for_backward(made.dx, made.dweight, made.dbias, count)
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return reduced(how, made.rows, count)

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        dx, dweight, dbias, count = ctx.saved_tensors
        with torch.no_grad():
            # Where no row counts every gradient is zero, as in torch.
            scale = douts[0] if count is None else (douts[0] / count).where(count > 0, 0)
            made = (dx, dweight, dbias)
            scaled = [None if t is None else _scaled(t, scale, to) for t, to in zip(made, ctx.dtypes, strict=True)]
        return _guarded(ctx, scaled, douts)


def _scaled(t: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # Out of place, for the next backward; rounded once, to the dtype of what it is the gradient of.
    return (t.to(wide_dtype(t.dtype)) * scale).to(dtype)


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
        with torch.no_grad():
            scale = douts[0].contiguous()
            args = (flat(x), weight, targets, bias, ctx.needs_input_grad[3:], scale, softmax)
            made = walk(ctx.how, ctx.product, *args)
            grads = [None if d is None else d.to(t.dtype) for d, t in zip(made[2:], (x, weight, bias), strict=True)]
        return _guarded(ctx, grads, (*douts, *saved))


def _guarded(ctx: Any, grads: list[Any], read: tuple[Any, ...]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = tuple(grads)
    if found[0] is not None:
        found = (found[0].view(ctx.shape), *found[1:])
    if torch.is_grad_enabled():
        found = _Once.guard(ctx, found, read)
    return (None, None, None, *found)
