"""An optional Bias and a gated unit, each way in one pass over memory by a Triton kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..env import Env
from ..fusion import BackwardFusion, ForwardFusion, Requirements
from ..operation import Grads
from ..ops import Bias
from ..pointwise import Gated
from ._kernels import kernel_takes_gated
from ._pointwise import chain, kernel_takes_chain, pointwise_of


class BiasGated(ForwardFusion):
    """y = act(gate) up, [gate; up] = x + bias, in one pass; the sum is stored for the gated unit's gradient.

    x, [gate; up]: [*, 2 F], y: [*, F]. Saves what the operations save.
    """

    bias: Bias | None
    gated: Gated

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        yield from kernel_takes_chain(self.bias, env)
        yield from kernel_takes_gated(self.gated, env)
        yield env.leaving is env.dtype, "the gated unit gives another dtype"

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        gated, bias = self.gated, self.bias
        steps = ("gated",) if bias is None else ("bias", "store", "gated")
        kernel = self.decided(gated.activation.P, _kernel, gated, steps)
        y: Any
        if bias is None:
            (y,) = kernel(x)
            return y, {"gated": gated.Saved(x=x)}  # pyright: ignore[reportCallIssue]
        y, packed = kernel(x, bias.read())
        return y, {"gated": gated.Saved(x=packed)}  # pyright: ignore[reportCallIssue]


class BiasGatedBackward(BackwardFusion):
    """dx = [dgate; dup], dgate = dy up act'(gate), dup = dy act(gate), and its sum over all rows, which is dbias.

    One pass; the sum is of float32 numbers and in a fixed order. dy: [*, F], dx: [*, 2 F].
    """

    bias: Bias | None
    gated: Gated

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        yield from kernel_takes_chain(self.bias, env)
        yield from kernel_takes_gated(self.gated, env)
        yield env.leaving is env.dtype, "the gated unit gives another dtype"

    def bwd(self, dy: Tensor, *, gated: Any, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:
        steps = ("dgated", "column_sum") if "bias.bias" in needs else ("dgated",)
        key = needs, self.gated.activation.P
        dx, *sums = self.decided(key, _kernel, self.gated, steps, "x" in needs)(dy, gated.x)
        return dx, {"bias.bias": sums[0]} if sums else {}


def _kernel(gated: Gated, steps: Sequence[str], result: bool = True) -> Callable[..., tuple[Tensor | None, ...]]:
    return pointwise_of()(chain(gated.activation, *steps), result=result)
