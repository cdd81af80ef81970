"""AllReduce: the sum of what all processes of a group hold."""

from __future__ import annotations

from torch import Tensor

from ._collective import Collective


class AllReduce(Collective):
    """y = sum of x over the processes of a group, the same in each of them.

    Backward: dx = dy, which every process has alike.

    x, y: any shape.  Saved: nothing. In a group of one process, y = x and nothing is sent.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, whose g it is.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or `None` for this process alone.

    Raises:
        StateError: (SF506) in every process that is left, naming group and operation, if one dies or is late.
    """

    sharding = ("features", "replicated")

    def exchange(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x, "AllReduce")

    def exchange_backward(self, dy: Tensor) -> Tensor:
        return dy
