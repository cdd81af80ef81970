"""What the collectives share: one exchange ahead, its adjoint back, and nothing kept between them."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .. import operation as sf
from ..group import Both, Group, Held, Meeting


class Collective(sf.UnfusedOperation, open=True):
    """An exchange among the processes of a group; a subclass states `ahead` and its adjoint `back`.

    Attributes:
        holds: what a process holds of x, and of y.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy alone."""

    autocast = "same"

    NOTHING: ClassVar[Saved] = Saved()
    holds: ClassVar[tuple[Held, Held]]

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = Group(group)
        self.meeting = Meeting(self.group, *self.holds)

    def ahead(self, x: Tensor) -> Tensor:
        """Y for x."""
        raise NotImplementedError

    def back(self, dy: Tensor) -> Tensor:
        """Dx for dy."""
        raise NotImplementedError

    def reference(self, x: Tensor) -> Tensor:
        return Both.ways(self.ahead, self.back, x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self.ahead(x), self.NOTHING

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        return self.back(dy) if "x" in needs else None, {}

    def extra_repr(self) -> str:
        return f"over {self.group.size}"


class CollectiveAlong(Collective, open=True):
    """An exchange along the dimension `dim`."""

    def __init__(self, group: Any = None, dim: int = 0) -> None:
        super().__init__(group)
        self.dim = dim

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"
