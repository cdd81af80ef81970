"""The fastest plan within a byte budget: each part of a sequence saves, saves less, or is recomputed in the backward.

A part lies between two cuts. Its options are a few schedules, from the fastest to the one that saves the fewest bytes,
and, for one or several parts together, saving only their input. Options are weighed on fake tensors. The result is the
fastest combination whose peak stays within the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from .schedule import TIES, Candidate, Kept, Path, best, fewest, graph, passes_of, weigher
from .step import Step, Stretch, ending

SHORTEST, LONGEST = 4, 12
"""The least and the most positions of a part, where cuts can be chosen."""

TOGETHER = (2, 4)
"""How many consecutive parts may be recomputed as one."""

SCHEDULES = 4
"""At most so many schedules of a part are options."""

FEW = 3
"""Every subset of at most so many GEMM results of a recomputed part is tried as saved tensors."""

SLACK = 32
"""A plan that saves fewer bytes may exceed the lowest peak by 1/SLACK of it."""

LABELS = 256
"""At most so many partial plans are extended; beyond, those that save nearly the same bytes as another are dropped."""


class Weight(NamedTuple):
    """The memory of a segment: bytes that only it saves; saved tensors at its borders and its inputs, by number; the
    most bytes alive beside saved ones during its forward and its backward; the same for a backward that frees no saved
    tensor before it ends; and the estimated time of both passes.
    """

    own: int
    shared: frozenset[int]
    entering: frozenset[int]
    forward: int
    backward: int
    lasting: int
    nanoseconds: int


class Scales(Protocol):
    """Weighs steps as one segment, from the first to the last.

    Unless `again` is `None`, the segment is recomputed in the backward pass, except for the steps at these positions.
    """

    sizes: dict[int, int]

    def __call__(
        self, forward: Sequence[Step], backward: Sequence[Step], again: tuple[int, ...] | None = None
    ) -> Weight: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """One way to run positions `start..stop`: recomputed except for the steps at the positions `again`.

    `extra` is its estimated additional time in nanoseconds; `again` is `None` if nothing is recomputed.
    """

    start: int
    stop: int
    time: int
    weight: Weight
    forward: Sequence[Candidate]
    backward: Sequence[Candidate]
    again: tuple[int, ...] | None = None
    extra: int = 0


_Passes = tuple[Sequence[Candidate], Sequence[Candidate]]
# The time and the saved bytes so far, the previous label and its option.
_Label = tuple[int, int, Any, Option | None]


class Front:
    """The options of a stretch; `within` selects the fastest ones that fit."""

    def __init__(self, stretch: Stretch, found: Sequence[Candidate], fast: Path, kept: Kept, weigh: Scales) -> None:
        self._stretch, self._found, self._kept, self._weigh = stretch, found, kept, weigh
        self._live, self.sizes = stretch.wants.live_from, weigh.sizes
        self.once = tuple(p for p in stretch.positions if not stretch.step(p, p + 1).repeatable)
        cuts = [*_cuts(stretch, [range(c.start, c.stop) for c in fast[2]], self.once), stretch.positions.stop]
        self.starting: dict[int, list[Option]] = {a: [*self._options(a, b)] for a, b in itertools.pairwise(cuts)}
        for i, a in enumerate(cuts):
            for b in (cuts[i + n] for n in TOGETHER if i + n < len(cuts)):
                self.starting[a] += self._again(a, b, self._graph(a, b))
        options = [option for several in self.starting.values() for option in several]
        self._last: dict[int, int] = {}
        for option in options:
            for number in option.weight.shared | option.weight.entering:
                self._last[number] = max(option.start, self._last.get(number, option.start))

    def within(self, limit: int, lasting: int | None = None) -> list[Option] | None:
        """The fastest options with a peak of at most `limit` bytes, or `None`.

        With backwards that free no saved tensor before they end, the peak is at most `lasting` bytes.
        """
        label = self._walk(limit, lasting, LABELS)
        found: list[Option] = []
        while label is not None:
            _, _, label, option = label
            found += [] if option is None else [option]
        return found[::-1] or None

    def least(self) -> int:
        """The smallest budget that a plan can meet."""
        return _first(lambda limit: self._walk(limit, None, 1) is not None)

    def fewest(self) -> list[Option]:
        """The options that save the fewest bytes among those of nearly the lowest peak.

        A sequence may be one of many layers: its saved tensors stay alive while the other layers run.
        """
        limit = self.least()
        limit += limit // SLACK
        return self.within(limit, _first(lambda lasting: self._walk(limit, lasting, 1) is not None)) or []

    def _walk(self, limit: int, lasting: int | None, most: int) -> _Label | None:
        """The label of the fastest complete plan; with `most` one, of the plan that saves the fewest bytes."""
        stop, none = self._stretch.positions.stop, frozenset[int]()
        fronts: dict[int, dict[frozenset[int], list[_Label]]] = {self._stretch.start: {none: [(0, 0, None, None)]}}
        for a in sorted(self.starting):
            for saved, several in fronts.pop(a, {}).items():
                labels = _front(several, most)
                for option in self.starting[a]:
                    w = option.weight
                    entering = sum(self.sizes[n] for n in w.entering - saved)
                    more = w.own + sum(self.sizes[n] for n in w.shared - saved)
                    room = limit - max(entering + w.forward, more + w.backward)
                    room = room if lasting is None else min(room, lasting - more - w.lasting)
                    after = frozenset([n for n in saved | w.shared if self._last[n] >= option.stop])
                    into = fronts.setdefault(option.stop, {}).setdefault(after, [])
                    into += [
                        (t + option.time, m + more, label, option)
                        for label in labels
                        for t, m in (label[:2],)
                        if m <= room
                    ]
        ends = [label for labels in fronts.get(stop, {}).values() for label in labels]
        return min(ends, key=lambda label: label[:2], default=None)

    def _graph(self, a: int, b: int) -> Any:
        start = self._stretch.start
        inside = [c for c in self._found if a <= c.start and c.stop <= b]
        kept = Kept(self._kept.own[a - start : b - start], self._kept.fused, self._kept.sizes)
        return [*graph(a, b, inside, self._live, kept)]

    def _options(self, a: int, b: int) -> Iterator[Option]:
        states = self._graph(a, b)
        fast, lean = best(states, lambda t, m: (t << 64) + m), best(states, fewest)
        paths = [fast, *_between(states, fast, lean, SCHEDULES - 2), *[lean] * (lean[1] < fast[1])]
        for path in paths:
            chosen, steps = self._steps(a, b, path)
            yield Option(a, b, path[0], self._weigh(*steps), *chosen)
        yield from self._again(a, b, states, True)

    def _again(self, a: int, b: int, states: Any, keeps: bool = False) -> Iterator[Option]:
        """Options that save the input and, with `keeps`, the results of some steps with GEMMs.

        None where a step may not run twice, or no gradient is needed.
        """
        if b <= self._live or any(a <= p < b for p in self.once):
            return
        lean = best(states, fewest)
        for path in (best(states, lambda t, m: (t << 64) + m), lean):
            yield from self._running(a, b, path, keeps and path is not lean)

    def _running(self, a: int, b: int, path: Path, keeps: bool) -> Iterator[Option]:
        chosen, steps = self._steps(a, b, path)
        running = steps[0][: ending(steps[0])]
        costly = [step.start for step in running if step.costly and step.restored is not None]
        sizes = range(len(costly) + 1) if len(costly) <= FEW else (0, 1, len(costly))
        several = [kept for size in sizes for kept in itertools.combinations(costly, size)]
        plain = self._weigh(*steps).nanoseconds
        for kept in several if keeps else [()]:
            weight = self._weigh(*steps, kept)
            extra = max(0, weight.nanoseconds - plain)
            yield Option(a, b, path[0] + (extra << TIES), weight, *chosen, kept, extra)

    def _steps(self, a: int, b: int, path: Path) -> tuple[_Passes, tuple[tuple[Step, ...], tuple[Step, ...]]]:
        live = max(a, self._live)
        forward, backward = passes_of(path, self._live)
        back = steps_of(self._stretch, [c for c in backward if c.stop > live], live, b) if live < b else ()
        return (forward, backward), (steps_of(self._stretch, forward, a, b), back)


def _first(enough: Callable[[int], bool]) -> int:
    """The smallest number of bytes that is enough, to 1/4,096 of it."""
    low, high = 0, 1
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1 + high // 4096:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def bytes_held(
    weigh: Scales,
    spans: Iterable[range],
    passes: tuple[Sequence[Step], Sequence[Step]],
    again: Mapping[range, tuple[int, ...]] = MappingProxyType({}),
) -> tuple[int, int]:
    """The bytes that the segments of two schedules save, and their peak."""
    kept = peak = 0
    saved = frozenset[int]()
    for span in spans:
        forward, backward = ([step for step in steps if step.start in span] for steps in passes)
        w = weigh(forward, backward, again.get(span))
        entering = sum(weigh.sizes[n] for n in w.entering - saved)
        peak = max(peak, kept + entering + w.forward)
        kept += w.own + sum(weigh.sizes[n] for n in w.shared - saved)
        peak, saved = max(peak, kept + w.backward), saved | w.shared
    return kept, peak


def steps_of(stretch: Stretch, chosen: Sequence[Candidate], a: int, b: int) -> tuple[Step, ...]:
    """The steps of positions `a..b` with these fusions."""
    steps: list[Step] = []
    for c in chosen:
        steps += [stretch.step(i, i + 1) for i in range(a, c.start)]
        steps.append(stretch.step(c.start, c.stop, c.fusion))
        a = c.stop
    return (*steps, *(stretch.step(i, i + 1) for i in range(a, b)))


def _front(labels: list[_Label], most: int) -> list[_Label]:
    """The labels on the Pareto front of time and bytes."""
    found: list[_Label] = []
    for label in sorted(labels, key=lambda label: label[:2]):
        if not found or label[1] < found[-1][1]:
            found.append(label)
    if len(found) > most:
        found = [found[i * (len(found) - 1) // max(1, most - 1)] for i in range(most)] if most > 1 else found[-1:]
    return found


def _between(states: Any, fast: Path, lean: Path, most: int) -> list[Path]:
    """Schedules on the convex hull between two schedules, fastest first."""
    if most < 1 or lean[1] >= fast[1]:
        return []
    weigh = weigher(fast[1] - lean[1], lean[0] - fast[0])
    path = best(states, weigh)
    if weigh(*path[:2]) >= weigh(*fast[:2]):
        return []
    ahead = _between(states, fast, path, (most - 1) // 2)
    return [*ahead, path, *_between(states, path, lean, most - 1 - len(ahead))]


def _cuts(stretch: Stretch, fused: Sequence[range], once: Sequence[int]) -> list[int]:
    """Cuts between parts: where one tensor crosses and no fusion of the fastest plan does, and around steps that may
    run only once.
    """
    start, stop, nodes = stretch.start, stretch.positions.stop, stretch.nodes
    inside = {p for span in fused for p in span[1:]}
    forced = sorted({q for p in once for q in (p, p + 1) if start < q < stop})
    cuts = [start]
    while stop - cuts[-1] > LONGEST or any(f > cuts[-1] for f in forced):
        at = cuts[-1]
        near = [f for f in forced if at < f <= at + LONGEST]
        reach = range(at + SHORTEST, min(at + LONGEST, stop - SHORTEST) + 1)
        middle = at + (SHORTEST + LONGEST) // 2
        cuts.append(
            near[0] if near else min(reach, key=lambda p: (nodes[p].crossing > 0, p in inside, abs(p - middle)))
        )
    return cuts
