"""The search for a plan: the fastest schedules of a stretch, or those of a choice of memory."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from ..env import tokens_of
from ..fusion import FusedOperation
from ..recipes import Recipe, Role
from .arriving import Unknown
from .facts import look
from .front import Front, Scales, bytes_held, steps_of
from .match import SMALL, Known, Matcher, is_own
from .native import TorchCalls, torch_calls
from .plan import Plan
from .schedule import (
    Budget,
    Candidate,
    Choice,
    Edge,
    Kept,
    Path,
    Refusal,
    cheapest,
    chosen_for,
    graph,
    passes_of,
)
from .step import Step, Stretch

SEGMENT = 8
SEGMENT_BYTES = 1 << 22
"""The least bytes of a segment: gradients of less are not worth an autograd node that delivers them early."""


def segments_of(stretch: Stretch, forward: Sequence[Step], backward: Sequence[Step]) -> tuple[range, ...]:
    """Cut where both schedules have a border: near every eighth position, preferably where a single tensor crosses.

    All segments but the last have at least about `SEGMENT_BYTES` of parameters and activations.
    """
    nodes, start, stop = stretch.nodes, stretch.start, stretch.positions.stop
    if start == stop:
        return ()
    first = backward[0].start if backward else stop
    borders = {s.start for s in forward} & {*(s.start for s in backward), *range(start, first)}
    # A tensor that exists in 8 bits only does not leave its segment.
    borders -= {max(s.start, s.to.at) for s in (*forward, *backward) if s.to is not None}
    cuts, before = [start], _bytes_before(stretch)
    while stop - cuts[-1] > SEGMENT + SEGMENT // 2:
        cut = cuts[-1] - start
        aim = start + bisect.bisect_left(before, before[cut] + SEGMENT_BYTES, cut + SEGMENT)
        if aim >= stop - SEGMENT // 2:
            break
        reach = range(aim - SEGMENT // 2, min(aim + SEGMENT // 2, stop - 1) + 1)
        near = [b for b in reach if b in borders]
        near = near or [b for b in range(reach.stop, stop) if b in borders][:1]
        if not near:
            break
        cuts.append(min(near, key=lambda b: (nodes[b].crossing > 0, abs(b - aim))))
    return tuple(range(a, b) for a, b in zip(cuts, [*cuts[1:], stop], strict=True))


def _bytes_before(stretch: Stretch) -> list[int]:
    """For each position of a stretch the bytes of parameters and inputs of all operations before it."""
    if stretch.shapes is None:
        return [i * SEGMENT_BYTES for i in range(len(stretch.positions) + 1)]
    sums, itemsize = [0], stretch.env.dtype.itemsize
    for node, shape in zip(stretch.inside, stretch.shapes, strict=False):
        size = math.prod(shape) * itemsize
        for owner, name in node.slots.values():
            p = owner._parameters.get(name)  # pyright: ignore[reportPrivateUsage]
            size += 0 if p is None else p.numel() * p.element_size()
        sums.append(sums[-1] + size)
    return sums


def held_by(plan: Plan, searches: Sequence[Search]) -> tuple[int, int] | str:
    """The bytes that a plan of consecutive stretches saves and their peak; or why they are unknown."""
    kept = peak = 0
    try:
        for search in searches:
            spans = [span for span in plan.segments if span.start in search.stretch.positions]
            own = bytes_held(search.weigh, spans, (plan.forward, plan.backward), dict(plan.recomputed))
            kept, peak = kept + own[0], max(peak, kept + own[1])
    except Unknown as error:
        return str(error)
    return kept, peak


@dataclasses.dataclass
class _Chosen:
    """A choice for a region: the fusions of each pass, its cuts, the recomputed parts, and the additional time."""

    forward: Sequence[Candidate]
    backward: Sequence[Candidate]
    segments: tuple[range, ...] | None = None
    recomputed: tuple[tuple[range, tuple[int, ...]], ...] = ()
    extra: int = 0  # in nanoseconds
    why: str | None = None  # the reason why it differs from the request
    unknown: bool = False  # whether that reason is unknown bytes
    once: tuple[int, ...] = ()  # positions of operations that must not be recomputed
    small: bool = False  # whether it has no C kernels, since torch's calls are expected to be faster


ONCE = "{} does not run again in the backward pass: processes exchange tensors in it, or it fills a cache"


class Search:
    """Facts of a stretch that all choices of memory share: its candidates, their saved tensors, its front.

    With `near`, refusals include near misses.
    """

    def __init__(
        self, stretch: Stretch, matcher: Matcher, weighing: Callable[[Stretch], Scales], near: bool = False
    ) -> None:
        self.stretch, self._matcher, self._weighing, self._near = stretch, matcher, weighing, near
        self._found: dict[bool, tuple[list[Candidate], list[Refusal]]] = {}

    def candidates(self, lean: bool) -> tuple[list[Candidate], list[Refusal]]:
        """Candidates and refusals; with `lean` including fusions that trade time for memory."""
        if lean not in self._found:
            self._found[lean] = self._matcher.find(self.stretch, Known(self.stretch), lean, self._near)
        found, refused = self._found[lean]
        return found, [*refused]

    @cached_property
    def found(self) -> list[Candidate]:
        """The candidates of all choices but `"fast"`."""
        return self.candidates(self.stretch.x is not None)[0]

    @cached_property
    def kept(self) -> Kept | str:
        return _saved_by(self.stretch, self.found)

    @cached_property
    def weigh(self) -> Scales:
        return self._weighing(self.stretch)

    @cached_property
    def fast(self) -> Path:
        return self._fastest([c for c in self.found if not c.fusion.saves_memory])

    def _fastest(self, found: Sequence[Candidate]) -> Path:
        """The fastest pair of schedules of these candidates."""
        stretch = self.stretch
        return cheapest(stretch.start, stretch.positions.stop, found, stretch.wants.live_from) if found else (0, 0, [])

    @cached_property
    def states(self) -> Sequence[list[Edge]]:
        """The pairs of schedules, with the bytes that they save."""
        start, stop, live = self.stretch.start, self.stretch.positions.stop, self.stretch.wants.live_from
        assert isinstance(self.kept, Kept)
        return [*graph(start, stop, self.found, live, self.kept)]

    @cached_property
    def front(self) -> Front:
        """The options among which budgets choose."""
        assert isinstance(self.kept, Kept)
        return Front(self.stretch, self.found, self.fast, self.kept, self.weigh)

    @cached_property
    def native(self) -> TorchCalls | None:
        return torch_calls(self.stretch)

    def chosen(self, memory: Choice) -> _Chosen:
        stretch, kept = self.stretch, None if memory == "fast" else self.kept
        live = stretch.wants.live_from
        if kept is not None and not isinstance(kept, str):
            try:
                if memory in ("balanced", "lean"):
                    tokens = None if stretch.x is None else tokens_of(stretch.x)
                    chosen = _Chosen(*passes_of(chosen_for(memory, self.states, stretch.env, tokens), live))
                    return self._natively(chosen) if memory == "balanced" else chosen
                return self._within(memory, kept)
            except Unknown as error:
                kept = str(error)
        why = None if kept is None else f"what would be saved is not known: {kept}"
        path = self._fastest(self.candidates(False)[0]) if kept is None else self.fast
        chosen = _Chosen(*passes_of(path, live), why=why, unknown=why is not None)
        return self._natively(chosen) if memory == "fast" else chosen

    def _natively(self, chosen: _Chosen) -> _Chosen:
        """The choice, without C kernels if torch's own calls are expected to take less time than a node with them."""
        stretch, live = self.stretch, self.stretch.wants.live_from
        used = [*{id(c): c for c in (*chosen.forward, *chosen.backward)}.values()]
        ours = not any(c.fusion.saves_memory or is_own(type(c.fusion)) for c in used)
        in_c = stretch.env.kernels == "c" and any(c.fusion.kernels for c in used)
        if not (ours and in_c) or chosen.recomputed or stretch.fusing.unmeasured:
            return chosen
        calls = self.native
        if calls is None or not 0 < calls.elements < calls.below:
            return chosen
        plainly = [c for c in self.candidates(False)[0] if calls.faster_than(c.fusion)]
        forward, backward = passes_of(self._fastest(plainly), live)
        taken = {id(c): c for c in (*forward, *backward)}.values()
        extra = sum(c.cost for c in used) - sum(c.cost for c in taken)  # costs count no node: it is not slower
        return _Chosen(forward, backward, extra=extra, small=True)

    def _within(self, memory: Choice, kept: Kept) -> _Chosen:
        """The fastest plan within a budget, or, for `"least"`, within the smallest budget that a plan can meet."""
        stretch, live, limit, why = self.stretch, self.stretch.wants.live_from, None, None
        if isinstance(memory, Budget):
            limit = int((memory.part or 0) * kept.unfused) if memory.bytes is None else memory.bytes
            chosen = passes_of(self.fast, live)
            cuts = segments_of(stretch, *self._steps(chosen))
            if bytes_held(self.weigh, cuts, self._steps(chosen))[1] <= limit:
                return _Chosen(*chosen, cuts)
        found = None if limit is None else self.front.within(limit)
        options = self.front.fewest() if found is None else found
        chosen = [c for o in options for c in o.forward], [c for o in options for c in o.backward]
        spans = [(range(o.start, o.stop), o.again) for o in options]
        again = tuple((span, keeps) for span, keeps in spans if keeps is not None)
        cuts, extra = tuple(span for span, _ in spans), sum(o.extra for o in options)
        if found is None and limit is not None and not _is_bare(stretch, memory, kept):
            least = bytes_held(self.weigh, cuts, self._steps(chosen), dict(again))[1]
            taken = f"the plan with the lowest peak was taken, whose peak is {least:,} bytes"
            why = f"does not fit: {taken}, and {limit:,} are allowed here"
            if isinstance(memory, Budget) and memory.part is not None:
                part = math.ceil(1000 * least / kept.unfused) / 1000
                few = 'no part fits so few operations: memory="least" gives this plan without a warning'
                why += f"; sf.Budget(part={part:g}) fits" if part <= 1 else f"; {few}"
        return _Chosen(*chosen, cuts, again, extra, why, once=self.front.once)

    def _steps(self, chosen: tuple[Sequence[Candidate], Sequence[Candidate]]) -> tuple[Sequence[Step], Sequence[Step]]:
        stretch, live, stop = self.stretch, self.stretch.wants.live_from, self.stretch.positions.stop
        back = max(stretch.start, live)
        return steps_of(stretch, chosen[0], stretch.start, stop), steps_of(stretch, chosen[1], back, stop)


