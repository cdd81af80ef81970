"""Reading a parameter at the price of a dictionary access."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..group import Share


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
    """A parameter to give initial values to: where this process holds a share, the whole, of which that is taken.

    So a generator in one state gives every process its share of the same values.
    """
    own: Tensor = getattr(module, name)
    share: Share | None = module.shares.get(name)
    if share is None:
        yield own
        return
    whole = own.new_empty(share.whole_shape(own))
    yield whole
    with torch.no_grad():
        own.copy_(share.of(whole))


def divide(module: Any, shares: dict[str, Share]) -> None:
    """Keep of each parameter this process's share, in the same `Parameter`; one that another module uses, too, once."""
    for name, share in shares.items():
        own: Tensor = getattr(module, name)
        if own.shape[share.dim] == sum(share.parts):
            own.grad, own.data = None, share.of(own.data)
    module.shares = {**module.shares, **shares}
