"""Fusions around a GEMM by a Triton kernel: its epilogue forward, and what the gradient before it needs backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, Requirements
from ..hardware import STEP
from ..maingrad import Accumulated, accumulated
from ..operation import Grads
from ..ops import Add, Bias, Dropout, Linear, MergedLinear
from ..ops.linear import weight_grad
from ..pointwise import Gated, Pointwise
from ._shared import act_fits, as_rows, bias_fits, device, gemm_fits, kernels_run, sum_dtype
from .chain import branch_bwd

if TYPE_CHECKING:
    from ..kernels.gemm import Gradients


class OwnGemm:
    """What fusions share that put a GEMM of their own in the place of the vendor's."""

    kernels = ("triton",)
    needs_measurement = True
    layout = "inner_contig"


class LinearBiasActivation(OwnGemm, ForwardFusion):
    """y = dropout(act(z)), z = x weight^T + bias, in one GEMM, for any activation or gated unit with device functions.

    All is computed from the float32 sums; z is rounded when it is stored, which it is only where the activation's
    gradient reads it, and so is act(z) where that is read and something was dropped from it. Of a gated unit
    z = [gate; up], from two accumulators; the weight stays as it is, the rows of the gate first. The mask is the one
    that the operation makes of the same seed; none is stored.

    x: [*, in_features], z: [*, out_features], y: like z, of a gated unit [*, out_features / 2]. Saves what the
    operations save.
    Source: Shazeer 2020, arXiv:2002.05202, of gated units.
    """

    linear: Linear
    bias: Bias | None
    act: Pointwise | Gated
    dropout: Dropout | None

    def requires(self, env: Env) -> Requirements:
        yield from epilogue_fits(self.linear, self.bias, self.act, env, self.dropout)
        yield env.leaving is env.dtype, "its kernel gives y in the dtype of x"

    def fwd(
        self, x: Tensor, *, dropout_seed: Tensor | None = None, dtype: torch.dtype | None = None, needs: frozenset[str]
    ) -> Any:
        act, drop, saves = self.act, mask(self.dropout, dropout_seed), bool(needs)
        before = isinstance(act, Gated) or act.reads == "input"
        after = saves and not before and drop is not None
        y, t = epilogue(x, self.linear, self.bias, act, drop, saves and before, after)
        if not saves:
            return y
        t = y if t is None else t
        return y, {"linear": Linear.Saved(x=x, weight=self.linear.weight_for(x)), "act": act.record(t, t)}


