"""Lowering: from a plan to segments that can run, each behind one autograd node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..env import Env
from ..operation import FusableOperation, configured
from ..plan.flatten import Node, public_channels
from ..plan.inputs import Like, check_dtypes
from ..plan.plan import Plan
from ..plan.step import Step, Stretch, Wants

Slot = tuple[nn.Module, str]
# The parameters (by their index), whether x, and the channels, whose gradients a backward pass needs.
NeededGrads = tuple[frozenset[int], bool, frozenset[str]]


@dataclasses.dataclass(slots=True, eq=False)
class Context:
    """The state that all segments of a region use; it holds neither the region nor the model, which hold it."""

    nodes: Sequence[Node]  # of the whole sequence
    wants: Wants
    env: Env
    mixed: bool  # whether dtypes can differ along it
    parameters: Mapping[tuple[int, str], Like]
    entering: Mapping[int, Like]  # by position
    dtypes: dict[int, torch.dtype]  # of what was seen to enter a step, by position
    can_fall_back: bool  # whether a fusion that fails gives way to its operations
    note: Callable[[], Callable[[str, int, str], None] | None]  # returns the function to tell of a failure, or `None`
    warned: set[tuple[str, str]] = dataclasses.field(default_factory=lambda: set[tuple[str, str]]())

    @classmethod
    def of(
        cls,
        stretch: Stretch,
        slots: Sequence[Slot],
        parameters: Sequence[Tensor],
        on_error: str,
        note: Callable[[], Callable[[str, int, str], None] | None],
    ) -> Context:
        """The context of a stretch for the tensors that enter it, without a hold on them."""
        nodes, positions, env, x = stretch.nodes, stretch.positions, stretch.env, stretch.x
        assert x is not None
        assert stretch.shapes is not None
        if env.autocast is None:
            check_dtypes(nodes, positions, [border.given for border in stretch.borders])
        likes = {(id(owner), name): Like.of(p) for (owner, name), p in zip(slots, parameters, strict=True)}
        shapes = enumerate(stretch.shapes, positions.start)
        entering = {at: Like(torch.Size(shape), x.dtype, x.device) for at, shape in shapes}
        return cls(nodes, stretch.wants, env, bool(stretch.borders), likes, entering, {}, on_error == "fallback", note)


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """The steps behind one autograd node."""

    context: Context
    span: range
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]  # in the order in which they run, with each operation configured as in the forward
    parameters: tuple[Slot, ...]  # those whose gradients are needed, each once
    inputs: tuple[str, ...]  # the channels that enter it
    outputs: tuple[str, ...]  # those that leave it
    crossing: frozenset[str]  # of these, those that a later operation reads
    frozen: frozenset[str]  # and those without a gradient
    consumed: tuple[str, ...]  # the inputs that nothing after it reads
    followed: bool  # by an operation of this library, which changes no tensor in place
    live: bool  # whether any gradient is needed
    signature: int  # of the plan
    index: dict[tuple[int, str], int] = dataclasses.field(init=False)
    autocast: torch.dtype | None = dataclasses.field(init=False)
    # Code made of the steps, once they have run and were checked; what the forward was seen to save.
    layout: tuple[Any, ...] | None = dataclasses.field(default=None, init=False)
    checked: set[Any] = dataclasses.field(default_factory=lambda: set[Any](), init=False)
    code: Callable[..., Any] | None = dataclasses.field(default=None, init=False)
    # By which outputs have no gradient, with the layout it is made for: a forward that saves otherwise is looked at
    # again while others wait for theirs.
    gradients: tuple[Any, dict[tuple[bool, ...], Callable[..., Any] | None]] = dataclasses.field(
        default=(None, dict[tuple[bool, ...], Any]()), init=False
    )
    surprises: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.autocast = self.context.env.autocast
        self.index = {(id(owner), attribute): i for i, (owner, attribute) in enumerate(self.parameters)}

    def is_checked(self, steps: Sequence[Step], backward: bool = False) -> bool:
        """Whether each of these steps of a pass has kept its contract in a call."""
        return all((step.key, backward) in self.checked for step in steps)

    def place(self, index: int) -> tuple[str, str, int]:
        """A parameter, by its index, with the operation that makes its gradient, and its position."""
        owner, attribute = self.parameters[index]
        step = next(s for s in self.backward if (id(owner), attribute) in [slot for _, slot in s.grads])
        return f"{type(owner).__name__}.{attribute}", step.name, step.start

    def narrowed(self, needed: NeededGrads) -> tuple[Step, ...]:
        """The backward steps where only some gradients are needed."""
        parameters, x, channels = needed

        def asks(owner: nn.Module, attribute: str) -> bool:
            return self.index.get((id(owner), attribute)) in parameters

        start, stop = self.span.start, self.span.stop
        needs = Wants.of(self.context.nodes, start, stop, x, dict.fromkeys(channels, True), True, asks).needs
        steps = [dataclasses.replace(s, needs=tuple(needs[p] for p in s.covers)) for s in self.backward]
        return tuple(s for s in steps if any(s.needs))


def lower(plan: Plan, context: Context, configured_at: dict[int, Any]) -> list[Segment]:
    """The segments of a plan; `configured_at` gains a copy of each operation as its forward is configured."""
    whole = hash(tuple((s.name, s.covers) for s in (*plan.forward, *plan.backward)))
    by_start = [{s.start: s for s in steps} for steps in (plan.forward, plan.backward)]
    nodes, wants = context.nodes, context.wants
    segments: list[Segment] = []
    for span in plan.segments:
        forward, backward = ([steps[p] for p in span if p in steps] for steps in by_start)
        inputs, outputs = public_channels(nodes, span.start, span.stop)
        readers, live = nodes[span.start].readers, wants.live_from < span.stop
        needed = [slot for p in span for name, slot in nodes[p].slots.items() if name in wants.needs[p]]
        for position in span if live else ():
            if position not in configured_at:
                configured_at[position] = configured(nodes[position].operation)  # pyright: ignore[reportArgumentType]
        segment = Segment(
            context=context,
            span=span,
            forward=tuple(forward),
            backward=tuple(_as_configured(s, configured_at) for s in reversed(backward)),
            parameters=tuple({(id(owner), attribute): (owner, attribute) for owner, attribute in needed}.values()),
            inputs=inputs,
            outputs=outputs,
            crossing=frozenset(c for c in outputs if readers[c]),
            frozen=frozenset(c for p in span if p < wants.live_from for _, c in nodes[p].outputs),
            consumed=tuple(c for c in inputs if max(readers[c]) < span.stop),
            followed=span.stop < len(nodes) and isinstance(nodes[span.stop].operation, FusableOperation),
            live=live,
            signature=whole,
        )
        segments.append(segment)
    return segments


def _as_configured(step: Step, configured_at: Mapping[int, Any]) -> Step:
    own = [configured_at[position] for position in step.covers]
    operation = step.operation.with_operations(own) if step.fused else own[0]
    nodes = [dataclasses.replace(node, operation=one) for node, one in zip(step.nodes, own, strict=True)]
    return dataclasses.replace(step, operation=operation, nodes=tuple(nodes))
