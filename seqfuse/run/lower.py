"""Lowers a plan to executable segments, each behind one autograd node."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..env import Env
from ..operation import FusableOperation, configured
from ..plan.flatten import Node, public_channels
from ..plan.inputs import Like, check_dtypes
from ..plan.plan import Plan
from ..plan.step import Record, Step, Stretch, Wants
from ..recipes import Float8DelayedScaling
from ..saved import Saved, kind_of
from ..scaling import Scaled

ParameterPlace = tuple[nn.Module, str]
# The needed gradients of a backward pass: parameters by index, whether that of x, and channels.
NeededGrads = tuple[frozenset[int], bool, frozenset[str]]
# The recomputed fields of a segment's saved tensors: the index of a field and the number of tensors that it needs.
Late = tuple[tuple[int, int], ...]
# Held while copies have the buffers of one forward; several threads may recompute a segment.
_lending = threading.RLock()
Buffered = Sequence[tuple[nn.Module, nn.Module]]
OnStep = Callable[..., Any]
"""`on_step(step, run, *args, **kwargs)` is called instead of `run`, the `fwd` or `bwd` of a step."""


@contextlib.contextmanager
def lent(slots: Sequence[ParameterPlace], parameters: Sequence[Any]) -> Generator[None]:
    """A block in which each module has the parameters of a call, such as those of a captured graph."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for (owner, name), parameter in zip(slots, parameters, strict=True):
            held: dict[str, Any] = owner._parameters  # pyright: ignore[reportPrivateUsage]
            if held.get(name) is not parameter:
                changed.append((held, name, held.get(name, held)))
                held[name] = parameter
        yield
    finally:
        for held, name, before in reversed(changed):
            if before is held:  # a parametrized tensor, which is not registered
                del held[name]
            else:
                held[name] = before


