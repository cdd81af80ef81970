# pyright: basic
# Schemas are text, and what is registered under them has no types of its own.
"""Attention as operators, `torch.ops.seqfuse.attention` and `attention_backward`: what traces see.

Arguments are those of the functions; the second returns dq, dk and dv, in memory of their own. Importing the kernels
registers them; eager code calls the functions, which call the operators where they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ._operators import register as _register

_OPTIONS = (
    "float? scale=None, *, bool causal=False, int? window=None, float? softcap=None, Tensor? mask=None, "
    "Tensor? cu_seqlens=None, Tensor? seed=None, float p=0.0"
)
_FORWARD = f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)"
_BACKWARD = (
    f"attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)"
)


def _fake(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    batch, heads, rows, size = q.shape
    return q.new_empty((batch, rows, heads, size)), q.new_empty((batch, heads, rows), dtype=torch.float32)


def _fake_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _flops(q: Tensor, k: Tensor, *_: Any, cu_seqlens: Tensor | None = None, **__: Any) -> int:
    """Of its two GEMMs over all keys: like torch's formula, without regard to masks."""
    batch, heads, rows, size = q.shape
    if cu_seqlens is None:
        pairs = batch * rows * k.shape[2]
    elif isinstance(cu_seqlens, FakeTensor) or cu_seqlens.is_meta:
        pairs = rows * rows // max(1, cu_seqlens.numel() - 1)  # as if all sequences were of one length
    else:
        pairs = int(cu_seqlens.diff().square().sum())
    return 4 * heads * size * pairs


def _backward_flops(dy: Tensor, q: Tensor, k: Tensor, *_: Any, **rest: Any) -> int:
    """Of its five GEMMs, one of which computes the scores a second time."""
    return 5 * _flops(q, k, **rest) // 2


def register(attention_fwd: Callable[..., tuple[Tensor, Tensor]], attention_bwd: Callable[..., None]) -> None:
    """Register operators that call these functions of `attention`."""

    def run_backward(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, scale: float | None = None, **rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = _fake_backward(dy, q, k, v)
        attention_bwd(dy, q, k, v, y, lse, out, scale, **rest)
        return out

    _register(_FORWARD, attention_fwd, _fake, flops=_flops)
    _register(_BACKWARD, run_backward, _fake_backward, flops=_backward_flops)


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, **rest: Any) -> tuple[Tensor, Tensor]:
    """`attention.attention_fwd` by its operator."""
    return torch.ops.seqfuse.attention(q, k, v, scale, **rest)


def backward(*tensors: Tensor, out: tuple[Tensor, Tensor, Tensor], scale: float | None, **rest: Any) -> None:
    """`attention.attention_bwd` by its operator."""
    for mine, made in zip(out, torch.ops.seqfuse.attention_backward(*tensors, scale, **rest), strict=True):
        mine.copy_(made)
