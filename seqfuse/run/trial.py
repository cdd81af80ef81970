"""Segments tried on fake tensors: the C kernels that they call, what they keep, the most that is alive while they run,
and what running them costs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import compiler
from ..casts import autocasting, cast_once
from ..env import Savings
from ..errors import one_line
from ..fake import faking, is_fake, laid_like
from ..plan.described import class_identity, describe
from ..plan.facts import Unknown, flops_of, owned, storage_of
from ..plan.flatten import public_channels
from ..plan.front import Weight, bytes_held
from ..plan.inputs import validate
from ..plan.plan import Plan
from ..plan.step import Step, Stretch
from .lower import Context, Segment, lower
from .node import back_alone, run_alone

# Calls of ATen that make a tensor and neither read nor write its numbers.
_FREE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
)


class Tally(TorchDispatchMode):
    """Counts bytes that are alive, of all tensors made within it, and the work of each call.

    `events` are the storages made and freed, each with its bytes, negative where they are freed.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.events: list[tuple[int, int]] = []
        self.work = Savings()
        self._alive: dict[int, tuple[Any, int]] = {}
        self._made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results, (makes, changes, makes_all) = _tensors(out), _work_of(func)
        if (makes and results) or changes:
            several = [*_tensors((args, tuple(kwargs.values()))), *results]
            moved = sum([t.numel() * t.element_size() for t in several])
            self.work += Savings(1, moved, flops_of(func, args, kwargs, out))
        if makes_all:
            for t in results:
                self._enter(t.untyped_storage())
        return out

    def number(self, t: Tensor) -> int | None:
        """The number of a tensor's storage, if it was made within."""
        known = self._alive.get(storage_of(t))
        return None if known is None else known[1]

    def most(self, start: int, without: Sequence[int] = ()) -> int:
        """The most bytes alive at once from an event on, but for storages with these numbers."""
        alive = most = 0
        for at, (number, size) in enumerate(self.events):
            alive += 0 if number in without else size
            most = max(most, alive) if at >= start else alive
        return most

    def _enter(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        number = self._made = self._made + 1

        def freed(_: Any) -> None:
            del self._alive[key]
            self.events.append((number, -size))

        self._alive[key] = weakref.ref(storage, freed), number
        self.events.append((number, size))


@functools.cache
def _work_of(func: Any) -> tuple[bool, bool, bool]:
    """Whether a call of ATen makes a result of its own, changes an argument, and makes all of its results."""
    own = [returned.alias_info is None for returned in func._schema.returns]
    changed = [given.alias_info is not None and given.alias_info.is_write for given in func._schema.arguments]
    works = func.overloadpacket not in _FREE
    return works and any(own), works and any(changed), all(own)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in lists and tuples, and in those in them, in order."""
    found, left = list[Tensor](), [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            left += cast(Sequence[Any], one)[::-1]
    return found


class _Trial(NamedTuple):
    """What was counted of a segment. Tensors at its borders are named by their places: those that enter count up from
    0, those that leave it count down from -1.
    """

    own: int  # bytes that it keeps beside those
    shared: tuple[int, ...]
    forward: int
    backward: int
    nanoseconds: int
    leaving: tuple[tuple[int, Any], ...]  # of each result its place, where it is that of another tensor, and its form
    kernels: dict[str, None]  # the sources of its C kernels


_known: dict[Any, _Trial] = {}
KEPT = 512  # by names and sizes: no class or tensor of a model is held


class Weighing:
    """Weighs segments of schedules of a stretch; segments that are alike, as those of equal layers are, once.

    Raises `Unknown` for what does not run on fake tensors.
    """

    def __init__(self, stretch: Stretch) -> None:
        x, env = stretch.x, stretch.env
        assert x is not None
        if stretch.shapes is None:  # of a plan without an input, whose x stands for one
            stretch = dataclasses.replace(stretch, shapes=validate(stretch.nodes, stretch.positions, x.shape))
        self._stretch = stretch
        slots = [*dict.fromkeys(slot for node in stretch.inside for slot in node.slots.values())]
        parameters = [getattr(*slot) for slot in slots]
        self._context = Context.of(stretch, slots, parameters, "raise", lambda: None)
        self._configured: dict[int, Any] = {}
        self._described: dict[int, str] = {}  # operations by position
        self._entering: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
        self._numbers: dict[int, int] = {}  # by storage
        self.sizes: dict[int, int] = {}  # bytes of each tensor at a border
        self._held: list[Tensor] = []
        self._owned = owned(stretch.nodes)
        self.kernels: dict[str, None] = {}  # the sources of C kernels of all segments so far
        with self._running() as mode:
            self._mode = mode
            count = len([node for node in stretch.nodes if node.seed is not None])
            self._seeds = torch.empty(count, dtype=torch.int64, device=stretch.place)
            channels = {name: self._like(t, t.dtype) for name, t in stretch.channels.items()}
            first = self._like(x, env.dtype if x.is_floating_point() else x.dtype)
            self._entering[stretch.start] = first, channels

    def __call__(
        self, forward: Sequence[Step], backward: Sequence[Step], again: tuple[int, ...] | None = None
    ) -> Weight:
        """The weight of these steps as one segment, which runs again but for the steps at the positions `again`."""
        span = range(forward[0].start, forward[-1].stop)
        inputs, outputs = public_channels(self._stretch.nodes, span.start, span.stop)
        x, channels = self._entering[span.start]
        with self._running():
            given = [x, *(channels[c] for c in inputs)]
            alike = [storage_of(t) for t in given]
            kept = None if again is None else tuple(at - span.start for at in again)
            key = self._about(span.start, (*forward, *backward), given), kept, *[alike.index(one) for one in alike]
            trial = _known.get(key)
            if trial is None:
                if len(_known) >= KEPT:
                    _known.clear()
                recomputed = () if again is None else ((span, again),)
                plan = Plan(self._stretch.env, (*forward,), (*backward,), (span,), recomputed)
                (segment,) = lower(plan, self._context, self._configured)
                try:
                    trial = self._try(segment, given)
                except Exception as error:
                    raise Unknown(one_line(error)) from error
                _known[key] = trial
            self.kernels |= trial.kernels
            if span.stop not in self._entering:
                y, *made = self._leaving(trial, given)
                after = {**channels, **dict(zip(outputs, made, strict=True))}
                self._entering[span.stop] = y, after
            y, after = self._entering[span.stop]
            leaving = [y, *(after[c] for c in outputs)]
        places = [given[place] if place >= 0 else leaving[-1 - place] for place in trial.shared]
        draws = any(self._stretch.nodes[p].seed is not None for p in span)
        seeds = [self._seeds] * (draws and self._context.wants.live_from < span.stop)
        shared = frozenset(map(self._number, (*places, *seeds)))
        entering = frozenset(map(self._number, given))
        return Weight(trial.own, shared, entering, trial.forward, trial.backward, trial.nanoseconds)

    def _about(self, start: int, steps: Sequence[Step], entering: Sequence[Tensor]) -> Any:
        """What a trial of the steps of a segment depends on."""
        for step in steps:
            for at, node in zip(step.covers, step.nodes, strict=True):
                self._described[at] = self._described.get(at) or describe(node)
        about: list[Any] = [
            (
                class_identity(s.operation.__class__),
                s.start - start,
                *map(self._described.get, s.covers),
                s.needs,
                s.borders,
                s.recipes,
                s.to and (s.to.at - start, s.to.recipe, s.to.role, s.to.rows, s.to.columns, s.to.record),
            )
            for s in steps
        ]
        env = dataclasses.replace(self._context.env, rows=None)
        return env, *about, *[(t.shape, t.stride(), t.dtype, t.device) for t in entering]

    def _try(self, segment: Segment, given: Sequence[Tensor]) -> _Trial:
        tally, seeds = Tally(), self._seeds.clone()
        here = self._stretch.env.device == "cpu"  # a plan for a GPU that is made on a CPU asks for no C kernels
        with compiler.collecting() if here else contextlib.nullcontext(dict[str, None]()) as kernels, tally:
            node, results = run_alone(segment, seeds, given[0], *given[1:])
            places = {storage_of(t): -1 - i for i, t in reversed([*enumerate(results)])}
            places |= {storage_of(t): i for i, t in reversed([*enumerate(given)])}
            kept = [t for t in _tensors(node.saved_tensors) if is_fake(t)]
            every = {storage_of(t): t for t in kept if storage_of(t) not in {*self._owned, storage_of(seeds)}}
            own = [t for at, t in every.items() if at not in places]
            numbers = [n for t in every.values() if (n := tally.number(t)) is not None]
            shared = tuple(places[at] for at in every if at in places)
            size = sum(t.untyped_storage().nbytes() for t in own)
            stated = [(places[storage_of(t)], _form(t)) for t in results]
            del kept, every, own
            made = sum(max(0, bytes) for number, bytes in tally.events if number in numbers)
            ahead, back = tally.most(0), 0
            if segment.live:
                named = zip(("", *segment.outputs), results, strict=True)
                douts = [None if c in segment.frozen else torch.empty_like(t) for c, t in named]
                del results, named
                start = len(tally.events)
                grads = back_alone(node, *douts)
                finished = [n for t in grads[1 + len(segment.inputs) :] if t is not None and (n := tally.number(t))]
                back = tally.most(start, finished) - made
                del grads, douts
        nanoseconds = round(self._stretch.env.microseconds(tally.work) * 1000)
        return _Trial(size, shared, ahead, back, nanoseconds, tuple(stated), kernels)

    def _leaving(self, trial: _Trial, given: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like those that a segment returns."""
        made: list[Tensor] = []
        for i, (place, (size, shape, stride, offset, dtype)) in enumerate(trial.leaving):
            base = given[place] if place >= 0 else made[-1 - place] if -1 - place < i else None
            whole = (
                torch.empty(size // dtype.itemsize, dtype=dtype, device=self._stretch.place) if base is None else base
            )
            made.append(whole.as_strided(shape, stride, offset))
        return made

    def _number(self, t: Tensor) -> int:
        at = storage_of(t)
        if at not in self._numbers:
            self._held.append(t)
            self._numbers[at] = len(self._numbers)
            size = 0 if at in self._owned else t.untyped_storage().nbytes()
            self.sizes[self._numbers[at]] = size
        return self._numbers[at]

    def _like(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        t = self._mode.from_tensor(t).detach()
        place = self._stretch.place
        return t if t.device == place and t.dtype is dtype else laid_like(t, dtype, place)

    @contextlib.contextmanager
    def _running(self) -> Generator[Any]:
        place, mode = self._stretch.place, getattr(self, "_mode", None)
        with torch.no_grad(), autocasting(place.type, self._stretch.env.autocast), faking(mode) as mode, cast_once():
            yield mode


def weighing(stretch: Stretch) -> Weighing:
    """What weighs segments of a stretch; raises `Unknown` for what cannot be made without data."""
    try:
        return Weighing(stretch)
    except Exception as error:
        raise Unknown(one_line(error)) from error


def calls_c(plan: Plan) -> bool:
    """Whether a plan may call C kernels: fusions have them, and operations that draw random numbers.

    One that exchanges tensors with other processes or writes a cache of keys and values is not run on fake ones.
    """
    if plan.env.kernels != "c":
        return False
    steps = (*plan.forward, *plan.backward)
    nodes = [node for step in steps for node in step.nodes]
    if any(getattr(node.operation, "redistribution", None) is not None for node in nodes):
        return False
    if not all(step.repeatable for step in steps):
        return False
    return any(node.seed is not None for node in nodes) or any(step.fused and step.operation.kernels for step in steps)


def kernels_of(plan: Plan, stretch: Stretch) -> Mapping[str, None]:
    """The sources of the C kernels that a plan of a stretch calls, so that all are compiled at once, before a call.

    Those of a segment that does not run on fake tensors, and of what is behind it, are compiled when they are called.
    """
    found: Mapping[str, None] = {}
    with contextlib.suppress(Unknown):  # the call itself will say what it was that failed
        trials = weighing(stretch)
        found = trials.kernels
        bytes_held(trials, plan.segments, (plan.forward, plan.backward), dict(plan.recomputed))
    return found


def _form(t: Tensor) -> tuple[int, torch.Size, tuple[int, ...], int, torch.dtype]:
    return t.untyped_storage().nbytes(), t.shape, t.stride(), int(t.storage_offset()), t.dtype
