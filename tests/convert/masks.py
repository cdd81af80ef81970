"""Masks as models write them: causal, sliding windows, and near misses of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqfuse.convert.masks import Limits

Mask = Callable[[Tensor], Tensor]
"""A mask for x [B, S, C]."""

CAUSAL, WINDOW = Limits(True, None, exact=True), Limits(True, 3, exact=True)


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of queries, [S, 1], and of keys, [1, S]."""
    p = torch.arange(x.shape[1])
    return p[:, None], p[None, :]


def seen(x: Tensor) -> Tensor:
    i, j = positions(x)
    return j <= i


def ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1])


def of_huggingface(x: Tensor, window: int | None = None) -> Tensor:
    """As in transformers without position ids, where it looks for packed sequences in those that it creates."""
    batch, length = x.shape[:2]
    ids = (torch.arange(length) + 0).unsqueeze(0).expand(batch, -1)
    packed = (torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    b = torch.arange(batch)[:, None, None, None]
    i = (torch.arange(length) + 0)[None, None, :, None]
    j = (torch.arange(length) + 0)[None, None, None, :]
    mask = i.new_ones((), dtype=torch.bool) & (packed[b, i] == packed[b, j]).to(x.device)
    if window is not None:
        mask = mask & (ids[b, j] > ids[b, i] - window)
    return (mask & (ids[b, j] <= ids[b, i])).expand(batch, -1, length, length)


def between(x: Tensor, before: int, behind: int) -> Tensor:
    i, j = positions(x)
    return (j > i - before) & (j < i + behind)


SPELLINGS: dict[str, tuple[Mask, Limits]] = {
    "of Hugging Face": (of_huggingface, CAUSAL),
    "of Hugging Face, with a window": (lambda x: of_huggingface(x, 3), WINDOW),
    "keys at most rows": (seen, CAUSAL),
    "rows at least keys": (lambda x: (p := positions(x))[0].ge(p[1]), CAUSAL),
    "keys before the next row": (lambda x: (p := positions(x))[1] < p[0] + 1, CAUSAL),
    "rows behind the key before": (lambda x: (p := positions(x))[0] > p[1] - 1, CAUSAL),
    "their difference": (lambda x: (p := positions(x))[0] - p[1] >= 0, CAUSAL),
    "not keys behind rows": (lambda x: ~((p := positions(x))[1] > p[0]), CAUSAL),
    "from another start": (lambda x: (p := torch.arange(5, 5 + x.shape[1]))[None] <= p.view(-1, 1), CAUSAL),
    "counted": (lambda x: (p := torch.ones(x.shape[1], dtype=torch.long).cumsum(0))[None] <= p[:, None], CAUSAL),
    "of four dimensions": (lambda x: seen(x)[None, None].expand(x.shape[0], 2, -1, -1), CAUSAL),
    "viewed": (lambda x: seen(x).view(1, 1, x.shape[1], -1).contiguous(), CAUSAL),
    "a lower triangle": (lambda x: torch.tril(ones(x)).bool(), CAUSAL),
    "a triangle that is not zero": (lambda x: ones(x).tril() != 0, CAUSAL),
    "not an upper triangle": (lambda x: torch.logical_not(torch.triu(ones(x).bool(), diagonal=1)), CAUSAL),
    "added": (lambda x: torch.triu((ones(x) * -torch.inf).double(), diagonal=1), CAUSAL),
    "filled": (lambda x: x.new_zeros(x.shape[1], x.shape[1]).masked_fill(~seen(x), torch.finfo(x.dtype).min), CAUSAL),
    "chosen": (lambda x: torch.where(seen(x), 0.0, -torch.inf).double(), CAUSAL),
    "multiplied": (lambda x: (1.0 - seen(x).double()) * torch.finfo(x.dtype).min, CAUSAL),
    "or nothing": (lambda x: seen(x) | torch.zeros_like(seen(x)), CAUSAL),
    "and rows that are there": (lambda x: seen(x) & (positions(x)[0] >= 0), CAUSAL),
    "all": (lambda x: ones(x).bool(), Limits(False, None, exact=True)),
    "nothing added": (lambda x: x.new_zeros(1, 1, x.shape[1], x.shape[1]), Limits(False, None, exact=True)),
    "a window": (lambda x: between(x, 3, 1), WINDOW),
    "two windows": (lambda x: between(x, 3, 1) & between(x, 5, 2), WINDOW),
    "two windows, the narrower last": (lambda x: between(x, 5, 2) & between(x, 3, 1), WINDOW),
    "a window on both sides": (lambda x: between(x, 3, 3), Limits(False, 3, exact=True)),
    "not behind or too far": (lambda x: ~(((p := positions(x))[1] > p[0]) | (p[0] - p[1] >= 3)), WINDOW),
    "with padding": (lambda x: seen(x) & (x[:, None, None, :, 0] < 9), Limits(True, None, exact=False)),
}  # fmt: skip

NEARLY: dict[str, Mask] = {
    "a row less": lambda x: (p := positions(x))[1] < p[0],
    "a row more": lambda x: (p := positions(x))[1] <= p[0] + 1,
    "a triangle with a diagonal more": lambda x: ones(x).tril(1).bool(),
    "transposed": lambda x: seen(x).transpose(0, 1),
    "the other way round": lambda x: (p := positions(x))[0] <= p[1],
    "every other key": lambda x: (p := positions(x))[1] * 2 <= p[0],
    "in steps": lambda x: torch.arange(0, 2 * x.shape[1], 2)[None] <= torch.arange(x.shape[1])[:, None],
    "every other position": lambda x: torch.arange(2 * x.shape[1])[::2][None] <= torch.arange(x.shape[1])[:, None],
    "looked up from the end": lambda x: (p := torch.arange(x.shape[1]))[p - 1][None] < p[:, None],
    "a triangle of nothing": lambda x: torch.triu(~ones(x).bool(), 1) & ones(x).bool(),
    "turned round": lambda x: seen(x).flip(-1),
    "of batches": lambda x: (torch.arange(x.shape[0])[:, None, None] <= torch.arange(x.shape[1])[:, None])[:, None],
    "of heads": lambda x: torch.arange(2)[:, None, None] <= torch.arange(x.shape[1])[:, None],
    "of keys alone": lambda x: torch.arange(x.shape[1])[None] <= 2,
    "padding": lambda x: x[:, None, None, :, 0] < 9,
    "or data": lambda x: seen(x) | (x[:, None, None, :, 0] > 9),
    "not data": lambda x: ~(seen(x) & (x[:, None, None, :, 0] < 9)),
    "added where not seen": lambda x: torch.where(seen(x), -torch.inf, 0.0).double(),
    "a small number added": lambda x: torch.where(seen(x), 0.0, -9.0).double(),
    "a slope": lambda x: torch.where(seen(x), -1.0, -torch.inf).double(),
    "uneven windows": lambda x: between(x, 3, 2),
    "a window of data": lambda x: torch.arange(x.shape[1])[None] <= x[0, :, :1].long(),
    "from data on": lambda x: (p := positions(x))[1] <= p[0] + x[0, 0, 0].long(),
    "changed in place": lambda x: changed(seen(x), lambda m: m.logical_and_(x[0, :, 0] < 9)),
    "changed in a part": lambda x: changed(seen(x), lambda m: m[:, :1].fill_(False)),
    "set in a part": lambda x: changed(seen(x), lambda m: m.__setitem__((slice(None), 0), False)),
    "of changed positions": lambda x: changed(torch.arange(x.shape[1]), lambda p: p[1:].sub_(1)) <= positions(x)[0],
}


def changed(t: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(t)
    return t
