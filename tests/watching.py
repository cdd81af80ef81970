"""Operators that are called, and tensors that autograd saves for a backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def name_of(func: Any, args: Any = (), out: Any = None) -> str:
    return func.overloadpacket.__name__


class Calls(TorchDispatchMode):
    """The names of the operators called, or the results of `note(operator, arguments, result)`."""

    def __init__(self, note: Callable[[Any, Any, Any], Any] = name_of) -> None:
        super().__init__()
        self.note, self.names = note, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, out = len(self.names), func(*args, **(kwargs or {}))
        if (noted := self.note(func, args, out)) is not None:
            self.names.insert(place, noted)  # before the operators that it calls
        return out

    def count(self, *names: Any) -> int:
        return sum(map(self.names.count, names))


@contextlib.contextmanager
def saving() -> Iterator[list[Tensor]]:
    """The tensors that autograd saves within the block."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        yield saved


def bytes_of(saved: Iterable[Tensor], model: nn.Module) -> int:
    """Bytes of tensors, each storage once, without the parameters of a model."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for place, size in storages.items() if place not in own)
