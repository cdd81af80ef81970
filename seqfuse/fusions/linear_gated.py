"""Linear, an optional Bias, a gated unit and an optional Dropout, in the epilogue of a Triton product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env, Savings
from ..fusion import ForwardFusion, InferenceFusion, Requirements
from ..ops import Bias, Dropout, Linear
from ..pointwise import Gated
from ._gemm import around_saved, bias_of, epilogue_takes, forward_worth, mask, tf32, weight_of
from ._kernels import device


class LinearGated(ForwardFusion):
    """y = dropout(act(gate) up), [gate; up] = x weight^T + bias, in one product with two accumulators.

    The weight stays as it is, the rows of the gate first. [gate; up] is rounded when it is stored, y is not made of the
    rounded numbers. The mask is the one that the operation makes of the same seed; none is stored.

    x: [*, in_features], [gate; up]: [*, 2 F], y: [*, F], 2 F = out_features. Saves what the operations save.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    linear: Linear
    bias: Bias | None
    gated: Gated
    dropout: Dropout | None

    triton = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.gated, env, self.dropout)

    def saves(self, env: Env) -> Savings:
        dropped = self.dropout is not None and self.dropout.random
        return forward_worth(self.linear, self.bias, self.gated, dropped, True, env)

    def fwd(self, x: Tensor, *, dropout_seed: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        from ..kernels import gemm

        gated, weight = self.gated, weight_of(self.linear)
        act, drop = device(gated.activation), mask(self.dropout, dropout_seed)
        bias = bias_of(self.bias)
        y, packed = gemm.linear_gated(x, weight, bias, act=act, store_pre=True, dropout=drop, tf32=tf32())
        record = gated.Saved(x=packed)  # pyright: ignore[reportCallIssue]
        saved = around_saved(x, weight, self.bias, self.dropout, dropout_seed)
        return y, {**saved, "gated": record}


class LinearGatedInference(InferenceFusion):
    """y = dropout(act(gate) up), [gate; up] = x weight^T + bias, for no gradient: [gate; up] is never written.

    x: [*, in_features], y: [*, F], 2 F = out_features.
    """

    linear: Linear
    bias: Bias | None
    gated: Gated
    dropout: Dropout | None

    triton = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.gated, env, self.dropout)

    def saves(self, env: Env) -> Savings:
        dropped = self.dropout is not None and self.dropout.random
        return forward_worth(self.linear, self.bias, self.gated, dropped, False, env)

    def fwd(self, x: Tensor, *, dropout_seed: Tensor | None = None) -> Tensor:
        from ..kernels import gemm

        act, drop = device(self.gated.activation), mask(self.dropout, dropout_seed)
        return gemm.linear_gated(x, weight_of(self.linear), bias_of(self.bias), act=act, dropout=drop, tf32=tf32())[0]
