"""Tries segments on fake tensors: the C kernels that they call, the bytes that they save, their peak and their cost.

Steps are tried one by one. The memory of a segment follows from its steps and from when its code, of `code.py`, frees
their tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..env import Savings
from ..errors import one_line
from ..fusion import BackwardFusion
from ..plan.arriving import Unknown
from ..plan.facts import SEEDS, Alike, Attempt, Fields, Tried, any_rows, changed_in, kept_fields, storages
from ..plan.flatten import public_channels
from ..plan.front import Weight, bytes_held
from ..plan.plan import Plan
from ..plan.step import Step, Stretch, ending
from ..plan.tally import most_of
from ..saved import Recompute, kind_of

_Border = tuple[Any, dict[str, Any]]


class _Trial(NamedTuple):
    """The facts of a segment. Storages at its borders are numbered: inputs up from 0, other results down from -1."""

    weight: Weight
    leaving: tuple[Alike, ...]
    made: tuple[int, ...]  # the bytes of the storages of results that are not inputs
    kernels: dict[str, None]


_known: dict[Any, _Trial] = {}
_SEEDS = 1 << 30  # the number of their storage
KEPT = 512  # entries; their keys are names and sizes, so that no class or tensor of a model stays alive


class Weighing:
    """Weighs segments of schedules of a stretch.

    Raises `Unknown` for steps that do not run on fake tensors, and for inputs that cannot be created without data.
    """

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self.kernels: dict[str, None] = {}  # the sources of C kernels of all segments so far
        try:  # a plan for a GPU that is computed on a CPU needs no C kernels
            self.tried = tried = Tried(stretch, collects=stretch.env.device == "cpu")
        except Exception as error:
            raise Unknown(one_line(error)) from error
        self.sizes = tried.sizes  # bytes of each tensor at a border
        self._entering: dict[int, _Border] = {stretch.start: (tried.x, tried.channels)}

    def __call__(
        self, forward: Sequence[Step], backward: Sequence[Step], again: tuple[int, ...] | None = None
    ) -> Weight:
        """The weight of these steps as one segment, recomputed except for the steps at the positions `again`."""
        start, stop = forward[0].start, forward[-1].stop
        segment, tried = _Segment(self._stretch, self.tried, range(start, stop)), self.tried
        x, channels = self._entering[start]
        given = [x, *(channels[c] for c in segment.inputs)]
        numbers = [*dict.fromkeys(storages(*given))]
        places = {number: place for place, number in enumerate(numbers)}
        key = (
            self._described(segment, forward, backward, again),
            *[t._replace(storage=places[t.storage]) for t in given],
        )
        found = _known.get(key)
        if found is None:
            with tried.running():
                try:
                    weight, results = segment.weighed(forward, backward, again, (x, channels))
                except Exception as error:
                    raise Unknown(one_line(error)) from error
            made = [*dict.fromkeys(n for n in storages(*results) if n not in places)]
            places |= {number: -1 - i for i, number in enumerate(made)} | {SEEDS: _SEEDS}
            leaving = tuple([t._replace(storage=places[t.storage]) for t in results])
            named = weight._replace(shared=frozenset([places[n] for n in weight.shared]))
            found = _Trial(named, leaving, tuple([tried.sizes[n] for n in made]), segment.kernels)
            tried.forget(segment.first)
            if len(_known) >= KEPT:
                _known.clear()
            _known[key] = found
        self.kernels |= found.kernels
        if stop not in self._entering:
            fresh = [tried.fresh(size) for size in found.made]
            y, *made = [t._replace(storage=([*numbers, *fresh[::-1]])[t.storage]) for t in found.leaving]
            self._entering[stop] = y, {**channels, **dict(zip(segment.outputs, made, strict=True))}
        y, after = self._entering[stop]
        # A border has one set of tensors, whichever schedule computed them.
        border = storages(y, *[after[c] for c in segment.outputs])
        at = {_SEEDS: SEEDS, **dict(enumerate(numbers))}
        at = {**{t.storage: n for t, n in zip(found.leaving, border, strict=True)}, **at}
        shared = frozenset([at[place] for place in found.weight.shared])
        return found.weight._replace(shared=shared, entering=frozenset(numbers))

    def _described(
        self, segment: _Segment, forward: Sequence[Step], backward: Sequence[Step], again: tuple[int, ...] | None
    ) -> Any:
        """The cache key of a segment's weight, without its inputs."""
        start = forward[0].start
        channels = {c: i for i, c in enumerate(segment.inputs)}
        for step in forward:
            for _, channel in step.writes:
                channels.setdefault(channel, len(channels))
        steps = [
            (
                self.tried.described(step),
                step.start - start,
                *[(name, channels.get(c)) for name, c in (*step.reads, *step.writes)],
                *[channels.get(c) for c in step.ends],
            )
            for step in (*forward, *backward)
        ]
        leaving = [(channels[c], c in segment.frozen) for c in segment.outputs]
        env, keeps = any_rows(self._stretch.env), again and tuple([p - start for p in again])
        every = [slot for node in self._stretch.nodes[start : forward[-1].stop] for slot in node.slots.values()]
        places = {slot: i for i, slot in enumerate(dict.fromkeys((id(owner), name) for owner, name in every))}
        tied = tuple([places[id(owner), name] for owner, name in every])  # gradients of one parameter are summed
        return env, keeps, again is None, tied, *steps, *leaving


