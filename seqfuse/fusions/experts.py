"""Fusions of experts: tokens in the order of experts are gathered again; factors are applied before the second GEMM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import ForwardFusion, JointFusion, Requirements
from ..hardware import RECOMPUTING, STEP
from ..maingrad import Accumulated
from ..operation import Grads
from ..ops import GroupedLinear, Permute, Unpermute
from ..ops._parameters import parameter
from ..ops.experts import kept_pairs, sorted_rows, summed
from ..pointwise import Gated
from ..traffic import gain
from ._shared import act_fits, kernels_run, numbers_of, unit_of
from .chain import chain_of, pointwise_maker


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
        y, of_linear = self.linear.run(rows, made["offsets"])
        again = functools.partial(_again, of_linear.x.dtype)
        late = context.Recompute(again, x, made["rows"], made["offsets"])
        record = GroupedLinear.Saved(x=late, weight=of_linear.weight, offsets=of_linear.offsets)  # pyright: ignore
        outputs = {f"permute_{name}": t for name, t in made.items()}
        return y, outputs, {"permute": of_permute, "linear": record}


def _again(dtype: torch.dtype, x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    return sorted_rows(x, rows, offsets).to(dtype)


class GatedGroupedLinearUnpermute(JointFusion):
    """y_t = sum_j p_j h_j weight_g^T, h = act(gate) up, over the rows j of token t; p are their factors, probs.

    The factors multiply the input of the GEMM, so its output is not saved for their gradient. With d = dy weight_g,
    dp = sum over features of d h, in the pass of the gated unit's gradient, which gets p d;  dweight_g = dy^T (p h).

    x, [gate; up]: [*, top_k, 2 F], probs: [*, top_k], y: [*, H].
    Source: Shazeer et al. 2017, arXiv:1701.06538; of factors before the second GEMM: Fedus et al. 2021,
    arXiv:2101.03961.
    """

    gated: Gated
    linear: GroupedLinear
    unpermute: Unpermute

    kernels = ("triton", "c")
    reorders = True

    class Saved(context.Saved):
        x: Tensor  # [*, top_k, 2 F]
        scaled: Tensor  # [*, top_k, F], h times its factors
        scales: Tensor  # [*, top_k], the factor of each row
        weight: Tensor  # [groups, H, F], the parameter, or its cast
        rows: Tensor  # [*, top_k] int64
        offsets: Tensor  # [groups]

    def requires(self, env: Env) -> Requirements:
        yield env.grad, "where nothing needs a gradient nothing is saved"
        yield from kernels_run(env)
        yield from act_fits(self.gated, env)
        yield parameter(self.linear, "bias") is None, "a bias of the GEMM has the factors of its output"
        yield self.linear.offsets == self.unpermute.offsets, "GEMM and Unpermute have other offsets"
        yield all(dtype is env.dtype for dtype in env.along[:-1]), "an operation in it gives another dtype"

    def saves(self, env: Env) -> Savings:
        """The gated unit's passes, and a read of the GEMM's output; two small passes put factors in order."""
        read = float(env.tokens * self.linear.out_features * env.itemsize)
        unit = gain((self.gated,), env, forward=True, backward=True, saved=(0,))
        return unit + Savings(launches=4 * STEP - 2, bytes=read)

    def fwd(
        self,
        x: Tensor,
        *,
        linear_offsets: Tensor,
        unpermute_rows: Tensor,
        unpermute_offsets: Tensor,
        unpermute_probs: Tensor,
    ) -> tuple[Tensor, Saved]:
        self.unpermute.check(x, unpermute_rows, unpermute_probs)
        at = unpermute_rows.reshape(-1)
        # Every row is some pair's; what a row of no expert is given adds nothing.
        scales = torch.empty_like(unpermute_probs).view(-1).scatter_(0, at, unpermute_probs.reshape(-1))
        kernel = self.decided(numbers_of(self.gated), _chain, self.gated, ("gated", "token_scale"))
        (scaled,) = kernel(x, scales.view(x.shape[:-1]))
        assert scaled is not None
        y, record = self.linear.run(scaled, linear_offsets)
        return summed(y, unpermute_rows, unpermute_offsets, None), self.Saved(
            x=x,
            scaled=record.x,
            scales=scales.view(unpermute_rows.shape),
            weight=record.weight,
            rows=unpermute_rows,
            offsets=unpermute_offsets,
        )

    def bwd(
        self, dy: Tensor, saved: Saved, *, needs: frozenset[str], main_grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, Grads]:
        before, dots = "x" in needs, "unpermute.probs" in needs
        rows = sorted_rows(dy if dy.dtype is saved.x.dtype else dy.to(saved.x.dtype), saved.rows, saved.offsets)
        record = GroupedLinear.Saved(x=saved.scaled, weight=saved.weight, offsets=saved.offsets)
        own = frozenset([*["x"] * (before or dots), *["weight"] * ("linear.weight" in needs)])
        buffer = main_grads.pop("linear.weight", None)
        d, of_linear = self.linear.bwd(rows, record, needs=own, main_grads={} if buffer is None else {"weight": buffer})
        grads: dict[str, Tensor | Accumulated | None] = {"linear.weight": of_linear.get("weight")}
        dx = None
        if d is not None:
            key = before, dots, saved.scales.dtype, numbers_of(self.gated)
            steps = (*["dot_gated"] * dots, *["token_scale", "dgated"] * before)
            kernel = self.decided(key, _chain, self.gated, steps, before, [saved.scales.dtype] * dots)
            behind = [saved.scales.reshape(d.shape[:-1]), saved.x] * before
            dx, *made = kernel(d, *[saved.x] * dots, *behind)
            if dots:
                assert made[0] is not None
                inside = made[0].reshape(-1).index_select(0, saved.rows.reshape(-1)).view(saved.rows.shape)
                grads["unpermute.probs"] = torch.where(kept_pairs(saved.rows, saved.offsets), inside, 0)
        return dx, grads

    def unfused(self, saved: Saved) -> dict[str, Any]:
        """What the operations themselves would have saved."""
        h, of_gated = self.gated.fwd(saved.x)
        y, of_linear = self.linear.run(h, saved.offsets)
        probs = saved.scales.reshape(-1).index_select(0, saved.rows.reshape(-1)).view(saved.rows.shape)
        back = Unpermute.Saved(x=y, probs=probs, rows=saved.rows, offsets=saved.offsets)
        return {"gated": of_gated, "linear": of_linear, "unpermute": back}


class RecomputeGatedGroupedLinearUnpermute(GatedGroupedLinearUnpermute):
    """y_t = sum_j p_j h_j weight_g^T, h = act(gate) up; saves x, and recomputes p h for the gradient of the weight.

    The backward pass takes one more gated unit, the forward pass saves one tensor less.

    x, [gate; up]: [*, top_k, 2 F], probs: [*, top_k], y: [*, H].
    Source: Chen et al. 2016, arXiv:1604.06174, of saving less and recomputing it.
    """

    saves_memory = True

    def saves(self, env: Env) -> Savings:
        made = float(env.tokens * self.linear.in_features * env.itemsize)
        return super().saves(env) - Savings(launches=1 + RECOMPUTING, bytes=3 * made)

    def fwd(
        self,
        x: Tensor,
        *,
        linear_offsets: Tensor,
        unpermute_rows: Tensor,
        unpermute_offsets: Tensor,
        unpermute_probs: Tensor,
    ) -> tuple[Tensor, Any]:
        y, saved = super().fwd(
            x,
            linear_offsets=linear_offsets,
            unpermute_rows=unpermute_rows,
            unpermute_offsets=unpermute_offsets,
            unpermute_probs=unpermute_probs,
        )
        again = functools.partial(_scaled, ("gated", *unit_of(self.gated)), saved.scaled.dtype)
        fields: dict[str, Any] = {**vars(saved), "scaled": context.Recompute(again, x, saved.scales)}
        return y, self.Saved(**fields)


def _scaled(gated: tuple[Any, ...], dtype: torch.dtype, x: Tensor, scales: Tensor) -> Tensor:
    """What a gated unit makes of x, times a factor for each token."""
    (h,) = pointwise_maker()(chain_of([gated, ("token_scale",)]), None, [], True)(x, scales.reshape(x.shape[:-1]))
    assert h is not None
    return h.to(dtype)


def _chain(
    gated: Gated, steps: tuple[str, ...], result: bool = True, dtypes: list[torch.dtype] | None = None
) -> Callable[..., tuple[Tensor | None, ...]]:
    of = unit_of(gated)
    return pointwise_maker()(chain_of([(s, *of) if "gated" in s else (s,) for s in steps]), None, dtypes or [], result)
