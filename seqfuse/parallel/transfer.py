"""Transfers between pipeline stages: activations forward, gradients back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import PlanError, StateError
from ..operation import NOT_GIVEN, FusableOperation
from .remote_tensor import Elsewhere

_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_DIMENSIONS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """The assignment of stages to ranks, in turn."""

    group: Any
    name: str  # of the group, in errors
    ranks: tuple[int, ...]  # global ranks of the group
    me: int  # index of this process among them
    stages: int
    tells: bool  # whether shapes are sent instead of inferred

    def rank(self, stage: int) -> int:
        """The global rank of a stage."""
        return self.ranks[stage % len(self.ranks)]

    def own(self, stage: int) -> bool:
        """Whether a stage is on this rank."""
        return stage % len(self.ranks) == self.me

    def where(self, stage: int) -> str:
        """A stage and its rank, for messages."""
        return f"in stage {stage} on rank {self.rank(stage)}"

    def __deepcopy__(self, memo: Any) -> Placement:
        return self

    def tell(self, stage: int, tensors: Sequence[Tensor] | None, count: int, device: torch.device) -> list[Any]:
        """Shape, dtype, `requires_grad`, and whether gradients pass the stage, of a stage's outputs, from its rank."""
        table = torch.zeros((count, 4 + _DIMENSIONS), dtype=torch.int64)
        if tensors is not None:
            for row, tensor in zip(table, tensors, strict=True):
                if tensor.ndim > _DIMENSIONS:
                    raise PlanError(f"a stage cannot pass on a tensor of {tensor.ndim} dimensions", code="SF202")
                passes = int(any(isinstance(node, _ENTERED) for node in nodes(tensor)))
                head = [_DTYPES.index(tensor.dtype), int(tensor.requires_grad), passes, tensor.ndim]
                row[: 4 + tensor.ndim] = torch.tensor([*head, *tensor.shape])
        table = table.to(device)
        try:
            dist.broadcast(table, self.rank(stage), group=self.group)
        except RuntimeError as error:
            raise self.failed(f"telling the shapes of what leaves stage {stage}", error) from error
        rows: list[list[int]] = table.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return [(r[4 : 4 + r[3]], _DTYPES[r[0]], bool(r[1]), bool(r[2])) for r in rows]

    def failed(self, doing: str, error: Exception) -> StateError:
        """The error for a failed transfer."""
        hint = "a rank that failed, or does something else, lets the others wait for as long as its group's timeout"
        why = (str(error).splitlines() or [repr(error)])[0]
        message = f"{doing} in group {self.name!r} failed: {why}"
        return StateError(message, code="SF509", hint=hint)


class Boundary(FusableOperation):
    """Begins a stage: y = x, received from the previous stage's rank; dx = dy, received from this stage's rank.

    Channels that cross it are sent in the same way. A sequence with boundaries must run as a whole, on every rank.
    """

    def __init__(self, stage: int, placement: Placement) -> None:
        super().__init__()
        self.stage, self.placement = stage, placement
        a, b = placement.rank(stage - 1), placement.rank(stage)
        way = f"rank {a} sends, rank {b} receives" if a != b else f"both are on rank {a}"
        self.barrier = f"stage {stage} begins here; {way}"

    def expand(self) -> tuple[FusableOperation, ...]:
        return ()

    def forward(self, x: Tensor = NOT_GIVEN, **channels: Tensor) -> Any:
        message = "runs only in the whole model that pipeline() cut, on plain tensors, neither compiled nor transformed"
        raise PlanError(message, code="SF202", operation="Boundary", hint="keep the model's fusions as they were then")

    def extra_repr(self) -> str:
        return f"stage={self.stage}, {self.barrier}"

    def enter(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Receive the tensors that these represent; gradients are sent back."""
        return [*_enter(self, device, *tensors)]

    def leave(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send these tensors; returns tensors that represent them, whose backward receives the gradients."""
        where = self.placement.where(self.stage)
        return [Elsewhere.of(t, where) for t in _leave(self, *tensors)]

    def send(self, tensors: Sequence[Tensor], back: bool) -> None:
        """Send to the stage that begins here, or back to the previous one."""
        stage = self.stage - back
        kept = [t.detach().contiguous() for t in tensors]
        self._wait([dist.P2POp(dist.isend, t, *self._peer(stage)) for t in kept if t.numel()], f"sending to {stage}")

    def receive(self, likes: Sequence[Tensor], device: torch.device, back: bool) -> list[Tensor]:
        """Receive from the previous stage, or back from the stage that begins here."""
        stage = self.stage - (not back)
        out = [torch.empty(like.shape, dtype=like.dtype, device=device) for like in likes]
        self._wait([dist.P2POp(dist.irecv, t, *self._peer(stage)) for t in out if t.numel()], f"receiving from {stage}")
        return out

    def send_gradients(self, pairs: Sequence[tuple[Tensor | None, Tensor]], device: torch.device) -> None:
        """Send gradients back, each with the tensor it belongs to; if several, first which of them exist."""
        there = [gradient is not None for gradient, _ in pairs]
        if not any(there):
            pairs = [(torch.zeros(like.shape, dtype=like.dtype, device=device), like) for _, like in pairs]
            there = [True] * len(pairs)
        if len(pairs) > 1:
            self.send([torch.tensor(there, dtype=torch.uint8, device=device)], back=True)
        self.send([gradient for gradient, _ in pairs if gradient is not None], back=True)

    def receive_gradients(self, likes: Sequence[Tensor], device: torch.device) -> list[Tensor | None]:
        """Receive the gradients of tensors that these represent; `None` for missing ones."""
        there: list[int] = [1] * len(likes)
        if len(likes) > 1:
            (said,) = self.receive([torch.empty(len(likes), dtype=torch.uint8, device="meta")], device, back=True)
            there = cast(list[int], said.tolist())  # pyright: ignore[reportUnknownMemberType]
        found = iter(self.receive([like for like, t in zip(likes, there, strict=True) if t], device, back=True))
        return [next(found) if t else None for t in there]

    def _peer(self, stage: int) -> tuple[int, Any]:
        return self.placement.rank(stage), self.placement.group

    def _wait(self, operations: list[Any], doing: str) -> None:
        if not operations:
            return
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        except RuntimeError as error:
            what, _, stage = doing.rpartition(" ")
            at = f"Boundary before stage {self.stage}: {what} {self.placement.where(int(stage)).removeprefix('in ')}"
            raise self.placement.failed(at, error) from error


def differentiable(tensors: Sequence[Tensor]) -> list[bool]:
    """Which outputs of a stage carry gradients: if one does, all that can, so that ranks agree."""
    live = any(t.requires_grad for t in tensors)
    return [live and (t.is_floating_point() or t.is_complex()) for t in tensors]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boundary: Boundary, device: torch.device, *metas: Tensor) -> Any:
        ctx.boundary, ctx.device, ctx.metas = boundary, device, [meta.detach() for meta in metas]
        received = boundary.receive(metas, device, back=False)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t, n in zip(received, ctx.needs_input_grad[2:], strict=True) if not n])
        return tuple(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        pairs = [(d, meta) for d, meta, n in zip(douts, ctx.metas, ctx.needs_input_grad[2:], strict=True) if n]
        ctx.boundary.send_gradients(pairs, ctx.device)
        return (None, None, *ctx.metas)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boundary: Boundary, *tensors: Tensor) -> Any:
        boundary.send(tensors, back=False)
        metas = [torch.empty_like(t, device="meta") for t in tensors]
        ctx.boundary, ctx.device, ctx.metas = boundary, tensors[0].device, [meta.detach() for meta in metas]
        ctx.wanted = differentiable(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t, w in zip(metas, ctx.wanted, strict=True) if not w])
        return tuple(metas)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        likes = [meta for meta, w in zip(ctx.metas, ctx.wanted, strict=True) if w]
        received = iter(ctx.boundary.receive_gradients(likes, ctx.device))
        return (None, *[next(received) if w else None for w in ctx.wanted])


