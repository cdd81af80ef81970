"""Bias and the activation after it, each way in one pass over memory by a Triton kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, InferenceFusion, Requirements
from ..operation import Grads
from ..ops import Bias
from ..pointwise import Pointwise
from ._kernels import kernel_takes_act
from ._pointwise import chain, kernel_takes_chain, passes


class BiasActivation(ForwardFusion):
    """y = act(z), z = x + bias, in one pass; z is stored only where the activation's gradient reads it.

    x, z, y: [*, H]. Saves what the operations save.
    """

    bias: Bias
    act: Pointwise

    triton = True

    def requires(self, env: Env) -> Requirements:
        yield from kernel_takes_chain(self.bias, env)
        yield from kernel_takes_act(self.act)

    def saves(self, env: Env) -> Savings:
        return passes(self.bias, env, 1, 1 if self.act.reads == "input" else 2)

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        from ..kernels.pointwise import pointwise

        steps = ("bias", "store", "act") if self.act.reads == "input" else ("bias", "act")
        y, *stored = pointwise(x, chain(self.act, *steps), (self.bias.read(),))
        z: Any = stored[0] if stored else y
        assert y is not None
        return y, {"bias": Bias.NOTHING, "act": self.act.record(z, y)}


class BiasActivationInference(InferenceFusion):
    """y = act(x + bias) in one pass, where nothing needs a gradient.

    x, y: [*, H].
    """

    bias: Bias
    act: Pointwise

    triton = True

    def requires(self, env: Env) -> Requirements:
        yield from kernel_takes_chain(self.bias, env)
        yield from kernel_takes_act(self.act)

    def saves(self, env: Env) -> Savings:
        return passes(self.bias, env, 1, 2)

    def fwd(self, x: Tensor) -> Any:
        from ..kernels.pointwise import pointwise

        return pointwise(x, chain(self.act, "bias", "act"), (self.bias.read(),))[0]


class BiasActivationBackward(BackwardFusion):
    """dx = dy act'(t) and its sum over all rows, which is dbias, in one pass; t is what the activation keeps.

    The sum is of float32 numbers and in a fixed order. dy, t, dx: [*, H].
    """

    bias: Bias
    act: Pointwise

    triton = True

    def requires(self, env: Env) -> Requirements:
        yield from kernel_takes_chain(self.bias, env)
        yield from kernel_takes_act(self.act)

    def saves(self, env: Env) -> Savings:
        return passes(self.bias, env, 1, 1)

    def bwd(self, dy: Tensor, *, bias: Bias.Saved, act: Any, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:
        from ..kernels.pointwise import pointwise

        t = act.x if self.act.reads == "input" else act.y
        steps = ("dact", "column_sum") if "bias.bias" in needs else ("dact",)
        dx, *sums = pointwise(dy, chain(self.act, *steps), (t,), result="x" in needs)
        return dx, {"bias.bias": sums[0] if sums else None}
