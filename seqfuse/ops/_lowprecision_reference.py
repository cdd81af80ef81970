"""The reference of GEMMs of quantized operands. Imports torch's compiler, so it is imported only when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autograd import with_gradients
from ..casts import lowered
from ..errors import InputError
from ..recipes import Recipe, recipe_of
from . import _grouped_lowprecision as grouped
from . import _lowprecision as low


def linear_by_reference(x: Tensor, weight: Tensor, recipe: Recipe, offsets: Tensor | None = None) -> Tensor:
    """`F.linear` of quantized operands, differentiable: its gradients are GEMMs of quantized operands, too.

    With `offsets`, the ends of groups of rows, it multiplies the rows of each group by its weight.
    """
    x, weight = lowered(x, always=True), lowered(weight, always=True)
    y = _differentiable(x.reshape(-1, x.shape[-1]), weight, offsets, *recipe.constants)
    return y.reshape(*x.shape[:-1], weight.shape[-2])


# A compiler accepts strings and numbers as constants, and torch 2.11 differentiates the inner function differently.
@torch.compiler.allow_in_graph  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
def _differentiable(x: Tensor, weight: Tensor, offsets: Tensor | None, *constants: Any) -> Tensor:
    recipe = recipe_of(*constants)
    given = partial(_linear, recipe), partial(_gradients, recipe), partial(_not_differentiable, recipe)
    return with_gradients(*given, x, weight, *[] if offsets is None else [offsets])


def _not_differentiable(recipe: Recipe) -> InputError:
    message = f"{recipe} has first derivatives in reverse mode only: no forward-mode AD, no derivatives of gradients"
    return InputError(message, code="SF108", hint="with sf.low_precision(enabled=False): ... runs without recipes")


def _linear(recipe: Recipe, x: Tensor, weight: Tensor, *offsets: Tensor) -> Tensor:
    if not offsets:
        qx, qweight = low.along(x, recipe, "x"), low.along(weight, recipe, "weight")
        return low.linear_in_8_bits(qx, qweight, recipe, x.dtype)
    qx, _ = low.quantized(x, recipe, "x", offsets=offsets[0])
    qweight, _ = grouped.quantized_group_weights(weight, recipe)
    assert qx is not None
    return grouped.grouped_in_8_bits(qx, qweight, recipe, offsets[0], x.dtype)


def _gradients(
    recipe: Recipe, dy: Tensor, x: Tensor, weight: Tensor, *offsets: Tensor, needs: Sequence[bool]
) -> tuple[Any, ...]:
    dx = dweight = None
    ends = offsets[0] if offsets else None
    along, down = low.quantized(dy, recipe, "dy", rows=needs[0], columns=needs[1], offsets=ends)
    if along is not None and ends is None:
        dx = low.dgrad_in_8_bits(along, low.down(weight, recipe, "weight"), recipe, dy.dtype)
    elif along is not None and ends is not None:
        _, columns = grouped.quantized_group_weights(weight, recipe, columns=True)
        assert columns is not None
        dx = grouped.grouped_in_8_bits(along, columns, recipe, ends, dy.dtype, role="dy")
    if down is not None:
        of_x = low.down(x, recipe, "x", ends)
        if ends is None:
            dweight = low.weight_grad_in_8_bits(down, of_x, recipe, dy.dtype)
        else:
            dweight = grouped.grouped_weight_grad_in_8_bits(down, of_x, recipe, ends, dy.dtype)
    return dx, dweight, *[None] * len(offsets)
