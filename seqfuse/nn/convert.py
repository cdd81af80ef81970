"""Modules of `torch.nn` as layers of this library, on the same parameters."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import ops
from ..fuser.sequential import Sequential
from ..operation import UnfusedOperation
from .attention import MultiHeadAttention
from .transformer import TransformerLayer, TransformerStack

_ACTIVATIONS: dict[Any, type[UnfusedOperation]] = {
    F.relu: ops.ReLU, F.gelu: ops.GeLU, torch.relu: ops.ReLU, nn.ReLU: ops.ReLU, F.silu: ops.SiLU, nn.SiLU: ops.SiLU,
}  # fmt: skip


def from_torch(module: nn.Module, **attention: Any) -> Sequential:
    """A `MultiHeadAttention`, `TransformerLayer` or `TransformerStack` that owns the parameters of a torch module.

    Of `torch.nn.MultiheadAttention` (self-attention alone), `TransformerEncoderLayer` and `TransformerEncoder`. The
    parameters are those of the module itself, not copies; inputs are [*, S, E], whatever `batch_first` says. Dropped
    elements are others than torch's.

    Args:
        module: the torch module.
        attention: what torch passes at each call: `causal=True`, or `mask="name"` for a mask passed by that keyword.

    Raises:
        TypeError: for a module of another type, or an activation that is no operation here.
        ValueError: for settings that no layer here has, naming them.
    """
    match module:
        case nn.MultiheadAttention():
            layer: Sequential = _attention(module, attention)
        case nn.TransformerEncoderLayer():
            layer = _layer(module, attention)
        case nn.TransformerEncoder():
            layer = _stack(module, attention)
        case _:
            raise TypeError(f"no layer here stands for {type(module).__name__}")
    return layer.train(module.training)


def _attention(module: Any, attention: dict[str, Any]) -> MultiHeadAttention:
    unlike = [name for name in ("bias_k", "bias_v") if getattr(module, name) is not None]
    unlike += ["add_zero_attn"] if module.add_zero_attn else []
    unlike += ["kdim or vdim"] if module.in_proj_weight is None else []
    if unlike:
        raise ValueError(f"MultiheadAttention with {', '.join(unlike)} is not self-attention of one packed product")
    layer = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        bias=module.in_proj_bias is not None,
        dropout=module.dropout,
        device="meta",
        **attention,
    )
    _take(layer.qkv, module.in_proj_weight, module.in_proj_bias)
    _take(layer.out, module.out_proj.weight, module.out_proj.bias)
    return layer


def _layer(module: Any, attention: dict[str, Any]) -> TransformerLayer:
    given: Any = module.activation
    act = _ACTIVATIONS.get(given) or _ACTIVATIONS.get(type(given))
    if isinstance(given, nn.GELU):
        act = functools.partial(ops.GeLU, given.approximate)  # pyright: ignore[reportArgumentType, reportAssignmentType]
    if act is None:
        raise TypeError(f"no operation here stands for the activation {given!r}")
    rates: set[float] = {module.dropout.p, module.dropout1.p, module.dropout2.p}
    if len(rates) > 1 or module.norm1.eps != module.norm2.eps:
        raise ValueError("TransformerEncoderLayer with several rates of dropout, or of eps, has no layer here")
    own = module.self_attn
    bias = module.linear1.bias is not None
    layer = TransformerLayer(
        own.embed_dim,
        own.num_heads,
        hidden_dim=module.linear1.out_features,
        activation=act,
        norm=functools.partial(ops.LayerNorm, eps=module.norm1.eps, bias=module.norm1.bias is not None),
        pre_norm=module.norm_first,
        bias=bias,
        dropout=module.dropout.p,
        hidden_dropout=module.dropout.p,
        device="meta",
        **attention,
    )
    first: Any = layer.attention
    second: Any = layer.feedforward
    first.mixer = _attention(own, attention)
    _take(second.mixer.up, module.linear1.weight, module.linear1.bias)
    _take(second.mixer.down, module.linear2.weight, module.linear2.bias)
    norms: tuple[Any, Any] = (
        (first.norm, second.norm) if module.norm_first else (layer.attention_norm, layer.feedforward_norm)
    )
    for mine, its in zip(norms, (module.norm1, module.norm2), strict=True):
        _take(mine, its.weight, its.bias)
    return layer


def _stack(module: nn.TransformerEncoder, attention: dict[str, Any]) -> Sequential:
    stack = TransformerStack(0, 1, 1, final_norm=False)
    for index, its in enumerate(module.layers):
        if not isinstance(its, nn.TransformerEncoderLayer):
            raise TypeError(f"no layer here stands for {type(its).__name__}")
        stack.add_module(str(index), _layer(its, attention))
    norm: Any = module.norm
    if isinstance(norm, nn.LayerNorm):
        weight, bias = norm._parameters["weight"], norm._parameters["bias"]  # pyright: ignore[reportPrivateUsage]
        last = ops.LayerNorm(norm.normalized_shape, norm.eps, bias=bias is not None, device="meta")
        _take(last, weight, bias)
        stack.add_module("norm", last)
    elif norm is not None:
        raise TypeError(f"no layer here stands for the last norm {type(norm).__name__}")
    return stack


def _take(mine: Any, weight: Any, bias: Any) -> None:
    """Put a torch module's own parameters in place."""
    mine.weight = weight
    if bias is not None:
        mine.bias = bias
