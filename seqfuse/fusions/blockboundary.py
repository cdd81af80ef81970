"""What stands between two residual blocks: the end of one, the residual stream, and the norm that begins the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, Requirements
from ..operation import Grads
from ..ops import Add, Bias, Dropout, Fork, LayerNorm, RMSNorm
from ._norm import copies, kernels_take, norm_fwd, pass_bytes, recorded_bwd, second_look


class BiasDropoutAddNorm(ForwardFusion):
    """z = dropout(x + bias) + other, y = norm(z), in one pass over memory that writes both.

    The mask is a function of the seed and is not stored. x, other, y: [*, H], bias: [H]. Saves what the operations
    save. `BlockBoundary` is the same where z goes on as the residual stream.
    """

    bias: Bias | None
    dropout: Dropout | None
    add: Add
    norm: LayerNorm | RMSNorm

    def requires(self, env: Env) -> Requirements:
        yield from _requirements(self.norm, self.dropout, env)

    def saves(self, env: Env) -> Savings:
        return _forward_savings(self.norm, self.bias, self.dropout, env)

    def fwd(self, x: Tensor, *, add_other: Tensor, dropout_seed: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        y, _, saved = _forward(self.norm, self.bias, self.dropout, x, add_other, dropout_seed)
        return y, saved


class BlockBoundary(ForwardFusion):
    """z = dropout(x + bias) + other, y = norm(z), fork_out = z: the boundary of two pre-norm blocks in one pass.

    The residual stream z is written once, and is what the norm keeps as well. The mask is a function of the seed and
    is not stored. x, other, y, z: [*, H], bias: [H]. Saves what the operations save.
    """

    bias: Bias | None
    dropout: Dropout | None
    add: Add
    fork: Fork
    norm: LayerNorm | RMSNorm

    outputs = ("fork_out",)

    def requires(self, env: Env) -> Requirements:
        yield from _requirements(self.norm, self.dropout, env)

    def saves(self, env: Env) -> Savings:
        return _forward_savings(self.norm, self.bias, self.dropout, env)

    def fwd(
        self, x: Tensor, *, add_other: Tensor, dropout_seed: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        y, stream, saved = _forward(self.norm, self.bias, self.dropout, x, add_other, dropout_seed)
        return y, {"fork_out": stream}, {**saved, "fork": Fork.NOTHING}


class BlockBoundaryBackward(BackwardFusion):
    """All gradients of a block's boundary in one pass: dz = norm'(dy) + d_fork_out, dx = dropout'(dz), dother = dz.

    The norm's parameters and the bias get their sums over rows from the same pass, in float32, in a fixed order and
    rounded once. Where nothing was dropped dx is dz. dy, d_fork_out, dx: [*, H].
    """

    bias: Bias | None
    dropout: Dropout | None
    add: Add
    fork: Fork | None
    norm: LayerNorm | RMSNorm

    def requires(self, env: Env) -> Requirements:
        yield from _requirements(self.norm, self.dropout, env)

    def saves(self, env: Env) -> Savings:
        # The sum with d_fork_out, which is read in any case; dropout's pass, which is written; the bias's sum.
        launches = (self.fork is not None) + _drops(self.dropout) + (self.bias is not None)
        tensors = second_look(self.norm, env) + launches + (self.fork is not None)
        return Savings(launches=launches, bytes=tensors * pass_bytes(self.norm, env))

    def bwd(
        self,
        dy: Tensor,
        *,
        add: Add.Saved,
        norm: LayerNorm.Saved | RMSNorm.Saved,
        bias: Bias.Saved | None = None,
        dropout: Dropout.Saved | None = None,
        fork: Fork.Saved | None = None,
        d_fork_out: Tensor | None = None,
        needs: frozenset[str],
    ) -> tuple[Tensor | None, Grads]:
        branch, summed = "x" in needs, "bias.bias" in needs
        around: dict[str, Any] = {}
        if dropout is not None and dropout.seed is not None:
            around = {"seed": dropout.seed, "p": dropout.p, "dbranch": branch}
        if summed:
            assert self.bias is not None
            around["dpre_bias"] = self.bias.read().dtype
        dx = branch or summed or "add.other" in needs
        out, grads = recorded_bwd(self.norm, dy, norm, needs, dx=dx, dstream=d_fork_out, **around)
        if out is None:
            return None, grads
        if summed:
            grads["bias.bias"] = out.dpre_bias
        if "add.other" in needs:
            grads["add.other"] = out.dx
        return (out.dbranch if "seed" in around else out.dx) if branch else None, grads


def _drops(dropout: Dropout | None) -> bool:
    return dropout is not None and dropout.random


def _requirements(norm: LayerNorm | RMSNorm, dropout: Dropout | None, env: Env) -> Requirements:
    yield from kernels_take(norm, env)
    upscale = dropout is None or dropout.mode == "upscale_in_train"
    yield upscale, "its kernel scales what dropout keeps: mode must be upscale_in_train"


def _forward_savings(norm: LayerNorm | RMSNorm, bias: Bias | None, dropout: Dropout | None, env: Env) -> Savings:
    # The norm reads the sum from registers; whatever stands before the sum reads and writes nothing.
    before = (bias is not None) + _drops(dropout)
    return Savings(launches=1 + before, bytes=(1 + 2 * before + copies(norm, env)) * pass_bytes(norm, env))


def _forward(
    norm: LayerNorm | RMSNorm,
    bias: Bias | None,
    dropout: Dropout | None,
    x: Tensor,
    other: Tensor,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The norm's result, the stream, and the operations' own records."""
    saved: dict[str, Any] = {"add": Add.NOTHING}
    dtype = torch.promote_types(x.dtype, other.dtype)
    around: dict[str, Any] = {"residual": other}
    if bias is not None:
        row = bias.read()
        dtype = torch.promote_types(dtype, row.dtype)
        around["pre_bias"] = row.contiguous()
        saved["bias"] = Bias.NOTHING
    if dropout is not None:
        seed = seed if dropout.random else None
        around |= {"seed": seed, "p": dropout.p}
        saved["dropout"] = Dropout.Saved(seed=seed, p=dropout.p)
    # The kernel writes the stream in the dtype of x.
    out, saved["norm"] = norm_fwd(norm, x if x.dtype is dtype else x.to(dtype), **around)
    assert out.stream is not None
    return out.y, out.stream, saved
