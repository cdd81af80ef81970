"""ReduceScatter: a part of the sum of what all processes of a group hold."""

from __future__ import annotations

from torch import Tensor

from ._collective import CollectiveAlong


class ReduceScatter(CollectiveAlong):
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

    sharding = ("features", "sequence")

    def exchange(self, x: Tensor) -> Tensor:
        return self.group.reduce_scatter(x, self.dim, "ReduceScatter")

    def exchange_backward(self, dy: Tensor) -> Tensor:
        return self.group.all_gather(dy, self.dim, "ReduceScatter")

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not -len(shape) <= self.dim < len(shape) or shape[self.dim] % self.group.size:
            raise ValueError(f"expects a dimension {self.dim} that {self.group.size} divides, got {tuple(shape)}")
        part = list(shape)
        part[self.dim] //= self.group.size
        return tuple(part)
