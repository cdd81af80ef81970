"""AllReduce: the sum of what all processes of a group hold."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .. import operation as sf
from ..group import Both, Group, Meeting, same


class AllReduce(sf.UnfusedOperation):
    """y = sum of x over the processes of a group, the same in each of them.

    Backward: dx = dy, which every process has alike.

    x, y: any shape.  Saved: nothing. In a group of one process, y = x and nothing is sent.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, whose g it is.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or `None` for this process alone.

    Raises:
        StateError: (SF506) in every process that is left, naming group and operation, if one dies or is late.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy alone."""

    NOTHING: ClassVar[Saved] = Saved()

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = Group(group)
        self.meeting = Meeting(self.group, "features", "whole")

    def _sum(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x, "AllReduce")

    def reference(self, x: Tensor) -> Tensor:
        return Both.ways(self._sum, same, x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self._sum(x), self.NOTHING

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return dy, {}

    def extra_repr(self) -> str:
        return f"over {self.group.size}"
