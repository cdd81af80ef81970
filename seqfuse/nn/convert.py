"""Modules of `torch.nn` as layers of this library, on the same parameters."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from .. import ops
from ..fuser.sequential import Sequential
from ..operation import UnfusedOperation
from ._unaltered import check_unaltered
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

    It has to be as torch made it: modules that were replaced, hooks, a `forward` of an instance, parametrizations,
    settings that do not fit together, parts in another mode, dtype or device are refused.

    Args:
        module: the torch module.
        attention: what torch passes at each call: `causal=True`, or `mask="name"` for a mask passed by that keyword.

    Raises:
        TypeError: for a module of another type, or an activation that is no operation here.
        ValueError: for settings that no layer here has, or a module that was altered, naming them.
    """
    made: dict[type, Callable[..., Sequential]] = {
        nn.MultiheadAttention: _attention, nn.TransformerEncoderLayer: _layer, nn.TransformerEncoder: _stack,
    }  # fmt: skip
    if type(module) not in made:
        raise TypeError(f"no layer here stands for {type(module).__name__}")
    check_unaltered(module, _fresh(module), aside=_ASIDE)
    return made[type(module)](module, attention).train(module.training)


# Of an encoder: how it spares the work for padded tokens.
_ASIDE = ("num_layers", "enable_nested_tensor", "use_nested_tensor", "mask_check")


def _fresh(module: Any) -> nn.Module:
    """A module as torch makes it from the settings that are read here, without numbers."""
    if isinstance(module, nn.MultiheadAttention):
        return _fresh_attention(module)
    if isinstance(module, nn.TransformerEncoderLayer):
        return _fresh_layer(module)
    if isinstance(module, nn.LayerNorm):
        biased: bool = _read(module, "bias", None) is not None
        return nn.LayerNorm([*module.normalized_shape], module.eps, bias=biased, device="meta")
    if isinstance(module, nn.TransformerEncoder):
        one = nn.TransformerEncoderLayer(1, 1, 1, device="meta")
        last = None if module.norm is None else _fresh(module.norm)
        made: Any = nn.TransformerEncoder(one, 0, last, enable_nested_tensor=False)
        made.layers = nn.ModuleList(map(_fresh, module.layers))
        return made
    raise TypeError(f"no layer here stands for {type(module).__name__}")


def _fresh_attention(module: Any) -> nn.MultiheadAttention:
    unlike = [name for name in ("bias_k", "bias_v") if getattr(module, name) is not None]
    unlike += ["add_zero_attn"] if module.add_zero_attn else []
    unlike += ["kdim or vdim"] if module.kdim != module.embed_dim or module.vdim != module.embed_dim else []
    unlike += ["num_heads that do not divide embed_dim"] if module.embed_dim % module.num_heads else []
    if unlike:
        raise ValueError(f"MultiheadAttention with {', '.join(unlike)} is not self-attention of one packed product")
    return nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        module.dropout,
        _read(module, "in_proj_bias", None) is not None,
        batch_first=module.batch_first,
        device="meta",
    )


def _fresh_layer(module: Any) -> nn.TransformerEncoderLayer:
    width: int = _read(module, "linear1.in_features", 1)
    act: Any = module.activation
    _activation(act)
    if isinstance(act, nn.Module):
        act = type(act)(cast(Any, act).approximate if isinstance(act, nn.GELU) else cast(Any, act).inplace)
    made: Any = nn.TransformerEncoderLayer(
        width,
        1,
        _read(module, "linear1.out_features", 1),
        _read(module, "dropout.p", 0.0),
        act,
        _read(module, "norm1.eps", 0.0),
        norm_first=module.norm_first,
        bias=_read(module, "linear1.bias", None) is not None,
        device="meta",
    )
    if isinstance(module.self_attn, nn.MultiheadAttention):
        made.self_attn = _fresh(module.self_attn)
    return made


def _activation(given: Any) -> Callable[[], UnfusedOperation]:
    if type(given) is nn.GELU:
        return functools.partial(ops.GeLU, cast(Any, given.approximate))
    act = _ACTIVATIONS.get(type(given) if isinstance(given, nn.Module) else given)
    if act is None:
        raise TypeError(f"no operation here stands for the activation {given!r}")
    return act


def _read(module: Any, path: str, otherwise: Any) -> Any:
    """A setting; where what should have it was replaced, which `check_unaltered` will say, another one."""
    try:
        return operator.attrgetter(path)(module)
    except AttributeError:
        return otherwise


def _attention(module: Any, attention: dict[str, Any]) -> MultiHeadAttention:
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
    own = module.self_attn
    bias = module.linear1.bias is not None
    layer = TransformerLayer(
        own.embed_dim,
        own.num_heads,
        hidden_dim=module.linear1.out_features,
        activation=_activation(module.activation),
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
        stack.add_module(str(index), _layer(its, attention))
    norm: Any = module.norm
    if norm is not None:
        last = ops.LayerNorm(norm.normalized_shape, norm.eps, bias=norm.bias is not None, device="meta")
        _take(last, norm.weight, norm.bias)
        stack.add_module("norm", last)
    return stack


def _take(mine: Any, weight: Any, bias: Any) -> None:
    """Put a torch module's own parameters in place."""
    mine.weight = weight
    if bias is not None:
        mine.bias = bias
