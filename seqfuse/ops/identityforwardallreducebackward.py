"""IdentityForwardAllReduceBackward: where one tensor begins to be used by all processes of a group."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .. import operation as sf
from ..group import Group, Meeting, summed_gradient


class IdentityForwardAllReduceBackward(sf.UnfusedOperation):
    """y = x, the same in every process of a group.

    Backward: dx = sum of dy over the processes, each of which used y for a part of what follows.

    x, y: any shape.  Saved: nothing. In a group of one process nothing is sent.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, whose f it is.

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
        self.meeting = Meeting(self.group, "whole", "features")

    def reference(self, x: Tensor) -> Tensor:
        return summed_gradient(self.group, x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return x, self.NOTHING

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        return self.group.all_reduce(dy, "IdentityForwardAllReduceBackward") if "x" in needs else None, {}

    def extra_repr(self) -> str:
        return f"over {self.group.size}"
