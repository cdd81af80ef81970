"""A residual feed-forward block of which only its input and the pre-activation are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import JointFusion, Requirements
from ..operation import Grads
from ..ops import Add, Bias, Dropout, Fork, LayerNorm, Linear, RMSNorm
from ..ops._tensors import stats_dtype
from ..ops.linear import weight_grad
from ..pointwise import Gated, Pointwise
from ._norm import kernels_take, norm_fwd, recorded_bwd, shift
from .linear_activation_linear import LinearActivationLinear


class NormLinearActivationLinear(JointFusion):
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

    kernels = ("triton",)
    needs_measurement = saves_memory = True
    casts = True

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
        yield from kernels_take(self.norm, env)
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
        eps = torch.finfo(stats_dtype(x)).eps if self.norm.eps is None else self.norm.eps
        return y, self.Saved(
            x=x, mean=out.mean, rstd=out.rstd, norm_weight=record.weight, norm_bias=shift(self.norm), eps=eps,
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
        gain = None if saved.norm_weight is None else saved.norm_weight.contiguous()
        from ..kernels.norm import norm_fwd

        bias = None if saved.norm_bias is None else saved.norm_bias.contiguous()
        how: dict[str, Any] = {"centered": isinstance(self.norm, LayerNorm), "zero_centered": self.norm.zero_centered}
        return norm_fwd(saved.x, gain, bias, saved.eps, **how, dtype=saved.z.dtype).y
