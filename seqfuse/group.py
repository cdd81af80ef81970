"""Process groups: their collectives, how tensors are sharded among them, and shards of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import InputError, StateError

# Functional collectives, which compilers can trace.
_ops: Any = torch.ops._c10d_functional
_divided = False


def mark_divided() -> None:
    """Record that a model of this process is sharded: its dropout then follows seeds of calls, not those of torch."""
    global _divided
    _divided = True


def divided() -> bool:
    """Whether a model of this process is sharded over processes: its parameters, rows or layers."""
    return _divided


class Group:
    """A process group and its collectives.

    A collective that fails, because a process died, disagrees or is late, raises in every other process within the
    timeout of the group in `torch.distributed`. Copies of a module share its group; a pickle stores the group's name
    and needs a group of that name when it is loaded.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or `None` for this process alone.

    Attributes:
        size: number of processes.
        rank: index of this process.

    Raises:
        InputError: (SF106) for another argument, or a group without this process.
    """

    def __init__(self, group: Any = None) -> None:
        if isinstance(group, Group):
            group = group.process_group
        elif hasattr(group, "mesh_dim_names"):
            if group.ndim != 1:
                message = f"expects a mesh of one dimension, got {group.ndim}"
                raise InputError(message, code="SF106", hint='take one of them: mesh["tp"]')
            group = group.get_group()
        self.process_group: Any = group
        if group is None:
            self.name, self.size, self.rank = "", 1, 0
            return
        if not isinstance(group, dist.ProcessGroup):
            message = f"expects a process group of torch.distributed this process is in, got {group!r}"
            raise InputError(message, code="SF106")
        self.name: str = group.group_name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if self.size > 1:
            mark_divided()

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (named, (self.name,)) if self.size > 1 else (Group, ())

    def __str__(self) -> str:
        if self.process_group is None:
            return "this process alone"
        about: str = getattr(self.process_group, "group_desc", "") or "undefined"
        ranks = ", ".join(map(str, dist.get_process_group_ranks(self.process_group)))
        return f"group {self.name if about == 'undefined' else about!r} of ranks {ranks}"

    def all_reduce(self, x: Tensor, what: str, by: Literal["sum", "max"] = "sum") -> Tensor:
        """The element-wise sum or maximum of all processes' x."""
        return self._run(what, lambda: _ops.all_reduce(x.contiguous(), by, self.name), x)

    def all_gather(self, x: Tensor, dim: int, what: str) -> Tensor:
        """All processes' x concatenated along `dim`."""
        parts = self._run(what, lambda: _ops.all_gather_into_tensor(x.contiguous(), self.size, self.name), x)
        if dim % x.ndim == 0 or self.size == 1:
            return parts
        return torch.cat(parts.chunk(self.size), dim)

    def reduce_scatter(self, x: Tensor, dim: int, what: str) -> Tensor:
        """This process's part along `dim` of the sum of all processes' x."""
        if dim % x.ndim and self.size > 1:
            x = torch.cat(x.chunk(self.size, dim))
        return self._run(what, lambda: _ops.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.name), x)

    def begin_all_reduce(self, x: Tensor, what: str) -> Callable[[], Tensor]:
        """Starts the sum of all processes' x; the returned function waits for it."""
        if self.size == 1 or not x.numel():
            return lambda: x
        y = self._checked(what, lambda: _ops.all_reduce(x.contiguous(), "sum", self.name))
        return lambda: self._checked(what, lambda: _ops.wait_tensor(y))

    def _run(self, what: str, launch: Callable[[], Tensor], x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        return self._checked(what, lambda: _ops.wait_tensor(launch()))

    def _checked(self, what: str, run: Callable[[], Tensor]) -> Tensor:
        if torch.compiler.is_compiling():
            return run()
        try:
            return run()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise self.failed(what, reason) from error

    def failed(self, what: str, reason: str) -> StateError:
        message = f"the collective of {what} failed in {self}, of which this is process {self.rank}: {reason}"
        hint = "a process died, is late or runs something else; none can go on alone"
        return StateError(message, code="SF506", operation=what, hint=hint)


def named(name: str) -> Group:
    """The group of this name in `torch.distributed`."""
    from torch.distributed import distributed_c10d

    try:
        return Group(cast(Any, distributed_c10d)._resolve_process_group(name))
    except (RuntimeError, ValueError) as error:
        message = f"a module of process group {name!r} was unpickled where there is no such group"
        raise StateError(message, code="SF506", hint="keep its state dictionary instead") from error


Sharding = Literal["replicated", "features", "sequence"]
"""How tensors between two collectives are sharded: replicated; each process has a shard of the features (or heads), or
a partial sum; or each has a sequence shard, some of the tokens.
"""


class Redistribution(NamedTuple):
    """A collective in a sequence: its group, and how tensors are sharded before and after it."""

    group: Group
    before: Sharding
    after: Sharding


@dataclasses.dataclass(frozen=True)
class ParameterShard:
    """How a parameter is sharded: each process of a group has one shard.

    Args:
        group: the process group.
        dim: the sharded dimension.
        parts: sizes along it that are sharded separately, such as those of queries, keys and values; each is a multiple
            of `group.size`.
    """

    group: Group
    dim: int
    parts: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """This process's shard of a whole tensor, as a new tensor."""
        if whole.shape[self.dim] != sum(self.parts):
            got, wanted = whole.shape[self.dim], sum(self.parts)
            raise InputError(f"expects {wanted} along dimension {self.dim} of the whole, got {got}", code="SF101")
        mine = [
            piece.chunk(self.group.size, self.dim)[self.group.rank] for piece in _split(whole, self.parts, self.dim)
        ]
        return torch.cat(mine, self.dim)

    def whole_shape(self, own: Tensor) -> tuple[int, ...]:
        shape = list(own.shape)
        shape[self.dim] = sum(self.parts)
        return tuple(shape)

    def whole(self, own: Tensor) -> Tensor:
        """The whole tensor, gathered from the shards of all processes; every process must call this."""
        gathered = self.group.all_gather(own, self.dim, "a parameter")
        sizes = [part // self.group.size for part in self.parts]
        shards = [_split(shard, sizes, self.dim) for shard in gathered.chunk(self.group.size, self.dim)]
        return torch.cat([shard[i] for i in range(len(sizes)) for shard in shards], self.dim)


def vocabulary_shard(operation: str, shards: Mapping[str, ParameterShard], rows: int, group: Group) -> ParameterShard:
    """The shard of an embedding weight of `rows` along its rows.

    Raises:
        InputError: (SF101) if `rows` is not a multiple of the group's size, (SF106) if the weight is already sharded.
    """
    if shards:
        raise InputError("it is divided among processes already", code="SF106", operation=operation)
    if rows % group.size:
        message = f"expects a vocabulary that {group.size} processes divide, got {rows}"
        raise InputError(message, code="SF101", operation=operation, hint="pad it")
    return ParameterShard(group, 0, (rows,))


def _split(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    return cast(Any, x).split(sizes, dim)


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(run: Callable[[Tensor], Tensor], run_backward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y = run(x)
        return x.view_as(x) if y is x else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.run_backward = inputs[1]

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        return None, None, ctx.run_backward(douts[0])


def with_backward(run: Callable[[Tensor], Tensor], run_backward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns `run(x)` with `dx = run_backward(dy)`: a collective and the collective of its gradient."""
    return cast(Tensor, _WithBackward.apply(run, run_backward, x))  # pyright: ignore[reportUnknownMemberType]


def summed_gradient(group: Group, x: Tensor) -> Tensor:
    """Returns x; its gradient, a partial sum in each process, is summed over the group."""
    return with_backward(handed_on, lambda d: group.all_reduce(d, "a gradient"), x)


def handed_on(x: Tensor) -> Tensor:
    """Returns x: no collective in this pass."""
    return x
