"""Times calls of alternating sides: on a device, on the host, on one thread; and measures limits of a device."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = Callable[[], Any]
# Cycles of the fastest clock of any GPU: a sleep takes at least the requested time.
_CYCLES_PER_MICROSECOND = 2000
_SHORTEST_SLEEP = 200.0
_LONGEST_SLEEP = 50_000.0
# A device queues about a thousand launches, which take the host less than this: with one more, the host waits for the
# device, however long that sleeps. Then fewer calls are timed at once.
_LONGEST_OF_SEVERAL = 12_000.0


class Times(NamedTuple):
    """Microseconds of one call: median, quartiles, and number of samples."""

    median: float
    low: float
    high: float
    samples: int


class OnHost:
    """Time on the host until the device is done."""

    def __init__(self, device: torch.device) -> None:
        self._wait: Call = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def sample(self, calls: Sequence[Call]) -> float:
        """Microseconds per call, for one run of each of several calls."""
        self._wait()
        begun = time.perf_counter_ns()
        for call in calls:
            call()
        self._wait()
        return (time.perf_counter_ns() - begun) / 1000 / len(calls)


class OnDevice:
    """Time on the device between two events, while the host is ahead.

    The device sleeps until the host has launched everything, so that CPU overhead does not count; if the sleep was too
    short, it is doubled and the sample repeated. Calls with more launches than a device queues are timed in parts.
    `exposed` counts samples for which neither was enough.
    """

    def __init__(self) -> None:
        self.exposed = 0
        self.forget()

    def forget(self) -> None:
        """Start again with a short sleep and all calls at once, for other calls."""
        self._sleep = _SHORTEST_SLEEP
        self._together: dict[int, int] = {}  # by the `id` of a list of calls, how many are timed at once

    def sample(self, calls: Sequence[Call]) -> float:
        while True:
            size = self._together.get(id(calls), len(calls))
            times = [self._timed(calls[i : i + size]) for i in range(0, len(calls), size)]
            whole = [time for time in times if time is not None]
            if len(whole) == len(times):
                return sum(whole) * 1000 / len(calls)
            self._together[id(calls)] = -(-size // 2)

    def _timed(self, calls: Sequence[Call]) -> float | None:
        """Milliseconds of all of these; `None` if the device may be unable to queue them all."""
        cuda: Any = torch.cuda
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        while True:
            cuda._sleep(int(self._sleep * _CYCLES_PER_MICROSECOND))
            start.record()
            for call in calls:
                call()
            end.record()
            ahead = not start.query()
            end.synchronize()
            if ahead or self._sleep >= _LONGEST_SLEEP:
                self.exposed += not ahead
                return start.elapsed_time(end)
            if len(calls) > 1 and self._sleep >= _LONGEST_OF_SEVERAL:
                return None
            self._sleep *= 2


Clock = OnHost | OnDevice


def interleaved(
    contenders: Mapping[str, Sequence[Call]], clock: Clock, *, seconds: float = 0.25, least: int = 7, most: int = 31,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:  # fmt: skip
    """Sample the contenders alternately, A B C, C B A, ..., for about `seconds` each, in `least` to `most` rounds.

    Two rounds warm up. The calls of a sample are the same on several sets of inputs, so that no inputs are in the
    cache. `now` is the clock that limits the seconds.
    """
    if isinstance(clock, OnDevice):
        clock.forget()
    for calls in [*contenders.values()] * 2:
        clock.sample(calls)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    begun, rounds = now(), 0
    while rounds < least or (rounds < most and now() - begun < seconds * len(contenders)):
        for name in list(contenders) if rounds % 2 == 0 else list(contenders)[::-1]:
            samples[name].append(clock.sample(contenders[name]))
        rounds += 1
    found: dict[str, Times] = {}
    for name, own in samples.items():
        low, median, high = statistics.quantiles(own * (1 if rounds > 1 else 2), n=4, method="inclusive")
        found[name] = Times(median, low, high, rounds)
    return found


class Ceilings(NamedTuple):
    """The speed of a copy, read and written, and of cuBLAS GEMMs by dtype."""

    copy_TB_per_s: float
    cublas_TFLOP_per_s: dict[str, float]

    def floor(self, least: int, flops: float, dtype: torch.dtype) -> float:
        """The minimum microseconds, limited by memory or by GEMMs."""
        return max(least / self.copy_TB_per_s, flops / self.cublas_TFLOP_per_s[name_of(dtype)]) / 1e6


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def ceilings(
    clock: Clock, device: torch.device, dtypes: tuple[torch.dtype, ...], *, numel: int = 2**29, side: int = 8192
) -> Ceilings:
    """Copy `numel` elements of two bytes, and multiply square matrices of random values."""
    sources = [torch.randn(numel, device=device, dtype=torch.bfloat16) for _ in range(2)]
    copies = [functools.partial(torch.empty_like(source).copy_, source) for source in sources]
    copy = 4 * numel / interleaved({"copy": copies}, clock, seconds=1.0)["copy"].median / 1e6
    del sources, copies
    rates: dict[str, float] = {}
    for dtype in dtypes:
        n = side if dtype.itemsize == 2 else side // 2
        pairs = [[torch.randn(n, n, device=device).to(dtype) for _ in range(2)] for _ in range(2)]
        products = [lambda a=a, b=b: a @ b for a, b in pairs]
        rates[name_of(dtype)] = 2 * n**3 / interleaved({"mm": products}, clock, seconds=1.0)["mm"].median / 1e6
    return Ceilings(copy, rates)


Ratios = dict[str, float]  # seconds of a step; median and quartiles of the ratio to eager


def paired(sides: Mapping[str, Call], rounds: int, seconds: float = 0.0, warm: int = 10) -> dict[str, Ratios]:
    """Time sides alternately, `eager` among them, each for about `seconds` in a round; the order rotates.

    Times are of the thread, so that other processes do not count.
    """
    torch.set_num_threads(1)
    steps = dict.fromkeys(sides, 1)
    for name, run in sides.items():
        _timed(run, warm)  # plans, generated code, tables of Dynamo
        steps[name] = max(1, math.ceil(seconds / max(_timed(run, 3), 1e-7))) if seconds else 1
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            times[name].append(_timed(sides[name], steps[name]))
        order.append(order.pop(0))
        gc.collect()  # so that no side collects the garbage of another
    found: dict[str, Ratios] = {}
    for name, own in times.items():
        low, middle, high = statistics.quantiles([t / e for t, e in zip(own, times["eager"], strict=True)], n=4)
        found[name] = {"seconds": statistics.median(own), "ratio": middle, "low": low, "high": high}
    return found


def _timed(run: Call, steps: int) -> float:
    """Seconds of a step."""
    gc.disable()
    begun = time.thread_time()
    for _ in range(steps):
        run()
    took = (time.thread_time() - begun) / steps
    gc.enable()
    return took


def step_of(call: Callable[[], Tensor], g: Tensor | None = None, clears: Iterable[Tensor] = ()) -> Call:
    """Forward and backward, after which the gradients of some tensors are cleared."""
    cleared = list(clears)

    def step() -> None:
        call().backward(g)
        for t in cleared:
            t.grad = None

    return step