class MergedLinearGated(OwnGemm, ForwardFusion):
    """y = dropout(act(gate) up), gate = x weight_0^T + bias_0, up = x weight_1^T + bias_1, in one GEMM of two weights.

    The weights stay where they are. gate and up are made from two accumulators and stored side by side, as the gradient
    of the gated unit reads them; what was dropped is decided again from the seed.

    x: [*, in_features], y: [*, out_features / 2]. Saves what the operations save.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    linear: MergedLinear
    act: Gated
    dropout: Dropout | None

    def requires(self, env: Env) -> Requirements:
        yield from kernels_run(env)
        parts, weights, biases = self.linear.parts, self.linear.weights(), self.linear.biases()
        yield len(parts) == 2 and parts[0] == parts[1], "a gated unit is made of two parts of one size"
        given = [bias for bias in biases if bias is not None]
        yield len(given) in (0, 2), "its parts must both have a bias, or none"
        one = all(env.cast(t.dtype) == env.dtype for t in (*weights, *given))
        yield one, "input, weights and biases must have one dtype"
        (gate, up) = weights
        alike = gate.stride() == up.stride() and (1 in gate.stride() or 1 in gate.shape)
        yield alike, "the weights must be of one layout, contiguous in their rows or their columns"
        yield from act_fits(self.act, env)
        yield env.leaving is env.dtype, "its kernel gives y in the dtype of x"
        yield from dropout_fits(self.dropout)

    def fwd(
        self, x: Tensor, *, dropout_seed: Tensor | None = None, dtype: torch.dtype | None = None, needs: frozenset[str]
    ) -> Any:
        from ..kernels import gemm

        (weight, up), (bias, up_bias) = self.linear.weights_for(x, always=True), self.linear.biases()
        around: dict[str, Any] = {"dropout": mask(self.dropout, dropout_seed), "store_pre": bool(needs), "tf32": tf32()}
        act = device(self.act.activation)
        y, t = gemm.linear_gated(x, weight, bias, act=act, up=up, up_bias=up_bias, **around)
        if t is None:
            return y
        saved = MergedLinear.Saved(x=x, weights=self.linear.weights_for(x))
        return y, {"linear": saved, "act": self.act.record(t, y)}


class LinearBiasDropoutAdd(OwnGemm, ForwardFusion):
    """y = other + dropout(x weight^T + bias) in one GEMM, made of its float32 sums and rounded once.

    The mask is the one that the operations make of the same seed; none is stored.

    x: [*, in_features], other, y: [*, out_features]; where `other` has another dtype, y has the one torch promotes to.
    Saves what the operations save.
    """

    linear: Linear
    bias: Bias | None
    dropout: Dropout | None
    add: Add

    def requires(self, env: Env) -> Requirements:
        yield from kernel_fits(self.linear, self.bias, env)
        yield from dropout_fits(self.dropout)

    def fwd(self, x: Tensor, *, add_other: Tensor, dropout_seed: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        from ..kernels import gemm

        weight = self.linear.weight_for(x, always=True)
        shape = (*x.shape[:-1], weight.shape[0])
        if add_other.shape != shape:
            self.add.fwd(x.new_empty(shape), other=add_other)  # raises, saying what does not fit
        dropout = mask(self.dropout, dropout_seed)
        dtype = sum_dtype(x, add_other)
        y, _ = gemm.linear(x, weight, bias_of(self.bias), dropout=dropout, residual=add_other, dtype=dtype, tf32=tf32())
        return y, {"linear": Linear.Saved(x=x, weight=self.linear.weight_for(x))}


class ActivationLinearBackward(OwnGemm, BackwardFusion):
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

    casts = True  # dz has the dtype of dy, whatever the activation gives

    def requires(self, env: Env) -> Requirements:
        return epilogue_fits(self.linear, self.bias, self.act, env, self.dropout)

    def bwd(
        self,
        dy: Tensor,
        *,
        act: Any,
        dropout: Dropout.Saved | None,
        linear: Linear.Saved,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        return unit_bwd(dy, linear, self.act, act, self.dropout, dropout, needs, main_grads)


class LinearBiasBackwardTriton(OwnGemm, BackwardFusion):
    """dweight = dy^T x and dbias, the sum of dy over all rows, in one GEMM: dy is read once for both.

    dx = dy weight is torch's GEMM. The sum is of float32 numbers and in a fixed order. Where one of the two is not
    needed, the other is torch's as well. It is worth a pass over dy, and so pays where a row of x is short.

    dy: [*, out_features], x, dx: [*, in_features].
    """

    linear: Linear
    bias: Bias

    def requires(self, env: Env) -> Requirements:
        return kernel_fits(self.linear, self.bias, env)

    def bwd(
        self, dy: Tensor, *, linear: Linear.Saved, needs: frozenset[str], main_grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, Grads]:
        rows = as_rows(dy)
        dx: Tensor | None = None
        grads: dict[str, Tensor | Accumulated | None] = {}
        if "x" in needs:
            dx = like(rows, linear.weight).mm(linear.weight).view(*dy.shape[:-1], linear.weight.shape[1])
        summed = "bias.bias" in needs
        if "linear.weight" not in needs:
            return dx, {"bias.bias": rows.sum(0, dtype=self.bias.dtype) if summed else None}
        # Last: what fails before it may fall back.
        buffer, d = main_grads.pop("linear.weight", None), like(rows, linear.x)
        if summed and (buffer is None or buffer.is_contiguous()):
            from ..kernels.gemm import linear_wgrad_bias, linear_wgrad_bias_

            x, of = as_rows(linear.x), self.bias.dtype
            if buffer is None:
                made, total = linear_wgrad_bias(d, x, sums_dtype=of, tf32=tf32())
            else:
                made, total = accumulated, linear_wgrad_bias_(buffer, d, x, sums_dtype=of, tf32=tf32())
            return dx, grads | {"linear.weight": made, "bias.bias": total}
        if summed:
            grads["bias.bias"] = rows.sum(0, dtype=self.bias.dtype)
        grads["linear.weight"] = weight_grad(d, linear.x, buffer)
        return dx, grads


class BlockEndBackward(OwnGemm, BackwardFusion):
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

    casts = True  # dz has the dtype of the weight, whatever the activation gives

    def requires(self, env: Env) -> Requirements:
        yield from epilogue_fits(self.linear, self.bias, self.act, env, self.act_dropout)
        yield from bias_fits(self.out_bias, env)
        yield from dropout_fits(self.dropout)

    def saves(self, env: Env) -> Savings:
        own = super().saves(env)
        dropped = self.dropout is not None and self.dropout.random
        if self.out_bias is None or not isinstance(self.act, Gated) or dropped:
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


def kernel_fits(linear: Linear, bias: Bias | None, env: Env) -> Requirements:
    """What the kernel asks of a GEMM, its input and its bias."""
    yield from kernels_run(env)
    yield from gemm_fits(linear, bias, env)
    weight = linear.weight
    yield 1 in weight.stride() or 1 in weight.shape, "the weight must be contiguous in its rows or its columns"


def epilogue_fits(
    linear: Linear, bias: Bias | None, act: Pointwise | Gated, env: Env, dropout: Dropout | None = None
) -> Requirements:
    """What the kernel asks of a GEMM with an activation or a gated unit in its epilogue, or before it."""
    yield from kernel_fits(linear, bias, env)
    yield from act_fits(act, env)
    keeps = env.autocast is None or isinstance(act, Gated) or act.reads == "input" or act.autocast != "float32"
    yield keeps, f"{type(act).__name__} keeps its result, which is float32 under autocast"
    yield from dropout_fits(dropout)


def dropout_fits(dropout: Dropout | None) -> Requirements:
    """What the kernel asks of a dropout in its epilogue."""
    scales = dropout is not None and dropout.mode == "downscale_in_infer" and dropout.p > 0 and not dropout.training
    yield not scales, "in evaluation this Dropout is a scale"


def mask(dropout: Dropout | None, seed: Tensor | None, p: float | None = None) -> Any:
    """A dropout as the kernel takes it, `None` where nothing is dropped; p as it was, or is now."""
    from ..kernels import gemm

    if dropout is None or seed is None:
        return None
    return gemm.DropoutMask(seed, dropout.p if p is None else p, dropout.mode == "upscale_in_train")


def epilogue(
    x: Tensor,
    linear: Linear,
    bias: Bias | None,
    act: Pointwise | Gated,
    dropout: Any,
    store_pre: bool = False,
    store_act: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return y = dropout(act(z)), z = x weight^T + bias, from one GEMM, and z or act(z) where it is to be stored."""
    from ..kernels import gemm

    weight, start = linear.weight_for(x, always=True), bias_of(bias)  # autocast does not reach the kernel
    around: dict[str, Any] = {"dropout": dropout, "tf32": tf32()}
    if isinstance(act, Gated):
        return gemm.linear_gated(x, weight, start, act=device(act.activation), store_pre=store_pre, **around)
    return gemm.linear(x, weight, start, act=device(act), store_pre=store_pre, store_act=store_act, **around)


