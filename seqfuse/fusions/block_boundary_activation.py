"""The end of a residual block, the norm after it and the norm's activations, each way in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import saved as context
from ..env import Env
from ..fusion import JointFusion, Requirements
from ..operation import Grads
from ..ops import Add, Bias, Dropout, Fork, LayerNorm, RMSNorm, Scale
from ..ops._parameters import parameter
from ..pointwise import Pointwise
from ._functions import composed, factors_of, kernel_takes_functions
from ._norm import gives_own, norm_bwd, shift
from .block_boundary import boundary_fwd, boundary_takes, branch_around
from .norm_activation import norm_records


class BlockBoundaryActivation(JointFusion):
    """z = dropout(x + bias) + other, y = act(norm(z)), fork_out = z, and all gradients, each way in one pass.

    As `BlockBoundary` and `BlockBoundaryBackward`, with act up to eight activations and constant factors behind the
    norm. Nothing between z and y is written or kept: the backward makes it again from z, in registers.

    x, other, y, z: [*, H], bias, weight, shift: [H], mean, rstd: [*].
    """

    bias: Bias | None
    dropout: Dropout | None
    add: Add
    fork: Fork | None
    norm: LayerNorm | RMSNorm
    acts: tuple[Pointwise | Scale, ...]

    kernels = ("triton", "c")
    any_dy = True
    outputs = ("fork_out",)

    class Saved(context.Saved):
        z: Tensor  # [*, H]
        mean: Tensor | None  # [*] float32, of LayerNorm
        rstd: Tensor  # [*] float32
        weight: Tensor | None  # [H], the parameter itself
        shift: Tensor | None  # [H], the norm's bias, the parameter itself
        seed: Tensor | None  # [] int64
        p: float
        factors: tuple[float, ...]  # of the constant factors

    def requires(self, env: Env) -> Requirements:
        yield from boundary_takes(self.bias, self.norm, self.dropout, env)
        yield from kernel_takes_functions(self.acts, env)
        yield from gives_own(self.norm, env.part(-2 - len(self.acts)))

    def saved_at(self) -> tuple[int, ...]:
        return (len(self.operations()) - len(self.acts) - 1,)

    def fwd(
        self, x: Tensor, *, add_other: Tensor, dropout_seed: Tensor | None = None, dtype: torch.dtype | None
    ) -> tuple[Tensor, dict[str, Tensor], Saved]:
        parts, factors = (self.bias, self.dropout, self.norm), factors_of(self.acts)
        act = composed(self.acts, factors)
        out, _, seed = boundary_fwd(*parts, x, add_other, dropout_seed, act=act, dtype=dtype)
        assert out.stream is not None
        saved = self.Saved(
            z=out.stream, mean=out.mean, rstd=out.rstd, weight=parameter(self.norm, "weight"), shift=shift(self.norm),
            seed=seed, p=0.0 if self.dropout is None else self.dropout.p, factors=factors,
        )  # fmt: skip
        return out.y, {} if self.fork is None else {"fork_out": out.stream}, saved

    def bwd(
        self,
        dy: Tensor,
        saved: Saved,
        *,
        d_fork_out: Tensor | None = None,
        needs: frozenset[str],
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor | None, Grads]:
        branch, summed = "x" in needs, "bias.bias" in needs
        around: dict[str, Any] = {"act": composed(self.acts, saved.factors), "dstream": d_fork_out}
        around["dx"] = branch or summed or "add.other" in needs
        around |= branch_around(saved.z, saved.seed, saved.p, branch, dtype)
        if summed:
            assert self.bias is not None
            around["dpre_bias"] = self.bias.dtype
        statistics = saved.mean, saved.rstd, saved.weight, saved.shift
        out, grads = norm_bwd(self.norm, dy, saved.z, *statistics, needs, **around)
        if summed:
            grads["bias.bias"] = out.dpre_bias
        if "add.other" in needs:
            grads["add.other"] = out.dx
        return (out.dbranch if "dbranch" in around else out.dx) if branch else None, grads

    def unfused(self, saved: Saved) -> dict[str, Any]:
        """What the operations themselves would have saved."""
        statistics = saved.mean, saved.rstd, saved.weight, saved.shift
        own = norm_records(self.norm, self.acts, saved.z, *statistics, saved.factors)
        return own if self.dropout is None else {**own, "dropout": Dropout.Saved(seed=saved.seed, p=saved.p)}
