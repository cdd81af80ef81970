"""The backward of an optional Bias, an activation, an optional Dropout and the Linear they feed, in one GEMM."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env
from ..fusion import BackwardFusion, Requirements
from ..operation import Grads
from ..ops import Bias, Dropout, Linear
from ..pointwise import Gated, Pointwise
from ._gemm import epilogue_takes, unit_bwd


class ActivationLinearBackward(BackwardFusion):
    """dz = act'(t) dropout(dy weight), and with it the gradient of the bias before: its sum over all rows.

    Of x = dropout(act(z)), z = ... + bias, y = x weight^T, whatever made z and whatever schedule the forward had; t
    is what the activation saves, z or act(z).  dweight = dy^T x;  dbias = sum of dz, of float32 numbers and in a fixed
    order. What was dropped is decided again from the seed. Of a gated unit, where z = [gate; up] and
    x = dropout(act(gate) up), with dh = dropout(dy weight): dgate = dh up act'(gate), dup = dh act(gate).

    dy: [*, out_features], t, dz: [*, in_features], of a gated unit [*, 2 in_features].
    """

    bias: Bias | None
    act: Pointwise | Gated
    dropout: Dropout | None
    linear: Linear

    triton = needs_measurement = True
    casts = True  # dz has the dtype of dy, whatever the activation gives
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return epilogue_takes(self.linear, self.bias, self.act, env, self.dropout)

    def bwd(
        self,
        dy: Tensor,
        *,
        bias: Bias.Saved | None,
        act: Any,
        dropout: Dropout.Saved | None,
        linear: Linear.Saved,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        return unit_bwd(dy, linear, self.act, act, self.dropout, dropout, needs, main_grads)
