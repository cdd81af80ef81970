"""The cheapest pair of schedules of a sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..fusion import BackwardFusion, FusedOperation, JointFusion


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A fusion matched on positions `start..stop`, with its cost in integer nanoseconds (negative: it saves)."""

    fusion: FusedOperation
    start: int
    stop: int
    cost: int
    rank: int = 0  # place of its class in the fusion set

    @property
    def name(self) -> str:
        """The fusion's name."""
        return type(self.fusion).__name__


@dataclasses.dataclass(slots=True)
class _Best:
    cost: int
    count: int
    ranks: int
    before: tuple[int, int] | None
    step: Candidate | None


Starting = dict[int, list[Candidate]]


def by_pass(candidates: Iterable[Candidate], live_from: int) -> tuple[Starting, Starting, Starting]:
    """Candidates of the forward pass, of the backward pass and of both, by the position where they begin."""
    forward: Starting = {}
    backward: Starting = {}
    joint: Starting = {}
    for c in candidates:
        if isinstance(c.fusion, BackwardFusion):
            backward.setdefault(c.start, []).append(c)
        elif isinstance(c.fusion, JointFusion) and c.stop > live_from:
            joint.setdefault(c.start, []).append(c)
        else:
            forward.setdefault(c.start, []).append(c)
    return forward, backward, joint


def cheapest(
    start: int, stop: int, candidates: Iterable[Candidate], live_from: int
) -> tuple[list[Candidate], list[Candidate]]:
    """The fusions of the exact cheapest pair of schedules of positions `start..stop`: forward, backward.

    A state is a pair of positions, one per pass; the pass that lags advances, so every pair of schedules is reached and
    the two positions meet wherever both schedules have a border. There a joint fusion may take both. The positions
    differ by less than the longest pattern, so the work is linear in its length. Ties go to fewer fusions, then to the
    order of the fusion set.
    """
    forward, backward, joint = by_pass(candidates, live_from)
    layers: list[dict[tuple[int, int], _Best]] = [{} for _ in range(2 * (stop - start) + 1)]
    layers[0][start, start] = _Best(0, 0, 0, None, None)

    def relax(before: tuple[int, int], best: _Best, f: int, b: int, step: Candidate | None) -> None:
        cost, count, ranks = best.cost, best.count, best.ranks
        if step is not None:
            cost, count, ranks = cost + step.cost, count + 1, ranks + step.rank
        layer = layers[f + b - 2 * start]
        known = layer.get((f, b))
        if known is None or (cost, count, ranks) < (known.cost, known.count, known.ranks):
            layer[f, b] = _Best(cost, count, ranks, before, step)

    for layer in layers[:-1]:
        for (f, b), best in layer.items():
            if f == b:
                for c in joint.get(f, ()):
                    relax((f, b), best, c.stop, c.stop, c)
            if f <= b:
                relax((f, b), best, f + 1, b, None)
                for c in forward.get(f, ()):
                    relax((f, b), best, c.stop, b, c)
            else:
                relax((f, b), best, f, b + 1, None)
                for c in backward.get(b, ()):
                    relax((f, b), best, f, c.stop, c)
    chosen: tuple[list[Candidate], list[Candidate]] = ([], [])
    at: tuple[int, int] | None = (stop, stop)
    while at is not None:
        best = layers[at[0] + at[1] - 2 * start][at]
        if best.step is not None and best.before is not None:
            if best.step.stop == at[0] and best.before[0] != at[0]:
                chosen[0].append(best.step)
            if best.step.stop == at[1] and best.before[1] != at[1]:
                chosen[1].append(best.step)
        at = best.before
    return chosen[0][::-1], chosen[1][::-1]
