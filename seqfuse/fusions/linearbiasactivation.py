"""Linear, an optional Bias and any activation, in the epilogue of a Triton product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env, Savings
from ..fusion import ForwardFusion, InferenceFusion, Requirements
from ..ops import Bias, Linear
from ..pointwise import Pointwise
from ._gemm import bias_of, epilogue_takes, tf32, weight_of, worth
from ._kernels import device


class LinearBiasActivation(ForwardFusion):
    """y = act(z), z = x weight^T + bias, in one product, for any `Pointwise` with device functions.

    Bias and activation are made of the float32 sums; z is rounded when it is stored, which it is only where the
    activation's gradient reads it.

    x: [*, in_features], z, y: [*, out_features]. Saves what the operations save.
    """

    linear: Linear
    bias: Bias | None
    act: Pointwise

    triton = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.act, env)

    def saves(self, env: Env) -> Savings:
        stored = self.act.reads == "input"
        launches, passes = (1, 2) if self.bias is None else (2, 4)
        return worth(self.linear, env, launches, passes - stored, self.linear.out_features)

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        from ..kernels import gemm

        act, weight = self.act, weight_of(self.linear)
        y, z = gemm.linear(x, weight, bias_of(self.bias), act=device(act), store_pre=act.reads == "input", tf32=tf32())
        record = act.record(y if z is None else z, y)
        saved = {"linear": Linear.Saved(x=x, weight=weight), "act": record}
        return y, saved if self.bias is None else {**saved, "bias": Bias.NOTHING}


class LinearBiasActivationInference(InferenceFusion):
    """y = act(x weight^T + bias) in one product, where nothing needs a gradient: nothing is written beside y.

    x: [*, in_features], y: [*, out_features].
    """

    linear: Linear
    bias: Bias | None
    act: Pointwise

    triton = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.act, env)

    def saves(self, env: Env) -> Savings:
        launches, passes = (1, 2) if self.bias is None else (2, 4)
        return worth(self.linear, env, launches, passes, self.linear.out_features)

    def fwd(self, x: Tensor) -> Tensor:
        from ..kernels import gemm

        return gemm.linear(x, weight_of(self.linear), bias_of(self.bias), act=device(self.act), tf32=tf32())[0]
