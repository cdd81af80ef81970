"""ReduceScatter: a part of the sum of what all processes of a group hold."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .. import operation as sf
from ..group import Both, Group, Meeting


class ReduceScatter(sf.UnfusedOperation):
    """y = this process's part along a dimension of the sum of x over the processes of a group.

    Backward: dx = the dy of all processes, one after another along that dimension.

    x, y: any shape of at least one dimension, `dim` of y as many times shorter as there are processes.
    Saved: nothing. In a group of one process, y = x and nothing is sent.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, whose conjugate of g it is.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or `None` for this process alone.
        dim: the dimension.

    Raises:
        InputError: (SF101) for a dimension that the processes do not divide.
        StateError: (SF506) in every process that is left, naming group and operation, if one dies or is late.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy alone."""

    NOTHING: ClassVar[Saved] = Saved()

    def __init__(self, group: Any = None, dim: int = 0) -> None:
        super().__init__()
        self.group, self.dim = Group(group), dim
        self.meeting = Meeting(self.group, "features", "rows")

    def _scatter(self, x: Tensor) -> Tensor:
        return self.group.reduce_scatter(x, self.dim, "ReduceScatter")

    def _gather(self, dy: Tensor) -> Tensor:
        return self.group.all_gather(dy, self.dim, "ReduceScatter")

    def reference(self, x: Tensor) -> Tensor:
        return Both.ways(self._scatter, self._gather, x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self._scatter(x), self.NOTHING

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        return self._gather(dy) if "x" in needs else None, {}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not -len(shape) <= self.dim < len(shape) or shape[self.dim] % self.group.size:
            raise ValueError(f"expects a dimension {self.dim} that {self.group.size} divides, got {tuple(shape)}")
        part = list(shape)
        part[self.dim] //= self.group.size
        return tuple(part)

    def extra_repr(self) -> str:
        return f"over {self.group.size}, dim={self.dim}"
