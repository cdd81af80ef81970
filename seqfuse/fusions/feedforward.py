"""Fusions that save less for the backward pass and take longer: of GEMMs and an activation the pre-activation alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import JointFusion, Requirements
from ..hardware import STEP
from ..maingrad import Accumulated
from ..operation import Grads
from ..ops import Add, Bias, Dropout, Fork, LayerNorm, Linear, RMSNorm
from ..ops.linear import weight_grad
from ..pointwise import Gated, Pointwise
from ._shared import (
    act_fits,
    as_rows,
    bias_fits,
    device,
    dgrad,
    gemm_fits,
    in_place,
    kernels_run,
    linear_of,
    output_bytes,
    plus_in_place,
    reads_input,
    sum_dtype,
)
from .chain import branch_bwd, chain_of, pointwise_of
from .gemm import OwnGemm, bias_of, dropout_fits, epilogue, epilogue_fits, kernel_fits, mask, tf32, unit_dgrad
from .norm import eps_of, norm_fits, norm_fwd, recorded_bwd, shift


class ActivationLinearJoint(JointFusion):
    """y = other + h weight^T + out_bias, h = act(z), z = x + bias, where h is not saved.

    The kernel that computes dx in the backward pass reads x in any case, and writes h on the way: dh = dy weight;
    dx = act'(z) dh, or that of a gated unit, and its sum over all rows, which is dbias;  dweight = dy^T h;
    dother = dy, whose sum is dout_bias. x is saved in the place of z, to which the bias is added again in registers.

    The GEMMs are torch's. This writes h twice, for the memory that it would take from the forward to the backward pass.

    x, z: [*, F], of a gated unit [*, 2 F], h: [*, F], other, y: [*, out_features].
    Source: Chen et al. 2016, arXiv:1604.06174, of saving less and recomputing it.
    """

    bias: Bias | None
    act: Pointwise | Gated
    linear: Linear
    out_bias: Bias | None
    add: Add | None

    kernels = ("triton", "c")
    saves_memory = True
    layout = "any"  # its kernels are handed copies of what does not fit

    class Saved(context.Saved):
        x: Tensor  # [*, F], of a gated unit [*, 2 F]
        bias: Tensor | None  # the parameter itself
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
        # dh is written and read, and h written. One step that calls as many kernels as two is not shorter than these.
        found = super().saves(env) - Savings(launches=1 + STEP, bytes=3 * h)
        if self.out_bias is not None:
            found = found - Savings(launches=1 - STEP, bytes=output_bytes(self.linear, env))
        return found if self.add is None else found - in_place(self.linear, env)

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
        # The operations hand on a gradient in their own dtype where the residual has another.
        x, bias = saved.x, saved.bias
        d = dy if dy.dtype is x.dtype else dy.to(x.dtype)
        if self.out_bias is not None and "out_bias.bias" in needs:
            grads["out_bias.bias"] = as_rows(d).sum(0, dtype=self.out_bias.dtype)
        dx = h = None
        before, again = not needs.isdisjoint({"x", "bias.bias"}), "linear.weight" in needs
        if before:
            sums = self.bias is not None and "bias.bias" in needs
            asked = sums, again, "x" in needs, d.dtype
            kernel = self.decided((self._unary.P, *asked), self._backward, *asked)
            row = () if bias is None else (bias,)
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
        """What the operations themselves would have saved."""
        h, act = self.act.fwd(saved.x if self.bias is None else self.bias.fwd(saved.x)[0])
        kept: Any = vars(saved).get  # what no gradient reads was dropped
        return {"act": act, "linear": Linear.Saved(x=h, weight=kept("weight"))}

    @property
    def _unary(self) -> Pointwise:
        return self.act.activation if isinstance(self.act, Gated) else self.act

    def _activated(self, x: Tensor, bias: Tensor | None) -> Tensor:
        kernel = self.decided(self._unary.P, self._forward)
        return kernel(x)[0] if bias is None else kernel(x, bias)[0]

    def _forward(self) -> Callable[..., Any]:
        act = ("gated" if isinstance(self.act, Gated) else "act", device(self._unary))
        return pointwise_of()(chain_of([*[("bias",)] * (self.bias is not None), act]))

    def _backward(self, sums: bool, again: bool, result: bool, dtype: torch.dtype) -> Callable[..., Any]:
        gated, of, row = isinstance(self.act, Gated), device(self._unary), self.bias
        emit, dact = ("emit_gated", "dgated") if gated else ("emit", "dact")
        steps: list[tuple[Any, ...]] = [("shift", gated)] if row is not None else []
        steps += [*[(emit, of)] * again, (dact, of), *[("column_sum",)] * sums]
        given = [*[dtype] * again, *[row.dtype for _ in range(sums) if row is not None]]
        return pointwise_of()(chain_of(steps), None, given, result)


class LinearActivationLinear(OwnGemm, JointFusion):
    """y = other + out_dropout(h out^T + out_bias), h = dropout(act(z)), z = x weight^T + bias, where h is not kept.

    With d = out_dropout'(dy), whose sum over all rows is dout_bias, and dh = dropout'(d out): dz = act'(z) dh, or that
    of a gated unit, its sum, which is dbias, and h itself, made again from z, leave one GEMM;  dout = d^T h,
    dweight = dz^T x, dx = dz weight, dother = dy.  h of the backward pass is made of the rounded z, as it is where
    nothing is fused; what was dropped is decided again from the seeds.

    This trades a pass over h for the memory that h would take from the forward to the backward pass.

    x: [*, in_features], z: [*, F], of a gated unit [*, 2 F], h: [*, F], other, y: [*, out_features].
    Source: Chen et al. 2016, arXiv:1604.06174, of keeping less and making it again.
    """

    linear: Linear
    bias: Bias | None
    act: Pointwise | Gated
    dropout: Dropout | None
    out: Linear
    out_bias: Bias | None
    out_dropout: Dropout | None
    add: Add | None

    saves_memory = True
    casts = True  # the activation is written in the dtype of z, whatever it gives

    class Saved(context.Saved):
        x: Tensor = context.field(for_="linear.weight")  # [*, in_features]
        weight: Tensor = context.field(for_="x")  # [F, in_features], the parameter itself
        z: Tensor  # [*, F], of a gated unit [*, 2 F]
        out_weight: Tensor = context.field(for_=("x", "bias.bias", "linear.weight"))  # the parameter itself
        seed: Tensor | None  # [] int64
        p: float
        out_seed: Tensor | None  # [] int64
        out_p: float

    def requires(self, env: Env) -> Requirements:
        yield env.grad, "where nothing needs a gradient nothing is kept"
        yield from epilogue_fits(self.linear, self.bias, self.act, env, self.dropout)
        yield from kernel_fits(self.out, self.out_bias, env)
        yield from dropout_fits(self.out_dropout)
        yield from reads_input(self.act)

    def saves(self, env: Env) -> Savings:
        # The GEMM that makes dz writes h again.
        return super().saves(env) - Savings(bytes=float(env.tokens * self.out.in_features * env.itemsize))

    def saved_at(self) -> tuple[int, ...]:
        return 0, 1 + (self.bias is not None)

    def fwd(
        self,
        x: Tensor,
        *,
        dropout_seed: Tensor | None = None,
        out_dropout_seed: Tensor | None = None,
        add_other: Tensor | None = None,
    ) -> tuple[Tensor, Saved]:
        from ..kernels import gemm

        weight, out = self.linear.weight_for(x, always=True), self.out.weight_for(x, always=True)
        h, z = epilogue(x, self.linear, self.bias, self.act, mask(self.dropout, dropout_seed), store_pre=True)
        assert z is not None
        record = self.Saved(
            x=x, weight=weight, z=z, out_weight=out, seed=dropout_seed, p=_p(self.dropout),
            out_seed=out_dropout_seed, out_p=_p(self.out_dropout),
        )  # fmt: skip
        if self.out_bias is None and out_dropout_seed is None and add_other is None:
            return h.matmul(out.t()), record
        dtype = x.dtype
        if add_other is not None:
            assert self.add is not None
            shape = (*x.shape[:-1], out.shape[0])
            if add_other.shape != shape:
                self.add.fwd(x.new_empty(shape), other=add_other)  # raises, saying what does not fit
            dtype = sum_dtype(x, add_other)
        drop, bias = mask(self.out_dropout, out_dropout_seed), bias_of(self.out_bias)
        return gemm.linear(h, out, bias, dropout=drop, residual=add_other, dtype=dtype, tf32=tf32())[0], record

    def bwd(
        self, dy: Tensor, saved: Saved, *, needs: frozenset[str], main_grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, Grads]:
        dx, grads, d, h, dz = self.gradients(dy, saved, needs)
        # Last: what fails before them may fall back.
        if d is not None and h is not None:
            grads["out.weight"] = weight_grad(d, h, main_grads.pop("out.weight", None))
        if dz is not None and "linear.weight" in needs:
            grads["linear.weight"] = weight_grad(dz, saved.x, main_grads.pop("linear.weight", None))
        return dx, grads

    def gradients(
        self, dy: Tensor, saved: context.Saved, needs: frozenset[str]
    ) -> tuple[Tensor | None, dict[str, Tensor | Accumulated | None], Tensor | None, Tensor | None, Tensor | None]:
        """dx, all gradients but those of weights, and what makes them as far as they are wanted: d, h and dz."""
        grads: dict[str, Tensor | Accumulated | None] = {"add.other": dy if "add.other" in needs else None}
        before = not needs.isdisjoint({"x", "linear.weight", "bias.bias"})
        wanted = before or "out.weight" in needs, "out_bias.bias" in needs
        dropped = Dropout.Saved(seed=saved.out_seed, p=saved.out_p)
        d, grads["out_bias.bias"] = branch_bwd(dy, self.out_bias, self.out_dropout, dropped, *wanted)
        if d is None:
            return None, grads, None, None, None
        # The operations hand on a gradient in their own dtype where the residual has another.
        d = d if d.dtype is saved.z.dtype else d.to(saved.z.dtype)
        if not before:
            return None, grads, d, self._again(saved), None
        around = {"sums": "bias.bias" in needs, "emit": "out.weight" in needs}
        drop = mask(self.dropout, saved.seed, saved.p)
        dz, grads["bias.bias"], h, _ = unit_dgrad(d, saved.out_weight, self.act, saved.z, dropout=drop, **around)
        dx = as_rows(dz).mm(saved.weight).view(*dz.shape[:-1], saved.weight.shape[1]) if "x" in needs else None
        return dx, grads, d, h, dz

    def _again(self, saved: context.Saved) -> Tensor:
        h: Tensor = self.act.fwd(saved.z)[0]
        return h if self.dropout is None else self.dropout.fwd(h, seed=saved.seed)[0]

    def unfused(self, saved: context.Saved) -> dict[str, context.Saved]:
        """What the operations themselves would have saved."""
        kept: Any = vars(saved).get  # what no gradient reads was dropped
        records: dict[str, Any] = {
            "linear": Linear.Saved(x=kept("x"), weight=kept("weight")),
            "act": self.act.fwd(saved.z)[1],
            "out": Linear.Saved(x=self._again(saved), weight=kept("out_weight")),
        }
        if self.dropout is not None:
            records["dropout"] = Dropout.Saved(seed=saved.seed, p=saved.p)
        if self.out_dropout is not None:
            records["out_dropout"] = Dropout.Saved(seed=saved.out_seed, p=saved.out_p)
        return records


def _p(dropout: Dropout | None) -> float:
    return 0.0 if dropout is None else dropout.p


class NormLinearActivationLinear(OwnGemm, JointFusion):
    """y = x + out_dropout(h out^T + out_bias), h = dropout(act(z)), z = n weight^T + bias, n = norm(x).

    Of n and h nothing is kept: h is made again with dz, as in `LinearActivationLinear`, and n by the kernel that made
    it, from x, when everything but dweight = dz^T n is there. With dn = dz weight,  dx = norm'(dn) + dy  in one pass,
    which gives the sums over rows for the norm's parameters, too.

    This trades a pass over h and two over x for memory.

    x, n, y: [*, H], z: [*, F], of a gated unit [*, 2 F], h: [*, F].
    Source: Chen et al. 2016, arXiv:1604.06174, of keeping less and making it again.
    """

    fork: Fork
    norm: LayerNorm | RMSNorm
    linear: Linear
    bias: Bias | None
    act: Pointwise | Gated
    dropout: Dropout | None
    out: Linear
    out_bias: Bias | None
    out_dropout: Dropout | None
    add: Add

    saves_memory = casts = True
    layout = "contig"

    class Saved(context.Saved):
        x: Tensor = context.field(for_=("x", "norm.weight", "linear.weight"))  # [*, H]
        mean: Tensor | None = context.field(for_=("x", "norm.weight"))  # [*] float32, of LayerNorm
        rstd: Tensor = context.field(for_=("x", "norm.weight"))  # [*] float32
        norm_weight: Tensor | None = context.field(for_=("x", "linear.weight"))  # [H], the parameter itself
        norm_bias: Tensor | None = context.field(for_="linear.weight")  # [H], the parameter itself
        eps: float
        weight: Tensor = context.field(for_=("x", "norm.weight", "norm.bias"))  # the parameter itself
        z: Tensor  # [*, F], of a gated unit [*, 2 F]
        out_weight: Tensor = context.field(
            for_=("x", "norm.weight", "norm.bias", "bias.bias", "linear.weight")
        )  # the parameter itself
        seed: Tensor | None  # [] int64
        p: float
        out_seed: Tensor | None  # [] int64
        out_p: float

    def requires(self, env: Env) -> Requirements:
        yield from norm_fits(self.norm, env)
        yield from self._rest().requires(env.part(2))

    def saves(self, env: Env) -> Savings:
        # The sum with the gradient of the stream is a launch and two passes less; to have n again costs as much.
        copied = sum(self.norm.traffic(env, backward).y - 1 for backward in (False, True))
        spared = float(copied * env.tokens * env.itemsize * self.norm.normalized_shape[-1])
        return self._rest().saves(env.part(2)) + Savings(bytes=spared)

    def fwd(
        self, x: Tensor, *, dropout_seed: Tensor | None = None, out_dropout_seed: Tensor | None = None, env: Env
    ) -> tuple[Tensor, Saved]:
        out, record = norm_fwd(self.norm, x, dtype=env.part(2).dtype if env.along else None)
        seeds: dict[str, Any] = {"dropout_seed": dropout_seed, "out_dropout_seed": out_dropout_seed}
        y, kept = self._rest().fwd(out.y, add_other=x, **seeds)
        return y, self.Saved(
            x=x, mean=out.mean, rstd=out.rstd, norm_weight=record.weight, norm_bias=shift(self.norm),
            eps=eps_of(self.norm, x),
            weight=kept.weight, z=kept.z, out_weight=kept.out_weight, seed=kept.seed, p=kept.p,
            out_seed=kept.out_seed, out_p=kept.out_p,
        )  # fmt: skip

    def bwd(
        self, dy: Tensor, saved: Saved, *, needs: frozenset[str], main_grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, Grads]:
        inner = {name for name in needs if name != "x" and not name.startswith("norm.")}
        beyond = len(inner) < len(needs)
        dn, grads, d, h, dz = self._rest().gradients(dy, saved, frozenset(inner | {"x"} if beyond else inner))
        del grads["add.other"]  # a part of dx
        dx = None
        if dn is not None:
            stream = dy if "x" in needs else None
            out, sums = recorded_bwd(self.norm, dn, self._norm_record(saved), needs, dx="x" in needs, dstream=stream)
            grads |= sums
            dx = None if out is None else out.dx
            del dn
        # Last: what fails before them may fall back.
        n = self._normalized(saved) if "linear.weight" in needs else None
        if d is not None and h is not None:
            grads["out.weight"] = weight_grad(d, h, main_grads.pop("out.weight", None))
        if dz is not None and n is not None:
            grads["linear.weight"] = weight_grad(dz, n, main_grads.pop("linear.weight", None))
        return dx, grads

    def unfused(self, saved: Saved) -> dict[str, context.Saved]:
        """What the operations themselves would have saved."""
        kept: Any = vars(saved).get  # what no gradient reads was dropped
        n: Any = self._normalized(saved) if "norm_bias" in vars(saved) else None
        records = self._rest().unfused(saved)
        linear = Linear.Saved(x=n, weight=kept("weight"))
        return {**records, "linear": linear, "norm": self._norm_record(saved)}

    def _rest(self) -> LinearActivationLinear:
        """What stands behind the norm."""
        own = vars(self)
        return LinearActivationLinear(**{slot.name: own.get(slot.name) for slot in LinearActivationLinear.slots})

    def _norm_record(self, saved: Saved) -> LayerNorm.Saved | RMSNorm.Saved:
        kept: Any = vars(saved).get
        record: dict[str, Any] = {"x": kept("x"), "rstd": kept("rstd"), "weight": kept("norm_weight")}
        if isinstance(self.norm, LayerNorm):
            return LayerNorm.Saved(mean=kept("mean"), **record)
        return RMSNorm.Saved(**record)

    def _normalized(self, saved: Saved) -> Tensor:
        """n, by the same kernel from the same numbers."""
        from ..kernels.norm import norm_fwd

        gain = None if saved.norm_weight is None else saved.norm_weight.contiguous()
        bias = None if saved.norm_bias is None else saved.norm_bias.contiguous()
        how: dict[str, Any] = {"centered": isinstance(self.norm, LayerNorm), "zero_centered": self.norm.zero_centered}
        return norm_fwd(saved.x, gain, bias, saved.eps, **how, dtype=saved.z.dtype).y
