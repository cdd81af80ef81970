"""Modules of `torch.nn` as layers of this library, on the same parameters."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from .. import ops
from ..operation import UnfusedOperation
from ..run import Sequential
from ._unaltered import check_unaltered
from .transformer import MultiHeadAttention, TransformerLayer

_ACTIVATIONS: dict[Any, type[UnfusedOperation]] = {
    F.relu: ops.ReLU, F.gelu: ops.GeLU, torch.relu: ops.ReLU, nn.ReLU: ops.ReLU, F.silu: ops.SiLU, nn.SiLU: ops.SiLU,
}  # fmt: skip


# What stands for a module of torch, and the settings that both are made of.
_OPERATIONS: dict[type[nn.Module], tuple[Callable[..., UnfusedOperation], tuple[str, ...]]] = {
    nn.Linear: (ops.Linear, ("in_features", "out_features", "bias")),
    nn.LayerNorm: (ops.LayerNorm, ("normalized_shape", "eps", "elementwise_affine", "bias")),
    nn.RMSNorm: (ops.RMSNorm, ("normalized_shape", "eps", "elementwise_affine")),
    nn.Embedding: (ops.Embedding, ("num_embeddings", "embedding_dim", "padding_idx")),
    nn.Dropout: (ops.Dropout, ("p", "inplace")),
    nn.Identity: (ops.Identity, ()),
    nn.ReLU: (ops.ReLU, ("inplace",)),
    nn.SiLU: (ops.SiLU, ("inplace",)),
    nn.GELU: (ops.GeLU, ("approximate",)),
    nn.Sigmoid: (ops.Sigmoid, ()),
    nn.Tanh: (ops.Tanh, ()),
}


def from_torch(module: nn.Module, **attention: Any) -> Any:
    """A layer or an operation that owns the parameters of a torch module.

    Of `torch.nn.MultiheadAttention` (self-attention alone) and `TransformerEncoderLayer` it is a `MultiHeadAttention`
    or a `TransformerLayer`; of `Linear`, `LayerNorm`, `RMSNorm`, `Embedding`, `Dropout`, `Identity` and activations the
    operation; of `torch.nn.Sequential` a `Sequential` of these, with its keys. The parameters are those of the module
    itself, not copies; inputs of attention are [*, S, E], whatever `batch_first` says. Dropped elements are others than
    torch's. A `TransformerEncoder` is converted by `sf.convert`, or given as an `nn.Sequential` of its layers.

    It has to be as torch made it: modules that were replaced, hooks, a `forward` of an instance, parametrizations,
    settings that do not fit together, parts in another mode, dtype or device are refused.

    Args:
        module: the torch module.
        attention: what torch passes at each call: `causal=True`, or `mask="name"` for a mask passed by that keyword.

    Raises:
        TypeError: for a module of another type, or an activation that is no operation here.
        ValueError: for settings that no layer here has, or a module that was altered, naming them.
    """
    taken = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.Sequential, *_OPERATIONS)
    if type(module) not in taken:
        hint = "; sf.convert(model) runs it in place" if type(module) is nn.TransformerEncoder else ""
        raise TypeError(f"no layer here stands for {type(module).__name__}{hint}")
    check_unaltered(module, _fresh(module))
    if attention and not any(isinstance(m, nn.MultiheadAttention) for m in module.modules()):
        raise ValueError(f"{type(module).__name__} has no attention that would take {', '.join(attention)}")
    return _converted(module, attention).train(module.training)


def _fresh(module: Any) -> nn.Module:
    """A module as torch makes it from the settings that are read here, without numbers."""
    if isinstance(module, nn.MultiheadAttention):
        return _fresh_attention(module)
    if isinstance(module, nn.TransformerEncoderLayer):
        return _fresh_layer(module)
    if type(module) is nn.Sequential:
        for name, child in module.named_children():
            inside = [m for m in child.modules() if isinstance(m, nn.MultiheadAttention)]
            if child in inside or not all(m.batch_first for m in inside):
                raise ValueError(f"{name} of a torch Sequential must take one input, with its batch first")
        return nn.Sequential(OrderedDict((name, _fresh(child)) for name, child in module._modules.items()))  # pyright: ignore
    if type(module) in _OPERATIONS:
        return type(module)(**_settings(module), **_on_meta(module))
    raise TypeError(f"no layer here stands for {type(module).__name__}")


def _settings(module: Any) -> dict[str, Any]:
    """What an operation's module of torch was made of."""
    unlike = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if _read(module, name, None)]
    if unlike:
        raise ValueError(f"no operation here has {', '.join(unlike)} of {type(module).__name__}")
    found = {name: _read(module, name, None) for name in _OPERATIONS[type(module)][1]}
    return found | ({"bias": found["bias"] is not None} if "bias" in found else {})


def _on_meta(module: nn.Module) -> dict[str, Any]:
    return {"device": "meta"} if module._parameters else {}  # pyright: ignore[reportPrivateUsage]


def _fresh_attention(module: Any) -> nn.MultiheadAttention:
    unlike = [name for name in ("bias_k", "bias_v") if getattr(module, name) is not None]
    unlike += ["add_zero_attn"] if module.add_zero_attn else []
    unlike += ["kdim or vdim"] if module.kdim != module.embed_dim or module.vdim != module.embed_dim else []
    unlike += ["num_heads that do not divide embed_dim"] if module.embed_dim % module.num_heads else []
    if unlike:
        raise ValueError(f"MultiheadAttention with {', '.join(unlike)} is not self-attention of one packed GEMM")
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


def _converted(module: Any, attention: dict[str, Any]) -> Any:
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, attention)
    if isinstance(module, nn.TransformerEncoderLayer):
        return _layer(module, attention)
    if type(module) is nn.Sequential:
        children: dict[str, nn.Module] = vars(module)["_modules"]
        return Sequential(OrderedDict((name, _converted(child, attention)) for name, child in children.items()))
    given = cast(nn.Module, module)
    settings = {name: value for name, value in _settings(given).items() if name != "inplace"}
    operation = _OPERATIONS[type(given)][0](**settings, **_on_meta(given))
    for name, parameter in given._parameters.items():  # pyright: ignore[reportPrivateUsage]
        if parameter is not None:
            setattr(operation, name, parameter)
    return operation


def _attention(module: Any, attention: dict[str, Any]) -> MultiHeadAttention:
    layer = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        bias=module.in_proj_bias is not None,
        dropout=module.dropout,
        device="meta",
        **attention,
    )
    qkv: Any = layer.qkv
    qkv.weight = module.in_proj_weight
    if module.in_proj_bias is not None:
        qkv.bias = module.in_proj_bias
    _take(layer.out, module.out_proj)
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
    norms = (first.norm, second.norm) if module.norm_first else (layer.attention_norm, layer.feedforward_norm)
    mine = (second.mixer.up, second.mixer.down, *norms)
    for its, theirs in zip(mine, (module.linear1, module.linear2, module.norm1, module.norm2), strict=True):
        _take(its, theirs)
    return layer


def _take(mine: Any, its: Any) -> None:
    """Put a torch module's own parameters in place."""
    mine.weight = its.weight
    if its.bias is not None:
        mine.bias = its.bias
