"""Reading a parameter at the price of a dictionary look-up."""

from __future__ import annotations

from torch import Tensor, nn


def parameter(module: nn.Module, name: str) -> Tensor | None:
    """`module.<name>` as it is now: the registered parameter, else whatever attribute stands for it.

    `nn.Module.__getattr__` costs several times as much. It still finds a parametrized tensor, which is not registered.
    """
    found = module._parameters.get(name)  # pyright: ignore[reportPrivateUsage]
    return getattr(module, name) if found is None else found
