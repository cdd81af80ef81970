"""Attention in both directions, causal, and with a window, for which torch has no kernel but one with a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.kernels.attention import attention_bwd, attention_fwd

from .case import Case, Contender, Inputs, Outputs, Run
from .draw import normal
from .peers import backward_of, forward_of
from .sizes import MAIN, Model, Sizes


def cases(sizes: Sizes) -> Iterator[Case]:
    """Heads of the main models over sequences of the usual length."""
    for model in sizes.models:
        if model.name in MAIN or len(sizes.models) <= 2:
            yield from _of_model(sizes, model, None)
            yield from _of_model(sizes, model, sizes.sequence // 4)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, dy: Tensor | None = None, *, window: int | None) -> tuple[Tensor, ...]:
    """Each step of both passes by itself: weights made again from the log-sum-exp, what products read rounded before.

    An exact zero is a difference of two sums there, as it is in every kernel that keeps nothing of the size S x S.
    """
    wide, group, S = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1], q.shape[2]
    scale = q.shape[-1] ** -0.5
    keys, values = (t.repeat_interleave(group, 1).to(wide) for t in (k, v))
    at = torch.arange(S, device=q.device)
    behind = at.unsqueeze(1) - at
    seen = (behind >= 0) & (behind < (window or S))
    scores = (q.to(wide) @ keys.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    rounded = weights.to(q.dtype).to(wide)
    y = (rounded @ values).to(q.dtype)
    if dy is None:
        return (y.transpose(1, 2),)
    dy = dy.transpose(1, 2).to(wide)
    delta = (dy * y.to(wide)).sum(-1, keepdim=True)
    d = (weights * (dy @ values.transpose(2, 3) - delta)).to(q.dtype).to(wide)
    dk, dv = d.transpose(2, 3) @ q.to(wide) * scale, rounded.transpose(2, 3) @ dy
    dk, dv = (t.unflatten(1, (-1, group)).sum(2).to(q.dtype) for t in (dk, dv))
    return (d @ keys * scale).to(q.dtype), dk, dv


def _of_model(sizes: Sizes, model: Model, window: int | None) -> Iterator[Case]:
    S, H, Hkv, D = sizes.sequence, model.heads, model.kv_heads, model.head_dim
    batch = max(1, sizes.tokens[0] // S)

    def make(*extra: str) -> Any:
        def drawn(rows: int, seed: int) -> Inputs:
            shapes = {"q": (rows, H, S, D), "k": (rows, Hkv, S, D), "v": (rows, Hkv, S, D)}
            return normal(shapes | dict.fromkeys(extra, (rows, S, H, D)), seed, sizes.device, sizes.dtype)

        return drawn

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None
        if window is not None:
            at = torch.arange(S, device=q.device)
            behind = at.unsqueeze(1) - at
            mask = (behind >= 0) & (behind < window)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=Hkv != H)
        return y.transpose(1, 2)

    def one_by_one(inputs: Inputs) -> Run:
        return lambda: _one_by_one(**inputs, window=window)

    def forward(inputs: Inputs) -> Run:
        return lambda: (attention_fwd(**inputs, causal=True, window=window)[0],)

    def backward(inputs: Inputs) -> Run:
        heads = [inputs[name] for name in "qkv"]
        y, lse = attention_fwd(*heads, causal=True, window=window)

        def call() -> Any:
            out = tuple(torch.empty_like(t) for t in heads)
            attention_bwd(inputs["dy"], *heads, y, lse, out, causal=True, window=window)
            return out

        return call

    seen = S * (S + 1) / 2 if window is None else S * window - window * (window - 1) / 2
    flops = 4.0 * batch * H * D * seen
    kind = "causal" if window is None else f"window {window}"
    common: dict[str, Any] = {
        "dtype": sizes.dtype, "rows": batch, "checked_rows": 1, "anywhere": True,
        "shape": {"B": batch, "S": S, "heads": H, "kv_heads": Hkv, "D": D},
    }  # fmt: skip
    label = f"{model.name} {batch} x {S}, {H}/{Hkv} x {D}, {kind}"
    late = 0 if window is None else 2

    def middle(outputs: Outputs) -> Outputs:
        """Without the rows that see, or are seen by, few: their gradients are many times as large as the others, and
        errors of the one kind are no measure of the other.
        """
        return [None if t is None else t[..., S // 4 : S - S // 4, :].contiguous() for t in outputs]

    yield Case(
        "attention forward", label, make=make(), priority=4 + late, flops=flops, **common,
        contenders={"seqfuse": Contender(forward), "eager": forward_of(eager)}, unfused=Contender(one_by_one),
    )  # fmt: skip
    yield Case(
        "attention backward", label, make=make("dy"), priority=4 + late, flops=2.5 * flops, **common,
        contenders={"seqfuse": Contender(backward), "eager": backward_of(eager, ["q", "k", "v"])},
        unfused=Contender(one_by_one), judged=middle,
    )  # fmt: skip
