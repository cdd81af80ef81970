"""GroupedLinear: a Linear per group of rows, such as the experts of a router."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import operation as sf
from ..casts import lowered
from ..env import autocast_of
from ..errors import InputError
from ..maingrad import Accumulated, accumulated
from ..recipes import Recipe
from ..saved import maker
from . import _grouped_lowprecision as low
from ._grouped import finished, grouped_bias_grad, grouped_linear, grouped_weight_grad, plain, spans
from ._lowprecision import operand, quantized
from ._parameters import parameter, required
from ._tensors import is_whole
from .linear import HasGEMM

_EVERY = frozenset({"x", "weight"})
_NOTHING = None, None


class GroupedLinear(HasGEMM, sf.UnfusedOperation):
    """y_i = x_i weight_g^T + bias_g for row i of group g: one `Linear` per group of consecutive rows (grouped GEMM).

    x is viewed as [rows, in_features]. Group g has rows offsets[g - 1] (0 for the first) to offsets[g], possibly none.
    Rows from offsets[groups - 1] on belong to no group: y and dx are zeros there. A GPU does not synchronize to read
    offsets.

    Backward: dx_i = dy_i weight_g;  dweight_g = sum of dy_i^T x_i,  dbias_g = sum of dy_i over the rows of group g,
    zeros for a group without rows.

    x: [*, in_features], y: [*, out_features], weight: [groups, out_features, in_features],
    bias: [groups, out_features], offsets: [groups] int32 or int64, non-decreasing, clamped to the number of rows.
    Saved: x for dweight, weight (under autocast its cast) for dx, offsets. With a recipe x and weight are saved in 8
    bits, quantized along columns. Groups do not share scales: blocks of x and dy start anew in each group. Initial
    values are those of a `torch.nn.Linear` for each group.
    Source: Shazeer et al. 2017, arXiv:1701.06538; Gale et al. 2022, arXiv:2211.15841.

    Args:
        groups: number of groups.
        in_features: last dimension of x.
        out_features: last dimension of y.
        bias: whether each group has a bias.
        offsets: channel of the ends of the groups, as from `Permute`.

    Raises:
        ValueError: for fewer than one group.
        InputError: (SF101) for offsets that are not one integer per group; (SF106) if the weight is `None`.
    """

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="weight")  # [*, in_features]
        weight: Tensor = sf.field(for_="x")  # [groups, out_features, in_features], the parameter, or its cast
        offsets: Tensor  # [groups]

    class SavedQuantized(sf.Saved):
        x: Tensor | None = sf.field(for_="weight")  # [R, in_features], 8 bits, quantized down its columns
        x_inverse: Tensor | None = sf.field(for_="weight")  # the inverse of its scales
        weight: Tensor | None = sf.field(for_="x")  # [groups, out_features, in_features], 8 bits, down their columns
        weight_inverse: Tensor | None = sf.field(for_="x")
        offsets: Tensor  # [groups]

    same_dtype = True
    autocast = "lower"

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        offsets: str = "offsets",
    ) -> None:
        super().__init__()
        if groups < 1:
            raise ValueError(f"expects at least one group, got {groups}")
        self.groups, self.in_features, self.out_features, self.offsets = groups, in_features, out_features, offsets
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty((groups, out_features, in_features), **made))
        self.register_parameter("bias", nn.Parameter(torch.empty((groups, out_features), **made)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each group from U(-1/sqrt(in_features), 1/sqrt(in_features)), as in `torch.nn.Linear`."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
        for p in self.parameters():
            nn.init.uniform_(p, -bound, bound)

    @property
    def channels(self) -> dict[str, str | None]:
        return {"offsets": self.offsets}

    def check(self, offsets: Tensor) -> None:
        """Raise `InputError` unless offsets has one integer per group."""
        if not is_whole(offsets) or tuple(offsets.shape) != (self.groups,):
            got = f"{tuple(offsets.shape)} {offsets.dtype}"
            message = f"expects the ends of {self.groups} groups, integers {(self.groups,)}, got {got}"
            raise InputError(message, code="SF101", operation="GroupedLinear")

    def reference(self, x: Tensor, *, offsets: Tensor, recipe: Recipe | None = None) -> Tensor:
        self.check(offsets)
        rows, bias = x.reshape(-1, self.in_features), parameter(self, "bias")
        if recipe is None:
            y = plain(rows, self.weight, offsets, bias)
        else:
            from ._lowprecision_reference import linear_by_reference

            y = linear_by_reference(rows, self.weight, recipe, offsets)
            y = finished(y, offsets, None if bias is None else bias.to(y.dtype))
        return y.reshape(*x.shape[:-1], self.out_features)

    def fwd(
        self, x: Tensor, *, offsets: Tensor, recipe: Recipe | None = None, needs: frozenset[str] = _EVERY
    ) -> tuple[Tensor, Saved | SavedQuantized]:
        return self.run(x, offsets) if recipe is None else self._quantized(x, offsets, recipe, needs)

    def run(self, x: Tensor, offsets: Tensor) -> tuple[Tensor, Saved]:
        """`fwd` without a recipe."""
        self.check(offsets)
        given, weight, bias = self.operands(x)
        y = grouped_linear(given.reshape(-1, self.in_features), weight, offsets, bias)
        return y.view(*x.shape[:-1], self.out_features), self._saved(given, weight, offsets)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, weight and bias, cast under autocast."""
        weight, bias = required(self, "weight"), parameter(self, "bias")
        dtype = autocast_of(x.device.type)
        if dtype is not None and x.dtype is not torch.float64:
            x, weight = x.to(dtype), lowered(weight, always=True)
            bias = None if bias is None else bias.to(dtype)
        return x, weight, bias

    def _quantized(
        self, x: Tensor, offsets: Tensor, recipe: Recipe, needs: frozenset[str]
    ) -> tuple[Tensor, SavedQuantized]:
        self.check(offsets)
        given, weight, bias = self.operands(x)
        rows = given.reshape(-1, self.in_features)
        kept = [self.scale_for(name, t, recipe, bool(needs)) for name, t in (("x", rows), ("weight", weight))]
        qx, x_down = quantized(rows, recipe, "x", columns="weight" in needs, kept=kept[0], offsets=offsets)
        qweight, weight_down = low.quantized_group_weights(weight, recipe, columns="x" in needs, kept=kept[1])
        assert qx is not None
        y = low.grouped_in_8_bits(qx, qweight, recipe, offsets, rows.dtype, bias)
        saved = _saved_quantized(*(x_down or _NOTHING), *(weight_down or _NOTHING), offsets)
        return y.view(*x.shape[:-1], self.out_features), saved

    def bwd(
        self,
        dy: Tensor,
        saved: Saved | SavedQuantized,
        *,
        needs: frozenset[str],
        main_grads: dict[str, Tensor] | None = None,
        recipe: Recipe | None = None,
    ) -> tuple[Tensor | None, sf.Grads]:
        rows, dx = dy.reshape(-1, self.out_features), None
        if recipe is not None:
            of = cast(GroupedLinear.SavedQuantized, saved)
            return self._quantized_grads(dy, rows, of, recipe, needs, main_grads)
        assert isinstance(saved, GroupedLinear.Saved)
        if "x" in needs:
            weight = saved.weight.conj() if dy.is_complex() else saved.weight
            rows = rows if rows.dtype is weight.dtype else rows.to(weight.dtype)
            dx = grouped_linear(rows, weight.mT, saved.offsets, None).view(*dy.shape[:-1], self.in_features)
        grads: dict[str, Tensor | Accumulated | None] = {"offsets": None}
        if "bias" in needs:
            grads["bias"] = grouped_bias_grad(rows, saved.offsets)
        if "weight" in needs:  # last: after an error before it, a fallback may still run
            x = saved.x.reshape(-1, self.in_features)
            x = x.conj() if dy.is_complex() else x
            rows = rows if rows.dtype is x.dtype else rows.to(x.dtype)
            buffer = main_grads.pop("weight", None) if main_grads else None
            grads["weight"] = self._weight_grad(rows, x, saved.offsets, buffer)
        return dx, grads

    def _quantized_grads(
        self,
        dy: Tensor,
        rows: Tensor,
        saved: SavedQuantized,
        recipe: Recipe,
        needs: frozenset[str],
        main_grads: dict[str, Tensor] | None,
    ) -> tuple[Tensor | None, sf.Grads]:
        grads: dict[str, Tensor | Accumulated | None] = {"offsets": None}
        if "bias" in needs:
            grads["bias"] = grouped_bias_grad(rows, saved.offsets)
        kept = None if needs.isdisjoint(_EVERY) else self.scale_for("dy", rows, recipe, True)
        asked = {"rows": "x" in needs, "columns": "weight" in needs}
        along, down = quantized(rows, recipe, "dy", **asked, kept=kept, offsets=saved.offsets)
        dx = None
        if along is not None:
            weight = operand(saved.weight, saved.weight_inverse)
            dx = low.grouped_in_8_bits(along, weight, recipe, saved.offsets, dy.dtype, role="dy")
            dx = dx.view(*dy.shape[:-1], self.in_features)
        if down is not None:
            x, buffer = operand(saved.x, saved.x_inverse), main_grads.pop("weight", None) if main_grads else None
            grads["weight"] = low.grouped_weight_grad_in_8_bits(down, x, recipe, saved.offsets, dy.dtype, buffer)
        return dx, grads

    def _weight_grad(self, dy: Tensor, x: Tensor, offsets: Tensor, buffer: Tensor | None) -> Tensor | Accumulated:
        if buffer is None:
            return grouped_weight_grad(dy, x, offsets)
        if x.is_cpu:  # not rounded to the dtype of dy before it is added
            for g, (start, end) in enumerate(spans(offsets, len(x))):
                buffer[g].addmm_(dy[start:end].to(buffer.dtype).t(), x[start:end].to(buffer.dtype))
        else:
            buffer.add_(grouped_weight_grad(dy, x, offsets))
        return accumulated

    @property
    def scale_shape(self) -> tuple[int, ...]:
        return (self.groups,)

    def not_quantized(self, recipe: Recipe, dtype: torch.dtype | None, arch: str) -> str | None:
        return low.why_no_grouped_gemm(recipe, dtype, arch)

    @classmethod
    def example(cls, x: Tensor) -> GroupedLinear:
        return cls(3, x.shape[-1], x.shape[-1] + 3, device=x.device, dtype=x.dtype)

    @classmethod
    def examples(cls, x: Tensor) -> tuple[GroupedLinear, ...]:
        return (cls.example(x), cls(2, x.shape[-1], 4, bias=False, device=x.device, dtype=x.dtype))

    def extra_repr(self) -> str:
        biased = self._parameters.get("bias") is not None
        text = f"{self.groups}, {self.in_features}, {self.out_features}, bias={biased}"
        return text + (f", offsets={self.offsets!r}" if self.offsets != "offsets" else "")


_saved_quantized = maker(GroupedLinear.SavedQuantized)
