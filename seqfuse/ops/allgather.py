"""AllGather: what the processes of a group hold, one after another."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .. import operation as sf
from ..group import Both, Group, Meeting


class AllGather(sf.UnfusedOperation):
    """y = the x of all processes of a group, one after another along a dimension.

    Backward: dx = this process's part of the sum of dy over the processes, each of which used y for a part of what
    follows.

    x, y: any shape of at least one dimension, `dim` of y as many times as long as there are processes.
    Saved: nothing. In a group of one process, y = x and nothing is sent.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, whose g it is.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or `None` for this process alone.
        dim: the dimension.

    Raises:
        StateError: (SF506) in every process that is left, naming group and operation, if one dies or is late.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy alone."""

    NOTHING: ClassVar[Saved] = Saved()

    def __init__(self, group: Any = None, dim: int = 0) -> None:
        super().__init__()
        self.group, self.dim = Group(group), dim
        self.meeting = Meeting(self.group, "rows", "features")

    def _gather(self, x: Tensor) -> Tensor:
        return self.group.all_gather(x, self.dim, "AllGather")

    def _scatter(self, dy: Tensor) -> Tensor:
        return self.group.reduce_scatter(dy, self.dim, "AllGather")

    def reference(self, x: Tensor) -> Tensor:
        return Both.ways(self._gather, self._scatter, x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self._gather(x), self.NOTHING

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        return self._scatter(dy) if "x" in needs else None, {}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(f"gathers along dimension {self.dim}, got shape {tuple(shape)}")
        whole = list(shape)
        whole[self.dim] *= self.group.size
        return tuple(whole)

    def extra_repr(self) -> str:
        return f"over {self.group.size}, dim={self.dim}"
