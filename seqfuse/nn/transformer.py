"""MultiHeadAttention, FeedForward, and layers and stacks of both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from .. import ops
from ..errors import InputError
from ..group import Group
from ..operation import UnfusedOperation
from ..pointwise import Gated
from ..run import Sequential


class _Parts(NamedTuple):
    """How the parts of a layer are created, and the process group over which they are sharded."""

    device: Any
    dtype: torch.dtype | None
    group: Any
    sequence_dim: int | None

    def _linear(self, features: int, dim: int, bias: bool, style: str, **parts: Any) -> ops.Linear:
        divided: dict[str, Any] = {"parallel": style, "group": self.group, "sequence_dim": self.sequence_dim, **parts}
        divided = {} if self.group is None else divided
        return ops.Linear(features, dim, bias, device=self.device, dtype=self.dtype, **divided)

    def first(self, features: int, sizes: tuple[int, ...], bias: bool, merged: bool) -> UnfusedOperation:
        """The GEMM that computes several outputs side by side, with separate weights or one packed weight."""
        if merged and self.group is not None:
            raise InputError("a MergedLinear is not divided among processes", code="SF106", operation="MergedLinear")
        if merged and len(sizes) > 1:
            return ops.MergedLinear(features, sizes, bias, device=self.device, dtype=self.dtype)
        return self._linear(features, sum(sizes), bias, "column", parts=sizes)

    def last(self, features: int, dim: int, bias: bool) -> ops.Linear:
        """The GEMM that ends a tensor-parallel region."""
        return self._linear(features, dim, bias, "row")

    def norm(self, norm: Callable[..., UnfusedOperation], dim: int) -> UnfusedOperation:
        """A norm between tensor-parallel regions: with a sequence shard, gradients are summed over the group."""
        made = norm(dim, device=self.device, dtype=self.dtype)
        if self.group is not None and self.sequence_dim is not None:
            made.sum_over = Group(self.group)
        return made


class MultiHeadAttention(Sequential):
    """y = Linear(Attention(Rotary(QKNorm(Linear(x))))), with optional `RotaryEmbedding` and `QKNorm`.

    One GEMM computes queries, keys and values, packed as `[q; k; v]`.  x, y: [*, S, embed_dim].
    State-dict keys: `qkv`, `qk_norm`, `rotary`, `attention`, `out`.
    Source: Vaswani et al. 2017, arXiv:1706.03762.

    Args:
        embed_dim: last dimension of x and y.
        heads: number of query heads.
        kv_heads: number of key and value heads (GQA), a divisor of `heads`; default `heads`.
        head_dim: size of a head; default `embed_dim / heads`.
        bias: whether the first GEMM has a bias.
        out_bias: whether the last GEMM has a bias; default `bias`.
        merged: whether queries, keys and values have separate weights, in an `ops.MergedLinear`, instead of one packed
            weight.
        qk_norm: whether each head of queries and keys is normalized, or a function `(head_dim, heads, kv_heads) ->
            ops.QKNorm`, such as `functools.partial(ops.QKNorm, eps=1e-5, zero_centered=True)`.
        rotary: a function `(heads, kv_heads) -> ops.RotaryEmbedding`, such as `functools.partial(ops.RotaryEmbedding,
            style="half")`.
        attention: other arguments of `ops.Attention`: causal, window, dropout, scale, softcap, mask, cu_seqlens.
        group: process group over which heads are sharded; see `ops.Linear`. A mask must then be the same for all heads,
            and has no gradient.
        sequence_dim: the dimension of x and y that is sharded (sequence parallel); attention gathers all tokens.

    Raises:
        InputError: (SF101) if the number of processes does not divide `heads` and `kv_heads`; (SF106) if a QKNorm at
            full width or merged weights would be sharded.
        ValueError: if `heads` does not divide `embed_dim` and `head_dim` is not given.
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
        made = _Parts(device, dtype, group, sequence_dim)
        own, own_shared = own_heads(heads, shared, Group(group))
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        sizes = tuple(n * head_dim for n in (heads, shared, shared))
        parts["qkv"] = made.first(embed_dim, sizes, bias, merged)
        if qk_norm:
            make: Any = ops.QKNorm if qk_norm is True else qk_norm
            parts["qk_norm"] = norm = make(head_dim, own, own_shared, device=device, dtype=dtype)
            if norm.full_width and own != heads:
                raise InputError("a QKNorm of all heads cannot be divided", code="SF106", operation="QKNorm")
            norm.sum_over = Group(group) if group is not None else None
        if rotary is not None:
            parts["rotary"] = rotary(own, own_shared)
        parts["attention"] = ops.Attention(own, own_shared, **attention)
        out_bias = bias if out_bias is None else out_bias
        parts["out"] = made.last(heads * head_dim, embed_dim, out_bias)
        super().__init__(parts)


