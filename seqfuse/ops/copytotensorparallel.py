"""CopyToTensorParallel: where one tensor begins to be used by all processes of a group."""

from __future__ import annotations

from torch import Tensor

from ._collective import Collective


class CopyToTensorParallel(Collective):
    """y = x, the same in every process of a group.

    Backward: dx = sum of dy over the processes, each of which used y for a part of what follows.

    x, y: any shape.  Saved: nothing. In a group of one process nothing is sent.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, whose f it is.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or `None` for this process alone.

    Raises:
        StateError: (SF506) in every process that is left, naming group and operation, if one dies or is late.
    """

    sharding = ("replicated", "features")

    def exchange(self, x: Tensor) -> Tensor:
        return x

    def exchange_backward(self, dy: Tensor) -> Tensor:
        return self.group.all_reduce(dy, "CopyToTensorParallel")
