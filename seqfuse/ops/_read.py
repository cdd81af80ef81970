"""Reading a parameter at the price of a dictionary access."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..group import ParameterShard


def parameter(module: nn.Module, name: str) -> Tensor | None:
    """`module.<name>` as it is now: the registered parameter, else whatever attribute stands for it.

    `nn.Module.__getattr__` costs several times as much. It still finds a parametrized tensor, which is not registered.
    """
    found: Any = module._parameters.get(name, module)  # pyright: ignore[reportPrivateUsage]
    return getattr(module, name) if found is module else found


def required(module: nn.Module, name: str) -> Tensor:
    """`parameter`, of an operation that cannot run without it.

    Raises:
        InputError: (SF106) if it is None.
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
    """Yield a parameter to initialize: of one that is sharded the whole, of which this process then keeps its shard.

    So a generator in one state gives every process its shard of the same values.
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


def divide(module: Any, shards: dict[str, ParameterShard]) -> None:
    """Keep this process's shard of each parameter, in the same `Parameter`; one that two modules use is cut once."""
    for name, shard in shards.items():
        own: Tensor = getattr(module, name)
        if own.shape[shard.dim] == sum(shard.parts):
            own.grad, own.data = None, shard.of(own.data)
    module.shards = {**module.shards, **shards}