class FeedForward(Sequential):
    """y = Linear(Dropout(activation(Linear(x)))).

    With a gated unit the first GEMM computes `[gate; up]`, twice as wide.  x, y: [*, dim].
    State-dict keys: `up`, `activation`, `dropout` (if any), `down`.
    Source: Vaswani et al. 2017, arXiv:1706.03762; gated: Shazeer 2020, arXiv:2002.05202.

    Args:
        dim: last dimension of x and y.
        hidden_dim: size of the output of the activation; default `4 dim`.
        activation: class or function that returns the activation, such as `ops.GeLU` or `ops.SwiGLU`.
        bias: whether the GEMMs have biases.
        merged: whether gate and up of a gated unit have separate weights, in an `ops.MergedLinear`.
        dropout: dropout probability after the activation.
        group: process group over which hidden features are sharded (gate and up alike); see `ops.Linear`.
        sequence_dim: the dimension of x and y that is sharded (sequence parallel).

    Raises:
        InputError: (SF101) if the number of processes does not divide the hidden features, (SF106) if merged weights
            would be sharded, or gate and up are interleaved.
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
        act, made = activation(), _Parts(device, dtype, group, sequence_dim)
        sizes = (hidden, hidden) if isinstance(act, Gated) else (hidden,)
        if isinstance(act, Gated) and act.packing == "interleaved":  # a shard has whole pairs of gate and up
            sizes = (2 * hidden,)
            if merged:
                message = f"gate and up of {type(act).__name__} are interleaved, so they have no separate weights"
                raise InputError(message, code="SF106", operation=type(self).__name__, hint='packing="gate_up"')
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        parts["up"] = made.first(dim, sizes, bias, merged)
        parts["activation"] = act
        if dropout:
            parts["dropout"] = ops.Dropout(dropout)
        parts["down"] = made.last(hidden, dim, bias)
        super().__init__(parts)


class TransformerLayer(Sequential):
    """An attention block and a feed-forward block, each with a norm and a residual connection.

    Pre-norm: x + s D(MHA(norm x)), then y + s D(FFN(norm y)). Post-norm: norm(x + s D(MHA(x))), then
    norm(y + s D(FFN(y))). With `branch_norm`: x + s D(norm(MHA(norm x))), the inner norm only with pre-norm; likewise
    for FFN. D is dropout, s the residual scale.  x, y: [*, S, dim].
    State-dict keys: `attention` and `feedforward`, each with `mixer`, `norm` (pre-norm) and `branch_norm` (if any); a
    post-norm layer also has `attention_norm` and `feedforward_norm`.
    Source: Vaswani et al. 2017, arXiv:1706.03762; pre-norm: Xiong et al. 2020, arXiv:2002.04745; norms of branches:
    Gemma Team 2024, arXiv:2408.00118; without pre-norm: OLMo et al. 2024, arXiv:2501.00656.

    Args:
        dim: last dimension of x and y.
        heads: number of query heads.
        kv_heads: number of key and value heads; default `heads`.
        hidden_dim: size of the hidden features; default `4 dim`.
        activation: class or function that returns the activation, such as `ops.GeLU` or `ops.SwiGLU`.
        norm: class or function that returns a norm of size `dim`, such as `ops.LayerNorm` or `ops.RMSNorm`.
        pre_norm: `True`: pre-norm; `False`: post-norm; `None`: no such norms.
        branch_norm: whether to add a norm at the end of each branch, before the sum.
        bias: whether the GEMMs have biases.
        qkv_bias: whether the `Linear` of queries, keys and values has a bias; default `bias`.
        merged: whether queries, keys, values, gate and up have separate weights; see `MultiHeadAttention`,
            `FeedForward`.
        dropout: dropout probability of the output of each branch.
        attention_dropout: dropout probability of attention weights.
        hidden_dropout: dropout probability after the activation.
        residual_scale: factor of the output of each branch.
        group: process group over which heads and hidden features are sharded (tensor parallel).
        sequence_dim: the dimension of x and y that is sharded (sequence parallel).
        attention: other arguments of `MultiHeadAttention` and `ops.Attention`.
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
        made = _Parts(device, dtype, group, sequence_dim)
        same: dict[str, Any] = {**made._asdict(), "merged": merged}
        attention = {"out_bias": bias, "bias": bias if qkv_bias is None else qkv_bias, **attention}
        mixers: dict[str, nn.Module] = {
            "attention": MultiHeadAttention(dim, heads, kv_heads, dropout=attention_dropout, **same, **attention),
            "feedforward": FeedForward(dim, hidden_dim, activation, bias=bias, dropout=hidden_dropout, **same),
        }
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        for name, mixer in mixers.items():
            block: OrderedDict[str, nn.Module] = OrderedDict()
            if pre_norm:
                block["norm"] = made.norm(norm, dim)
            block["mixer"] = mixer
            if branch_norm:
                block["branch_norm"] = made.norm(norm, dim)
            if dropout:
                block["dropout"] = ops.Dropout(dropout)
            if residual_scale is not None:
                block["scale"] = ops.Scale(residual_scale)
            parts[name] = ops.Residual(block)
            if pre_norm is False:
                parts[f"{name}_norm"] = made.norm(norm, dim)
        super().__init__(parts)


class TransformerStack(Sequential):
    """Layers in sequence, with an optional final norm.

    x, y: [*, S, dim].  State-dict keys: `0`, `1`, ..., `norm` (if any).

    Args:
        layers: number of layers.
        dim: last dimension of x and y.
        heads: number of query heads.
        final_norm: whether to add a norm at the end; by default if the layers do not end in a norm.
        layer: other arguments of `TransformerLayer`.
    """

    inlines: ClassVar[bool] = True

    def __init__(self, layers: int, dim: int, heads: int, *, final_norm: bool | None = None, **layer: Any) -> None:
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        for index in range(layers):
            parts[str(index)] = TransformerLayer(dim, heads, **layer)
        if final_norm or (final_norm is None and layer.get("pre_norm", True) is not False):
            made = _Parts(*(layer.get(name) for name in _Parts._fields))
            parts["norm"] = made.norm(layer.get("norm", ops.LayerNorm), dim)
        super().__init__(parts)


def own_heads(heads: int, kv_heads: int, group: Group) -> tuple[int, int]:
    """The number of heads in each process."""
    for name, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count % group.size:
            hint = "a key head is not held twice" if name == "kv_heads" and not heads % group.size else None
            message = f"expects {name} that {group.size} processes divide, got {count}"
            raise InputError(message, code="SF101", operation="Attention", hint=hint)
    return heads // group.size, kv_heads // group.size
