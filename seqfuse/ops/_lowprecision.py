"""GEMMs of quantized operands: y = x weight^T, dx = dy weight, dweight = dy^T x, each rounded once.

Operands are multiplied as `recipes.dequantize` gives them, summed in float32: so a CPU does, which has no instructions
for 8 bits, and a recipe that is emulated elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casts import autocasting
from ..maingrad import Accumulated, accumulated
from ..recipes import Recipe, Role, dequantize, quantize


class Operand(NamedTuple):
    """A quantized matrix: 8-bit numbers and the inverse of their scales, as `recipes.quantize` gives them."""

    data: Tensor
    inverse: Tensor


def operand(data: Tensor | None, inverse: Tensor | None) -> Operand:
    """An operand that was saved."""
    assert data is not None
    assert inverse is not None
    return Operand(data, inverse)


def along(x: Tensor, recipe: Recipe, role: Role, scale: Tensor | None = None) -> Operand:
    """An operand quantized along its rows; a delayed recipe is given the `scale`. x: [M, N]."""
    return Operand(*quantize(x, recipe, role, "rows", scale=scale))


def down(x: Tensor, recipe: Recipe, role: Role, rows: Operand | None = None, scale: Tensor | None = None) -> Operand:
    """An operand quantized down its columns: `rows` itself where both share their scales. x: [M, N]."""
    if rows is not None and recipe.block(role, "rows") == recipe.block(role, "columns"):
        return rows
    return Operand(*quantize(x, recipe, role, "columns", scale=scale))


def linear(x: Operand, weight: Operand, recipe: Recipe, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias from operands quantized along their rows. x: [M, K], weight: [N, K], y: [M, N]."""
    sums = wide(dtype)
    with autocasting(x.data.device.type, None):
        a = dequantize(*x, recipe, "x", "rows").to(sums)
        b = dequantize(*weight, recipe, "weight", "rows").to(sums)
        return F.linear(a, b, None if bias is None else bias.to(sums)).to(dtype)


def dgrad(dy: Operand, weight: Operand, recipe: Recipe, dtype: torch.dtype, addend: Tensor | None = None) -> Tensor:
    """Return addend + dy weight, of dy along its rows and weight down its columns; an addend is not rounded before.

    dy: [M, N], weight: [N, K], dx: [M, K].
    """
    sums = wide(dtype)
    with autocasting(dy.data.device.type, None):
        a = dequantize(*dy, recipe, "dy", "rows").to(sums)
        b = dequantize(*weight, recipe, "weight", "columns").to(sums)
        return (torch.mm(a, b) if addend is None else torch.addmm(addend, a, b)).to(dtype)


def weight_grad(
    dy: Operand, x: Operand, recipe: Recipe, dtype: torch.dtype, main_grad: Tensor | None = None
) -> Tensor | Accumulated:
    """Return dy^T x, of both down their columns, or `accumulated` where it was added to `main_grad`, in its dtype.

    dy: [M, N], x: [M, K], dweight, main_grad: [N, K].
    """
    sums = wide(dtype if main_grad is None else main_grad.dtype)
    with autocasting(dy.data.device.type, None):
        a = dequantize(*dy, recipe, "dy", "columns").to(sums).t()
        b = dequantize(*x, recipe, "x", "columns").to(sums)
        if main_grad is None:
            return torch.mm(a, b).to(dtype)
        main_grad.add_(torch.mm(a, b))
        return accumulated


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 in what results are compared with."""
    return torch.promote_types(dtype, torch.float32)
