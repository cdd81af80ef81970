"""A Linear with a Scale before or behind it, whose factor is the GEMM's: backward, and forward with an Add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, Requirements
from ..hardware import STEP
from ..maingrad import Accumulated
from ..operation import Grads
from ..ops import Add, Bias, Linear, Scale
from ..ops._mm import addmm, linear
from ..ops.linear import weight_grad
from ._linear import as_rows, dgrad, fits, gemm_takes, output_bytes


class ForwardLinearScaleAdd(ForwardFusion):
    """y = factor (x weight^T) + other from one GEMM, which adds to `other`, rounded once; on any device.

    x: [*, in_features], other, y: [*, out_features]. Saves what the operations save.
    """

    linear: Linear
    scale: Scale
    add: Add

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield from gemm_takes(self.linear, None, env)
        yield env.leaving is env.dtype, "the GEMM and what is added to it must have one dtype"

    def saves(self, env: Env) -> Savings:
        # ATen copies `other`, on a GPU by a kernel of its own.
        copied = Savings(launches=0 if env.device == "cpu" else 1 - STEP, bytes=2 * output_bytes(self.linear, env))
        return super().saves(env) - copied

    def fwd(self, x: Tensor, *, add_other: Tensor) -> tuple[Tensor, dict[str, Any]]:
        weight, factor = self.linear.weight_for(x), self.scale.factor
        shape = (*x.shape[:-1], weight.shape[0])
        if add_other.shape == shape and add_other.dtype is x.dtype and fits(factor):
            y = addmm(as_rows(add_other), as_rows(x), weight.t(), factor)
            y = y if x.ndim == 2 else y.view(shape)
        else:
            y, _ = self.add.fwd(linear(x, weight) * factor, other=add_other)
        return y, {"linear": Linear.Saved(x=x, weight=weight)}


class BackwardLinearScale(BackwardFusion):
    """dx = factor (dy weight) from one GEMM, rounded once, for a Scale before a Linear or behind it.

    Before, of y = (factor x) weight^T: dweight is as ever, the Linear having saved factor x.
    Behind, of y = factor (x weight^T + bias): dweight = factor (dy^T x), dbias = factor times the sum of dy over all
    rows. No gradient is multiplied by the factor in a pass of its own.

    dx: [*, in_features], dy: [*, out_features].
    """

    first: Scale | Linear
    bias: Bias | None
    second: Linear | Scale

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield type(self.first) is not type(self.second), "there is no Scale beside the Linear"
        linear = self.first if isinstance(self.first, Linear) else self.second
        assert isinstance(linear, Linear)
        yield self.bias is None or linear is self.first, "a Bias stands between the Scale and the Linear"
        yield from gemm_takes(linear, self.bias, env)

    def saves(self, env: Env) -> Savings:
        columns = self.first.out_features if isinstance(self.first, Linear) else _features(self.second)
        joined = self.bias is not None and env.device == "cpu"
        return Savings(launches=1 + joined, bytes=2.0 * env.tokens * env.itemsize * columns)

    def bwd(
        self, dy: Tensor, *, first: Any, second: Any, needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:  # fmt: skip
        grads: dict[str, Tensor | Accumulated | None] = {}
        before = isinstance(self.first, Scale)
        scale, linear, weight = (first, second, "second.weight") if before else (second, first, "first.weight")
        factor, behind = scale.factor, 1.0 if before else scale.factor
        if not fits(factor):
            dy, factor, behind = dy if before else dy * factor, 1.0, 1.0
        dx = dgrad(dy, linear.weight, factor=factor) if "x" in needs else None
        if dx is not None and before and not fits(scale.factor):
            dx = dx * scale.factor
        if "bias.bias" in needs:
            wide = torch.float32 if dy.dtype.itemsize < 4 else dy.dtype
            grads["bias.bias"] = (as_rows(dy).sum(0, dtype=wide) * behind).to(dy.dtype)
        if weight in needs:  # last: what fails before it may fall back
            grads[weight] = weight_grad(dy, linear.x, main_grads.pop(weight, None), behind)
        return dx, grads


def _features(linear: Linear | Scale) -> int:
    assert isinstance(linear, Linear)
    return linear.in_features
