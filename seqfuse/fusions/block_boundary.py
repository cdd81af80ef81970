"""What stands between two residual blocks: the end of one, the residual stream, and the norm that begins the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..env import Env, autocast_of
from ..fusion import BackwardFusion, ForwardFusion, Requirements
from ..operation import Grads
from ..ops import Add, Bias, Dropout, Fork, LayerNorm, RMSNorm
from ._kernels import kernels_read, sum_dtype
from ._norm import Record, kernels_take, norm_fwd, recorded_bwd

if TYPE_CHECKING:
    from ..kernels.norm import Normed


class BlockBoundary(ForwardFusion):
    """z = dropout(x + bias) + other, y = norm(z), fork_out = z: the boundary of two blocks in one pass.

    z is written once: it is what the norm keeps and, between pre-norm blocks, the residual stream. Where no `Fork`
    stands before the norm, as in post-norm blocks, nothing else reads it. The mask is a function of the seed and is not
    stored. x, other, y, z: [*, H], bias: [H]. Saves what the operations save.
    """

    bias: Bias | None
    dropout: Dropout | None
    add: Add
    fork: Fork | None
    norm: LayerNorm | RMSNorm

    kernels = ("triton", "c")
    outputs = ("fork_out",)

    def requires(self, env: Env) -> Requirements:
        yield from boundary_takes(self.bias, self.norm, self.dropout, env)

    def fwd(
        self, x: Tensor, *, add_other: Tensor, dropout_seed: Tensor | None = None, dtype: torch.dtype | None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        out, record, _ = boundary_fwd(self.bias, self.dropout, self.norm, x, add_other, dropout_seed, dtype=dtype)
        assert out.stream is not None
        return out.y, {} if self.fork is None else {"fork_out": out.stream}, {"norm": record}


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

    kernels = ("triton", "c")
    any_dy = True

    def requires(self, env: Env) -> Requirements:
        yield from boundary_takes(self.bias, self.norm, self.dropout, env)

    def bwd(
        self,
        dy: Tensor,
        *,
        norm: LayerNorm.Saved | RMSNorm.Saved,
        dropout: Dropout.Saved | None = None,
        d_fork_out: Tensor | None = None,
        needs: frozenset[str],
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor | None, Grads]:
        branch, summed = "x" in needs, "bias.bias" in needs
        seed, p = (None, 0.0) if dropout is None else (dropout.seed, dropout.p)
        around = branch_around(vars(norm).get("x"), seed, p, branch, dtype)
        if summed:
            assert self.bias is not None
            around["dpre_bias"] = self.bias.dtype
        dx = branch or summed or "add.other" in needs
        out, grads = recorded_bwd(self.norm, dy, norm, needs, dx=dx, dstream=d_fork_out, **around)
        if out is None:
            return None, grads
        if summed:
            grads["bias.bias"] = out.dpre_bias
        if "add.other" in needs:
            grads["add.other"] = out.dx
        return (out.dbranch if "dbranch" in around else out.dx) if branch else None, grads


def branch_around(
    z: Tensor | None, seed: Tensor | None, p: float, branch: bool, dtype: torch.dtype | None
) -> dict[str, Any]:
    """What the kernel takes to write the gradient of the branch beside that of the stream z, where the two differ."""
    around: dict[str, Any] = {} if seed is None else {"seed": seed, "p": p}
    cast = z is not None and dtype is not None and dtype is not z.dtype
    if seed is not None or (cast and branch):
        around |= {"dbranch": branch, "branch_dtype": dtype}
    return around


def boundary_fwd(
    bias: Bias | None,
    dropout: Dropout | None,
    norm: LayerNorm | RMSNorm,
    x: Tensor,
    other: Tensor,
    seed: Tensor | None,
    **around: Any,
) -> tuple[Normed, Record, Tensor | None]:
    """Slots `bias` to `norm`, the norm's record, and the seed if it was read; `around` is for the kernel."""
    stream = sum_dtype(x, other)
    around["residual"] = other
    if bias is not None:
        row = bias.read()
        if row.dtype is not x.dtype and autocast_of(x.device.type) is None:  # under it the bias takes the dtype of x
            stream = sum_dtype(x, other, row)
        around["pre_bias"] = row.contiguous()
    if dropout is None or not dropout.random:
        seed = None
    else:
        around |= {"seed": seed, "p": dropout.p}
    around["dtype"] = around.get("dtype") or stream
    return *norm_fwd(norm, x, stream_dtype=stream, **around), seed


def boundary_takes(bias: Bias | None, norm: LayerNorm | RMSNorm, dropout: Dropout | None, env: Env) -> Requirements:
    """What the kernels ask of a boundary."""
    yield from kernels_take(norm, env)
    if bias is not None:
        yield from kernels_read("bias", bias.dtype, env)
    upscale = dropout is None or dropout.mode == "upscale_in_train"
    yield upscale, "its kernel scales what dropout keeps: mode must be upscale_in_train"
