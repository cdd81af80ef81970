"""Grouped GEMMs of quantized operands, with scales per group: y_g = x_g weight_g^T and its gradients.

Operands are dequantized as by `recipes.dequantize`, multiplied, summed in float32 and rounded once. On sm_90 torch has
a GEMM for bfloat16 results from e4m3 operands with one scale per row of x and per row of each weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casts import autocasting
from ..maingrad import Accumulated, accumulated
from ..recipes import MULTIPLE, Recipe, Role
from ..scaling import KeptScale
from . import _lowprecision as low
from ._grouped import finished, group_at, grouped_linear, grouped_weight_grad
from ._lowprecision import Operand, dequantize


def why_no_grouped_gemm(recipe: Recipe, dtype: torch.dtype | None, arch: str) -> str | None:
    """The reason why torch has no grouped GEMM for operands of a recipe on a GPU, or `None` if it has."""
    reason = None
    if arch != "sm_90":
        reason = f"for {arch}"
    elif not recipe.whole_rows:
        reason = f"with scales of {recipe.scaling('x')}"
    elif recipe.format != "e4m3":
        reason = 'of e5m2, which dy has with format="hybrid"'
    elif dtype not in (None, torch.bfloat16):
        reason = f"that gives {str(dtype).removeprefix('torch.')}"
    return reason and f"torch has no grouped GEMM of 8 bits {reason}"


def quantized_group_weights(
    weight: Tensor, recipe: Recipe, *, columns: bool = False, kept: KeptScale | None = None
) -> tuple[Operand, Operand | None]:
    """`_lowprecision.quantized` of the weights of all groups, [G, N, K], each by itself."""
    each: list[tuple[Operand | None, Operand | None]] = []
    for g, own in enumerate(weight.unbind()):
        of_group = None
        if kept is not None:
            of_group = KeptScale(kept.scale[g], None if kept.newest is None else kept.newest[0, g : g + 1])
        each.append(low.quantized(own, recipe, "weight", columns=columns, kept=of_group))
    along = _stacked(a for a, _ in each)
    assert along is not None
    shared = recipe.block("weight", "rows") == recipe.block("weight", "columns")
    return along, along if columns and shared else _stacked(b for _, b in each)


def _stacked(each: Iterable[Operand | None]) -> Operand | None:
    found = [one for one in each if one is not None]
    if not found:
        return None
    data, inverse = (_in_one([one[i] for one in found]) for i in (0, 1))
    return Operand(data, inverse)


def _in_one(each: list[Tensor]) -> Tensor:
    """Stack several tensors; 8-bit ones as uint8, because autocast cannot stack their dtype."""
    dtype = each[0].dtype
    return torch.stack(each if dtype.itemsize > 1 else [t.view(torch.uint8) for t in each]).view(dtype)


def grouped_in_8_bits(
    x: Operand,
    weight: Operand,
    recipe: Recipe,
    offsets: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    role: Role = "x",
) -> Tensor:
    """Return x_g weight_g^T + bias_g from operands quantized along their rows; zeros for rows without a group.

    With the role "dy", return x_g weight_g from weights quantized down their columns.
    """
    turned = role == "dy"
    if _by_torch(recipe, x.data):
        right = weight.data.mT if turned else weight.data
        scales = weight.inverse.unsqueeze(-1) if weight.inverse.dim() == 1 else weight.inverse.flatten(1)
        scales, ends = scales.expand(right.shape[:2]).contiguous(), offsets.clamp(max=len(x.data))
        y = _scaled_grouped_mm(x.data, right.contiguous().mT, _by_row(x, offsets), scales, ends)
        return finished(y, offsets, None if bias is None else bias.to(dtype))
    sums = low.wide(dtype)
    with autocasting(x.data.device.type, None):
        a = dequantize(*x, recipe, role, "rows", offsets=offsets).to(sums)
        each = zip(weight.data.unbind(), weight.inverse.unbind(), strict=True)
        b = torch.stack([dequantize(*own, recipe, "weight", "columns" if turned else "rows") for own in each]).to(sums)
        return grouped_linear(a, b.mT if turned else b, offsets, None if bias is None else bias.to(sums)).to(dtype)


def grouped_weight_grad_in_8_bits(
    dy: Operand, x: Operand, recipe: Recipe, offsets: Tensor, dtype: torch.dtype, main_grad: Tensor | None = None
) -> Tensor | Accumulated:
    """dy_g^T x_g from both quantized down their columns, zeros for a group without rows; or add it to `main_grad`."""
    if _by_torch(recipe, dy.data):
        product = _outer_by_torch(dy, x, offsets)
    else:
        sums = low.wide(dtype if main_grad is None else main_grad.dtype)
        pairs: tuple[tuple[Operand, Role], ...] = (dy, "dy"), (x, "x")
        with autocasting(dy.data.device.type, None):
            a, b = (dequantize(*one, recipe, role, "columns", offsets=offsets).to(sums) for one, role in pairs)
            product = grouped_weight_grad(a, b, offsets)
    if main_grad is None:
        return product.to(dtype)
    main_grad.add_(product)
    return accumulated


def _by_torch(recipe: Recipe, data: Tensor) -> bool:
    return data.is_cuda and not recipe.emulate


def _by_row(x: Operand, offsets: Tensor) -> Tensor:
    """The inverse scale of each row, [R]."""
    if x.inverse.dim() == 2:
        return x.inverse.reshape(-1)
    return x.inverse.index_select(0, group_at(offsets, len(x.data)).clamp(max=len(offsets) - 1))


def _outer_by_torch(dy: Operand, x: Operand, offsets: Tensor) -> Tensor:
    """Return dy_g^T x_g by torch, which needs groups to begin at multiples of 16: pads groups with zero rows."""
    rows, groups = len(x.data), len(offsets)
    ends = F.pad(offsets.to(torch.int64).clamp(max=rows), (1, 0))
    padded = (ends.diff() + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE
    behind = F.pad(padded.cumsum(0), (1, 0))
    total = (rows // MULTIPLE + groups) * MULTIPLE
    group, at = group_at(offsets, rows), torch.arange(rows, device=offsets.device)
    to = torch.where(group < groups, behind.index_select(0, group) + at - ends.index_select(0, group), total)

    def spread(one: Operand) -> Tensor:
        whole = one.data.new_zeros(total + 1, one.data.shape[1], dtype=torch.uint8)
        whole.index_copy_(0, to, one.data.contiguous().view(torch.uint8))
        return whole.narrow(0, 0, total).t().contiguous().view(one.data.dtype)

    def scales(one: Operand) -> Tensor:
        n = one.data.shape[1]
        return (one.inverse.unsqueeze(-1).expand(groups, n) if one.inverse.dim() == 1 else one.inverse).reshape(-1)

    product = _scaled_grouped_mm(spread(dy), spread(x).t(), scales(dy), scales(x), behind.narrow(0, 1, groups))
    return torch.where((padded > 0).view(-1, 1, 1), product, 0)


def _scaled_grouped_mm(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, offsets: Tensor) -> Tensor:
    run: Any = torch._scaled_grouped_mm  # pyright: ignore
    ends = offsets.to(torch.int32)
    return run(a, b, a_inverse, b_inverse, offs=ends, out_dtype=torch.bfloat16)
