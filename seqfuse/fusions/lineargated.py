"""Linear, an optional Bias and a gated unit, in the epilogue of a Triton product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env, Savings
from ..fusion import ForwardFusion, InferenceFusion, Requirements
from ..ops import Bias, Linear
from ..pointwise import Gated
from ._gemm import bias_of, epilogue_takes, tf32, weight_of, worth
from ._kernels import device


class LinearGated(ForwardFusion):
    """y = act(gate) up, [gate; up] = x weight^T + bias, in one product with two accumulators.

    The weight stays as it is, the rows of the gate first. [gate; up] is rounded when it is stored, y is not made of the
    rounded numbers.

    x: [*, in_features], [gate; up]: [*, 2 F], y: [*, F], 2 F = out_features. Saves what the operations save.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    linear: Linear
    bias: Bias | None
    gated: Gated

    triton = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.gated, env)

    def saves(self, env: Env) -> Savings:
        # The operations write [gate; up], and read and write it for a bias; act(gate) is a tensor of its own.
        launches, passes = (2, 4) if self.bias is None else (3, 8)
        return worth(self.linear, env, launches, passes, self.linear.out_features // 2)

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        from ..kernels import gemm

        gated, weight = self.gated, weight_of(self.linear)
        act = device(gated.activation)
        y, packed = gemm.linear_gated(x, weight, bias_of(self.bias), act=act, store_pre=True, tf32=tf32())
        record = gated.Saved(x=packed)  # pyright: ignore[reportCallIssue]
        saved = {"linear": Linear.Saved(x=x, weight=weight), "gated": record}
        return y, saved if self.bias is None else {**saved, "bias": Bias.NOTHING}


class LinearGatedInference(InferenceFusion):
    """y = act(gate) up, [gate; up] = x weight^T + bias, where nothing needs a gradient: [gate; up] is never written.

    x: [*, in_features], y: [*, F], 2 F = out_features.
    """

    linear: Linear
    bias: Bias | None
    gated: Gated

    triton = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.gated, env)

    def saves(self, env: Env) -> Savings:
        launches, passes = (2, 6) if self.bias is None else (3, 10)
        return worth(self.linear, env, launches, passes, self.linear.out_features // 2)

    def fwd(self, x: Tensor) -> Tensor:
        from ..kernels import gemm

        act = device(self.gated.activation)
        return gemm.linear_gated(x, weight_of(self.linear), bias_of(self.bias), act=act, tf32=tf32())[0]
