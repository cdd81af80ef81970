"""The backward of a residual block's end: an activation, the Linear it feeds, and the Add that closes the block."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, Requirements
from ..hardware import STEP
from ..operation import Grads
from ..ops import Add, Bias, Dropout, Linear
from ..pointwise import Gated, Pointwise
from ._gemm import epilogue_takes, kernel_takes_dropout, unit_bwd
from ._kernels import bias_fits
from .bias_dropout_add import branch_bwd


class BlockEndBackward(BackwardFusion):
    """All gradients of y = other + dropout(x weight^T + out_bias), x = act_dropout(act(z)), z = ... + bias.

    d = dropout(dy) and its sum over all rows, which is dout_bias, in one pass over dy; from d, in one GEMM,
    dz = act'(t) act_dropout(d weight), or that of a gated unit, and its sum, which is dbias;  dweight = d^T x;
    dother = dy.  Where nothing was dropped d is dy, and dout_bias comes from the GEMM as well, but for a gated
    unit's. Sums are of float32 numbers and in a fixed order; what was dropped is decided again from the seeds.

    dy: [*, out_features], dz: [*, in_features], of a gated unit [*, 2 in_features].
    """

    bias: Bias | None
    act: Pointwise | Gated
    act_dropout: Dropout | None
    linear: Linear
    out_bias: Bias | None
    dropout: Dropout | None
    add: Add

    kernels = ("triton",)
    needs_measurement = True
    casts = True  # dz has the dtype of the weight, whatever the activation gives
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        yield from epilogue_takes(self.linear, self.bias, self.act, env, self.act_dropout)
        yield bias_fits(self.out_bias, env), "input and bias must have one dtype"
        yield from kernel_takes_dropout(self.dropout)

    def saves(self, env: Env) -> Savings:
        own = super().saves(env)
        if self.out_bias is None or not isinstance(self.act, Gated) or drops(self.dropout):
            return own
        # The GEMM of a gated unit does not sum dy.
        return own - Savings(launches=1 - STEP, bytes=float(env.tokens * self.out_bias.size * env.itemsize))

    def bwd(
        self,
        dy: Tensor,
        *,
        act: Any,
        act_dropout: Dropout.Saved | None,
        linear: Linear.Saved,
        dropout: Dropout.Saved | None,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        branch = not needs.isdisjoint({"x", "bias.bias", "linear.weight"})
        sums, inside = "out_bias.bias" in needs, None
        multiplied = not needs.isdisjoint({"x", "bias.bias"}) and not isinstance(self.act, Gated)
        if sums and multiplied and (dropout is None or dropout.seed is None):
            assert self.out_bias is not None
            sums, inside = False, self.out_bias.dtype
        d, total = branch_bwd(dy, self.out_bias, self.dropout, dropout, branch, sums)
        dx, grads = unit_bwd(d, linear, self.act, act, self.act_dropout, act_dropout, needs, main_grads, inside)
        return dx, {"out_bias.bias": total, **grads, "add.other": dy if "add.other" in needs else None}


def drops(dropout: Dropout | None) -> bool:
    """Whether there is a dropout that drops something."""
    return dropout is not None and dropout.random
