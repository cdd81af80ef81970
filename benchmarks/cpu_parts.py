"""Where the CPU time of a converted training step goes: timers around the region, its generated code and each step.

Of tiny models of Hugging Face, by default and with `memory="lean"`, each in a process of its own. Times are those of
the thread, medians over steps; what lies around a timer pays for it. Writes `results/cpu_parts.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_cpu import language_model_step
from record import write
from torch import nn

import seqfuse as sf
from seqfuse.convert.region import CapturedRegion
from seqfuse.fusion import FusedOperation
from seqfuse.operation import UnfusedOperation
from seqfuse.run import node

STEPS = 300


class Timers:
    """Microseconds of each timed function, step by step."""

    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = defaultdict(list)
        self.calls: Counter[str] = Counter()
        self._now: dict[str, float] = defaultdict(float)
        self._inside = False  # of an operation: those that it recomputes are a part of it

    def timed(self, name: str, function: Callable[..., Any], operation: bool = False) -> Callable[..., Any]:
        """The function, timed."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if operation and self._inside:
                return function(*args, **kwargs)
            self._inside = operation
            begun = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._now[name] += (time.thread_time_ns() - begun) / 1e3
                self.calls[name] += 1
                self._inside = False

        return run

    def end_step(self) -> None:
        """Keep the sums of a step, and begin the next one."""
        for name, took in self._now.items():
            self.steps[name].append(took)
        self._now.clear()

    def median(self, name: str) -> float:
        """Microseconds in a step."""
        return statistics.median(self.steps[name]) if name in self.steps else 0.0


def _subclasses(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def instrument(timers: Timers) -> None:
    """Time each `fwd` and `bwd` that code is generated with from now on, the code, and regions."""
    for cls in {*_subclasses(UnfusedOperation), *_subclasses(FusedOperation)}:
        for name in ("fwd", "bwd"):
            own = vars(cls).get(name)
            if callable(own):
                setattr(cls, name, timers.timed(f"{name} {cls.__name__.removeprefix('_')}", own, operation=True))
    for name in ("forward", "backward"):
        make = getattr(node, f"{name}_code")

        def made(*args: Any, of: Any = make, name: str = name, **kwargs: Any) -> Any:
            return timers.timed(f"{name} code", of(*args, **kwargs))

        setattr(node, f"{name}_code", made)
    CapturedRegion.forward = timers.timed("region", CapturedRegion.forward)


def empty_node(count: int) -> float:
    """Microseconds of a `torch.autograd.Function` of so many parameters that computes nothing, both passes."""

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, *parameters)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *d: Any) -> Any:
            _ = ctx.saved_tensors
            return (d[0], *[None] * count)

    x = torch.randn(1, 32, 64, requires_grad=True)
    parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(count)]
    g = torch.randn(1, 32, 64)
    times: list[float] = []
    for _ in range(STEPS):
        begun = time.thread_time_ns()
        torch.autograd.grad(Empty.apply(x, *parameters), x, g)
        times.append((time.thread_time_ns() - begun) / 1e3)
    return statistics.median(times)


def measured(name: str, memory: str) -> dict[str, Any]:
    """The parts of a step of one model, in a process that has made no other."""
    timers = Timers()
    instrument(timers)
    models: list[nn.Module] = []

    def change(model: nn.Module) -> None:
        sf.convert(model, memory=memory)  # pyright: ignore[reportArgumentType]
        models.append(model)

    step = timers.timed("step", language_model_step(name, change, 64, 32))
    for _ in range(30):
        step()
    timers.end_step()
    timers.steps.clear()
    timers.calls.clear()
    for _ in range(STEPS):
        step()
        timers.end_step()
    named = {n: timers.median(n) for n in timers.steps if n.startswith(("fwd ", "bwd "))}
    sums = {side: sum(t for n, t in named.items() if n.startswith(side)) for side in ("fwd", "bwd")}
    whole, region, forward, backward = map(timers.median, ("step", "region", "forward code", "backward code"))
    parts = {
        "model's Python, Dynamo, loss, autograd": whole - region - backward,
        "region: parameters lent, guard, node": region - forward,
        "forward code: records, saved tensors": forward - sums["fwd"],
        "forward code: `fwd` of operations": sums["fwd"],
        "backward code: records, gradients summed": backward - sums["bwd"],
        "backward code: `bwd` of operations": sums["bwd"],
        "(an empty node of as many parameters)": empty_node(len(list(models[0].parameters()))),
    }
    calls = {n: timers.calls[n] / STEPS for n in named}
    operations = {n: {"each": took / calls[n], "calls": calls[n]} for n, took in named.items()}
    return {"model": name, "memory": memory, "step": whole, "parts": parts, "operations": operations}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "MEMORY"), help="print the parts of one as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(measured(*options.one)))
        return
    rows: list[dict[str, Any]] = []
    for name in ("GPT-2", "Llama"):
        for memory in ("save", "lean"):
            command = [sys.executable, __file__, "--one", name, memory]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows.append(json.loads(out.splitlines()[-1]))
            print(f"{name}, memory={memory}: {rows[-1]['step']:,.0f} us a step with timers", flush=True)
            for part, took in rows[-1]["parts"].items():
                print(f"  {took:8.0f} us  {part}", flush=True)
    print(f"wrote {write('cpu_parts', {'rows': rows}).name}")


if __name__ == "__main__":
    main()