@dataclasses.dataclass(slots=True, eq=False)
class Context:
    """The state shared by all segments of a region; it references neither the region nor the model."""

    nodes: Sequence[Node]  # of the whole sequence
    wants: Wants
    env: Env
    mixed: bool  # whether dtypes can differ along it
    parameters: Mapping[tuple[int, str], Like]
    entering: Mapping[int, Like]  # by position
    dtypes: dict[int, torch.dtype]  # seen at the inputs of steps, by position
    can_fall_back: bool  # whether a failing fusion falls back to its operations
    note: Callable[[], Callable[[str, int, str], None] | None]  # returns the function that records a failure, or `None`
    on_step: OnStep | None = None
    lock: Any = None  # of a model that borrows its parameters in each call: held meanwhile
    warned: set[tuple[str, str]] = dataclasses.field(default_factory=lambda: set[tuple[str, str]]())

    @classmethod
    def of(
        cls,
        stretch: Stretch,
        slots: Sequence[ParameterPlace],
        parameters: Sequence[Tensor],
        on_error: str,
        note: Callable[[], Callable[[str, int, str], None] | None],
        on_step: OnStep | None = None,
        lock: Any = None,
    ) -> Context:
        nodes, positions, env, x = stretch.nodes, stretch.positions, stretch.env, stretch.x
        assert x is not None
        assert stretch.shapes is not None
        if env.autocast is None:
            check_dtypes(nodes, positions, [border.given for border in stretch.borders])
        likes = {(id(owner), name): Like.of(p) for (owner, name), p in zip(slots, parameters, strict=True)}
        shapes = enumerate(stretch.shapes, positions.start)
        entering = {at: Like(torch.Size(shape), x.dtype, x.device) for at, shape in shapes}
        falls_back = on_error == "fallback"
        mixed = bool(stretch.borders)
        return cls(nodes, stretch.wants, env, mixed, likes, entering, {}, falls_back, note, on_step, lock)

    def called(self, step: Step, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, the `fwd` or `bwd` of a step, wrapped in `on_step` if there is one."""
        return run if self.on_step is None else functools.partial(self.on_step, step, run)


class SavedAt(NamedTuple):
    """A saved field of a segment: the index of its record, its name, and the kinds of values that it may have."""

    record: int
    name: str
    kind: str


class Saves(NamedTuple):
    """The saved records of a segment, with the index of each field among the saved tensors, or among other data."""

    records: tuple[tuple[int, Record], ...]  # with the index of the step
    tensors: tuple[SavedAt, ...]
    several: tuple[SavedAt, ...]
    data: tuple[SavedAt, ...]

    @classmethod
    def holding(cls, records: Sequence[tuple[int, Record]]) -> Saves:
        """Saves these records, each with the index of its step."""
        fields = [SavedAt(j, name, kind_of(r.cls, name)) for j, (_, r) in enumerate(records) for name in r.kept]
        of_kind = [tuple([f for f in fields if f.kind == kind]) for kind in ("tensor", "tuple", "data")]
        return cls((*records,), *of_kind)


class Inputs(Saved):
    """The saved tensors of a recomputed segment: its inputs, seeds, and all of its parameters."""

    buffers: list[dict[str, Any]]  # of its modules with buffers, before the forward


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """The steps behind one autograd node."""

    context: Context
    span: range
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]  # in execution order, each operation configured as in the forward
    signature: int  # of the plan
    # The same steps as recomputed in the backward pass for their saved tensors; `None` if the forward saves these.
    again: Segment | None = None
    replays: bool = False  # whether it recomputes another segment: it has no results and saves tensors step by step
    keeps: frozenset[int] = frozenset()  # first positions of steps with saved results, which are not recomputed
    given: Saves | None = None  # if recomputed: the saved tensors of the forward
    # If recomputed: modules with buffers, each with the copy that is recomputed.
    buffered: Buffered = ()
    parameters: tuple[ParameterPlace, ...] = dataclasses.field(init=False)  # with a needed gradient, without duplicates
    inputs: tuple[str, ...] = dataclasses.field(init=False)  # the channels that it reads from outside
    outputs: tuple[str, ...] = dataclasses.field(init=False)  # the channels that it returns
    crossing: frozenset[str] = dataclasses.field(init=False)  # the outputs that a later operation reads
    frozen: frozenset[str] = dataclasses.field(init=False)  # the outputs without a gradient
    consumed: tuple[str, ...] = dataclasses.field(init=False)  # the inputs that no later operation reads
    followed: bool = dataclasses.field(init=False)  # by an operation of this library, which mutates nothing
    live: bool = dataclasses.field(init=False)  # whether any gradient is needed
    slots: Sequence[ParameterPlace] = dataclasses.field(default=(), init=False)  # if recomputed: all parameters
    index: dict[tuple[int, str], int] = dataclasses.field(init=False)
    autocast: torch.dtype | None = dataclasses.field(init=False)
    saves: Saves = dataclasses.field(init=False)
    # Positions whose records are arguments of a backward, since the joint fusion that saved them failed.
    divided: frozenset[int] = frozenset()
    checked: set[Any] = dataclasses.field(default_factory=lambda: set[Any]())  # steps whose contract was checked
    # Generated code: the forward after and before its steps are checked; the backward by the gradients it must return.
    code: Callable[..., Any] | None = dataclasses.field(default=None, init=False)
    first: Callable[..., Any] | None = dataclasses.field(default=None, init=False)
    codes: dict[Any, Any] = dataclasses.field(default_factory=lambda: dict[Any, Any](), init=False)
    late: Late = dataclasses.field(default=(), init=False)  # as in its first call
    # Indices of its parameters that are not of class `Parameter`: a node must not keep these alive.
    apart: tuple[int, ...] = dataclasses.field(default=(), init=False)
    others: dict[Any, Segment] = dataclasses.field(default_factory=lambda: dict[Any, Segment](), init=False)

    def __post_init__(self) -> None:
        span, nodes, wants = self.span, self.context.nodes, self.context.wants
        readers = nodes[span.start].readers
        self.inputs, self.outputs = public_channels(nodes, span.start, span.stop)
        self.crossing = frozenset(c for c in self.outputs if readers[c])
        self.frozen = frozenset(c for p in span if p < wants.live_from for _, c in nodes[p].outputs)
        self.consumed = tuple(c for c in self.inputs if max(readers[c]) < span.stop)
        self.followed = span.stop < len(nodes) and isinstance(nodes[span.stop].operation, FusableOperation)
        self.live, self.autocast = wants.live_from < span.stop, self.context.env.autocast
        needed = [slot for p in span for name, slot in nodes[p].slots.items() if name in wants.needs[p]]
        self.parameters = tuple(dict.fromkeys(needed))
        self.saves = Saves.holding([(i, r) for i, step in enumerate(self.forward) for r in step.saves if self.live])
        if self.replays or self.again is not None:
            every = [slot for p in span for slot in nodes[p].slots.values()]
            self.slots = [*{(id(owner), attribute): (owner, attribute) for owner, attribute in every}.values()]
            self.given = self._given()
            self.saves = self.given if self.again is not None else self.saves
        self.index = {(id(owner), attribute): i for i, (owner, attribute) in enumerate(self.parameters)}

    def _given(self) -> Saves:
        """The saved tensors from which its forward can be recomputed."""
        names = ("x", "seeds", *(f"c{i}" for i in range(len(self.inputs))), *(f"p{i}" for i in range(len(self.slots))))
        names += (*(f"y{at}" for at in sorted(self.keeps)), *["buffers"] * bool(self.buffered))
        records = [(-1, Record((), ~self.span.start, Inputs, names))]
        for i, step in enumerate(self.forward):
            if step.start in self.keeps and step.restored:
                records.append((i, dataclasses.replace(step.saves[0], kept=step.restored)))
        return Saves.holding(records)

    @contextlib.contextmanager
    def buffers_of(self, data: Sequence[Any]) -> Generator[None]:
        """A block in which recomputed copies have the buffers of the first forward, the first items of `data`."""
        with _lending if self.buffered else contextlib.nullcontext():
            for (_, copy), held in zip(self.buffered, data[0] if self.buffered else (), strict=True):
                copy._buffers.update(held)  # pyright: ignore[reportPrivateUsage]
            yield

    def without(self, at: int, backward: bool = False) -> Segment:
        """This segment with the operations of a failed forward or backward fusion instead of the fusion."""
        if (at, backward) not in self.others:
            step = (self.backward if backward else self.forward)[at]
            if backward and step.joint and self.replays:  # its forward is recomputed, too
                return self.without(next(i for i, ahead in enumerate(self.forward) if ahead.key == step.key))
            new: dict[str, Any] = {"signature": hash((self.signature, step.start))}
            if not backward:
                new["forward"] = (*self.forward[:at], *step.unfused(), *self.forward[at + 1 :])
            for i, back in enumerate(self.backward) if backward or step.joint else ():
                if back.key == step.key:
                    new["backward"] = (*self.backward[:i], *back.unfused(backward=True), *self.backward[i + 1 :])
            if backward and step.joint:
                new["divided"] = self.divided | {*step.covers}
            if self.again is not None:
                new["again"] = self.again.without(at)
            other = self.others[at, backward] = dataclasses.replace(self, **new)
            other.apart = self.apart
        return self.others[at, backward]

    def place(self, index: int) -> tuple[str, str, int]:
        """The name of a parameter, by index, and the operation that computes its gradient, with its position."""
        owner, attribute = self.parameters[index]
        step = next(s for s in self.backward if (id(owner), attribute) in [slot for _, slot in s.grads])
        return f"{type(owner).__name__}.{attribute}", step.name, step.start

    def narrowed(self, needed: NeededGrads) -> tuple[Step, ...]:
        """The backward steps if only some gradients are needed."""
        parameters, x, channels = needed

        def asks(owner: nn.Module, attribute: str) -> bool:
            return self.index.get((id(owner), attribute)) in parameters

        start, stop = self.span.start, self.span.stop
        needs = Wants.of(self.context.nodes, start, stop, x, dict.fromkeys(channels, True), True, asks).needs
        steps = [dataclasses.replace(s, needs=tuple(needs[p] for p in s.covers)) for s in self.backward]
        return tuple(s for s in steps if any(s.needs))


def lower(plan: Plan, context: Context, configured_at: dict[int, Any]) -> list[Segment]:
    """The segments of a plan; adds a copy of each operation, as configured now, to `configured_at`."""
    whole = hash(tuple((s.name, s.covers) for s in (*plan.forward, *plan.backward)))
    by_start = [{s.start: s for s in steps} for steps in (plan.forward, plan.backward)]
    segments: list[Segment] = []
    for span in plan.segments:
        forward, backward = ([steps[p] for p in span if p in steps] for steps in by_start)
        for position in span if context.wants.live_from < span.stop else ():
            if position not in configured_at:
                configured_at[position] = configured(context.nodes[position].operation)  # pyright: ignore[reportArgumentType]
        back = tuple(_as_configured(s, configured_at) for s in reversed(backward))
        segment = Segment(context, span, tuple(forward), back, whole)
        for keeps in [frozenset(keeps) for again, keeps in plan.recomputed if again == span]:
            copies, buffered = {p: configured_at[p] for p in span}, list[tuple[nn.Module, nn.Module]]()
            for position in span:
                own, delayed = configured_at[position], isinstance(context.nodes[position].recipe, Float8DelayedScaling)
                if pairs := _buffered(own, copy := configured(own), delayed):
                    copies[position] = copy
                    buffered += pairs
            steps = tuple(_as_configured(s, copies) for s in forward)
            again = dataclasses.replace(segment, forward=steps, replays=True, keeps=keeps, buffered=buffered)
            segment = dataclasses.replace(segment, again=again, keeps=keeps, buffered=buffered)
        segments.append(segment)
    return segments


def _buffered(operation: FusableOperation, copy: FusableOperation, delayed: bool) -> list[tuple[nn.Module, nn.Module]]:
    """The modules of an operation with buffers (with `delayed`, also future ones), each with its copy."""
    found: list[tuple[nn.Module, nn.Module]] = []
    for module, own in zip(operation.modules(), copy.modules(), strict=True):
        held: dict[str, Any] = module._buffers  # pyright: ignore[reportPrivateUsage]
        if isinstance(module, FusableOperation) and (held or (delayed and isinstance(module, Scaled))):
            own.__dict__.update(_buffers={**held}, runs_again=True)
            found.append((module, own))
    return found


def _as_configured(step: Step, configured_at: Mapping[int, Any]) -> Step:
    own = [configured_at[position] for position in step.covers]
    operation = step.operation.with_operations(own) if step.fused else own[0]
    nodes = [dataclasses.replace(node, operation=one) for node, one in zip(step.nodes, own, strict=True)]
    to = None if step.to is None else dataclasses.replace(step.to, operation=configured_at[step.to.at])
    return dataclasses.replace(step, operation=operation, nodes=tuple(nodes), to=to)
