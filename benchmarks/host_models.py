"""The models of `bench_host.py`: seqfuse, its `nn.Sequential` twin with the same weights, and a hand-written node."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops

H = 16
ROWS = 4


class PlainResidual(nn.Sequential):
    """What a user of torch writes for a residual branch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def ours(operations: int) -> sf.Sequential:
    """A model of 1, 6 or 24 operations: one GeLU, or blocks of LayerNorm, Linear, GeLU, Linear, residual."""
    if operations == 1:
        return sf.Sequential(ops.GeLU())
    block = [
        ops.Residual(ops.LayerNorm(H), ops.Linear(H, H), ops.GeLU(), ops.Linear(H, H)) for _ in range(operations // 6)
    ]
    return sf.Sequential(*block)


def eager(operations: int) -> nn.Sequential:
    """The same in torch."""
    if operations == 1:
        return nn.Sequential(nn.GELU())
    block = [
        PlainResidual(nn.LayerNorm(H), nn.Linear(H, H), nn.GELU(), nn.Linear(H, H)) for _ in range(operations // 6)
    ]
    return nn.Sequential(*block)


class HandWritten(torch.autograd.Function):
    """The block of six as one node written out by hand: what no general engine can beat."""

    @staticmethod
    def forward(ctx, x, lw, lb, w1, b1, w2, b2):
        y, mean, rstd = torch.native_layer_norm(x, (H,), lw, lb, 1e-5)
        h = F.linear(y, w1, b1)
        a = F.gelu(h)
        ctx.save_for_backward(x, mean, rstd, lw, lb, y, w1, h, a, w2)
        return F.linear(a, w2, b2) + x

    @staticmethod
    def backward(ctx, g):
        x, mean, rstd, lw, lb, y, w1, h, a, w2 = ctx.saved_tensors
        dh = torch.ops.aten.gelu_backward.default(g.mm(w2), h)
        norm = torch.ops.aten.native_layer_norm_backward.default
        dx, dlw, dlb = norm(dh.mm(w1), x, (H,), mean, rstd, lw, lb, [True, True, True])
        return dx + g, dlw, dlb, dh.t().mm(y), dh.sum(0), g.t().mm(a), g.sum(0)


def pair(operations: int) -> tuple[sf.Sequential, nn.Sequential, Tensor, Tensor]:
    """Both models with the same weights, an input and an incoming gradient; checked against each other."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mine, theirs = ours(operations), eager(operations)
    mine.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(ROWS, H, requires_grad=True)
    g = torch.randn(ROWS, H)
    results = []
    for model in (mine, theirs):
        x.grad = None
        y = model(x)
        y.backward(g)
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        x.grad = None
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    return mine, theirs, x, g
