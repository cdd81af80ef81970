"""The cheapest pair of schedules of a sequence."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from ..env import Env, Savings
from ..errors import InputError
from ..fusion import BackwardFusion, FusedOperation, JointFusion

TIES = 40  # bits below a nanosecond that break ties by the number of fusions and their ranks


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A fusion matched on positions `start..stop`, with its cost in integer nanoseconds (negative: it saves).

    The cost is an estimate unless it was `measured`.
    """

    fusion: FusedOperation
    start: int
    stop: int
    cost: int
    rank: int = 0  # place of its class in the fusion set
    measured: bool = False

    @property
    def name(self) -> str:
        return type(self.fusion).__name__


class Refusal(NamedTuple):
    """A fusion that matched but is not used: its name, the first position, and the reason.

    `superseded`: it applies, but the schedule is cheaper without it. `expected`: the reason holds in every such plan
    and is not printed. `own`: a user's fusion.
    """

    fusion: str
    at: int
    reason: str
    superseded: bool = False
    expected: bool = False
    own: bool = False

    def __repr__(self) -> str:
        return f"Refusal(fusion={self.fusion!r}, at={self.at}, reason={self.reason!r})"


Edge = tuple[int, int, int, Candidate | None]  # the node before, time, bytes, and the fusion
Weigh = Callable[[int, int], int]
Path = tuple[int, int, list[Candidate]]  # time, bytes, and the fusions
Starting = dict[int, list[Candidate]]


@dataclasses.dataclass(frozen=True)
class Kept:
    """The tensors that steps would save, by number; a tensor saved by two steps has one number."""

    own: Sequence[frozenset[int]]  # of each operation, in order
    fused: Mapping[tuple[int, FusedOperation], frozenset[int]]  # of fusions that save other tensors, by start
    sizes: Mapping[int, int]  # bytes of each tensor
    flops: int = 0  # of the operations

    @property
    def unfused(self) -> int:
        """Bytes that the operations save unfused."""
        return self._bytes(self.own)

    def saved(self, forward: Iterable[Any]) -> int:
        """Bytes that the steps of a forward schedule of a whole sequence save."""
        tensors = list[frozenset[int]]()
        for step in forward:
            other = self.fused.get((step.start, step.operation)) if step.fused else None
            tensors += self.own[step.start : step.stop] if other is None else [other]
        return self._bytes(tensors)

    def _bytes(self, tensors: Iterable[frozenset[int]]) -> int:
        return sum(self.sizes[t] for t in frozenset[int]().union(*tensors))


def cheapest(start: int, stop: int, candidates: Iterable[Candidate], live_from: int) -> Path:
    """The exact cheapest pair of schedules of positions `start..stop`.

    Ties go to fewer fusions, then to the order of the fusion set.
    """
    return best([*graph(start, stop, candidates, live_from)], lambda time, _: time)


def passes_of(path: Path, live_from: int) -> tuple[list[Candidate], list[Candidate]]:
    """The fusions of each pass: forward, backward."""
    back = [c for c in path[2] if isinstance(c.fusion, BackwardFusion) or (c.fusion.has_record and c.stop > live_from)]
    return [c for c in path[2] if not isinstance(c.fusion, BackwardFusion)], back


def graph(
    start: int, stop: int, candidates: Iterable[Candidate], live_from: int, kept: Kept | None = None
) -> Iterator[list[Edge]]:
    """The edges into each state in topological order; the first state is the start and the last one the end.

    A state is a pair of positions, one per pass; the pass that lags advances, so every pair of schedules is reached and
    the two positions meet wherever both schedules have a border. There a joint fusion may advance both. The positions
    differ by less than the longest pattern, so the work is linear in its length. Where bytes count, a state also
    contains the saved tensors that later steps may save again.
    """
    forward: Starting = {}
    backward: Starting = {}
    joint: Starting = {}
    for c in candidates:
        both = isinstance(c.fusion, JointFusion) and c.stop > live_from
        into = backward if isinstance(c.fusion, BackwardFusion) else joint if both else forward
        into.setdefault(c.start, []).append(c)
    last: dict[int, int] = {}
    if kept is not None:
        for at, tensors in enumerate(kept.own, start):
            last.update(dict.fromkeys(tensors, at))
        for c in itertools.chain(*forward.values(), *joint.values()):
            last.update((t, c.start) for t in kept.fused.get((c.start, c.fusion), ()) if c.start > last.get(t, -1))
    none = frozenset[int]()
    layers: list[dict[tuple[int, int, frozenset[int]], list[Edge]]] = [{} for _ in range(2 * (stop - start) + 1)]
    layers[0][start, start, none] = []

    def reach(before: int, saved: frozenset[int], f: int, b: int, to: tuple[int, int], c: Candidate | None) -> None:
        t = 0 if c is None else (c.cost << TIES) + (1 << 24) + c.rank
        m = 0
        if kept is not None and to[0] > f:
            tensors = None if c is None else kept.fused.get((c.start, c.fusion))
            if tensors is None:
                tensors = none.union(*kept.own[f - start : to[0] - start])
            m = sum(kept.sizes[tensor] for tensor in tensors - saved)
            saved = frozenset(tensor for tensor in tensors | saved if last[tensor] >= to[0])
        layers[to[0] + to[1] - 2 * start].setdefault((*to, saved), []).append((before, t, m, c))

    number = 0
    for layer in layers:
        for (f, b, saved), edges in layer.items():
            yield edges
            if f == b:
                for c in joint.get(f, ()):
                    reach(number, saved, f, b, (c.stop, c.stop), c)
            if f <= b and f < stop:
                reach(number, saved, f, b, (f + 1, b), None)
                for c in forward.get(f, ()):
                    reach(number, saved, f, b, (c.stop, b), c)
            elif b < stop:
                reach(number, saved, f, b, (f, b + 1), None)
                for c in backward.get(b, ()):
                    reach(number, saved, f, b, (f, c.stop), c)
            number += 1


