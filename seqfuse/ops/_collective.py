"""What the collectives have in common: one exchange forward, one backward, and no saved tensors."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .. import operation as sf
from ..group import Group, Redistribution, Sharding, with_backward


class Collective(sf.UnfusedOperation, open=True):
    """A collective of a group; a subclass states `exchange` of x, and `exchange_backward` of dy, its adjoint.

    Attributes:
        sharding: how tensors are sharded before the collective, and after it.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy alone."""

    autocast = "same"

    NOTHING: ClassVar[Saved] = Saved()
    sharding: ClassVar[tuple[Sharding, Sharding]]

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = Group(group)
        self.redistribution = Redistribution(self.group, *self.sharding)

    def exchange(self, x: Tensor) -> Tensor:
        """Return y for x."""
        raise NotImplementedError

    def exchange_backward(self, dy: Tensor) -> Tensor:
        """Return dx for dy."""
        raise NotImplementedError

    def reference(self, x: Tensor) -> Tensor:
        return with_backward(self.exchange, self.exchange_backward, x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self.exchange(x), self.NOTHING

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        return self.exchange_backward(dy) if "x" in needs else None, {}

    def extra_repr(self) -> str:
        return f"over {self.group.size}"


class CollectiveAlong(Collective, open=True):
    """A collective along the dimension `dim`."""

    def __init__(self, group: Any = None, dim: int = 0) -> None:
        super().__init__(group)
        self.dim = dim

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"
