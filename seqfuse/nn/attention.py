"""MultiHeadAttention."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from .. import ops
from ..errors import InputError
from ..group import Group
from ..run.sequential import Sequential
from ._across import across, own_heads


class MultiHeadAttention(Sequential):
    """y = Linear(Attention(Rotary(QKNorm(Linear(x))))), of which the middle two are there if asked for.

    One GEMM makes queries, keys and values, packed `[q; k; v]`.  x, y: [*, S, embed_dim].
    Keys: `qkv`, `qk_norm`, `rotary`, `attention`, `out`.
    Source: Vaswani et al. 2017, arXiv:1706.03762.

    Args:
        embed_dim: last dimension of x and y.
        heads: query heads.
        kv_heads: key and value heads, which divide `heads`; as many by default.
        head_dim: size of a head; `embed_dim / heads` by default.
        bias: whether the first GEMM has a bias.
        out_bias: whether the last one has; as `bias` by default.
        merged: whether queries, keys and values have a weight each, in an `ops.MergedLinear`, else one packed weight.
        qk_norm: whether queries and keys are normalized head by head, or what makes another `ops.QKNorm` of
            `(head_dim, heads, kv_heads)`, as `functools.partial(ops.QKNorm, eps=1e-5, zero_centered=True)` does.
        rotary: makes the `ops.RotaryEmbedding` of `(heads, kv_heads)`, as
            `functools.partial(ops.RotaryEmbedding, style="half")` does.
        attention: the remaining arguments of `ops.Attention`: causal, window, dropout, scale, softcap, mask,
            cu_seqlens.
        group: processes that divide the heads; see `ops.Linear`. A mask must be the same for all heads, and has then
            no gradient of its own.
        sequence_dim: the dimension of x and y of which each process has its shard, none by default; attention itself
            sees all rows.

    Raises:
        InputError: (SF101) for `heads` or `kv_heads` that the processes do not divide: a key head is not held twice;
            (SF106) for a QKNorm of all heads together, or merged weights, that they would divide.
        ValueError: where `heads` does not divide `embed_dim` and no `head_dim` is given.
    """

    inlines: ClassVar[bool] = True

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        merged: bool = False,
        qk_norm: bool | Callable[..., ops.QKNorm] = False,
        rotary: Callable[[int, int], ops.RotaryEmbedding] | None = None,
        group: Any = None,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        if head_dim is None:
            if heads < 1 or embed_dim % heads:
                raise ValueError(f"heads must divide embed_dim, got {heads} and {embed_dim}; or give head_dim")
            head_dim = embed_dim // heads
        shared = heads if kv_heads is None else kv_heads
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        into, out = across(group, sequence_dim)
        several = Group(group)
        own, own_shared = own_heads(heads, shared, several)
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        sizes = tuple(n * head_dim for n in (heads, shared, shared))
        if merged and group is not None:
            raise InputError("a MergedLinear is not divided among processes", code="SF106", operation="MergedLinear")
        packed: dict[str, Any] = {**made, **into, "parts": sizes if into else None}
        parts["qkv"] = (
            ops.MergedLinear(embed_dim, sizes, bias, **made)
            if merged
            else ops.Linear(embed_dim, sum(sizes), bias, **packed)
        )
        if qk_norm:
            make = ops.QKNorm if qk_norm is True else qk_norm
            parts["qk_norm"] = norm = make(head_dim, own, own_shared, **made)
            if norm.full_width and own != heads:
                raise InputError("a QKNorm of all heads cannot be divided", code="SF106", operation="QKNorm")
            norm.sum_over = several if group is not None else None
        if rotary is not None:
            parts["rotary"] = rotary(own, own_shared)
        parts["attention"] = ops.Attention(own, own_shared, **attention)
        out_bias = bias if out_bias is None else out_bias
        parts["out"] = ops.Linear(heads * head_dim, embed_dim, out_bias, **made, **out)
        super().__init__(parts)