class _Passed:
    """The outcome of a segment's forward: results, records by position with the x of their step, saved results."""

    def __init__(self) -> None:
        self.x: Any = None
        self.channels: dict[str, Any] = {}
        self.every: dict[int, Fields] = {}  # all fields of each record
        self.entered: dict[int, Any] = {}  # the input of its step
        self.fields: dict[int, Fields] = {}  # the saved fields of each record
        self.results: dict[int, Any] = {}  # of steps that are not recomputed
        self.likes: dict[int, tuple[Any, dict[str, Any]]] = {}  # y and extra outputs, by the next position


class _Segment:
    """Tracks the tensors of one segment through both passes, as in the code of `forward_code` and `backward_code`."""

    def __init__(self, stretch: Stretch, tried: Tried, span: range) -> None:
        self._stretch, self._tried, self._span = stretch, tried, span
        nodes, live = stretch.nodes, stretch.wants.live_from
        self.inputs, self.outputs = public_channels(nodes, span.start, span.stop)
        self.frozen = {c for p in span if p < live for _, c in nodes[p].outputs}
        self._live = live < span.stop
        self.first = tried.fresh(0)  # storages that the segment allocates have larger numbers
        self.kernels: dict[str, None] = {}
        self._work = Savings()
        self._moments: list[tuple[frozenset[int], Sequence[tuple[int, int]]]] = []
        self._constant: set[int] = set()  # storages that stay alive throughout and are counted elsewhere
        self._sums: dict[tuple[int, str], Any] = {}  # gradients of parameters

    def weighed(
        self, forward: Sequence[Step], backward: Sequence[Step], again: tuple[int, ...] | None, entering: _Border
    ) -> tuple[Weight, list[Any]]:
        tried, x, channels = self._tried, *entering
        self._replays, keeps = again is not None, frozenset(again or ())
        passed = self._forward(forward, x, channels, keeps)
        results = [passed.x, *(passed.channels[c] for c in self.outputs)]
        ahead, kept = self._most(), list[Any]()
        if self._live and again is None:
            kept = [*passed.fields.values()]
        elif self._live:
            restored = [passed.fields[s.saves[0].position] for s in forward if s.start in keeps and s.restored]
            kept = [x, *(channels[c] for c in self.inputs), *passed.results.values()]
            names = [s.restored or () for s in forward if s.start in keeps and s.restored]
            kept += [[f[name] for name in own if name in f] for f, own in zip(restored, names, strict=True)]
        saved = {*storages(*kept)} - tried.owned - {SEEDS}
        given = {*storages(x, *[channels[c] for c in self.inputs])}
        border = given | {*storages(*results)}
        private, back, lasting = saved - border, 0, 0
        if self._live:
            self._moments.clear()
            self._constant = saved if again is not None else saved & border
            like = dict(zip(("", *self.outputs), results, strict=True))
            douts = {c: None if c in self.frozen else tried.new(t) for c, t in like.items()}
            if again is not None:
                ends = ending(forward)
                passed = self._forward(forward, x, channels, keeps, passed, ends, [*douts.values()])
            finished = self._backward(backward, passed, douts)
            back = lasting = self._most(finished)
            if again is None:
                back, lasting = back - sum(tried.sizes[n] for n in private), self._most(finished | private)
        drawn = self._live and any(self._stretch.nodes[p].seed is not None for p in self._span)
        shared = (saved & border) | ({SEEDS} if drawn else set[int]())
        own = sum(tried.sizes[n] for n in private)
        nanoseconds = round(self._stretch.env.microseconds(self._work) * 1000)
        return Weight(own, frozenset(shared), frozenset(given), ahead, back, lasting, nanoseconds), results

    def _note(self, run: Attempt | None, *alive: Any) -> None:
        """Records a moment at which these tensors are alive, with the allocations of a step."""
        held = frozenset([n for n in storages(*alive) if n > self.first and n not in self._constant])
        self._moments.append((held, () if run is None else run.events))
        if run is not None:
            self._work += run.work
            self.kernels |= run.kernels

    def _most(self, without: frozenset[int] = frozenset()) -> int:
        """The peak of live bytes, without these storages."""
        sizes, most = self._tried.sizes, 0
        for held, events in self._moments:
            most = max(most, most_of(events, without, sum([sizes[n] for n in held if n not in without])))
        return most

    def _enter(self, step: Step, t: Any, dtype: torch.dtype | None, *alive: Any) -> Any:
        """Converts a tensor to the dtype and the layout that a step expects; during the copy both are alive."""
        taken = self._tried.entered(t, dtype, step.operation.layout)
        if taken is not t:
            self._work += Savings(1, t.bytes + taken.bytes)
            self._note(None, t, taken, *alive)
        return taken

    def _forward(
        self,
        steps: Sequence[Step],
        x: Any,
        channels: Mapping[str, Any],
        keeps: frozenset[int],
        before: _Passed | None = None,
        stop: int | None = None,
        beside: Sequence[Any] = (),
    ) -> _Passed:
        """The forward pass; a recomputed one uses the saved results of the one `before` and ends after `stop`."""
        env, tried, found = self._stretch.env, self._tried, _Passed()
        channels, casts = {**channels}, list[Any]()
        stop = len(steps) if stop is None else stop
        running = [not (before and (i >= stop or s.start in keeps)) for i, s in enumerate(steps)]
        for step, runs in zip(steps, running, strict=True):
            alive = found.every, found.results, channels, casts, beside
            if before is not None and not runs:
                self._restore(step, x, before, found)
                x = before.results.get(step.start, x)
                continue
            entered = x = self._enter(step, x, step.cast, *alive)
            layout = step.operation.layout
            reads = {channel: tried.entered(channels[channel], None, layout) for _, channel in step.reads}
            run = tried.forward(step, x, reads, env)
            self._note(run, x, reads, *alive)
            x, made, records = run.results
            casts += run.casts
            made = dict(zip([channel for _, channel in step.writes], made, strict=True))
            channels |= made
            if made and step.zeros:
                found.likes[step.stop] = x, made
            for record, (names, values) in zip(step.saves, records, strict=True) if self._live else ():
                found.every[record.position] = dict(zip(names, values, strict=True))
                found.entered[record.position] = entered
                found.fields[record.position] = kept_fields(record, (names, values))
            if step.start in keeps:
                found.results[step.start] = x
            for channel in step.ends:
                if channel not in self.outputs:
                    del channels[channel]
        found.x, found.channels = x, channels
        if before is not None:
            found.likes = before.likes
        return found

    def _restore(self, step: Step, x: Any, before: _Passed, found: _Passed) -> None:
        for record in step.saves:
            fields, entered = before.every[record.position], before.entered[record.position]
            if not step.record_of(record)[1]:  # from x, which was recomputed
                again = dict(zip(storages(entered), storages(x), strict=True))

                def moved(t: Alike, again: Mapping[int, int] = again) -> Alike:
                    return t._replace(storage=again.get(t.storage, t.storage))

                kept = step.restored or ()
                fields = {n: v if n in kept else changed_in(v, Alike, moved) for n, v in fields.items()}
            found.every[record.position] = fields
            found.fields[record.position] = {n: v for n, v in fields.items() if n in record.kept}

    def _backward(self, steps: Sequence[Step], passed: _Passed, douts: Mapping[str, Any]) -> frozenset[int]:
        """The backward pass; returns the storages of parameter gradients."""
        self._late = any(_is_late(s, passed.fields) for s in steps)
        self._left, self._douts = dict(passed.fields), [*douts.values()]
        self._d, self._known = douts[""], douts[""] is not None
        self._has = {c: t for c, t in douts.items() if c and t is not None}
        for step in reversed(steps):
            lacking = [c for _, c in step.incoming if c not in self._has]
            whole = not isinstance(step.operation, BackwardFusion) or not step.incoming
            for one in (step,) if whole or (self._known and not lacking) else step.unfused(backward=True):
                self._step_back(one, passed)
        return frozenset(storages(*self._sums.values()))

    def _step_back(self, step: Step, passed: _Passed) -> None:
        came = [(keyword, channel, self._has.get(channel)) for keyword, channel in step.incoming]
        if not self._known and all(g is None for _, _, g in came):
            return  # no gradient arrives
        tried, layout, alive = self._tried, step.operation.layout, self._alive()
        zeros = bool(came) and step.zeros and not isinstance(step.operation, BackwardFusion)
        if not self._known:
            self._d = tried.new(passed.likes[step.stop][0]) if zeros else None
            self._known = zeros
        if self._known:
            self._d = self._enter(step, self._d, step.dy_dtype, *alive)
        incoming: dict[str, Any] = {}
        for keyword, channel, g in came:
            if g is None and zeros and step.joint:
                g = tried.new(passed.likes[step.stop][1][channel])
            incoming[keyword] = tried.entered(g, None, layout)
        records: list[Fields | None] = []
        for record in step.records:
            fields = self._left.pop(record.position, None) if self._replays else self._left.get(record.position)
            own = fields and {n: v if isinstance(v, Recompute) else _fit(tried, v, layout) for n, v in fields.items()}
            records.append(own)
        dx, named = self._passes(step, records, incoming)
        grads = dict(zip(*named, strict=True))
        self._d, self._known = dx, "x" in step.needs[0]
        for key, slot in step.grads:
            self._sums[slot] = self._sum(self._sums.get(slot), grads[key])
        for _, channel in step.incoming:
            self._has.pop(channel, None)
        for key, channel in step.channel_grads:
            self._has[channel] = self._sum(self._has.get(channel), grads[key])
        for record in step.records:
            self._left.pop(record.position, None)

    def _passes(self, step: Step, records: list[Fields | None], incoming: Mapping[str, Any]) -> Any:
        """Runs its `bwd`, in two calls if that frees tensors in between: dx, and its gradients."""
        needed = step.needed
        separable = step.operation.separable and step.recipe is None and "x" in needed and len(needed) > 1
        asked = [needed - _X, _X] if separable and (self._replays or self._late) else [None]
        named: Any = ((), ())
        for needs in asked:
            alive = [self._d, incoming, records, named, *self._alive()]
            run = self._tried.backward(step, self._d, records, incoming, self._stretch.env, needs)
            self._note(run, *alive)
            dx, grads, filled = run.results
            for fields, made in zip(records, filled, strict=True):
                if fields is not None:
                    fields |= dict(zip(*made, strict=True))
            if needs != _X:
                named = grads
            if needs is not None and needs != _X:
                for record, fields in zip(step.records, records, strict=True):
                    for name in [n for n in fields or () if n not in record.cls.kept(_X)]:
                        assert fields is not None
                        del fields[name]
        return dx, named  # pyright: ignore[reportPossiblyUnboundVariable]

    def _alive(self) -> list[Any]:
        return [self._d, self._has, self._douts, self._sums, self._left]

    def _sum(self, known: Any, g: Any) -> Any:
        if known is None:
            return g
        made = self._tried.new(known)
        self._work += Savings(1, known.bytes + g.bytes + made.bytes)
        self._note(None, known, g, made, *self._alive())
        return made


