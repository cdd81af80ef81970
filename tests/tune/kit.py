"""Operations and fusions that take as long as they say, on a clock that only they move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
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
    """`Bias, Halve` forward; `takes` microseconds, and says that it saves `launches`."""

    takes = 0.0
    launches = 1.0

    def saves(self, env: sf.Env) -> sf.Savings:
        return sf.Savings(launches=self.launches)

    def both(self, x: Tensor) -> Any:
        spend(self.takes)
        bias: Any = self.bias
        return (x + bias.bias) / 2, {"bias": ops.Bias.Saved(), "halve": Halve.Saved()}


class Quick(_Pair, sf.ForwardFusion):
    bias: ops.Bias
    halve: Halve

    takes, launches = 10.0, -100.0  # faster than it thinks

    def fwd(self, x: Tensor) -> Any:
        return self.both(x)


class Slow(_Pair, sf.ForwardFusion):
    bias: ops.Bias
    halve: Halve

    takes, launches = 80.0, 100.0  # slower than it thinks

    def fwd(self, x: Tensor) -> Any:
        return self.both(x)


class Broken(_Pair, sf.ForwardFusion):
    bias: ops.Bias
    halve: Halve

    def fwd(self, x: Tensor) -> Any:
        raise ArithmeticError("no such luck")


class Starved(_Pair, sf.ForwardFusion):
    bias: ops.Bias
    halve: Halve

    def fwd(self, x: Tensor) -> Any:
        raise torch.OutOfMemoryError("not now")


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
    """Reads a record that a forward must have made."""

    act: ops.GeLU
    halve: Halve

    def bwd(self, dy: Tensor, *, act: Any, halve: Any) -> Any:
        spend(3)
        return gelu_backward(dy / 2, act.x), {}


def pair(*fusions: Any, width: int = 4) -> sf.Sequential:
    return sf.Sequential(ops.Bias(width), Halve(), fusions=fusions)
