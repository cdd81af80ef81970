"""A norm and the activations after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import ForwardFusion, JointFusion, Requirements
from ..operation import Grads
from ..ops import LayerNorm, RMSNorm, Scale
from ..ops._parameters import parameter
from ..pointwise import Pointwise
from ._functions import Function, composed, factors_of, kernel_takes_functions, own_records
from ._kernels import device, kernel_takes_act
from ._norm import Record, gives_own, kernels_take, norm_bwd, norm_fwd, shift


class NormActivation(ForwardFusion):
    """y = act(norm(x)) in one pass over memory, for any `Pointwise` with device functions.

    The norm's result is not rounded on its way. x, y: [*, H]. Saves what the operations save: an activation that keeps
    its input gets it made again, from x, when a backward reads it. That costs more than is saved here, so that in
    training `NormActivationJoint` is the better one.
    """

    norm: LayerNorm | RMSNorm
    act: Pointwise

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        yield from kernels_take(self.norm, env)
        yield from kernel_takes_act(self.act, env)
        yield from gives_own(self.norm, env)
        cast = self.act.reads == "output" and env.leaving is not env.dtype
        yield not cast, f"{type(self.act).__name__} keeps y, which is cast for what comes next"

    def saved_at(self) -> tuple[int, ...]:
        return (0,)  # and y: the norm's result is never written

    def saves(self, env: Env) -> Savings:
        if not env.grad or self.act.reads == "output":
            return super().saves(env)
        # Made again in float32, an operator of torch at a time.
        again = 17.0 * env.tokens * env.itemsize * self.norm.normalized_shape[-1]
        return super().saves(env) - Savings(launches=5, bytes=again)

    def fwd(self, x: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, Any]]:
        norm, act = self.norm, self.act
        out, record = norm_fwd(norm, x, act=device(act), dtype=dtype)
        own: Any = out.y if act.reads == "output" else _result_later(norm, record)
        return out.y, {"norm": record, "act": act.record(own, own)}


class NormActivationJoint(JointFusion):
    """y = act(norm(x)) and its gradients, act up to eight activations and constant factors, one after the other.

    z = xhat gain + bias, y = act(z);  with d = dy act'(z) and g = d gain, dx is the norm's from g, dweight the sum of
    d xhat and dbias that of d over all rows. Each pass reads and writes every tensor once: all between x and y is made
    again in the backward, in registers.

    x, y: [*, H], weight, bias: [H], mean, rstd: [*].
    """

    norm: LayerNorm | RMSNorm
    acts: tuple[Pointwise | Scale, ...]

    kernels = ("triton", "c")
    any_dy = True

    class Saved(context.Saved):
        x: Tensor  # [*, H]
        mean: Tensor | None  # [*] float32, of LayerNorm
        rstd: Tensor  # [*] float32
        weight: Tensor | None  # [H], the parameter itself
        bias: Tensor | None  # [H], the parameter itself
        factors: tuple[float, ...]  # of the constant factors

    def requires(self, env: Env) -> Requirements:
        yield from kernels_take(self.norm, env)
        yield from kernel_takes_functions(self.acts, env)
        yield from gives_own(self.norm, env)

    def saved_at(self) -> tuple[int, ...]:
        return (0,)

    def fwd(self, x: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Saved]:
        norm, factors = self.norm, factors_of(self.acts)
        out, _ = norm_fwd(norm, x, act=composed(self.acts, factors), dtype=dtype)
        saved = self.Saved(
            x=x, mean=out.mean, rstd=out.rstd, weight=parameter(norm, "weight"), bias=shift(norm), factors=factors
        )
        return out.y, saved

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:
        weight, bias, dx = saved.weight, saved.bias, "x" in needs
        act = composed(self.acts, saved.factors)
        out, grads = norm_bwd(self.norm, dy, saved.x, saved.mean, saved.rstd, weight, bias, needs, act=act, dx=dx)
        return out.dx, grads

    def unfused(self, saved: Saved) -> dict[str, Any]:
        """What the operations themselves would have saved."""
        statistics = saved.mean, saved.rstd, saved.weight, saved.bias
        return norm_records(self.norm, self.acts, saved.x, *statistics, saved.factors)


def norm_records(
    norm: LayerNorm | RMSNorm,
    acts: Sequence[Function],
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    factors: Sequence[float],
) -> dict[str, Any]:
    """The records of slots `norm` and `acts`, where the former's result was not kept."""
    if mean is None:
        record: Record = RMSNorm.Saved(x=x, rstd=rstd, weight=weight)
    else:
        record = LayerNorm.Saved(x=x, mean=mean, rstd=rstd, weight=weight)
    z = _normalized(x, mean, rstd, weight, bias, norm.zero_centered)
    return {"norm": record, "acts": own_records(acts, z, factors)}


def _result_later(norm: LayerNorm | RMSNorm, record: Record) -> context.Recompute:
    """A stand-in for the norm's result, made of what its record keeps."""
    parameters = [t for t in (record.weight, shift(norm)) if t is not None]
    if isinstance(record, LayerNorm.Saved):
        fn = _layernorm_about_one if norm.zero_centered else _layernorm
        return context.Recompute(fn, record.x, record.mean, record.rstd, *parameters)
    fn = _rmsnorm_about_one if norm.zero_centered else _rmsnorm
    return context.Recompute(fn, record.x, record.rstd, *parameters)


def _layernorm(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    return _normalized(x, mean, rstd, weight, bias, False)


def _layernorm_about_one(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    return _normalized(x, mean, rstd, weight, bias, True)


def _rmsnorm(x: Tensor, rstd: Tensor, weight: Tensor | None = None) -> Tensor:
    return _normalized(x, None, rstd, weight, None, False)


def _rmsnorm_about_one(x: Tensor, rstd: Tensor, weight: Tensor | None = None) -> Tensor:
    return _normalized(x, None, rstd, weight, None, True)


def _normalized(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, about_one: bool
) -> Tensor:
    """The norm's result from its statistics, in their dtype, rounded to that of x."""
    stats = rstd.dtype
    z = x.to(stats) if mean is None else x.to(stats) - mean.unsqueeze(-1)
    z = z * rstd.unsqueeze(-1)
    if weight is not None:
        gain = weight.to(stats) + 1 if about_one else weight.to(stats)
        z = z * gain if bias is None else torch.addcmul(bias.to(stats), z, gain)
    return z.to(x.dtype)
