"""The backward of an optional Bias, a gated unit and the Linear it feeds, in the product that makes dx."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, Requirements
from ..operation import Gated, Grads
from ..ops import Bias, Linear
from ._gemm import epilogue_takes, tf32, weight_grad, worth
from ._kernels import device


class GatedLinearBackward(BackwardFusion):
    """[dgate; dup] from dh = dy weight: dgate = dh up act'(gate), dup = dh act(gate); and their sum over all rows.

    Of h = act(gate) up, [gate; up] = ... + bias, y = h weight^T, whatever made [gate; up] and whatever cover the
    forward pass had.  dweight = dy^T h;  dbias = sum of [dgate; dup], of float32 numbers and in a fixed order.

    dy: [*, out_features], [gate; up]: [*, 2 in_features].
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    bias: Bias | None
    gated: Gated
    linear: Linear

    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.gated, env)

    def saves(self, env: Env) -> Savings:
        # The operations write dh, make act(gate) again, dh up, dgate and dup, and join the two: 16 passes, here 4.
        launches, passes = (5, 12) if self.bias is None else (6, 14)
        return worth(self.linear, env, launches, passes, self.linear.in_features)

    def bwd(
        self, dy: Tensor, *, bias: Bias.Saved | None, gated: Any, linear: Linear.Saved, needs: frozenset[str]
    ) -> tuple[Tensor | None, Grads]:
        from ..kernels import gemm

        dx: Tensor | None = None
        grads: dict[str, Tensor | None] = {}
        if "linear.weight" in needs:
            grads["linear.weight"] = weight_grad(dy, linear.x)
        if "x" in needs or "bias.bias" in needs:
            dx, grads["bias.bias"], _ = gemm.linear_dgrad_gated(
                dy,
                linear.weight,
                act=device(self.gated.activation),
                t=gated.x,
                sums="bias.bias" in needs,
                tf32=tf32(),
            )
        return (dx if "x" in needs else None), grads
