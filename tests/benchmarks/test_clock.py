"""Implementations are sampled alternately, and not while the host is slower than the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.clock import OnDevice, interleaved


class Fake:
    """A clock that advances by what each call declares."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def sample(self, calls: Any) -> float:
        name, value = calls[0]()
        self.order.append(name)
        return value


def test_contenders_take_turns_and_change_places() -> None:
    clock = Fake()
    values = iter(range(100))
    times = interleaved(
        {"a": [lambda: ("a", 1.0)], "b": [lambda: ("b", float(next(values)))]}, clock, seconds=0, least=3
    )
    assert clock.order == ["a", "b", "a", "b", "a", "b", "b", "a", "a", "b"]
    # The two rounds of warming up count for nothing.
    assert (times["b"].low, times["b"].median, times["b"].high, times["b"].samples) == (2.5, 3.0, 3.5, 3)
    assert times["a"].median == 1.0


def test_rounds_end_with_the_time_or_at_the_most() -> None:
    ticks = iter(range(1000))
    call = {"a": [lambda: ("a", 1.0)]}
    assert interleaved(call, Fake(), seconds=5, least=1, most=100, now=lambda: next(ticks))["a"].samples == 5
    two = {**call, "b": call["a"]}  # each has its seconds
    assert interleaved(two, Fake(), seconds=5, least=1, most=100, now=lambda: next(ticks))["a"].samples == 10
    assert interleaved(call, Fake(), seconds=500, least=1, most=10, now=lambda: next(ticks))["a"].samples == 10


class Event:
    """An event on a device that sleeps for a given time, then runs everything that the host launched."""

    slept = 0.0
    behind_until = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.slept < self.behind_until

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 0.006


def test_a_device_sleeps_until_the_host_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[float] = []

    def sleep(cycles: int) -> None:
        Event.slept = cycles / 2000
        sleeps.append(Event.slept)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    clock, calls = OnDevice(), []
    Event.behind_until = 700.0
    assert clock.sample([lambda: calls.append(1)] * 3) == pytest.approx(2.0)
    assert sleeps == [200, 400, 800]
    assert clock.exposed == 0
    assert clock.sample([lambda: calls.append(1)]) == pytest.approx(6.0)
    assert sleeps[3:] == [800]
    Event.behind_until = 1e9
    clock.sample([lambda: None])
    assert clock.exposed == 1
    assert sleeps[-1] <= 100_000
    assert len(calls) == 10


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Launches behind each sleep, of a device that queues 1,000: with more, the host waits until it has slept."""
    since: list[int] = []

    class Queue(Event):
        def query(self) -> bool:
            return since[-1] > 1000

    monkeypatch.setattr(torch.cuda, "Event", Queue)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: since.append(0))
    return since


def test_of_more_launches_than_a_device_queues_fewer_are_timed_at_once(launched: list[int]) -> None:
    def layer() -> None:
        launched[-1] += 300

    clock, calls = OnDevice(), [layer] * 8
    assert clock.sample(calls) == pytest.approx(4 * 6.0 / 8)
    assert clock.exposed == 0
    assert launched[-4:] == [600] * 4
    launched.clear()
    clock.sample(calls)
    assert launched == [600] * 4


def test_other_calls_are_timed_without_the_sleeps_of_those_before(launched: list[int]) -> None:
    def stack() -> None:
        launched[-1] += 3000

    clock, sleeps = OnDevice(), []
    interleaved({"stack": [stack]}, clock, seconds=0, least=1)
    assert clock.exposed == 3
    torch.cuda._sleep = lambda cycles: (sleeps.append(cycles / 2000), launched.append(0))
    interleaved({"norm": [lambda: None] * 2}, clock, seconds=0, least=1)
    assert sleeps == [200] * 3
    assert clock.exposed == 3
