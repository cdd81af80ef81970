"""Linear, an optional Bias, and the Add that closes a residual."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env, Savings
from ..fusion import ForwardFusion, Requirements
from ..ops import Add, Bias, Linear
from ._linear import in_place, linear_of, one_dtype, plus_in_place


class LinearBiasAdd(ForwardFusion):
    """y = (x weight^T + bias) + other, the sum written over the GEMM's result; on any device.

    The numbers are those of `LinearBias` followed by `Add`, bit for bit. Where `other` has another dtype, as a float32
    residual has under autocast, the sum is made beside the GEMM, in the dtype torch promotes to.

    x: [*, in_features], other, y: [*, out_features]. Saves what the operations save.
    """

    linear: Linear
    bias: Bias | None
    add: Add

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield one_dtype(self.linear, self.bias, env), "weight and bias must have one dtype"

    def saves(self, env: Env) -> Savings:
        return super().saves(env) - in_place(self.linear, env)

    def fwd(self, x: Tensor, *, add_other: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y, gemm = self.decided("linear", linear_of, self.linear, self.bias)(x)
        return plus_in_place(y, self.add, add_other), {"linear": gemm}
