"""MergedLinear with what stands around it: a gated unit behind it in one Triton GEMM, and a Fork before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, Requirements
from ..operation import Grads
from ..ops import Dropout, Fork, MergedLinear
from ..pointwise import Gated
from ._gemm import kernel_takes_dropout, mask, tf32
from ._kernels import device, kernel_takes_gated, kernels_run


class MergedLinearGated(ForwardFusion):
    """y = dropout(act(gate) up), gate = x weight_0^T + bias_0, up = x weight_1^T + bias_1, in one GEMM of two weights.

    The weights stay where they are. gate and up are made from two accumulators and stored side by side, as the gradient
    of the gated unit reads them; what was dropped is decided again from the seed.

    x: [*, in_features], y: [*, out_features / 2]. Saves what the operations save.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    linear: MergedLinear
    act: Gated
    dropout: Dropout | None

    kernels = ("triton",)
    needs_measurement = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return _kernel_takes(self.linear, self.act, self.dropout, env)

    def fwd(
        self,
        x: Tensor,
        *,
        dropout_seed: Tensor | None = None,
        dtype: torch.dtype | None = None,
        needs: frozenset[str],
    ) -> Any:
        y, t = _run(x, self.linear, self.act, mask(self.dropout, dropout_seed), store=bool(needs))
        if not needs:
            return y
        weights = self.linear.weights_for(x)
        return y, {"linear": MergedLinear.Saved(x=x, weights=weights), "act": self.act.Saved(x=t)}  # pyright: ignore[reportCallIssue]


class BackwardMergedLinearAdd(BackwardFusion):
    """dx = d_fork_out + sum of dy_i weight_i, the first sum in the GEMM that computes dx, rounded once.

    The gradients of the parameters are those of the operation. On a CPU a call is saved. On a GPU ATen copies
    d_fork_out before the GEMM adds to it, which takes as long as the sum that is saved.

    d_fork_out, x, dx: [*, in_features], dy: [*, out_features].
    """

    fork: Fork
    linear: MergedLinear

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield not env.dtype.is_complex, "gradients of complex numbers need conjugates"
        one = all(env.cast(w.dtype) == env.dtype for w in self.linear.weights())
        yield one, "input and weights must have one dtype"

    def saves(self, env: Env) -> Savings:
        return Savings(launches=1 if env.device == "cpu" else 0)

    def bwd(
        self,
        dy: Tensor,
        *,
        linear: MergedLinear.Saved,
        d_fork_out: Tensor | None,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        operation, dx = self.linear, None
        if "x" in needs:
            same = d_fork_out is None or d_fork_out.dtype is dy.dtype
            dx = operation.dgrad(dy, linear.weights, d_fork_out if same else None)
            dx = dx if same or d_fork_out is None else dx + d_fork_out
        return dx, operation.grads(dy, linear, needs, main_grads, "linear.")


def _kernel_takes(linear: MergedLinear, act: Gated, dropout: Dropout | None, env: Env) -> Requirements:
    """What the kernel asks of two weights."""
    yield from kernels_run(env)
    yield (
        linear.parts[0] * len(linear.parts) == linear.out_features and len(linear.parts) == 2,
        ("a gated unit is made of two parts of one size"),
    )
    (gate, up), biases = linear.weights(), [bias for bias in linear.biases() if bias is not None]
    yield len(biases) in (0, 2), "its parts must both have a bias, or none"
    one = all(env.cast(t.dtype) == env.dtype for t in (gate, up, *biases))
    yield one, "input, weights and biases must have one dtype"
    alike = gate.stride() == up.stride() and (1 in gate.stride() or 1 in gate.shape)
    yield alike, "the weights must be of one layout, contiguous in their rows or their columns"
    yield from kernel_takes_gated(act, env)
    yield env.leaving is env.dtype, "its kernel gives y in the dtype of x"
    yield from kernel_takes_dropout(dropout)


def _run(x: Tensor, linear: MergedLinear, act: Gated, dropout: Any, *, store: bool) -> tuple[Tensor, Tensor | None]:
    from ..kernels import gemm

    (weight, up), (bias, up_bias) = linear.weights_for(x, always=True), linear.biases()
    given: dict[str, Any] = {"up": up, "up_bias": up_bias, "dropout": dropout, "store_pre": store, "tf32": tf32()}
    return gemm.linear_gated(x, weight, bias, act=device(act.activation), **given)