class _Through(torch.autograd.Function):
    """A stage of another rank as one autograd node, whose backward runs when that rank's does."""

    @staticmethod
    def forward(ctx: Any, wanted: Sequence[bool], *tensors: Tensor) -> Any:
        outs = [torch.empty_like(t) for t in tensors[: len(wanted)]]
        ctx.entries = [t.detach() for t in tensors[len(wanted) :]]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t, w in zip(outs, wanted, strict=True) if not w])
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        before = len(ctx.needs_input_grad) - len(ctx.entries)
        return (*[None] * before, *ctx.entries)


class _Together(torch.autograd.Function):
    """The outputs of the last stage as one autograd node: a loss of any output reaches all inputs."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return douts


def through(entries: Sequence[Tensor], outs: Sequence[Tensor], passes: bool, where: str) -> list[Tensor]:
    """The outputs of another rank's stage; if gradients pass it, in a graph that connects every output to every input.

    That rank, too, returns the gradients of all inputs or of none.
    """
    wanted = differentiable(outs)
    plain: list[Tensor] = [t.detach() for t in outs]
    if passes and any(wanted):
        plain = [*_link(wanted, *plain, *entries)]
    elif any(wanted):
        plain = [t.requires_grad_(w) for t, w in zip(plain, wanted, strict=True)]
    return [Elsewhere.of(t, where) for t in plain]


def together(outs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of the last stage on its own rank, connected as they are on other ranks."""
    wanted = differentiable(outs)
    if sum(wanted) < 2:
        return [*outs]
    bound = iter(_bind(*[t for t, w in zip(outs, wanted, strict=True) if w]))
    return [next(bound) if w else t for t, w in zip(outs, wanted, strict=True)]


def stand_in(like: Tensor, wants: bool, sources: Sequence[Tensor]) -> Tensor:
    """A new tensor that represents one like this; if it has a gradient, connected to its sources."""
    if wants and sources:
        return _link([True], like, *sources)[0]
    return torch.empty_like(like, requires_grad=wants)


def nodes(tensor: Tensor) -> Iterator[Any]:
    """The nodes of a tensor's autograd graph."""
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]


def sources(tensor: Tensor, leaves: Sequence[Tensor]) -> list[int]:
    """The indices of the leaves that a tensor depends on."""
    found = {id(tensor), *(id(getattr(node, "variable", None)) for node in nodes(tensor))}
    return [i for i, leaf in enumerate(leaves) if id(leaf) in found]


_enter: Callable[..., tuple[Tensor, ...]] = _Enter.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportAssignmentType]
_leave: Callable[..., tuple[Tensor, ...]] = _Leave.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportAssignmentType]
_link: Callable[..., tuple[Tensor, ...]] = _Through.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportAssignmentType]

_bind: Callable[..., tuple[Tensor, ...]] = _Together.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportAssignmentType]

_ENTERED: Any = _Enter._backward_cls  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