def unit_bwd(
    dy: Tensor | None,
    linear: Linear.Saved,
    act: Pointwise | Gated,
    record: Any,
    dropout: Dropout | None,
    dropped: Dropout.Saved | None,
    needs: frozenset[str],
    main_grads: dict[str, Tensor],
    dy_sums: torch.dtype | None = None,
) -> tuple[Tensor | None, dict[str, Tensor | Accumulated | None]]:
    """The gradients of slots `bias`, `act`, an optional dropout and `linear`, in that order, from the GEMM's.

    Where its dtype is given, which it is of no gated unit, the sum of dy over all rows is the gradient of a bias after
    the GEMM, `out_bias`.
    """
    dx: Tensor | None = None
    grads: dict[str, Tensor | Accumulated | None] = {}
    if dy is None:
        return dx, grads
    given = dy
    if "x" in needs or "bias.bias" in needs:
        dy = like(dy, linear.weight)
        drop = None if dropped is None else mask(dropout, dropped.seed, dropped.p)
        output = isinstance(act, Pointwise) and act.reads == "output"
        around: dict[str, Any] = {} if isinstance(act, Gated) else {"t_is_output": output, "dy_sums": dy_sums}
        around |= {"dropout": drop, "sums": "bias.bias" in needs}
        made = unit_dgrad(dy, linear.weight, act, record.y if output else record.x, **around)
        dx, grads["bias.bias"] = made.dz, made.sum
        if dy_sums is not None:
            grads["out_bias.bias"] = made.dy_sum
    if "linear.weight" in needs:  # last: what fails before it may fall back
        main_grad = main_grads.pop("linear.weight", None)
        grads["linear.weight"] = weight_grad(like(given, linear.x), linear.x, main_grad)
    return (dx if "x" in needs else None), grads


def unit_dgrad(dy: Tensor, weight: Tensor, act: Pointwise | Gated, t: Tensor, **around: Any) -> Gradients:
    """The gradient before an activation or a gated unit, from dy behind the GEMM, and what is asked for beside it."""
    from ..kernels import gemm

    if isinstance(act, Gated):
        return gemm.linear_dgrad_gated(dy, weight, act=device(act.activation), t=t, tf32=tf32(), **around)
    return gemm.linear_dgrad(dy, weight, act=device(act), t=t, tf32=tf32(), **around)


def tf32() -> bool:
    """Whether the user lets float32 GEMMs be rounded to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def bias_of(bias: Bias | None) -> Tensor | None:
    """The bias as it is now, if there is one."""
    return None if bias is None else bias.read()


def like(dy: Tensor, t: Tensor) -> Tensor:
    """In the dtype of the GEMM, where a residual in another had the sum promoted."""
    return dy if dy.dtype is t.dtype else dy.to(t.dtype)
