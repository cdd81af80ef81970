"""The one autograd function, which runs a segment of a plan as one node of the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import CheckpointError

from .errors import StateError
from .maingrad import MainGrads, main_grads

# The parameters (by their index), whether x, and the channels, whose gradients a backward was asked for.
Asked = tuple[frozenset[int], bool, frozenset[str]]


class Segment(Protocol):
    """What a node runs: named channels in and out beside the chain's tensor, and both passes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    crossing: frozenset[str]  # of the outputs, those that are read further on in the list
    followed: bool  # by an operation of this library, which changes no tensor in place
    frozen: frozenset[str]  # of the outputs, those without a gradient
    consumed: tuple[str, ...]
    device: str
    autocast: torch.dtype | None
    live: bool

    @property
    def parameters(self) -> Sequence[Any]:
        """Where the tensors live that gradients are summed for."""
        ...

    def run(self, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None) -> Tensor:
        """The forward, keeping nothing."""
        ...

    def run_keeping(
        self, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None
    ) -> tuple[Tensor, list[Tensor], dict[int, Any]]:
        """The forward, with the tensors to save and the records packed into them."""
        ...

    def run_backward(
        self,
        dy: Tensor | None,
        sides: dict[str, Tensor | None],
        packed: dict[int, Any],
        tensors: tuple[Tensor, ...],
        asked: Asked | None,
        buffers: MainGrads | None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The backward: gradients of x and of the parameters; `sides` are those of the channels, updated."""
        ...

    def place(self, index: int) -> tuple[str, str, int]:
        """A parameter, by its index, with the operation that makes its gradient, and its position."""
        ...

    def ran(self, packed: dict[int, Any]) -> int:
        """A number for what ran: the plan, and the fusions that fell back."""
        ...


class Seqfuse(torch.autograd.Function):
    """Runs one segment; graphs and profiles show it as `SeqfuseBackward`."""

    @staticmethod
    def forward(ctx: Any, segment: Segment, seeds: Tensor | None, x: Tensor, *tensors: Tensor) -> Any:
        channels = dict(zip(segment.inputs, tensors, strict=False)) if segment.inputs else {}
        if segment.autocast is None:
            y, keep, ctx.packed = segment.run_keeping(x, channels, seeds)
        else:
            with _own_casts():
                y, keep, ctx.packed = segment.run_keeping(x, channels, seeds)
        ctx.segment, ctx.mark = segment, _mark(segment, ctx.packed, keep) if keep else None
        ctx.save_for_backward(*keep)
        ctx.set_materialize_grads(False)
        if segment.outputs:
            return _outputs(ctx, segment, [y, *[channels[name] for name in segment.outputs]], (x, *tensors))
        return _own(y, (x, *tensors)) if y.requires_grad or y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        segment: Segment = ctx.segment
        tensors = _saved_tensors(ctx)
        if not torch.is_grad_enabled():
            return _gradients(ctx, segment, douts, tensors)
        with torch.no_grad():
            grads = _gradients(ctx, segment, douts, tensors)
        return _Once.guard(ctx, grads, (*douts, *tensors))


def _outputs(ctx: Any, segment: Segment, values: list[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor | int, ...]:
    """What a node returns, nothing with a gradient it does not have.

    Other modules may change a tensor in place: before one, each tensor is returned once, then the place of the first.
    Operations of this library change nothing: before one, each name has a tensor of its own, so that gradients are
    summed in the same order wherever a list is cut.
    """
    found: list[Any] = []
    for name, value in zip(("", *segment.outputs), values, strict=True):
        first = next(i for i, other in enumerate(values) if other is value)
        if first < len(found) and segment.followed and name in segment.crossing:
            found.append(value.view_as(value))
        elif first < len(found):
            found.append(first)
        elif name not in segment.crossing and (value.requires_grad or value._is_view()):
            found.append(_own(value, [*inputs, *(t for t in values if t is not value)]))
        else:
            found.append(value)
    pairs = zip(segment.outputs, found[1:], strict=True)
    ctx.mark_non_differentiable(*[v for name, v in pairs if name in segment.frozen and isinstance(v, Tensor)])
    return tuple(found)


def _own(value: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A tensor that the caller may change in place, as autograd allows for no input and no view that a node returns."""
    base = value if value._base is None else value._base
    return value.clone() if any(t is base or t._base is base for t in others) else value.detach()


@contextlib.contextmanager
def _own_casts() -> Generator[None]:
    # Autocast keeps a parameter's cast for later uses; one made here, without a graph, would lose their gradients.
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


def _gradients(ctx: Any, segment: Segment, douts: Sequence[Any], tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    sides: dict[str, Tensor | None] = dict(zip(segment.outputs, douts[1:], strict=True)) if segment.outputs else {}
    asked = _asked(ctx, segment)
    nodes = ctx.next_functions
    first = len(nodes) - len(segment.parameters)
    buffers = main_grads([fn for fn, _ in nodes[first:]], _executes, segment.place)
    if segment.autocast is not None or _any_autocast():
        with _autocast_as(segment):
            dx, sums = segment.run_backward(douts[0], sides, ctx.packed, tensors, asked, buffers)
    else:
        dx, sums = segment.run_backward(douts[0], sides, ctx.packed, tensors, asked, buffers)
    return (None, None, dx, *[sides.get(c) for c in segment.inputs], *sums)


def _asked(ctx: Any, segment: Segment) -> Asked | None:
    """What `torch.autograd.grad` and `backward(inputs=)` leave of the gradients; `None` where they are all wanted."""
    if torch.compiler.is_compiling():
        return None
    try:
        runs = [fn is None or _executes(fn) for fn, _ in ctx.next_functions]
    except RuntimeError:  # there is a leaf whose gradient is to be returned
        runs = [fn is None or _will_run(fn) for fn, _ in ctx.next_functions]
    if all(runs):
        return None
    first = len(runs) - len(segment.parameters)
    at_x = first - len(segment.inputs) - 1
    channels = frozenset(c for c, run in zip(segment.inputs, runs[at_x + 1 : first], strict=True) if run)
    return frozenset(i for i, run in enumerate(runs[first:]) if run), runs[at_x], channels


def _will_run(fn: Any) -> bool:
    try:
        return _executes(fn)
    except RuntimeError:
        return True


_executes: Callable[[Any], bool] = torch._C._will_engine_execute_node  # pyright: ignore[reportPrivateUsage]


def _saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    if ctx.mark is None:
        return ctx.saved_tensors
    # Reading them recomputes a checkpointed forward, which must run the plan this node was made by.
    try:
        *tensors, mark = ctx.saved_tensors
    except CheckpointError as error:
        raise _replanned() from error
    if mark.shape != ctx.mark:
        raise _replanned()
    return tuple(tensors)


def _mark(segment: Segment, packed: dict[int, Any], keep: list[Any]) -> torch.Size | None:
    """Under a checkpoint, save an empty tensor whose shape says what ran: torch compares it with the recomputed one."""
    hooks: Any = _top_saved_tensors_default_hooks(False)
    if hooks is None or getattr(hooks[1], "__module__", None) != "torch.utils.checkpoint":
        return None
    if all(t is None for t in keep):
        return None
    keep.append(torch.empty((0, segment.ran(packed) % (1 << 62)), dtype=torch.uint8, device="cpu"))
    return keep[-1].shape


def _replanned() -> StateError:
    message = "a checkpointed forward was recomputed under another plan, or did not save again what it had saved"
    return StateError(message, code="SF503", hint="do not change fusions, modes or hooks between forward and backward")


def _autocast_as(segment: Segment) -> contextlib.AbstractContextManager[Any]:
    device, wanted = segment.device, segment.autocast
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, wanted or torch.get_autocast_dtype(device), enabled=wanted is not None)


_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # pyright: ignore[reportPrivateUsage]


class _Once(torch.autograd.Function):
    """Passes first gradients through; differentiating them again is an error."""

    @staticmethod
    def guard(ctx: Any, grads: Sequence[Any], read: Sequence[Any]) -> tuple[Any, ...]:
        """Put every path from `grads` to what they depend on (tensors `read`, leaves of the node) behind the error.

        Where no tensor is left that leads to one of the node's inputs, the error is raised at once.
        """
        present = [g for g in grads if g is not None]
        links = [t for t in read if t is not None and t.requires_grad]
        nodes = [fn for fn, _ in ctx.next_functions if fn is not None]
        links += [fn.variable for fn in nodes if hasattr(fn, "variable")]
        led_to = [t.grad_fn for t in links]
        if present and not all(hasattr(fn, "variable") or any(fn is other for other in led_to) for fn in nodes):
            raise _twice()
        if not present or not links:
            return tuple(grads)
        guarded: Iterator[Any] = iter(_Once.apply(len(present), *present, *links))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        return tuple(None if g is None else next(guarded) for g in grads)

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Any:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        raise _twice()


def _twice() -> StateError:
    hint = "differentiate under torch.func, or run the operations' reference"
    return StateError("double backward is not supported", code="SF501", hint=hint)


# `Function.apply` first looks for functorch wrappers among its arguments; the fuser has already ruled them out.
_apply: Callable[..., Any] = super(torch.autograd.Function, Seqfuse).apply  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def apply(
    segment: Segment,
    x: Tensor,
    channels: dict[str, Tensor],
    seeds: Tensor | None,
    parameters: Iterable[Tensor],
) -> Tensor:
    """Run a segment behind one autograd node, or plainly where nothing in it wants a gradient."""
    if not segment.live:
        return segment.run(x, channels, seeds)
    if not segment.inputs and not segment.outputs:
        return _apply(segment, seeds, x, *parameters)
    inputs = [channels[name] for name in segment.inputs]
    out: Any = _apply(segment, seeds, x, *inputs, *parameters)
    if not segment.outputs:
        y = out
    else:
        y, *rest = out
        channels.update(zip(segment.outputs, (out[t] if isinstance(t, int) else t for t in rest), strict=True))
    for name in segment.consumed:
        del channels[name]
    return y
