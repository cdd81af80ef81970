"""Linear, an optional Bias, any activation and an optional Dropout, in the epilogue of a Triton product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env, Savings
from ..fusion import ForwardFusion, InferenceFusion, Requirements
from ..ops import Bias, Dropout, Linear
from ..pointwise import Pointwise
from ._gemm import around_saved, bias_of, epilogue_takes, forward_worth, mask, tf32, weight_of
from ._kernels import device


class LinearBiasActivation(ForwardFusion):
    """y = dropout(act(z)), z = x weight^T + bias, in one product, for any `Pointwise` with device functions.

    All is made of the float32 sums; z is rounded when it is stored, which it is only where the activation's gradient
    reads it, and so is act(z) where that is read and something was dropped from it. The mask is the one that the
    operation makes of the same seed; none is stored.

    x: [*, in_features], z, y: [*, out_features]. Saves what the operations save.
    """

    linear: Linear
    bias: Bias | None
    act: Pointwise
    dropout: Dropout | None

    triton = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.act, env, self.dropout)

    def saves(self, env: Env) -> Savings:
        dropped = self.dropout is not None and self.dropout.random
        stored = self.act.reads == "input" or dropped
        return forward_worth(self.linear, self.bias, self.act, dropped, stored, env)

    def fwd(self, x: Tensor, *, dropout_seed: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        from ..kernels import gemm

        act, weight, drop = self.act, weight_of(self.linear), mask(self.dropout, dropout_seed)
        before = act.reads == "input"
        y, t = gemm.linear(
            x, weight, bias_of(self.bias), act=device(act), dropout=drop, tf32=tf32(),
            store_pre=before, store_act=not before and drop is not None,
        )  # fmt: skip
        t = y if t is None else t
        saved = around_saved(x, weight, self.bias, self.dropout, dropout_seed)
        return y, {**saved, "act": act.record(t, t)}


class LinearBiasActivationInference(InferenceFusion):
    """y = dropout(act(x weight^T + bias)) in one product where nothing needs a gradient: nothing is written beside y.

    x: [*, in_features], y: [*, out_features].
    """

    linear: Linear
    bias: Bias | None
    act: Pointwise
    dropout: Dropout | None

    triton = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.act, env, self.dropout)

    def saves(self, env: Env) -> Savings:
        dropped = self.dropout is not None and self.dropout.random
        return forward_worth(self.linear, self.bias, self.act, dropped, False, env)

    def fwd(self, x: Tensor, *, dropout_seed: Tensor | None = None) -> Tensor:
        from ..kernels import gemm

        act, drop = device(self.act), mask(self.dropout, dropout_seed)
        return gemm.linear(x, weight_of(self.linear), bias_of(self.bias), act=act, dropout=drop, tf32=tf32())[0]
