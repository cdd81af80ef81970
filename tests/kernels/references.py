"""Activations and attention in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.ops._philox import drop_mask

ACTIVATIONS_IN_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x * 1,
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "quickgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamped_silu": lambda x: x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7)),
    "clamp": lambda x: x.clamp(-7, 7) + 1,
}
"""Those of `seqfuse.kernels.activations`, by their names there."""

AttentionGrads = tuple[Tensor, Tensor, Tensor, Tensor]


def hidden_from(rows: int, keys: int, how: dict[str, Any], device: torch.device) -> Tensor:
    """Pairs hidden by causality, a window or the ends of packed sequences."""
    row, key = torch.arange(rows, device=device).unsqueeze(1), torch.arange(keys, device=device)
    none = torch.zeros(rows, keys, dtype=torch.bool, device=device)
    if how.get("causal"):
        none |= key > row
    if how.get("window") is not None:
        none |= (key - row).abs() >= how["window"]
    if how.get("cu_seqlens") is not None:
        ends = how["cu_seqlens"].long()
        none |= torch.searchsorted(ends, row, right=True) != torch.searchsorted(ends, key, right=True)
    return none


def attention_in_torch(
    qkv: tuple[Tensor, ...], dy: Tensor, how: dict[str, Any], kind: torch.dtype
) -> tuple[AttentionGrads, Tensor, Tensor]:
    """y, dq, dk and dv, log-sum-exp and weights: the formulas in plain torch, rounded to `kind` after each GEMM. In a
    16-bit dtype delta is computed from the stored y, like in every kernel that saves no scores."""
    q, k, v = (t.to(kind) for t in qkv)
    shared, wide = q.shape[1] // k.shape[1], torch.promote_types(kind, torch.float32)
    keys, values = (t.repeat_interleave(shared, 1) for t in (k, v))
    scale = how.get("scale") or q.shape[-1] ** -0.5
    scores, slope = (q @ keys.mT).to(wide) * scale, 1.0
    if how.get("softcap") is not None:
        bent = torch.tanh(scores / how["softcap"])
        scores, slope = how["softcap"] * bent, 1 - bent * bent
    mask = how.get("mask")
    if mask is not None:
        scores = scores + mask.to(wide) if mask.is_floating_point() else scores.masked_fill(mask == 0, -torch.inf)
    scores = scores.masked_fill(hidden_from(*scores.shape[-2:], how, q.device), -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0)
    sums = scores.logsumexp(-1, keepdim=True).masked_fill(blind, 0)
    if kind is torch.float64 or (mask is not None and mask.is_floating_point()):
        weights, kept = scores.softmax(-1).masked_fill(blind, 0), 1.0
    else:  # torch's kernel recomputes them from the log-sum-exp
        weights, kept = (scores - sums).exp().masked_fill(blind, 0), 1.0
    if how.get("p"):
        kept = ~drop_mask(how["seed"], weights.shape, how["p"]) * (1 / (1 - how["p"]) if how["p"] < 1 else 0.0)
    y, dy = (weights * kept).to(kind) @ values, dy.to(kind).transpose(1, 2)
    delta = (y.to(wide) * dy.to(wide)).sum(-1, keepdim=True)
    dscores = (weights * ((dy @ values.mT).to(wide) * kept - delta) * slope).to(kind)
    dq = (dscores @ keys).to(wide) * scale
    dk, dv = ((t.mT @ of).to(wide) for t, of in ((dscores, q), ((weights * kept).to(kind), dy)))
    dk, dv = (t.unflatten(1, (-1, shared)).sum(2) for t in (dk * scale, dv))
    return (y.transpose(1, 2), *(t.to(kind) for t in (dq, dk, dv))), sums.squeeze(-1), weights
