"""Fusions of experts: what is saved of tokens that were sorted is the tokens themselves."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import ForwardFusion
from ..hardware import RECOMPUTING, STEP
from ..ops import GroupedLinear, Permute
from ..ops.experts import sorted_rows


class PermuteGroupedLinear(ForwardFusion):
    """y_g = x_g weight_g^T + bias_g, x_g the tokens of expert g, which are not saved in this order, but gathered again.

    dweight_g = dy_g^T x_g. The backward pass takes one more gather, the forward pass saves `top_k` rows for each token
    less.

    x: [*, in_features], y: [*, top_k, out_features].
    Source: Chen et al. 2016, arXiv:1604.06174, of saving less and recomputing it.
    """

    permute: Permute
    linear: GroupedLinear

    outputs = ("permute_offsets", "permute_rows")
    saves_memory = True
    layout = "any"

    def saves(self, env: Env) -> Savings:
        """A step of the engine, less one more gather in the backward pass."""
        gather = float(env.tokens * self.permute.top_k * self.linear.in_features * env.itemsize)
        return Savings(launches=STEP - 1 - RECOMPUTING, bytes=-2 * gather)

    def fwd(self, x: Tensor, *, permute_experts: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        rows, made, of_permute = self.permute.fwd(x, experts=permute_experts)
        y, of_linear = self.linear.fwd(rows, offsets=made["offsets"])
        again = functools.partial(_again, of_linear.x.dtype)
        late = context.Recompute(again, x, made["rows"], made["offsets"])
        record = GroupedLinear.Saved(x=late, weight=of_linear.weight, offsets=of_linear.offsets)  # pyright: ignore
        outputs = {f"permute_{name}": t for name, t in made.items()}
        return y, outputs, {"permute": of_permute, "linear": record}


def _again(dtype: torch.dtype, x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    return sorted_rows(x, rows, offsets).to(dtype)
