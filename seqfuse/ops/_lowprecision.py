"""GEMMs of quantized operands: y = x weight^T, dx = dy weight, dweight = dy^T x, each rounded once.

Operands are multiplied as `recipes.dequantize` gives them, summed in float32: so a CPU does, which has no instructions
for 8 bits, and a recipe that is emulated elsewhere. A GPU has torch's GEMMs where a tensor or a row has one scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casts import autocasting
from ..maingrad import Accumulated, accumulated
from ..recipes import MULTIPLE, Recipe, Role, dequantize, quantize


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
    if by_torch(recipe, x.data):
        y = _scaled_mm(x.data, weight.data.t(), x.inverse, weight.inverse.t(), dtype)
        return y if bias is None else y + bias.to(dtype)
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
    if by_torch(recipe, dy.data):
        out = dtype if addend is None else sums
        dx = _scaled_mm(dy.data, _turned(weight.data).t(), dy.inverse, weight.inverse, out)
        return dx if addend is None else (dx + addend).to(dtype)
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
    if by_torch(recipe, dy.data):
        out = dtype if main_grad is None else torch.float32
        product = _scaled_mm(_turned(dy.data), _turned(x.data).t(), dy.inverse.t(), x.inverse, out)
    else:
        with autocasting(dy.data.device.type, None):
            a = dequantize(*dy, recipe, "dy", "columns").to(sums).t()
            product = torch.mm(a, dequantize(*x, recipe, "x", "columns").to(sums))
    if main_grad is None:
        return product.to(dtype)
    main_grad.add_(product)
    return accumulated


def by_torch(recipe: Recipe, data: Tensor) -> bool:
    """Whether GEMMs are torch's of 8-bit operands: on a GPU, with a scale for a tensor or for a row."""
    return data.device.type == "cuda" and not recipe.emulate and recipe.whole_rows


def _turned(data: Tensor) -> Tensor:
    """The transpose as a tensor of its own: the instructions read both operands along the sum."""
    return data.t().contiguous()


def _scaled_mm(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a b, rounded once. a: [M, K] row by row, b: [K, N] column by column, scales [] or [M, 1] and [1, N]."""
    if not a.numel() or not b.numel():
        return a.new_zeros(a.shape[0], b.shape[1], dtype=dtype)
    if (short := -a.shape[1] % MULTIPLE) > 0:  # rows of tokens, which may be of any number
        a, b = F.pad(a, (0, short)), F.pad(b.t(), (0, short)).t()
    run: Any = torch._scaled_mm  # pyright: ignore
    if inverse_a.dim() == 0:
        return run(a, b, inverse_a, inverse_b, out_dtype=dtype, use_fast_accum=False)
    if dtype is torch.bfloat16:
        scales = inverse_a.flatten().view(-1, 1), inverse_b.flatten().view(1, -1)  # with the strides that it asks for
        return run(a, b, *scales, out_dtype=dtype, use_fast_accum=False)
    # With a scale for a row torch gives bfloat16 alone.
    one = torch.ones((), device=a.device)
    return (run(a, b, one, one, out_dtype=torch.float32, use_fast_accum=False) * inverse_a * inverse_b).to(dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 in what results are compared with."""
    return torch.promote_types(dtype, torch.float32)
