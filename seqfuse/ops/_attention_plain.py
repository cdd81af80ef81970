"""Attention as its formula says it, differentiable: the truth that kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from ._attention import QKV, additive
from ._philox import drop_mask, masked


def attend_plain(
    qkv: QKV, scale: float, softcap: float | None, mask: Tensor | None, seed: Tensor | None, p: float
) -> Tensor:
    """The result [*, H, S, D] for q [*, H, S, D], k and v [*, Hkv, N, D] of the dtype that scores are made in.

    mask: broadcast to [*, H, S, N]; bool, where true is seen, or float, added. Weights are dropped where there is a
    seed.
    """
    q, k, v = qkv
    shared = q.shape[-3] // k.shape[-3]
    k, v = (t.repeat_interleave(shared, -3) for t in (k, v))
    scores = ((q * scale) @ k.mT).to(q.dtype)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if mask is not None:
        added = mask.is_floating_point()
        scores = scores + additive(mask, q.dtype) if added else scores.masked_fill(~mask, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0)
    # Of an infinite score no more is spoiled than the key that it is of, as by the kernels.
    infinite = (scores == torch.inf).any(-1, keepdim=True)
    spoiled = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    weights = torch.where(infinite, spoiled, scores.softmax(-1)).masked_fill(blind, 0)
    if seed is not None:
        weights = masked(weights, drop_mask(seed, weights.shape, p), p)
    return weights @ v
