"""A fusion of an activation and a GEMM that saves only the pre-activation, and takes longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import JointFusion, Requirements
from ..hardware import STEP
from ..kernels import kernels_of
from ..maingrad import Accumulated
from ..operation import Grads
from ..ops import Add, Bias, Linear
from ..ops._mm import addmm, mm
from ..ops.linear import weight_grad
from ..pointwise import Gated, Pointwise
from ._shared import (
    act_fits,
    as_rows,
    bias_fits,
    cost_in_place,
    device,
    dgrad,
    gemm_fits,
    kernels_run,
    linear_of,
    numbers_of,
    output_bytes,
    plus_in_place,
    reads_input,
    unit_of,
)
from .chain import chain_of


class ActivationLinearJoint(JointFusion):
    """y = other + h weight^T + out_bias, h = act(z), z = x + bias; h is not saved.

    The kernel that computes dx in the backward pass reads x anyway, and also writes h: dh = dy weight; dx = act'(z) dh,
    or the gradient of a gated unit; dbias = sum of dx over all tokens;  dweight = dy^T h; dother = dy; dout_bias = sum
    of dy over all tokens. x is saved instead of z; the bias is added again in registers.

    The GEMMs run in torch. h is written twice, but not held between the passes.

    x, z: [*, F], [*, 2 F] for a gated unit, h: [*, F], other, y: [*, out_features].
    Source: Chen et al. 2016, arXiv:1604.06174 (recompute).
    """

    bias: Bias | None
    act: Pointwise | Gated
    linear: Linear
    out_bias: Bias | None
    add: Add | None

    kernels = ("triton", "c")
    saves_memory = True
    layout = "any"  # its host functions copy tensors with other strides

    class Saved(context.Saved):
        x: Tensor  # [*, F], [*, 2 F] for a gated unit
        bias: Tensor | None  # the parameter
        weight: Tensor = context.field(for_=("x", "bias.bias"))  # [out_features, F], the parameter, or its cast

    def requires(self, env: Env) -> Requirements:
        yield env.grad, "where nothing needs a gradient nothing is saved"
        yield from kernels_run(env)
        yield from bias_fits(self.bias, env)
        yield from act_fits(self.act, env)
        yield from reads_input(self.act)
        yield from gemm_fits(self.linear, self.out_bias, env)
        yield all(dtype is env.dtype for dtype in env.along[:-1]), "an operation in it gives another dtype"

    def saves(self, env: Env) -> Savings:
        h = float(env.tokens * self.linear.in_features * env.itemsize)
        # dh is written and read, and h written. One step with the kernels of two takes as long as two steps.
        found = super().saves(env) - Savings(launches=1 + STEP, bytes=3 * h)
        if self.out_bias is not None:
            found = found - Savings(launches=1 - STEP, bytes=output_bytes(self.linear, env))
        return found if self.add is None else found - cost_in_place(self.linear, env)

    def saved_at(self) -> tuple[int, ...]:
        return (0,)

    def fwd(self, x: Tensor, *, add_other: Tensor | None = None) -> tuple[Tensor, Saved]:
        bias = None if self.bias is None else self.bias.read()
        y, gemm = self.decided("linear", linear_of, self.linear, self.out_bias)(self._activated(x, bias))
        if self.add is not None:
            assert add_other is not None
            y = plus_in_place(y, self.add, add_other)
        return y, self.Saved(x=x, bias=bias, weight=gemm.weight)

    def bwd(
        self, dy: Tensor, saved: Saved, *, needs: frozenset[str], main_grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, Grads]:
        grads: dict[str, Tensor | Accumulated | None] = {}
        if "add.other" in needs:
            grads["add.other"] = dy
        # If the residual has another dtype, the operations propagate a gradient in their own dtype.
        x, bias = saved.x, saved.bias
        d = dy if dy.dtype is x.dtype else dy.to(x.dtype)
        if self.out_bias is not None and "out_bias.bias" in needs:
            grads["out_bias.bias"] = as_rows(d).sum(0, dtype=self.out_bias.dtype)
        dx = h = None
        before, again = not needs.isdisjoint({"x", "bias.bias"}), "linear.weight" in needs
        if before:
            sums = self.bias is not None and "bias.bias" in needs
            asked = sums, again, "x" in needs, d.dtype
            kernel = self.decided((numbers_of(self.act), *asked), self._backward, *asked)
            row = () if bias is None else (bias,)
            if again and "x" in needs and not main_grads and _worth_parts(d):
                dx, grads["linear.weight"], *made = _in_parts(kernel, as_rows(d), saved.weight, row, as_rows(x))
                dx = dx.view(x.shape)
            else:
                dx, *made = kernel(dgrad(d, saved.weight), *row, *(x,) * (1 + again))
                h = made[0] if again else None
            if sums:
                grads["bias.bias"] = made[-1]
        elif again:
            h = self._activated(x, bias)
        if h is not None:
            grads["linear.weight"] = weight_grad(d, h, main_grads.pop("linear.weight", None))
        return dx, grads

    def unfused(self, saved: Saved) -> dict[str, context.Saved]:
        """The `Saved` of each operation, for the unfused backward pass."""
        h, act = self.act.fwd(saved.x if saved.bias is None else saved.x + saved.bias.to(saved.x.dtype))
        kept: Any = vars(saved).get  # fields that no gradient reads were dropped
        return {"act": act, "linear": Linear.Saved(x=h, weight=kept("weight"))}

    @property
    def _of(self) -> tuple[Any, ...]:
        return unit_of(self.act) if isinstance(self.act, Gated) else (device(self.act),)

    def _activated(self, x: Tensor, bias: Tensor | None) -> Tensor:
        kernel = self.decided(numbers_of(self.act), self._forward)
        return kernel(x)[0] if bias is None else kernel(x, bias)[0]

    def _forward(self) -> Callable[..., Any]:
        act = ("gated" if isinstance(self.act, Gated) else "act", *self._of)
        return kernels_of("pointwise").pointwise_of(chain_of([*[("bias",)] * (self.bias is not None), act]))

    def _backward(self, sums: bool, again: bool, result: bool, dtype: torch.dtype) -> Callable[..., Any]:
        gated, of, row = isinstance(self.act, Gated), self._of, self.bias
        emit, dact = ("emit_gated", "dgated") if gated else ("emit", "dact")
        steps: list[tuple[Any, ...]] = [("shift", gated)] if row is not None else []
        steps += [*[(emit, *of)] * again, (dact, *of), *[("column_sum",)] * sums]
        given = [*[dtype] * again, *[row.dtype for _ in range(sums) if row is not None]]
        return kernels_of("pointwise").pointwise_of(chain_of(steps), None, given, result)


PART = 1024
"""Rows per part on a CPU: dh, h and the rows of dx stay in its caches, and dh and h are never allocated as a whole."""


def _worth_parts(d: Tensor) -> bool:
    """Whether the backward pass runs in parts; not in 16 bits, where the sum of each part would be rounded."""
    rows = d.numel() // max(1, d.shape[-1])
    return d.is_cpu and d.dtype.itemsize >= 4 and not torch.compiler.is_compiling() and rows >= 2 * PART


def _in_parts(
    kernel: Callable[..., Any], d: Tensor, weight: Tensor, row: tuple[Tensor, ...], x: Tensor
) -> tuple[Tensor, ...]:
    """dx, dweight and the sums of dx over all rows, computed part by part. d: [M, N], x, dx: [M, F]."""
    dx, sums = torch.empty_like(x, memory_format=torch.contiguous_format), ()
    for at in range(0, len(x), PART):
        own, part = d[at : at + PART], x[at : at + PART]
        dx[at : at + PART], h, *made = kernel(mm(own, weight), *row, part, part)
        found = mm(own.mT, h) if not sums else addmm(sums[0], own.mT, h), *made
        sums = found[:1] + tuple(map(torch.add, sums[1:], made)) if sums else found
    return dx, *sums
