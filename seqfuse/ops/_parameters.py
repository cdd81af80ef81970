"""Read parameters of operations, initialize them, shard them among processes, and join them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..group import ParameterShard


def parameter(module: nn.Module, name: str) -> Tensor | None:
    """`module.<name>` as it is now: the registered parameter, else any attribute of this name.

    `nn.Module.__getattr__` costs several times as much. It still finds a parametrized tensor, which is not registered.
    """
    found: Any = module._parameters.get(name, module)  # pyright: ignore[reportPrivateUsage]
    return getattr(module, name) if found is module else found


def required(module: nn.Module, name: str) -> Tensor:
    """`parameter`, for an operation that cannot run without it.

    Raises:
        InputError: (SF106) if it is `None`.
    """
    found = module._parameters.get(name)  # pyright: ignore[reportPrivateUsage]
    if found is not None:
        return found
    found = getattr(module, name)
    if found is None:
        raise InputError(f"its {name} is None", code="SF106", operation=type(module).__name__)
    return found


@contextlib.contextmanager
def initial(module: Any, name: str) -> Generator[Tensor]:
    """Yield a parameter to initialize: for a sharded parameter the whole one, of which this process keeps its shard.

    So processes whose generators are in one state get shards of the same values.
    """
    own: Tensor = getattr(module, name)
    shard: ParameterShard | None = module.shards.get(name)
    if shard is None:
        yield own
        return
    whole = own.new_empty(shard.whole_shape(own))
    yield whole
    with torch.no_grad():
        own.copy_(shard.of(whole))


def reset_linear(module: Any, weight: str | None = "weight", bias: str = "bias") -> None:
    """Initialize a weight [out_features, in_features] and its bias, if any, as `torch.nn.Linear` does.

    Values are from U(-1/sqrt(in_features), 1/sqrt(in_features)); with a weight of `None` only the bias is set.
    """
    size: int = module.in_features
    if weight is not None:
        with initial(module, weight) as whole:
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
            size = whole.shape[1]
    if getattr(module, bias) is not None:
        bound = 1 / math.sqrt(size) if size > 0 else 0
        with initial(module, bias) as whole:
            nn.init.uniform_(whole, -bound, bound)


def divide(module: Any, shards: dict[str, ParameterShard]) -> None:
    """Keep this process's shard of each parameter, in the same `Parameter`; a tied parameter is sharded once."""
    for name, shard in shards.items():
        own: Tensor = getattr(module, name)
        if own.shape[shard.dim] == sum(shard.parts):
            own.grad, own.data = None, shard.of(own.data)
    module.shards = {**module.shards, **shards}


def one_gemm(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None] | None:
    """One weight and one bias as views over these parts; `None` if the parts are not adjacent in memory."""
    given = [bias for bias in biases if bias is not None]
    whole, start = joined(weights), joined(given) if len(given) == len(biases) else None
    return None if whole is None or (start is None and given) else (whole, start)


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """One view, along the first dimension, of tensors that are adjacent in one storage; else `None`."""
    if not tensors or torch.compiler.is_compiling():
        return None
    first = tensors[0]
    if len(tensors) == 1:
        return first
    end = first.storage_offset() + first.numel()
    for t in tensors[1:]:
        if t.storage_offset() != end:
            return None
        end += t.numel()
    storage = first.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    dtype = first.dtype
    for t in tensors:
        same = type(t) in (Tensor, nn.Parameter) and t.is_contiguous() and t.dtype is dtype
        if not same or t.untyped_storage()._cdata != storage:  # pyright: ignore[reportPrivateUsage]
            return None
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride(), first.storage_offset())
