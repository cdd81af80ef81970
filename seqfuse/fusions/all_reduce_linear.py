"""The backward of a GEMM whose features several processes divide, its sum over them meanwhile."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, Requirements
from ..maingrad import Accumulated
from ..operation import Grads
from ..ops import Bias, CopyToTensorParallel, Linear
from ..ops._mm import mm
from ..ops.linear import weight_grad
from ._linear import one_dtype


class AllReduceLinearBackward(BackwardFusion):
    """dx = sum of dy weight over the processes, which is sent while dweight = dy^T x and dbias = sum of dy are made.

    dy: [*, out_features], dx: [*, in_features]. The operations one after another wait for the sum. As processes
    exchange tensors in it, nothing falls back if it fails.
    """

    enter: CopyToTensorParallel
    linear: Linear
    bias: Bias | None

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield self.enter.group.size > 1, "needs several processes"
        yield not env.dtype.is_complex, "gradients of complex numbers need conjugates"
        yield one_dtype(self.linear, self.bias, env), "weight and bias must have one dtype"
        yield env.autocast is None, "under autocast the sum is of x's dtype, not of the GEMM's"

    def saves(self, env: Env) -> Savings:
        """The shorter of what overlaps; the wire is taken to be as fast as memory, so that it is no less."""
        rows, linear, size = float(env.rows or 1), self.linear, self.enter.group.size
        product = Savings(flops=2 * rows * linear.in_features * linear.out_features)
        sent = Savings(bytes=2 * (size - 1) / size * rows * linear.in_features * env.itemsize)
        return dataclasses.replace(min(product, sent, key=env.microseconds), launches=1 if env.device == "cpu" else 0)

    def bwd(
        self,
        dy: Tensor,
        *,
        linear: Linear.Saved,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        rows = dy if dy.ndim == 2 else dy.flatten(0, -2) if dy.ndim > 2 else dy.unsqueeze(0)
        wait = None
        grads: dict[str, Tensor | Accumulated | None] = {}
        if "x" in needs:
            dx = mm(rows, linear.weight).view(*dy.shape[:-1], linear.weight.shape[1])
            wait = self.enter.group.begin_all_reduce(dx, "CopyToTensorParallel")
        if "linear.weight" in needs:
            grads["linear.weight"] = weight_grad(rows, linear.x, main_grads.pop("linear.weight", None))
        if "bias.bias" in needs:
            grads["bias.bias"] = rows.sum(0)
        return None if wait is None else wait(), grads
