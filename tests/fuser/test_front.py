"""The search for the fastest choice of saved tensors within a budget, against all choices; models that save least."""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import FallbackWarning
from seqfuse.plan.front import Front, Option, Weight, bytes_held

from .kit import assert_same


class _Case(Front):
    """Random options of several parts, which share tensors at their boundaries."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.parts = draw.randint(1, 4)
        self.sizes = {n: draw.choice([1, 2, 5]) for n in range(self.parts + 2)}

        def some() -> frozenset[int]:
            return frozenset(draw.sample(sorted(self.sizes), draw.randint(0, 2)))

        self.starting = {a: [] for a in range(self.parts)}
        for a, options in self.starting.items():
            for _ in range(draw.randint(1, 3)):
                stop = draw.randint(a + 1, self.parts) if options else a + 1
                numbers = [draw.randint(0, 9) for _ in range(4)]
                weight = Weight(numbers[0], some(), some(), *numbers[1:], 0)
                options.append(Option(a, stop, draw.randint(0, 9), weight, (), ()))
        self._last = dict.fromkeys(self.sizes, self.parts)
        self._stretch: Any = type("Stretch", (), {"start": 0, "positions": range(self.parts)})

    def ways(self, at: int = 0) -> list[tuple[Option, ...]]:
        if at == self.parts:
            return [()]
        return [(option, *rest) for option in self.starting[at] for rest in self.ways(option.stop)]

    def held(self, way: Sequence[Option]) -> tuple[int, int, int]:
        """Time, saved bytes and peak of a choice, from the definition of `Weight`."""
        kept, saved, peak = 0, frozenset[int](), 0
        for option in way:
            w = option.weight
            peak = max(peak, kept + sum(self.sizes[n] for n in w.entering - saved) + w.forward)
            saved_now = saved | w.shared
            kept += w.own + sum(self.sizes[n] for n in saved_now - saved)
            saved, peak = saved_now, max(peak, kept + w.backward)
        return sum(option.time for option in way), kept, peak

    def lasting(self, way: Sequence[Option]) -> int:
        """The peak of a backward that frees no saved tensor before it ends."""
        kept, saved, most = 0, frozenset[int](), 0
        for option in way:
            kept += option.weight.own + sum(self.sizes[n] for n in option.weight.shared - saved)
            saved, most = saved | option.weight.shared, max(most, kept + option.weight.lasting)
        return most

    def counted(self, way: Sequence[Option]) -> tuple[int, int]:
        """Saved bytes and peak, as `bytes_held` counts those of a plan."""

        def weigh(forward: Any, backward: Any, again: Any) -> Weight:
            return way[again[0]].weight

        weigh.sizes = self.sizes
        spans = {range(option.start, option.stop): (i,) for i, option in enumerate(way)}
        return bytes_held(weigh, spans, ((), ()), spans)


@pytest.mark.parametrize("seed", range(30))
def test_a_budget_takes_the_fastest_of_all_ways_that_fit(seed: int):
    case = _Case(seed)
    every = [(time, peak) for time, _, peak in map(case.held, case.ways())]
    least = min(peak for _, peak in every)
    assert case.least() == least
    for limit in range(least - 1, max(peak for _, peak in every) + 2):
        found = case.within(limit)
        fits = [time for time, peak in every if peak <= limit]
        assert (found is None) == (not fits)
        if found is not None:
            time, *held, peak = case.held(found)
            assert case.counted(found) == (*held, peak)
            assert (time, peak <= limit) == (min(fits), True)
            assert [*itertools.chain(*(range(o.start, o.stop) for o in found))] == [*range(case.parts)]


@pytest.mark.parametrize("seed", range(30))
def test_the_least_leaves_most_room_for_what_follows_near_the_lowest_peak(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[Front.__module__], "SLACK", 3)  # so that several choices are close
    case = _Case(seed)
    least = case.least()
    low = [way for way in case.ways() if case.held(way)[2] <= least + least // 3]
    room = min(map(case.lasting, low))
    time, _, peak = case.held(found := case.fewest())
    assert (case.lasting(found), peak <= least + least // 3) == (room, True)
    assert time == min(case.held(way)[0] for way in low if case.lasting(way) == room)


def test_tokens_behind_an_embedding_need_no_record_of_their_own(recwarn: pytest.WarningsRecorder):
    """An Embedding saves its x, which nothing recomputes if the segment that contains it is recomputed."""
    model = sf.Sequential(ops.Embedding(50, 16), ops.Linear(16, 64), ops.GeLU(), ops.Linear(64, 16))
    tokens = torch.randint(50, (4, 32), generator=torch.Generator().manual_seed(0))
    found: list[dict[str, Tensor | None]] = []
    for memory in ("fast", "least"):
        model.memory = memory
        model.zero_grad()
        model(tokens).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
        assert not [r for r in model.plan(tokens).refused if "not known" in r.reason]
    assert_same(*found)
    assert not recwarn.list


def test_a_fusion_with_a_slot_of_any_name_runs_in_two_calls() -> None:
    layers = [(ops.LayerNorm(32), ops.Tanh(), ops.Linear(32, 32, bias=False), ops.Scale(0.5)) for _ in range(4)]
    fusions = (sf.fusions.BackwardLinearScale,)  # with a slot `first`
    model = sf.Sequential(*itertools.chain(*layers), memory="least", fusions=fusions)
    x = torch.randn(64, 32, requires_grad=True)
    with sf.fusing(unmeasured=True), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        plan = model.plan(x)
        again = {position for span, _ in plan.recomputed for position in span}
        assert any(step.fused and step.start in again for step in plan.backward)
        model(x).sum().backward()
