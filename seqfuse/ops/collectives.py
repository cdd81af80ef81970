"""Collectives: one exchange of a process group forward, its adjoint backward, and no saved tensors."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .. import operation as sf
from ..group import Group, Redistribution, Sharding, with_backward


class Collective(sf.UnfusedOperation, open=True):
    """A collective of a group; a subclass defines `exchange` of x, and its adjoint `exchange_backward` of dy.

    Attributes:
        sharding: how tensors are sharded before and after the collective.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass only reads dy."""

    autocast = "same"

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
        return self.exchange(x), self._saved()

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


class AllGather(CollectiveAlong):
    """y = x of all processes of a group, concatenated along a dimension.

    Backward: dx = this process's slice of the sum of dy over the processes (reduce-scatter).

    x, y: at least one dimension; `dim` of y is as many times longer as there are processes.
    Saved: nothing. In a group of one process, y = x without communication.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, where it is called g.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or `None` for this process only.
        dim: the dimension.

    Raises:
        StateError: (SF506) in every remaining process, with group and operation, if a process dies or times out.
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


class AllReduce(Collective):
    """y = sum of x over the processes of a group.

    Backward: dx = dy, which is replicated.

    x, y: any shape.  Saved: nothing. In a group of one process, y = x without communication.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, where it is called g.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or `None` for this process only.

    Raises:
        StateError: (SF506) in every remaining process, with group and operation, if a process dies or times out.
    """

    sharding = ("features", "replicated")

    def exchange(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x, "AllReduce")

    def exchange_backward(self, dy: Tensor) -> Tensor:
        return dy


class CopyToTensorParallel(Collective):
    """y = x, replicated over a group; the gradient is summed.

    Backward: dx = sum of dy over the processes (all-reduce).

    x, y: any shape.  Saved: nothing. In a group of one process there is no communication.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, where it is called f.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or `None` for this process only.

    Raises:
        StateError: (SF506) in every remaining process, with group and operation, if a process dies or times out.
    """

    sharding = ("replicated", "features")

    def exchange(self, x: Tensor) -> Tensor:
        return x

    def exchange_backward(self, dy: Tensor) -> Tensor:
        return self.group.all_reduce(dy, "CopyToTensorParallel")


class ReduceScatter(CollectiveAlong):
    """y = this process's slice along a dimension of the sum of x over a group.

    Backward: dx = dy of all processes, concatenated along that dimension (all-gather).

    x, y: at least one dimension; `dim` of y is as many times shorter as there are processes.
    Saved: nothing. In a group of one process, y = x without communication.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, the conjugate of g there.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or `None` for this process only.
        dim: the dimension.

    Raises:
        InputError: (SF101) for a dimension that is not a multiple of the number of processes.
        StateError: (SF506) in every remaining process, with group and operation, if a process dies or times out.
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
