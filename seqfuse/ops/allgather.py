"""AllGather: what the processes of a group hold, one after another."""

from __future__ import annotations

from torch import Tensor

from ._collective import CollectiveAlong


class AllGather(CollectiveAlong):
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

    sharding = ("sequence", "features")

    def exchange(self, x: Tensor) -> Tensor:
        return self.group.all_gather(x, self.dim, "AllGather")

    def exchange_backward(self, dy: Tensor) -> Tensor:
        return self.group.reduce_scatter(dy, self.dim, "AllGather")

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(f"gathers along dimension {self.dim}, got shape {tuple(shape)}")
        whole = list(shape)
        whole[self.dim] *= self.group.size
        return tuple(whole)
