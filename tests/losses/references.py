"""The loss by functions of torch, and gradients of a small loss under a loss scale."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.losses import linear_cross_entropy


def scaled_gradients(dtype: torch.dtype, device: torch.device | None = None, **options: Any) -> dict[str, Tensor]:
    """Those of classes that are no target, where the loss is 5e-6, of logits that float16 has exactly.

    Of a target it is a difference from 1 in float32, most of whose digits are noise.
    """
    targets = torch.arange(48, device=device) * 5 % 128
    others = torch.tensor([c for c in range(128) if c not in targets.tolist()], device=device)
    x = 17.0 * F.one_hot(targets, 128) + torch.arange(-8, 8, device=device).repeat(48, 8) / 64
    leaves = [t.to(dtype).requires_grad_() for t in (x, torch.eye(128, device=device), torch.zeros_like(x[0]))]
    loss = linear_cross_entropy(leaves[0], leaves[1], targets, leaves[2], chunk=16, **options)
    assert 4e-6 < loss.item() < 6e-6
    dx, dweight, dbias = torch.autograd.grad(65536.0 * loss, leaves)
    return {"dx": dx[:, others], "dweight": dweight[others], "dbias": dbias[others]}


def in_torch(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    **rest: Any,
) -> Tensor:
    """The same by functions of torch."""
    z = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    z = z if z.dtype is torch.float64 else z.float()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    flat = targets.reshape(-1)
    loss = F.cross_entropy(z, flat, ignore_index=ignore_index, reduction=reduction, **rest)
    if z_loss:
        squares = (z_loss * z.logsumexp(-1).square()).masked_fill(flat == ignore_index, 0)
        count = (flat != ignore_index).sum()
        loss = loss + {"none": squares, "sum": squares.sum(), "mean": squares.sum() / count}[reduction]
    return loss.view(targets.shape) if reduction == "none" else loss
