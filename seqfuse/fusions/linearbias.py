"""Linear and Bias, forward and backward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, Requirements
from ..maingrad import Accumulated
from ..operation import Grads
from ..ops import Bias, Linear
from ..ops._read import required
from ..ops.linear import weight_grad
from ._linear import one_dtype, output_bytes


class LinearBias(ForwardFusion):
    """y = x weight^T + bias in one product that starts from the bias, on any device.

    x: [*, in_features], y: [*, out_features]. Saves what `Linear` and `Bias` save.
    """

    linear: Linear
    bias: Bias

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield one_dtype(self.linear, self.bias), "weight and bias must have one dtype"

    def saves(self, env: Env) -> Savings:
        return Savings(launches=1, bytes=2 * output_bytes(self.linear, env))

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Linear.Saved | Bias.Saved]]:
        weight = required(self.linear, "weight")
        y = F.linear(x, weight, self.bias.read())
        return y, {"linear": Linear.Saved(x=x, weight=weight), "bias": Bias.NOTHING}


class LinearBiasBackward(BackwardFusion):
    """All gradients of a product and its bias in one step over the rows of dy.

    dx = dy weight;  dweight = dy^T x;  dbias = sum of dy over all rows. ATen has no kernel that makes two of them; what
    is saved is a step of the engine and, beyond two dimensions, a second look for the rows.
    """

    linear: Linear
    bias: Bias

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield not env.dtype.is_complex, "gradients of complex numbers need conjugates"
        yield one_dtype(self.linear, self.bias), "weight and bias must have one dtype"

    def saves(self, env: Env) -> Savings:
        return Savings(launches=1 if env.device == "cpu" else 0)

    def bwd(
        self,
        dy: Tensor,
        *,
        linear: Linear.Saved,
        bias: Bias.Saved,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        rows = dy if dy.ndim == 2 else dy.flatten(0, -2) if dy.ndim > 2 else dy.unsqueeze(0)
        dx: Tensor | None = None
        grads: dict[str, Tensor | Accumulated | None] = {}
        if "x" in needs:
            dx = rows.mm(linear.weight)
            dx = dx if rows is dy else dx.view(*dy.shape[:-1], dx.shape[1])
        if "bias.bias" in needs:
            grads["bias.bias"] = rows.sum(0)
        if "linear.weight" in needs:  # last: what fails before it may fall back
            x = linear.x if rows is dy else linear.x.reshape(rows.shape[0], linear.x.shape[-1])
            grads["linear.weight"] = weight_grad(rows, x, main_grads.pop("linear.weight", None))
        return dx, grads
