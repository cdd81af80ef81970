"""TransformerLayer and TransformerStack."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from .. import ops
from ..operation import UnfusedOperation
from ..run.sequential import Sequential
from ._across import norm_on_rows
from .attention import MultiHeadAttention
from .feedforward import FeedForward


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
                block["norm"] = norm_on_rows(norm, dim, group, sequence_dim, made)
            block["mixer"] = mixer
            if branch_norm:
                block["branch_norm"] = norm_on_rows(norm, dim, group, sequence_dim, made)
            if dropout:
                block["dropout"] = ops.Dropout(dropout)
            if residual_scale is not None:
                block["scale"] = ops.Scale(residual_scale)
            parts[name] = ops.Residual(block)
            if pre_norm is False:
                parts[f"{name}_norm"] = norm_on_rows(norm, dim, group, sequence_dim, made)
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
            parts["norm"] = norm_on_rows(layer.get("norm", ops.LayerNorm), dim, *several, made)
        super().__init__(parts)
