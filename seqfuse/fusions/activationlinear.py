"""The backward of an optional Bias, an activation and the Linear it feeds, in the product that makes dx."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, Requirements
from ..operation import Grads, Pointwise
from ..ops import Bias, Linear
from ._gemm import epilogue_takes, tf32, weight_grad, worth
from ._kernels import device


class ActivationLinearBackward(BackwardFusion):
    """dz = act'(t) (dy weight), and with it the gradient of the bias before: its sum over all rows.

    Of x = act(z), z = ... + bias, y = x weight^T, whatever made z and whatever cover the forward pass had; t is what
    the activation keeps, z or x.  dweight = dy^T x;  dbias = sum of dz, of float32 numbers and in a fixed order.

    dy: [*, out_features], t, dz: [*, in_features].
    """

    bias: Bias | None
    act: Pointwise
    linear: Linear

    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.act, env)

    def saves(self, env: Env) -> Savings:
        launches, passes = (1, 2) if self.bias is None else (2, 3)
        return worth(self.linear, env, launches, passes, self.linear.in_features)

    def bwd(
        self,
        dy: Tensor,
        *,
        bias: Bias.Saved | None,
        act: Any,
        linear: Linear.Saved,
        needs: frozenset[str],
    ) -> tuple[Tensor | None, Grads]:
        from ..kernels import gemm

        dz: Tensor | None = None
        grads: dict[str, Tensor | None] = {}
        if "linear.weight" in needs:
            grads["linear.weight"] = weight_grad(dy, linear.x)
        if "x" in needs or "bias.bias" in needs:
            t: Tensor = act.x if self.act.reads == "input" else act.y
            dz, grads["bias.bias"], _ = gemm.linear_dgrad(
                dy,
                linear.weight,
                act=device(self.act),
                t=t,
                t_is_output=self.act.reads == "output",
                sums="bias.bias" in needs,
                tf32=tf32(),
            )
        return (dz if "x" in needs else None), grads
