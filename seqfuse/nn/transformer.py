"""MultiHeadAttention, FeedForward, and the layers and stacks that are made of both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from .. import ops
from ..errors import InputError
from ..group import Group
from ..operation import UnfusedOperation
from ..pointwise import Gated
from ..run import Sequential


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
        several = Group(group)
        own, own_shared = own_heads(heads, shared, several)
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        sizes = tuple(n * head_dim for n in (heads, shared, shared))
        parts["qkv"] = _side_by_side(embed_dim, sizes, bias, merged, group, sequence_dim, made)
        if qk_norm:
            make = ops.QKNorm if qk_norm is True else qk_norm
            if not callable(make):
                message = f"qk_norm must be True, False, or a function that makes an ops.QKNorm, got {qk_norm!r}"
                raise InputError(message, code="SF106", operation=type(self).__name__)
            parts["qk_norm"] = norm = make(head_dim, own, own_shared, **made)
            if norm.full_width and own != heads:
                raise InputError("a QKNorm of all heads cannot be divided", code="SF106", operation="QKNorm")
            norm.sum_over = several if group is not None else None
        if rotary is not None:
            parts["rotary"] = rotary(own, own_shared)
        parts["attention"] = ops.Attention(own, own_shared, **attention)
        out_bias = bias if out_bias is None else out_bias
        parts["out"] = _last(heads * head_dim, embed_dim, out_bias, group, sequence_dim, made)
        super().__init__(parts)


class FeedForward(Sequential):
    """y = Linear(Dropout(activation(Linear(x)))).

    With a gated unit the first GEMM makes `[gate; up]`, twice as wide.  x, y: [*, dim].
    Keys: `up`, `activation`, `dropout` (if any), `down`.
    Source: Vaswani et al. 2017, arXiv:1706.03762; gated: Shazeer 2020, arXiv:2002.05202.

    Args:
        dim: last dimension of x and y.
        hidden_dim: what the activation gives; `4 dim` by default.
        activation: makes the activation, as `ops.GeLU` or `ops.SwiGLU` do.
        bias: whether the GEMMs have biases.
        merged: whether gate and up of a gated unit have a weight each, in an `ops.MergedLinear`, else one packed.
        dropout: probability of dropping what the activation gives, in training.
        group: processes that divide the hidden features, each half of a gated unit's; see `ops.Linear`.
        sequence_dim: the dimension of x and y of which each process has its shard, none by default.

    Raises:
        InputError: (SF101) for hidden features that the processes do not divide, (SF106) for merged weights that they
            would.
    """

    inlines: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        activation: Callable[[], UnfusedOperation] = ops.GeLU,
        *,
        bias: bool = True,
        merged: bool = False,
        dropout: float = 0.0,
        group: Any = None,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        hidden = 4 * dim if hidden_dim is None else hidden_dim
        act = activation()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        sizes = (hidden, hidden) if isinstance(act, Gated) else (hidden,)
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        parts["up"] = _side_by_side(dim, sizes, bias, merged, group, sequence_dim, made)
        parts["activation"] = act
        if dropout:
            parts["dropout"] = ops.Dropout(dropout)
        parts["down"] = _last(hidden, dim, bias, group, sequence_dim, made)
        super().__init__(parts)


class TransformerLayer(Sequential):
    """A block of attention and a feed-forward block, each with a norm and a residual sum.

    Pre-norm: x + s D(MHA(norm x)), then y + s D(FFN(norm y)). Post-norm: norm(x + s D(MHA(x))), then
    norm(y + s D(FFN(y))). With norms of branches: x + s D(norm(MHA(norm x))), where the inner norm is there pre-norm,
    and so for FFN. D is dropout, s the residual scale.  x, y: [*, S, dim].
    Keys: `attention`, `feedforward`, in each `mixer`, pre-norm `norm`, and `branch_norm` if asked for; a post-norm
    layer has `attention_norm` and `feedforward_norm` after its blocks.
    Source: Vaswani et al. 2017, arXiv:1706.03762; pre-norm: Xiong et al. 2020, arXiv:2002.04745; of branches: Gemma
    Team 2024, arXiv:2408.00118; alone: OLMo et al. 2024, arXiv:2501.00656.

    Args:
        dim: last dimension of x and y.
        heads: query heads.
        kv_heads: key and value heads; as many by default.
        hidden_dim: of the feed-forward block; `4 dim` by default.
        activation: makes the activation, as `ops.GeLU` or `ops.SwiGLU` do.
        norm: makes a norm of `dim`, as `ops.LayerNorm` or `ops.RMSNorm` do.
        pre_norm: whether norms stand before the blocks, else after the sums; `None` for neither.
        branch_norm: whether a norm stands at the end of each branch, before the sum.
        bias: whether the GEMMs have biases.
        qkv_bias: whether the `Linear` of queries, keys and values has a bias; as `bias` by default.
        merged: whether queries, keys, values, gate and up have a weight each; see `MultiHeadAttention`, `FeedForward`.
        dropout: probability of dropping what a block adds, in training.
        attention_dropout: the same of an attention weight.
        hidden_dropout: the same of what the activation gives.
        residual_scale: what a block's result is multiplied by.
        group: processes that divide heads and hidden features; see `MultiHeadAttention` and `FeedForward`.
        sequence_dim: the dimension of x and y of which each process has its shard, none by default.
        attention: the remaining arguments of `MultiHeadAttention` and `ops.Attention`.
    """

    inlines: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        hidden_dim: int | None = None,
        activation: Callable[[], UnfusedOperation] = ops.GeLU,
        norm: Callable[..., UnfusedOperation] = ops.LayerNorm,
        pre_norm: bool | None = True,
        branch_norm: bool = False,
        bias: bool = True,
        qkv_bias: bool | None = None,
        merged: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        residual_scale: float | None = None,
        group: Any = None,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        several: dict[str, Any] = {"group": group, "sequence_dim": sequence_dim}
        attention = {"out_bias": bias, "bias": bias if qkv_bias is None else qkv_bias, **attention}
        mixers: dict[str, nn.Module] = {
            "attention": MultiHeadAttention(
                dim, heads, kv_heads, merged=merged, dropout=attention_dropout, **several, **made, **attention
            ),
            "feedforward": FeedForward(
                dim, hidden_dim, activation, bias=bias, merged=merged, dropout=hidden_dropout, **several, **made
            ),
        }
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        for name, mixer in mixers.items():
            block: OrderedDict[str, nn.Module] = OrderedDict()
            if pre_norm:
                block["norm"] = _norm_on_rows(norm, dim, group, sequence_dim, made)
            block["mixer"] = mixer
            if branch_norm:
                block["branch_norm"] = _norm_on_rows(norm, dim, group, sequence_dim, made)
            if dropout:
                block["dropout"] = ops.Dropout(dropout)
            if residual_scale is not None:
                block["scale"] = ops.Scale(residual_scale)
            parts[name] = ops.Residual(block)
            if pre_norm is False:
                parts[f"{name}_norm"] = _norm_on_rows(norm, dim, group, sequence_dim, made)
        super().__init__(parts)


class TransformerStack(Sequential):
    """Layers one after another, and a last norm.

    x, y: [*, S, dim].  Keys: `0`, `1`, ..., `norm` (if any).

    Args:
        layers: how many.
        dim: last dimension of x and y.
        heads: query heads.
        final_norm: whether a norm stands at the end; by default where the layers do not end in one.
        layer: the remaining arguments of `TransformerLayer`.
    """

    inlines: ClassVar[bool] = True

    def __init__(self, layers: int, dim: int, heads: int, *, final_norm: bool | None = None, **layer: Any) -> None:
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        for index in range(layers):
            parts[str(index)] = TransformerLayer(dim, heads, **layer)
        if final_norm or (final_norm is None and layer.get("pre_norm", True) is not False):
            made = {name: layer[name] for name in ("device", "dtype") if name in layer}
            several = layer.get("group"), layer.get("sequence_dim")
            parts["norm"] = _norm_on_rows(layer.get("norm", ops.LayerNorm), dim, *several, made)
        super().__init__(parts)


def _side_by_side(
    features: int, sizes: tuple[int, ...], bias: bool, merged: bool, group: Any, sequence_dim: int | None, made: Any
) -> UnfusedOperation:
    """The GEMM that makes several features side by side, with a weight for each or one of all of them."""
    if merged and group is not None:
        raise InputError("a MergedLinear is not divided among processes", code="SF106", operation="MergedLinear")
    if merged and len(sizes) > 1:
        return ops.MergedLinear(features, sizes, bias, **made)
    if group is None:
        return ops.Linear(features, sum(sizes), bias, **made)
    divided: dict[str, Any] = {"parallel": "column", "parts": sizes, "group": group, "sequence_dim": sequence_dim}
    return ops.Linear(features, sum(sizes), bias, **made, **divided)


def _last(features: int, dim: int, bias: bool, group: Any, sequence_dim: int | None, made: Any) -> ops.Linear:
    """The GEMM with which a region of several processes ends."""
    divided: dict[str, Any] = {"parallel": "row", "group": group, "sequence_dim": sequence_dim}
    return ops.Linear(features, dim, bias, **made, **(divided if group is not None else {}))


def own_heads(heads: int, kv_heads: int, group: Group) -> tuple[int, int]:
    """How many of the heads each process has."""
    for name, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count % group.size:
            hint = "a key head is not held twice" if name == "kv_heads" and not heads % group.size else None
            message = f"expects {name} that {group.size} processes divide, got {count}"
            raise InputError(message, code="SF101", operation="Attention", hint=hint)
    return heads // group.size, kv_heads // group.size


def _norm_on_rows(
    norm: Callable[..., UnfusedOperation], dim: int, group: Any, sequence_dim: int | None, made: dict[str, Any]
) -> UnfusedOperation:
    """A norm between regions: where each process has its shard of the tokens, its gradients are summed."""
    made_norm = norm(dim, **made)
    if group is not None and sequence_dim is not None:
        made_norm.sum_over = Group(group)
    return made_norm