def _is_late(step: Step, fields: Mapping[int, Fields]) -> bool:
    """Whether a step reads fields that are not saved as one tensor each."""
    for record in step.records:
        for name, value in fields.get(record.position, {}).items():
            if isinstance(value, Recompute) or (kind_of(record.cls, name) == "tuple" and type(value) is not tuple):
                return True
    return False


_X = frozenset({"x"})


def _fit(tried: Tried, value: Any, layout: Any) -> Any:
    if type(value) is tuple:
        return tuple([tried.entered(one, None, layout) for one in value])  # pyright: ignore
    return tried.entered(value, None, layout)


def sources_of(plan: Plan, stretch: Stretch) -> Mapping[str, None]:
    """The sources of the C kernels of a plan, so that all are compiled at once, before a call.

    Fusions and random operations have some. Kernels of a segment that does not run on fake tensors, and of later ones,
    are compiled when they are called; so are all of a plan with collectives or KV caches, which is not tried.
    """
    steps, found = (*plan.forward, *plan.backward), dict[str, None]()
    calls = any((s.fused and s.operation.kernels) or any(node.seed is not None for node in s.nodes) for s in steps)
    if plan.env.kernels != "c" or not calls or not all(step.repeatable for step in steps):
        return found
    with contextlib.suppress(Unknown):  # the call itself raises the error
        trials = Weighing(stretch)
        found = trials.kernels
        bytes_held(trials, plan.segments, (plan.forward, plan.backward), dict(plan.recomputed))
    return found