def absorbing(
    stretch: Stretch, forward: Sequence[Step], backward: Sequence[Step]
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps of both schedules; their kernels quantize results for unfused readers."""

    def told(steps: Sequence[Step], role: Role) -> Iterator[Step]:
        unfused = {step.start for step in steps if not step.fused}
        for step in steps:
            found = stretch.absorbed(step.operation, step.start, step.stop) if step.fused else ()
            to = next((to for to in found if to.role == role and to.at in unfused), None)
            yield step if to is None else dataclasses.replace(step, to=to)

    if not any(isinstance(recipe, Recipe) for recipe in stretch.recipes.values()):
        return tuple(forward), tuple(backward)
    return tuple(told(forward, "x")), tuple(told(backward, "dy"))


def quantized_within(steps: Sequence[Step], segments: Sequence[range], saved: Sequence[int] = ()) -> tuple[Step, ...]:
    """The steps without quantization for a step of another segment, or of a result saved at one of these positions."""

    def stands(step: Step) -> bool:
        assert step.to is not None
        near = any(step.start in span and step.to.at in span for span in segments)
        return near and not (step.to.role == "x" and step.start in saved)

    return tuple(s if s.to is None or stands(s) else dataclasses.replace(s, to=None) for s in steps)


def _is_bare(stretch: Stretch, memory: Choice, kept: Kept) -> bool:
    """Whether no operation saves more than the input, as in an Embedding alone: then a part of it is not a budget."""
    x = stretch.x
    entering = 0 if x is None else x.numel() * x.element_size()
    return isinstance(memory, Budget) and memory.part is not None and kept.unfused <= entering


def plan_region(search: Search, memory: Choice) -> Plan:
    """Plan a stretch; several plans may share a `search`."""
    stretch = search.stretch
    start, stop, live = stretch.start, stretch.positions.stop, stretch.wants.live_from
    if live == stop:  # without a gradient nothing is saved, so there is nothing to choose
        memory = "fast"
    found, refused = search.candidates(memory != "fast" and stretch.x is not None)
    chosen = search.chosen(memory)
    forward, backward = chosen.forward, chosen.backward
    used = {id(c): c for c in (*forward, *backward)}
    applied = {(c.name, c.start) for c in used.values()}  # one of several matches
    winners: tuple[dict[int, Candidate], ...] = ({}, {})
    for covered, taken in zip(winners, (forward, backward), strict=True):
        for c in taken:
            covered.update(dict.fromkeys(range(c.start, c.stop), c))
    for c in found:
        if id(c) not in used and (c.name, c.start) not in applied:
            passes = [winners[0]] * c.fusion.replaces_forward + [winners[1]] * c.fusion.replaces_backward
            rivals = {id(r): r for w in passes for p in range(c.start, c.stop) if (r := w.get(p)) is not None}
            asked = memory if not chosen.unknown else "fast"
            small = chosen.small and bool(c.fusion.kernels)
            reason = SMALL if small else _why_not(c, [*rivals.values()], asked)
            if chosen.unknown and c.fusion.saves_memory:
                alone = _saved_by(stretch, [c])
                reason = f"what it would save is not known: {alone}" if isinstance(alone, str) else chosen.why or ""
            refused.append(Refusal(c.name, c.start, reason, not small, own=is_own(type(c.fusion))))
    ahead, back = steps_of(stretch, forward, start, stop), steps_of(stretch, backward, max(start, live), stop)
    ahead, back = absorbing(stretch, ahead, back)
    for p in chosen.once:
        refused.append(Refusal("recomputation", p, ONCE.format(stretch.nodes[p].name)))
    if chosen.why is not None:
        refused.append(Refusal(f"memory={memory}", start, chosen.why))
    refused = sorted(dict.fromkeys(refused), key=lambda r: r.at)  # a pattern with optional parts matches several times
    segments = chosen.segments or segments_of(stretch, ahead, back)
    ahead = quantized_within(ahead, segments, [at for _, keeps in chosen.recomputed for at in keeps])
    back = quantized_within(back, segments)
    cost = sum(c.cost for c in used.values()) + chosen.extra
    return Plan(stretch.env, ahead, back, segments, chosen.recomputed, tuple(refused), cost=cost)


def _saved_by(stretch: Stretch, candidates: Sequence[Candidate]) -> Kept | str:
    """The saved tensors of a stretch's operations and of those of these fusions that save others; or why unknown."""
    live = [c for c in candidates if c.stop > stretch.wants.live_from]
    others = [c for c in live if c.fusion.saves_memory or c.fusion.has_record]
    return look(stretch, [stretch.step(c.start, c.stop, c.fusion) for c in others], (stretch,))


def _why_not(candidate: Candidate, rivals: Sequence[Candidate], memory: Choice) -> str:
    names = ", ".join(sorted({r.name for r in rivals} - {candidate.name}))
    if names and memory != "fast":
        return f"superseded by {names}, as memory={memory} asks"
    theirs, own = -sum(r.cost for r in rivals), -candidate.cost
    if names and theirs == own:
        return f"superseded by {names}: the same estimated time, and earlier in the fusion set{_advice(candidate)}"
    if names:
        digits = next((d for d in (0, 1) if f"{theirs / 1000:.{d}f}" != f"{own / 1000:.{d}f}"), 3)
        saved, this = f"{theirs / 1000:,.{digits}f}", f"{own / 1000:,.{digits}f}"
        return f"superseded by {names} (est. {saved} us saved, against {this}){_advice(candidate)}"
    if candidate.cost >= 0:
        return f"not faster on this device{_advice(candidate)}"
    return "superseded by another match of the same fusion"


def _advice(candidate: Candidate) -> str:
    """A hint for authors whose fusion has an estimate by declared traffic only."""
    kind = type(candidate.fusion)
    return "; state saves() if it gains more" if is_own(kind) and kind.saves is FusedOperation.saves else ""
