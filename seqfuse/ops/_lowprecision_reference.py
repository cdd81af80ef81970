"""The reference of a GEMM of quantized operands. It imports torch's compiler, so it is imported where one is run."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..casts import lowered
from ..recipes import Recipe, recipe_of
from . import _lowprecision as low


def linear_by_reference(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """`F.linear` of quantized operands, differentiable: gradients are those of GEMMs of quantized operands, too."""
    x, weight = lowered(x, always=True), lowered(weight, always=True)
    y = _differentiable(x.reshape(-1, x.shape[-1]), weight, *recipe.data)
    return y.reshape(*x.shape[:-1], weight.shape[0])


# A compiler takes strings and numbers for constants, and torch 2.11 makes other gradients of the function inside.
@torch.compiler.allow_in_graph  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
def _differentiable(x: Tensor, weight: Tensor, kind: str, *numbers: Any) -> Tensor:
    return cast(Tensor, _Linear.apply(x, weight, recipe_of(kind, *numbers)))  # pyright: ignore[reportUnknownMemberType]


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        return low.linear(low.along(x, recipe, "x"), low.along(weight, recipe, "weight"), recipe, x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, ctx.recipe = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight), (dy,), recipe = ctx.saved_tensors, grads, ctx.recipe
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = low.dgrad(low.along(dy, recipe, "dy"), low.down(weight, recipe, "weight"), recipe, dy.dtype)
        if ctx.needs_input_grad[1]:
            dweight = low.weight_grad(low.down(dy, recipe, "dy"), low.down(x, recipe, "x"), recipe, dy.dtype)
        return dx, dweight, None
