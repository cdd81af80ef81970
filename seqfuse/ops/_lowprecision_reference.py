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


def linear_by_reference(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """`F.linear` of quantized operands, differentiable: its gradients are GEMMs of quantized operands, too."""
    x, weight = lowered(x, always=True), lowered(weight, always=True)
    y = _differentiable(x.reshape(-1, x.shape[-1]), weight, *recipe.constants)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def grouped_linear_by_reference(x: Tensor, weight: Tensor, offsets: Tensor, recipe: Recipe) -> Tensor:
    """The rows of each group times its weight, of quantized operands, differentiable as `linear_by_reference`."""
    x, weight = lowered(x, always=True), lowered(weight, always=True)
    return _differentiable_by_group(x, weight, offsets, *recipe.constants)


# A compiler accepts strings and numbers as constants, and torch 2.11 differentiates the inner function differently.
@torch.compiler.allow_in_graph  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
def _differentiable(x: Tensor, weight: Tensor, *constants: Any) -> Tensor:
    recipe = recipe_of(*constants)
    given = partial(_linear, recipe), partial(_gradients, recipe), partial(_not_differentiable, recipe)
    return with_gradients(*given, x, weight)


@torch.compiler.allow_in_graph  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
def _differentiable_by_group(x: Tensor, weight: Tensor, offsets: Tensor, *constants: Any) -> Tensor:
    recipe = recipe_of(*constants)
    given = partial(_grouped_linear, recipe), partial(_grouped_gradients, recipe), partial(_not_differentiable, recipe)
    return with_gradients(*given, x, weight, offsets)


def _not_differentiable(recipe: Recipe) -> InputError:
    message = f"{recipe} has first derivatives in reverse mode only: no forward-mode AD, no derivatives of gradients"
    return InputError(message, code="SF108", hint="with sf.low_precision(enabled=False): ... runs without recipes")


def _linear(recipe: Recipe, x: Tensor, weight: Tensor) -> Tensor:
    qx, qweight = low.along(x, recipe, "x"), low.along(weight, recipe, "weight")
    return low.linear_in_8_bits(qx, qweight, recipe, x.dtype)


def _gradients(recipe: Recipe, dy: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> tuple[Any, Any]:
    dx = dweight = None
    along, down = low.quantized(dy, recipe, "dy", rows=needs[0], columns=needs[1])
    if along is not None:
        dx = low.dgrad_in_8_bits(along, low.down(weight, recipe, "weight"), recipe, dy.dtype)
    if down is not None:
        dweight = low.weight_grad_in_8_bits(down, low.down(x, recipe, "x"), recipe, dy.dtype)
    return dx, dweight


def _grouped_linear(recipe: Recipe, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    qx, _ = grouped.quantized_rows(x, recipe, "x", offsets)
    qweight, _ = grouped.quantized_group_weights(weight, recipe)
    assert qx is not None
    return grouped.grouped_in_8_bits(qx, qweight, recipe, offsets, x.dtype)


def _grouped_gradients(
    recipe: Recipe, dy: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, needs: Sequence[bool]
) -> tuple[Any, Any, None]:
    dx = dweight = None
    along, down = grouped.quantized_rows(dy, recipe, "dy", offsets, rows=needs[0], columns=needs[1])
    if along is not None:
        _, columns = grouped.quantized_group_weights(weight, recipe, columns=True)
        assert columns is not None
        dx = grouped.grouped_in_8_bits(along, columns, recipe, offsets, dy.dtype, role="dy")
    if down is not None:
        _, columns = grouped.quantized_rows(x, recipe, "x", offsets, rows=False, columns=True)
        assert columns is not None
        dweight = grouped.grouped_weight_grad_in_8_bits(down, columns, recipe, offsets, dy.dtype)
    return dx, dweight, None
