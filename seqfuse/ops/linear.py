"""Linear: a product with a weight, and the bias it hands to `Bias`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import operation as sf
from ..maingrad import Accumulated, accumulated
from ._read import parameter
from .bias import Bias


class Linear(sf.UnfusedOperation):
    """y = x weight^T, followed by `Bias` where there is a bias.

    Forward: y = x weight^T. Called as a module it adds `bias`; in a list it expands to this product and a `Bias` that
    reads `linear.bias`, so that `Linear(bias=True)` and `Linear(bias=False), Bias` are one pattern.

    Backward: dx = dy weight;  dweight = dy^T x over all rows; where there is a `weight.main_grad` it is
    added to that in float32.

    x: [*, in_features], y: [*, out_features], weight: [out_features, in_features], bias: [out_features].
    Saved: x for dweight, weight for dx; each is dropped when that gradient is not wanted.
    Keys, arguments and initial values are those of `torch.nn.Linear`.

    Args:
        in_features: last dimension of x.
        out_features: last dimension of y.
        bias: whether to own a bias.
    """

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="weight")  # [*, in_features]
        weight: Tensor = sf.field(for_="x")  # [out_features, in_features], the parameter itself

    bias: nn.Parameter | None
    _member: tuple[Bias, ...]  # a tuple, so that it is not registered as a submodule

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype))
        owned = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", owned)
        self._member = (Bias.of(self, out_features),)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start from U(-1/sqrt(in_features), 1/sqrt(in_features)), as `torch.nn.Linear` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            nn.init.uniform_(self.bias, -bound, bound)

    def expand(self) -> tuple[nn.Module, ...]:
        # A parametrized bias is no longer registered; reading it would evaluate it.
        if self._parameters.get("bias", self) is None:
            return (self,)
        if not self._member[0].belongs_to(self):  # a shallow replica
            self._member = (Bias.of(self, self.out_features),)
        return (self, *self._member)

    def reference(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        weight = parameter(self, "weight")
        assert weight is not None
        return F.linear(x, weight), self.Saved(x=x, weight=weight)

    def bwd(
        self, dy: Tensor, saved: Saved, *, needs: frozenset[str], main_grads: dict[str, Tensor] | None = None
    ) -> tuple[Tensor | None, sf.Grads]:
        flat, conjugate = dy.ndim == 2, dy.is_complex()
        dx = dweight = None
        if "x" in needs:
            weight = saved.weight.conj() if conjugate else saved.weight
            dx = dy.mm(weight) if flat else dy.matmul(weight)
        if "weight" in needs:
            x = saved.x.conj() if conjugate else saved.x
            dweight = weight_grad(dy, x, main_grads.pop("weight", None) if main_grads else None)
        return dx, {"weight": dweight}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape or shape[-1] != self.in_features:
            got = shape[-1] if shape else "a 0-d tensor"
            raise ValueError(f"expects last dimension {self.in_features}, got {got}")
        return (*shape[:-1], self.out_features)

    @classmethod
    def example(cls, x: Tensor) -> Linear:
        # Not square: a transposed weight must not fit.
        return cls(x.shape[-1], x.shape[-1] + 3, device=x.device, dtype=x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self._parameters.get('bias', self) is not None}"


def weight_grad(dy: Tensor, x: Tensor, main_grad: Tensor | None = None) -> Tensor | Accumulated:
    """The gradient of a weight, dy^T x over all rows, or `accumulated` where it was added to `main_grad`.

    What is added is float32, as `main_grad` is (float64 as that): it is not rounded to the dtype of dy first.
    dy: [*, N], x: [*, K], dweight, main_grad: [N, K].
    """
    dy, x = dy if dy.ndim == 2 else _rows(dy), x if x.ndim == 2 else _rows(x)
    if main_grad is None:
        return dy.t().mm(x)
    device, dtype = dy.device.type, main_grad.dtype
    if torch.is_autocast_enabled(device):  # it does not reach a product in place
        dy, x = (t.to(torch.get_autocast_dtype(device)) for t in (dy, x))
    if device == "cuda" and torch.version.hip is None and dy.dtype is not dtype and dy.dtype is x.dtype:
        torch.addmm(main_grad, dy.t(), x, out_dtype=dtype, out=main_grad)
    else:
        main_grad.addmm_(dy.to(dtype).t(), x.to(dtype))
    return accumulated


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)
