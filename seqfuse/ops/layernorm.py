"""LayerNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import operation as sf
from ._aten import layer_norm_backward
from ._norm import Norm, rounded, stats_dtype
from ._takes import floating


class LayerNorm(Norm):
    """y = xhat gain + bias, xhat = (x - mean) rstd over the trailing dimensions `normalized_shape`.

    Forward: mean = E[x], rstd = (E[(x - mean)^2] + eps)^-1/2; gain = weight, or 1 + weight with `zero_centered=True`;
    no weight is a gain of one, no bias a bias of zero.

    Backward: with g = dy gain, dx = rstd (g - E[g] - xhat E[g xhat]);  dweight = sum of dy xhat and dbias = sum of dy
    over all rows.

    x, y: [*, H], weight, bias: [H], where H stands for `normalized_shape`; mean, rstd: [*].
    Saved: x, mean, rstd, and weight for dx.
    Statistics are float32 (float64 for a float64 input), for half inputs too, and `1 + weight` is taken in that dtype.
    y has the dtype of x; under autocast on an accelerator it is float32, as in torch.
    Keys, arguments and initial values are those of `torch.nn.LayerNorm`.
    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.

    Args:
        normalized_shape: the trailing dimensions, an int or a tuple.
        eps: added to the variance.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias beside the weight.
        zero_centered: whether the weight is stored minus one.

    Raises:
        ValueError: for an empty `normalized_shape`.
    """

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_=("x", "weight"))  # [*, H]
        mean: Tensor = sf.field(for_=("x", "weight"))  # [*] float32
        rstd: Tensor = sf.field(for_=("x", "weight"))  # [*] float32
        weight: Tensor | None = sf.field(for_="x")  # [H], the parameter itself

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered: bool = False,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine, zero_centered, device=device, dtype=dtype)
        self.eps = eps
        shift = torch.empty(self.normalized_shape, device=device, dtype=dtype) if elementwise_affine and bias else None
        self.register_parameter("bias", None if shift is None else nn.Parameter(shift))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def reference(self, x: Tensor) -> Tensor:
        floating(x, "LayerNorm")
        stats = stats_dtype(x)
        gain, bias = self.gain(self.weight, stats), self.bias
        gain, bias = (t if t is None or t.dtype is stats else t.to(stats) for t in (gain, bias))
        return rounded(F.layer_norm(x.to(stats), self.normalized_shape, gain, bias, self.eps), x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        own = self.__dict__  # an attribute of a module costs several times as much
        found, sizes = own["_parameters"], own["normalized_shape"]
        weight, bias = found.get("weight"), found.get("bias")
        weight, bias = self.weight if weight is None else weight, self.bias if bias is None else bias
        fit, gain, stats = x, weight, torch.float32
        exact = x.dtype is stats and weight is not None and weight.dtype is stats and not own["zero_centered"]
        if not exact:
            floating(x, "LayerNorm")
            stats = stats_dtype(x)
            fit, gain = self._fit(x, weight)
        wanted = stats if exact else (fit if gain is None else gain).dtype
        if bias is not None and bias.dtype is not wanted:
            bias = bias.to(wanted)
        y, mean, rstd = torch.native_layer_norm(fit, sizes, gain, bias, own["eps"])
        for _ in sizes:
            mean, rstd = mean.squeeze_(-1), rstd.squeeze_(-1)  # nobody else has seen them; a view costs more
        if not exact:
            y = rounded(y, x)
            if mean.dtype is not stats:  # fake tensors take it from x
                mean, rstd = mean.to(stats), rstd.to(stats)
        return y, self._saved(x, mean, rstd, weight)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        if needs <= {"bias"}:
            return None, {"bias": self._dbias(dy)} if needs else {}
        x, mean = saved.x, saved.mean
        stats = mean.dtype
        wanted = ["x" in needs, "weight" in needs, "bias" in needs]
        gain = saved.weight if wanted[0] else None
        if self.zero_centered:
            gain = self.gain(gain, stats)
        exact = x.dtype is stats and dy.dtype is stats and (gain is None or gain.dtype is stats)
        if not exact:
            # ATen's kernel for the CPU sums half gradients in half: 5000 ones give 256 in bfloat16.
            native = dy.device.type != "cpu" and x.dtype is dy.dtype and (gain is None or gain.dtype is x.dtype)
            if not native:
                x, dy, gain = x.to(stats), dy.to(stats), None if gain is None else gain.to(stats)
        if gain is None and (wanted[1] or wanted[2]):
            gain = x.new_ones(self.normalized_shape)  # where dx is not needed, only its shape and dtype are read
        dx, dweight, dbias = layer_norm_backward(dy, x, self.normalized_shape, mean, saved.rstd, gain, gain, wanted)
        grads: dict[str, Tensor | None] = {}
        if wanted[1]:
            grads["weight"] = dweight if exact else self.as_parameter(dweight, "weight")
        if wanted[2]:
            grads["bias"] = dbias if exact else self.as_parameter(dbias, "bias")
        return ((dx if exact else rounded(dx, saved.x)) if wanted[0] else None), grads

    def _dbias(self, dy: Tensor) -> Tensor:
        """The gradient of the bias alone, summed as the whole backward sums it; the kernel reads dy only."""
        stats = stats_dtype(dy)
        fit = dy if dy.device.type != "cpu" else dy.to(stats)
        unread = fit.new_zeros(dy.shape[: -len(self.normalized_shape)], dtype=stats)
        gain = fit.new_ones(self.normalized_shape)
        wanted = [False, False, True]
        dbias = layer_norm_backward(fit, fit, self.normalized_shape, unread, unread, gain, gain, wanted)[2]
        return self.as_parameter(dbias, "bias")

    def _fit(self, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The input and the gain in dtypes for which ATen computes in, and gives, statistics of `stats_dtype`."""
        stats = stats_dtype(x)
        gain = self.gain(weight, stats)
        if x.dtype is stats:
            return x, gain if gain is None or gain.dtype is stats else gain.to(stats)
        if x.device.type == "cpu":
            # ATen's mixed kernel; with parameters of x's dtype it would round the statistics to that dtype.
            return x, x.new_ones(self.normalized_shape, dtype=stats) if gain is None else gain.to(stats)
        if gain is None or gain.dtype is x.dtype:
            return x, gain
        return x.to(stats), gain.to(stats)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bias={self.bias is not None}"

    @classmethod
    def example(cls, x: Tensor) -> LayerNorm:
        self = cls(x.shape[-1], device=x.device, dtype=x.dtype)
        assert self.weight is not None
        assert self.bias is not None
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)
        return self
