"""Attention in both directions, causal, and with a window, for which torch has only a kernel with a mask; decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.kernels.attention import attention_bwd, attention_fwd
from seqfuse.kernels.decode import decode_attention

from .case import Case, Contender, Inputs, Outputs, Run
from .peers import Kernels
from .sizes import MAIN, Model, Sizes


def cases(sizes: Sizes) -> Iterator[Case]:
    """Heads of the main models over sequences of the usual length."""
    for model in sizes.models:
        if model.name in MAIN or len(sizes.models) <= 2:
            yield from _of_model(sizes, model, None)
            yield from _of_model(sizes, model, sizes.sequence // 4)


def _seen(length: int, window: int, device: torch.device) -> Tensor:
    """Whether a row sees a key, [S, S]."""
    at = torch.arange(length, device=device)
    behind = at.unsqueeze(1) - at
    return (behind >= 0) & (behind < window)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, dy: Tensor | None = None, *, window: int | None) -> tuple[Tensor, ...]:
    """Each step of both passes by itself: weights made again from the log-sum-exp, what products read rounded before.

    An exact zero is a difference of two sums there, as it is in every kernel that keeps nothing of the size S x S.
    """
    wide, group, S = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1], q.shape[2]
    scale = q.shape[-1] ** -0.5
    keys, values = (t.repeat_interleave(group, 1).to(wide) for t in (k, v))
    scores = (q.to(wide) @ keys.transpose(2, 3) * scale).masked_fill(~_seen(S, window or S, q.device), -torch.inf)
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
    label = f"{model.name} {batch} x {S}, {H}/{Hkv} x {D}, {'causal' if window is None else f'window {window}'}"
    numbers = {"B": batch, "S": S, "heads": H, "kv_heads": Hkv, "D": D}
    of = Kernels(sizes, label, batch, numbers, compiles=False, checked_rows=1)
    shapes = {"q": (-1, H, S, D), "k": (-1, Hkv, S, D), "v": (-1, Hkv, S, D)}

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None if window is None else _seen(S, window, q.device)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=Hkv != H)
        return y.transpose(1, 2)

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

    def middle(outputs: Outputs) -> Outputs:
        """Without the rows that see, or are seen by, few: their gradients are many times as large as the others, and
        errors of the one kind are no measure of the other.
        """
        return [None if t is None else t[..., S // 4 : S - S // 4, :].contiguous() for t in outputs]

    seen = S * (S + 1) / 2 if window is None else S * window - window * (window - 1) / 2
    flops = 4.0 * batch * H * D * seen
    late = 4 if window is None else 6
    step_by_step = Contender(lambda inputs: lambda: _one_by_one(**inputs, window=window))
    common: dict[str, Any] = {"anywhere": True, "unfused": step_by_step}
    yield of.case("attention forward", late, shapes, forward, eager, flops=flops, **common)
    yield of.case(
        "attention backward", late, shapes | {"dy": (-1, S, H, D)}, backward, eager, wanted=["q", "k", "v"],
        flops=2.5 * flops, judged=middle, **common,
    )  # fmt: skip


def decode_cases(sizes: Sizes) -> Iterator[Case]:
    """One new row per sequence over a cache, at each batch and length."""
    grouped = [m for m in sizes.models if m.kv_heads != m.heads]
    for model in sorted(grouped, key=lambda m: m.name not in MAIN):
        for rank, (batch, length) in enumerate(sizes.decodes):
            yield _decode(sizes, model, batch, length, 3 + (rank > 5) + 2 * (model.name not in MAIN))


def _decode(sizes: Sizes, model: Model, batch: int, length: int, priority: int) -> Case:
    """All sequences are as long as the cache, since torch has no kernel for others."""
    heads, kv, size = model.heads, model.kv_heads, model.head_dim
    numbers = {"model": model.name, "B": batch, "length": length}
    of = Kernels(sizes, f"{model.name} {batch} x {length}", batch, numbers, compiles=False, checked_rows=min(batch, 2))
    shapes = {"q": (-1, heads, size), "k": (-1, kv, length, size), "v": (-1, kv, length, size)}

    def make(rows: int, seed: int) -> Inputs:
        lengths = torch.full((rows,), length, dtype=torch.int32, device=sizes.device)
        return of.inputs(shapes, rows, seed) | {"lengths": lengths}

    def eager(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)

    return of.case(
        "decode attention", priority, shapes, lambda inputs: lambda: (decode_attention(**inputs),), eager, make=make,
        anywhere=True, flops=4.0 * batch * heads * length * size,
    )  # fmt: skip