def best(graph: Sequence[list[Edge]], weigh: Weigh) -> Path:
    """The path of the least weight."""
    values: list[int] = [0]
    steps: list[Edge | None] = [None]
    for edges in graph[1:]:
        least, through = values[edges[0][0]] + weigh(*edges[0][1:3]), edges[0]
        for edge in edges[1:]:
            value = values[edge[0]] + weigh(edge[1], edge[2])
            if value < least:
                least, through = value, edge
        values.append(least)
        steps.append(through)
    time = size = 0
    path: list[Candidate] = []
    edge = steps[-1]
    while edge is not None:
        before, t, m, c = edge
        time, size = time + t, size + m
        path += () if c is None else (c,)
        edge = steps[before]
    return time, size, path[::-1]


BALANCED = 4
"""`"balanced"` values one byte not saved as much as so many bytes moved."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """A limit on the activation memory of a `Sequential`; the fastest plan within it is used.

    It limits the peak: saved tensors and temporary tensors of the passes, such as recomputed activations. If eager
    modules divide the `Sequential`, `bytes` is divided among its regions by number of operations.

    Args:
        bytes: the limit in bytes, without parameters and their gradients, as in `plan.memory.peak`.
        part: instead of bytes, a factor from 0 to 1. The limit is `part * plan.memory.saved_unfused`, the bytes that
            unfused operations save for backward. These are not a peak, so `part=1` may already recompute.

    Raises:
        InputError: (SF106) for another value, or if both are given.
    """

    bytes: int | None = None
    part: float | None = None

    def __post_init__(self) -> None:
        whole = type(self.bytes) is int and self.bytes >= 0 and self.part is None
        number = self.bytes is None and type(self.part) in (int, float) and 0 <= cast(float, self.part) <= 1
        if not whole and not number:
            given = f"bytes={self.bytes!r}, part={self.part!r}"
            message = f"takes a whole number of bytes, or a part from 0 to 1 of what is saved unfused: got {given}"
            hint = "sf.Budget(2 * 2**30), or sf.Budget(part=0.65)"
            raise InputError(message, code="SF106", operation="Budget", hint=hint)

    def __str__(self) -> str:
        return f"Budget({self.bytes})" if self.part is None else f"Budget(part={self.part:g})"


@dataclasses.dataclass(frozen=True)
class Share(Budget):
    """The share of one region in the budget of the whole sequence; it prints as the whole budget."""

    whole: Budget | None = None

    def __str__(self) -> str:
        return str(self.whole)


Mode = Literal["fast", "balanced", "lean", "least"]
Choice = Mode | Budget
AnyChoice = Choice | Literal["save"] | int
"""What `memory=` takes: a choice, a number of bytes, or `"save"`, an earlier name of `"fast"`."""
MODES: tuple[Mode, ...] = ("fast", "balanced", "lean", "least")


def choice_of(given: AnyChoice) -> Choice:
    """Normalizes the argument `memory=`: a number of bytes becomes a `Budget`."""
    if isinstance(given, Budget):
        return given
    if type(given) is int:
        return Budget(given)
    for mode in ("fast" if given == "save" else given,):
        if mode in MODES:
            return mode
    hint = 'memory is "fast", "balanced", "lean", "least", a number of bytes, or an sf.Budget'
    value: Any = given
    if type(value) is float:
        hint = f"sf.Budget(part={value:g})" if 0 <= value <= 1 else f"a whole number of bytes, {value:.0f}"
    elif type(given) is str and (near := difflib.get_close_matches(given.lower(), MODES, 1, 0.25)):
        hint = f'did you mean "{near[0]}"? {hint}'
    raise InputError(f"memory must not be {given!r}", code="SF106", hint=hint)


@dataclasses.dataclass(frozen=True)
class MemoryChoice:
    """A choice of `memory`: the bytes that its plan saves for backward, the peak, and its time beyond `"fast"`.

    The time is estimated. `used` is whether the printed plan has this choice.
    """

    memory: str
    saved: int
    peak: int
    microseconds: float
    used: bool


def chosen_for(memory: Choice, states: Sequence[list[Edge]], env: Env, tokens: int | None = None) -> Path:
    """The best pair of schedules of a `graph` with bytes.

    Of all pairs, `"lean"` selects the one that saves the fewest bytes, and `"balanced"` the least sum of time and
    bytes. Both are exact; for `"fast"` see `cheapest`. The bytes are those of an input of `tokens`, the times those of
    the number of tokens in `env`.
    """
    if memory != "balanced":
        return best(states, fewest)
    worth = BALANCED * env.tokens / (tokens or env.tokens)
    rate, per = (env.microseconds(Savings(bytes=worth)) * 1000).as_integer_ratio()
    return best(states, weigher(per, rate << TIES))


def fewest(t: int, m: int) -> int:
    """The weight of a path by its bytes, and of equal ones by its time."""
    return (m << 128) + t


def weigher(time: int, size: int) -> Weigh:
    """The weight of a path whose time and bytes are worth so much."""
    return lambda t, m: t * time + m * size
