"""CPU time of steps on one thread: sides take turns, and the ratios are those of one round."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], Any]
"""One training step, or what is measured in its place."""


Times = dict[str, float]
"""Seconds of a step, and of the ratios to eager the median and the quartiles."""


def paired(sides: Mapping[str, Step], rounds: int, seconds: float = 0.0, warm: int = 10) -> dict[str, Times]:
    """Time sides in turn, `eager` among them, each for about `seconds` in a round; the first side of a round changes.

    Times are those of the thread, which other processes do not add to.
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
        gc.collect()  # here, so that no side pays for the garbage of another
    found: dict[str, Times] = {}
    for name, own in times.items():
        low, middle, high = statistics.quantiles([t / e for t, e in zip(own, times["eager"], strict=True)], n=4)
        found[name] = {"seconds": statistics.median(own), "ratio": middle, "low": low, "high": high}
    return found


def _timed(run: Step, steps: int) -> float:
    """Seconds of a step."""
    gc.disable()
    begun = time.thread_time()
    for _ in range(steps):
        run()
    took = (time.thread_time() - begun) / steps
    gc.enable()
    return took


def step_of(call: Callable[[], Tensor], g: Tensor | None = None, clears: Iterable[Tensor] = ()) -> Step:
    """Forward and backward, after which some tensors have no gradients."""
    cleared = list(clears)

    def step() -> None:
        call().backward(g)
        for t in cleared:
            t.grad = None

    return step
