"""The backward of a Linear behind a Fork, whose GEMM starts from the gradient that arrives at the Fork."""

from __future__ import annotations

from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, Requirements
from ..maingrad import Accumulated
from ..operation import Grads
from ..ops import Bias, Fork, Linear
from ..ops.linear import weight_grad
from ._linear import as_rows, dgrad, gemm_takes


class BackwardLinearAdd(BackwardFusion):
    """dx = d_fork_out + dy weight, the sum in the GEMM that computes dx, rounded once.

    dweight = dy^T x;  dbias = sum of dy over all rows. On a CPU a call is saved. On a GPU ATen copies
    d_fork_out before the GEMM adds to it, which takes as long as the sum that is saved.

    d_fork_out, x, dx: [*, in_features], dy: [*, out_features].
    """

    fork: Fork
    linear: Linear
    bias: Bias | None

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        return gemm_takes(self.linear, self.bias, env)

    def saves(self, env: Env) -> Savings:
        return Savings(launches=1 + (self.bias is not None) if env.device == "cpu" else 0)

    def bwd(
        self,
        dy: Tensor,
        *,
        linear: Linear.Saved,
        d_fork_out: Tensor | None,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        grads: dict[str, Tensor | Accumulated | None] = {}
        dx = dgrad(dy, linear.weight, d_fork_out) if "x" in needs else None
        if "bias.bias" in needs:
            grads["bias.bias"] = as_rows(dy).sum(0)
        if "linear.weight" in needs:  # last: what fails before it may fall back
            grads["linear.weight"] = weight_grad(dy, linear.x, main_grads.pop("linear.weight", None))
        return dx, grads
