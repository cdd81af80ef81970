"""Modules of `torch.nn` as operations of this library, on the same parameters."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .. import ops
from ..operation import UnfusedOperation
from ..run import Sequential

# The operation for a torch module, and the attributes that are its arguments.
_OPERATIONS: dict[type[nn.Module], tuple[Callable[..., UnfusedOperation], tuple[str, ...]]] = {
    nn.Linear: (ops.Linear, ("in_features", "out_features", "bias")),
    nn.LayerNorm: (ops.LayerNorm, ("normalized_shape", "eps", "elementwise_affine", "bias")),
    nn.RMSNorm: (ops.RMSNorm, ("normalized_shape", "eps", "elementwise_affine")),
    nn.Embedding: (ops.Embedding, ("num_embeddings", "embedding_dim", "padding_idx")),
    nn.Dropout: (ops.Dropout, ("p",)),
    nn.Identity: (ops.Identity, ()),
    nn.ReLU: (ops.ReLU, ()),
    nn.SiLU: (ops.SiLU, ()),
    nn.GELU: (ops.GeLU, ("approximate",)),
    nn.GLU: (functools.partial(ops.GLU, packing="up_gate"), ()),
    nn.Sigmoid: (ops.Sigmoid, ()),
    nn.Tanh: (ops.Tanh, ()),
}


def from_torch(module: nn.Module) -> Any:
    """Convert a torch module to the equivalent operation, or a torch `Sequential` to an `sf.Sequential`.

    Supports `Linear`, `LayerNorm`, `RMSNorm`, `Embedding`, `Dropout`, `Identity`, activations, and
    `torch.nn.Sequential`s of these, whose state-dict keys stay the same. Parameters are shared, not copied. Dropout
    masks differ from torch's. For all other modules use `sf.convert`.

    Args:
        module: the torch module.

    Raises:
        TypeError: for a module of another type.
        ValueError: for an unsupported setting, or for changes that would be lost: hooks, an overridden `forward`,
            additional parameters, buffers or modules.
    """
    return _converted("", module)


def _converted(path: str, module: nn.Module) -> Any:
    kind = type(module)
    if kind is not nn.Sequential and kind not in _OPERATIONS:
        at = f", at {path}" if path else ""
        raise TypeError(f"there is no operation for {kind.__name__}{at}; sf.convert(model) runs it in place")
    altered = [*_alterations(module)]
    if altered:
        raise ValueError(f"{kind.__name__}{f' at {path}' if path else ''} was altered: it has {'; '.join(altered)}")
    if kind is nn.Sequential:
        inner: dict[str, nn.Module] = vars(module)["_modules"]
        children = ((name, _converted(f"{path}.{name}".lstrip("."), child)) for name, child in inner.items())
        return Sequential(OrderedDict(children)).train(module.training)
    make, names = _OPERATIONS[kind]
    settings: dict[str, Any] = {name: getattr(module, name) for name in names}
    settings |= {"bias": settings["bias"] is not None} if "bias" in settings else {}
    parameters = {name: p for name, p in module._parameters.items() if p is not None}  # pyright: ignore[reportPrivateUsage]
    operation = make(**settings, **({"device": "meta"} if "weight" in vars(module)["_parameters"] else {}))
    for name, made in operation.named_parameters(recurse=False):
        given = parameters.pop(name, None)
        if type(given) is not nn.Parameter or given.shape != made.shape:
            raise ValueError(f"{kind.__name__} was altered: its {name} is not a plain parameter {tuple(made.shape)}")
        setattr(operation, name, given)
    if parameters:
        raise ValueError(f"{kind.__name__} was altered: it has {', '.join(parameters)} beside its own parameters")
    return operation.train(module.training)


def _alterations(module: nn.Module) -> Iterator[str]:
    """Changes to a module that an operation or an `sf.Sequential` would not reproduce."""
    state: dict[str, Any] = vars(module)
    yield from (f"hooks ({name})" for name, value in state.items() if name.endswith("hooks") and value)
    if "forward" in state or type(module).forward.__module__ != type(module).__module__:
        yield "its own forward"
    beside = "_parameters" if type(module) is nn.Sequential else "_modules"
    yield from (f"{name} beside its own" for name in (*state[beside], *state["_buffers"]))
    if state.get("dim", -1) != -1:
        yield f"dim={state['dim']}, which no operation here has"
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if state.get(name):
            yield f"{name}, which no operation here has"
