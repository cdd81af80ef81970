"""Operations and fusions that take a declared time, on a clock that only they advance."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import cost_table, ops
from seqfuse.ops.activations import gelu_backward


@dataclasses.dataclass
class FakeClock:
    """Nanoseconds that have passed; `calls` counts what was timed."""

    now: float = 0.0
    calls: int = 0

    def __call__(self, device: torch.device) -> Callable[[Callable[[], Any]], float]:
        def timed(run: Callable[[], Any]) -> float:
            self.calls += 1
            begun = self.now
            run()
            return self.now - begun + 1.0

        return timed


CLOCK = FakeClock()
US = 1000.0
X = torch.ones(6, 4)
TUNING: Any = sys.modules["seqfuse.tune"]  # the package's attribute of this name is the function


def spend(microseconds: float) -> None:
    CLOCK.now += microseconds * US


class Halve(sf.UnfusedOperation):
    """y = x / 2, which takes 50 us each way."""

    class Saved(sf.Saved):
        pass

    def reference(self, x: Tensor) -> Tensor:
        return x / 2

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        spend(50)
        return x / 2, self.Saved()

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        spend(50)
        return dy / 2, {}


class _Pair:
    """`Bias, Halve`; declares that it saves `launches`."""

    launches = 1.0

    def saves(self, env: sf.Env) -> sf.Savings:
        return sf.Savings(launches=self.launches)


def both(self: Any, x: Tensor) -> Any:
    """A right forward pass."""
    return (x + self.bias.bias) / 2, {"bias": ops.Bias.Saved(), "halve": Halve.Saved()}


def forward(name: str, act: Callable[[Any, Tensor], Any], launches: float = 1.0) -> type[sf.ForwardFusion]:
    """A forward fusion of `Bias, Halve` that first calls `act(self, x)`, and returns its result, if any."""

    class Made(_Pair, sf.ForwardFusion):
        bias: ops.Bias
        halve: Halve

        def fwd(self, x: Tensor) -> Any:
            found = act(self, x)
            return both(self, x) if found is None else found

    Made.__name__ = Made.__qualname__ = name
    Made.launches = launches
    return Made


def failing(error: BaseException) -> Callable[[Any, Tensor], Any]:
    def act(self: Any, x: Tensor) -> Any:
        raise error

    return act


# Their source is the same in every process, unlike that of fusions with a closure.
class Quick(_Pair, sf.ForwardFusion):
    bias: ops.Bias
    halve: Halve

    launches = -100.0  # faster than it declares

    def fwd(self, x: Tensor) -> Any:
        spend(10)
        return both(self, x)


class Slow(_Pair, sf.ForwardFusion):
    bias: ops.Bias
    halve: Halve

    launches = 100.0  # slower than it declares

    def fwd(self, x: Tensor) -> Any:
        spend(80)
        return both(self, x)


class QuickBackward(_Pair, sf.BackwardFusion):
    bias: ops.Bias
    halve: Halve

    def bwd(self, dy: Tensor, *, bias: Any, halve: Any, needs: frozenset[str]) -> Any:
        spend(20)
        dx = dy / 2
        return dx, {"bias.bias": dx.sum(0) if "bias.bias" in needs else None}


class QuickJoint(_Pair, sf.JointFusion):
    bias: ops.Bias
    halve: Halve

    class Saved(sf.Saved):
        pass

    def fwd(self, x: Tensor) -> Any:
        spend(11)
        return (x + self.bias.bias) / 2, self.Saved()

    def bwd(self, dy: Tensor, saved: Saved) -> Any:
        spend(22)
        dx = dy / 2
        return dx, {"bias.bias": dx.sum(0)}


class QuickInference(_Pair, sf.InferenceFusion):
    bias: ops.Bias
    halve: Halve

    def fwd(self, x: Tensor) -> Any:
        spend(7)
        return (x + self.bias.bias) / 2


class DropoutAdd(sf.ForwardFusion):
    """Reads a seed and a channel."""

    drop: ops.Dropout
    add: ops.Add

    def fwd(self, x: Tensor, *, drop_seed: Tensor | None, add_other: Tensor) -> Any:
        spend(1)
        y, saved = self.drop.fwd(x, seed=drop_seed)
        return y + add_other, {"drop": saved, "add": ops.Add.Saved()}


class GeLUHalveBackward(sf.BackwardFusion):
    """Reads a tensor that a forward must have saved."""

    act: ops.GeLU
    halve: Halve

    def bwd(self, dy: Tensor, *, act: Any, halve: Any) -> Any:
        spend(3)
        return gelu_backward(dy / 2, act.x), {}


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like the start of a new process."""
    monkeypatch.setattr(cost_table, "_tables", {})
    monkeypatch.setattr(cost_table, "_warned", set())


def times(report: sf.tune.TuneReport) -> dict[tuple[str, str], tuple[float | None, float | None, bool]]:
    """Times of each row without and with fusion in us, and whether the fusion is chosen."""
    rounded = {}
    for r in report.rows:
        a, b = (None if t is None else round(t) for t in (r.fused_us, r.unfused_us))
        rounded[r.fusion, r.mode] = a, b, r.chosen
    return rounded


def pair(*fusions: Any, width: int = 4) -> sf.Sequential:
    return sf.Sequential(ops.Bias(width), Halve(), fusions=fusions)
