"""The backward of an optional Bias, a gated unit, an optional Dropout and the Linear they feed, in one product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, Requirements
from ..operation import Grads
from ..ops import Bias, Dropout, Linear
from ..pointwise import Gated
from ._gemm import epilogue_takes, unit_bwd, unit_worth


class GatedLinearBackward(BackwardFusion):
    """[dgate; dup] from dh = dropout(dy weight): dgate = dh up act'(gate), dup = dh act(gate); their sum over all rows.

    Of h = dropout(act(gate) up), [gate; up] = ... + bias, y = h weight^T, whatever made [gate; up] and whatever cover
    the forward pass had.  dweight = dy^T h;  dbias = sum of [dgate; dup], of float32 numbers and in a fixed order. What
    was dropped is decided again from the seed.

    dy: [*, out_features], [gate; up]: [*, 2 in_features].
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    bias: Bias | None
    gated: Gated
    dropout: Dropout | None
    linear: Linear

    triton = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.gated, env, self.dropout)

    def saves(self, env: Env) -> Savings:
        dropped = self.dropout is not None and self.dropout.random
        return unit_worth(self.linear, self.bias, self.gated, dropped, env)

    def bwd(
        self,
        dy: Tensor,
        *,
        bias: Bias.Saved | None,
        gated: Any,
        dropout: Dropout.Saved | None,
        linear: Linear.Saved,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        return unit_bwd(dy, linear, self.gated, gated, self.dropout, dropout, needs, main_grads)
