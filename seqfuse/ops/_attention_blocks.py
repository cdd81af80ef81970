"""Attention in plain torch, some rows at a time: everything that no kernel of torch does, on any device.

Memory beside the inputs and outputs is bounded, whatever the length: weights are made again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._attention import QKV, Scores, additive
from ._philox import drop_spans, masked
from ._tensors import stats_dtype, unflatten

# Scores held at a time: 16 MiB in float32.
_HELD = 1 << 22


def attend_blocks(qkv: QKV, how: Scores) -> tuple[Tensor, Tensor]:
    """As `attend`, whatever is asked."""
    q = qkv[0]
    batch, heads, length, size = q.shape
    y = q.new_empty(batch, length, heads, size)
    lse = q.new_empty(batch, heads, length, dtype=stats_dtype(q))
    grouped = _grouped(qkv, how)
    for rows, keys in _blocks(qkv, how):
        scores, _, _ = _scores(grouped, rows, keys, how)
        weights, sums, _ = _weights(scores)
        lse[:, :, rows] = sums.flatten(1, 2).squeeze(-1)
        drop = _drop(qkv, rows, keys, how)
        if drop is not None:
            weights = masked(weights, drop, how.p)
        y[:, rows] = (weights @ grouped[2][..., keys, :]).flatten(1, 2).transpose(1, 2).to(y.dtype)
    return y, lse


def attend_blocks_backward(dy: Tensor, qkv: QKV, how: Scores, out: QKV | None, needs_mask: bool) -> Tensor | None:
    """Write dq, dk and dv into `out`, if given; returns the mask's gradient, if asked, in the dtype of the scores."""
    grouped = q, k, v = _grouped(qkv, how)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dmask = q.new_zeros(how.mask.shape) if needs_mask and how.mask is not None else None
    dy = unflatten(dy.transpose(1, 2), 1, *q.shape[1:3]).to(q.dtype)
    for rows, keys in _blocks(qkv, how):
        scores, bent, hidden = _scores(grouped, rows, keys, how)
        weights, _, blind = _weights(scores)
        d = dy[..., rows, :]
        dweights, kept = d @ v[..., keys, :].mT, weights
        drop = _drop(qkv, rows, keys, how)
        if drop is not None:
            dweights, kept = masked(dweights, drop, how.p), masked(weights, drop, how.p)
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        # What is NaN or Inf spoils no gradient of a key that is not seen.
        dscores = dscores.masked_fill_(blind if hidden is None else blind | hidden, 0)
        if dmask is not None:
            _add_to_mask(dmask, dscores.flatten(1, 2), rows, keys)
        if out is None:
            continue
        if bent is not None:
            dscores = dscores * (1 - bent * bent)
        dv[..., keys, :] += (kept.mT @ d).sum(2, keepdim=True)
        dk[..., keys, :] += (dscores.mT @ q[..., rows, :]).sum(2, keepdim=True)
        out[0][:, :, rows] = ((dscores @ k[..., keys, :]) * how.scale).flatten(1, 2).to(out[0].dtype)
    if out is not None:
        out[1].copy_(dk.squeeze(2))
        out[2].copy_(dv.squeeze(2))
    return dmask


def _grouped(qkv: QKV, how: Scores) -> QKV:
    """Queries, scaled, as [B, Hkv, G, S, D] beside k and v as [B, Hkv, 1, S, D], in the dtype of the scores."""
    q, k, v = qkv
    stats = stats_dtype(q)
    q = unflatten(q, 1, k.shape[1], q.shape[1] // k.shape[1]).to(stats) * how.scale
    return q, k.unsqueeze(2).to(stats), v.unsqueeze(2).to(stats)


def _blocks(qkv: QKV, how: Scores) -> Iterator[tuple[slice, slice]]:
    """Rows, and the keys that any of them may see."""
    batch, heads, length, _ = qkv[0].shape
    keys = qkv[1].shape[2]
    count = max(1, _HELD // max(1, batch * heads * keys))
    for first in range(0, length if batch * heads else 0, count):
        stop = min(first + count, length)
        begin = 0 if how.window is None else max(0, first - how.window + 1)
        end = stop if how.causal else keys if how.window is None else min(keys, stop + how.window - 1)
        yield slice(first, stop), slice(begin, end)


def _scores(grouped: QKV, rows: slice, keys: slice, how: Scores) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores [B, Hkv, G, rows, keys], -inf where not seen; tanh(score / softcap) where they are bent; what is not seen,
    but by a mask of floats.
    """
    q, k, _ = grouped
    # Autocast would run these GEMMs in 16 bits, in which the weights lose more than they do here.
    scores, bent = (q[..., rows, :] @ k[..., keys, :].mT).to(q.dtype), None
    if how.softcap is not None:
        bent = (scores / how.softcap).tanh_()
        scores = bent * how.softcap
    hidden = _hidden(rows, keys, how, scores.device)
    if how.mask is not None:
        mask = _part(how.mask, rows, keys)
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else unflatten(mask, 1, *q.shape[1:3])
        if mask.is_floating_point():
            scores = scores + additive(mask, scores.dtype)
        else:
            hidden = mask == 0 if hidden is None else hidden | (mask == 0)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf), bent, hidden


def _weights(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of the scores, zeros for a row that sees no key, the log-sum-exp, and which rows see none.

    The scores are overwritten.

    Greatest score and sum are kept apart: beside a large mask that all keys of a row have, the logarithm of the sum is
    lost, and weights made of the log-sum-exp would not add up to one.
    """
    most = scores.amax(-1, keepdim=True)
    blind = most == -torch.inf
    most.masked_fill_(blind, 0)
    weights = scores.sub_(most).exp_()
    total = weights.sum(-1, keepdim=True)
    # Of an infinite score no more is spoiled than the key that it is of.
    total.masked_fill_((total == 0) | (most == torch.inf), 1)
    return weights.div_(total), most + total.log(), blind


def _hidden(rows: slice, keys: slice, how: Scores, device: torch.device) -> Tensor | None:
    if not how.causal and how.window is None and how.cu_seqlens is None:
        return None
    row = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    key = torch.arange(keys.start, keys.stop, device=device)
    hidden = key > row if how.causal else torch.zeros_like(key > row)
    if how.window is not None:
        hidden |= row - key >= how.window
        hidden |= key - row >= how.window
    if how.cu_seqlens is not None:
        first = how.cu_seqlens.to(key.dtype)
        hidden |= torch.searchsorted(first, row, right=True) != torch.searchsorted(first, key, right=True)
    return hidden


def _drop(qkv: QKV, rows: slice, keys: slice, how: Scores) -> Tensor | None:
    """True where a weight is dropped, [B, Hkv, G, rows, keys]: elements of one mask over [B, H, S, S]."""
    if not how.p or how.seed is None:
        return None
    (batch, heads, length, _), of = qkv[0].shape, qkv[1].shape
    taken = rows.stop - rows.start
    starts = (torch.arange(batch * heads, device=how.seed.device) * length + rows.start) * of[2]
    drop = drop_spans(how.seed, starts, taken * of[2], how.p)
    return drop.view(batch, of[1], heads // of[1], taken, of[2])[..., keys]


def _part(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    """The part of a broadcast mask that these rows and keys take."""
    whole = slice(None)
    return mask[..., rows if mask.shape[-2] != 1 else whole, keys if mask.shape[-1] != 1 else whole]


def _add_to_mask(total: Tensor, dscores: Tensor, rows: slice, keys: slice) -> None:
    for dim, size in enumerate(total.shape):
        if size == 1:
            dscores = dscores.sum(dim, keepdim=True)
    _part(total, rows, keys).add_(dscores)
