"""RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import operation as sf
from ..env import Env, autocast_of
from ._aten import fused_rms_norm, fused_rms_norm_backward, layer_norm_backward
from ._norm import Norm, rounded, rows_summed, stats_dtype
from ._read import parameter
from ._takes import floating


class RMSNorm(Norm):
    """y = xhat gain, xhat = x rstd over the trailing dimensions `normalized_shape`.

    Forward: rstd = (E[x^2] + eps)^-1/2; gain = weight, or 1 + weight with `zero_centered=True`; no weight is a gain of
    one.

    Backward: with g = dy gain, dx = rstd (g - xhat E[g xhat]);  dweight = sum of dy xhat over all rows.

    x, y: [*, H], weight: [H], where H stands for `normalized_shape`; rstd: [*].
    Saved: x, rstd, and weight for dx.
    All is computed in float32 (float64 for a float64 input), for half inputs too, and rounded to the dtype of x once;
    under autocast on an accelerator y is float32, as in torch.
    Keys, arguments and initial values are those of `torch.nn.RMSNorm`.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.

    Args:
        normalized_shape: the trailing dimensions, an int or a tuple.
        eps: added to the mean square; `None` is the machine epsilon of the dtype it is computed in.
        elementwise_affine: whether there is a weight.
        zero_centered: whether the weight is stored minus one.

    Raises:
        ValueError: for an empty `normalized_shape`.
    """

    class Saved(sf.Saved):
        x: Tensor  # [*, H]
        rstd: Tensor  # [*] float32
        weight: Tensor | None = sf.field(for_="x")  # [H], the parameter itself

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered: bool = False,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine, zero_centered, device=device, dtype=dtype)
        self.eps = eps
        self.reset_parameters()

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        if env.device != "cpu" or backward:
            return super().traffic(env, backward)
        # Square, mean, product with rstd and with the gain, and three operators over the rows' statistics. In 16 bits
        # all of that is made of a copy of x in float32, and y is copied once more. Operators that ATen itself calls
        # cost less than a launch from Python: all of them together as much as two or three.
        return sf.Traffic(3, 1, 19) if env.dtype.itemsize == 2 else sf.Traffic(2, 2, 5)

    def reference(self, x: Tensor) -> Tensor:
        floating(x, "RMSNorm")
        stats = stats_dtype(x)
        gain = self.gain(self.weight, stats)
        gain = gain if gain is None or gain.dtype is stats else gain.to(stats)
        return rounded(F.rms_norm(x.to(stats), self.normalized_shape, gain, self.eps), x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        floating(x, "RMSNorm")
        weight, kind, fit = parameter(self, "weight"), x.device.type, x
        gain = self.gain(weight, stats_dtype(x)) if self.zero_centered else weight
        if kind != "cpu" and ((gain is not None and gain.dtype is not x.dtype) or autocast_of(kind) is not None):
            # An accelerator's kernel takes one dtype only, and autocast does not reach it.
            stats = stats_dtype(x)
            fit, gain = x.to(stats), None if gain is None else gain.to(stats)
        y, rstd = fused_rms_norm(fit, self.normalized_shape, gain, self.eps)
        for _ in self.normalized_shape:
            rstd = rstd.squeeze_(-1)  # nobody else has seen it; a view costs more
        return rounded(y, x), self.Saved(x=x, rstd=rstd, weight=weight)

    def again(self, x: Tensor, rstd: Tensor, weight: Tensor | None = None) -> Tensor:
        """Make y again from what is saved: on a CPU the bits of `fwd`, which ATen makes by these calls and others."""
        wide = x if x.dtype is rstd.dtype else x.to(rstd.dtype)
        y = wide * rstd.view(*rstd.shape, *(1,) * len(self.normalized_shape))
        gain = self.gain(weight, rstd.dtype)
        if gain is not None:
            y = y.mul_(gain) if gain.dtype is y.dtype else y * gain
        return y if y.dtype is x.dtype else y.to(x.dtype)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        x, rstd, weight = saved.x, saved.rstd, saved.weight if "x" in needs else None
        same = weight is not None and weight.dtype is x.dtype is dy.dtype
        if same and x.device.type == "cuda" and not self.zero_centered:
            wanted = ["x" in needs, "weight" in needs]
            dx, dweight = fused_rms_norm_backward(dy, x, self.normalized_shape, rstd, weight, wanted)
            return dx, {"weight": dweight} if wanted[1] else {}
        stats, dims = rstd.dtype, tuple(range(-len(self.normalized_shape), 0))
        gain = self.gain(weight, stats)
        if x.device.type == "cpu" and len(dims) == 1:
            return self._by_layer_norm(dy, x, rstd, gain, needs)
        rstd = rstd.view(*rstd.shape, *(1,) * len(dims))
        xhat = x.to(stats) * rstd
        dy = dy.to(stats)
        product = dy * xhat
        dx: Tensor | None = None
        grads: dict[str, Tensor | None] = {}
        if "weight" in needs:
            grads["weight"] = self.as_parameter(rows_summed(product, len(dims)), "weight")
        if "x" in needs:
            if gain is not None:
                dy, product = dy * gain, product.mul_(gain)
            dx = rounded(torch.addcmul(dy, xhat, product.mean(dims, keepdim=True), value=-1).mul_(rstd), x)
        return dx, grads

    def _by_layer_norm(
        self, dy: Tensor, x: Tensor, rstd: Tensor, gain: Tensor | None, needs: frozenset[str]
    ) -> tuple[Tensor | None, sf.Grads]:
        """Both gradients in one pass of ATen's kernel for a LayerNorm of mean 0, whose dx is short of rstd E[g]."""
        stats, like = rstd.dtype, x.dtype
        dy, x = (t if t.dtype is stats else t.to(stats) for t in (dy, x))
        gain = gain if gain is None or gain.dtype is stats else gain.to(stats)
        wanted = ["x" in needs, "weight" in needs, False]
        unread = x.new_ones(self.normalized_shape) if gain is None and wanted[1] else gain
        sizes = self.normalized_shape
        dx, dweight, _ = layer_norm_backward(dy, x, sizes, torch.zeros_like(rstd), rstd, unread, None, wanted)
        if wanted[0]:
            if gain is None or autocast_of("cpu") is not None:  # which would round what is multiplied to 16 bits
                total = (dy if gain is None else dy * gain).sum(-1)
            else:
                total = dy.matmul(gain)
            dx = dx.add_(total.mul_(rstd).unsqueeze(-1), alpha=1 / (sizes[0] or 1))
            dx = dx if dx.dtype is like else dx.to(like)
        grads: sf.Grads = {"weight": self.as_parameter(dweight, "weight")} if wanted[1] else {}
        return (dx if wanted[0] else None), grads

    @classmethod
    def example(cls, x: Tensor) -> RMSNorm:
        self = cls(x.shape[-1], device=x.device, dtype=x.dtype)
        assert self.weight is not None
        nn.init.normal_(self.weight)
        return self
