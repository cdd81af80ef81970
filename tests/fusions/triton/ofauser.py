"""Activations as a user's module states them, and what kernels made with them compile to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

import seqfuse as sf
from seqfuse.kernels import gemm, norm, pointwise
from seqfuse.kernels._variants import Variant


class Mish(sf.Pointwise):
    """y = x tanh(log(1 + exp(x)))."""

    @triton.jit
    def value(x):
        e = tl.exp(tl.where(x > 40.0, 40.0, x))
        return x * (e * (e + 2.0) / (e * (e + 2.0) + 2.0))

    @triton.jit
    def derivative(x):
        e = tl.exp(tl.where(x > 40.0, 40.0, x))  # of 40 the square of n overflows, and what x is multiplied by is 0
        n = e * (e + 2.0) + 2.0
        return e * (e + 2.0) / n + x * (4.0 * e * (e + 1.0) / (n * n))

    def reference(self, x: Tensor) -> Tensor:
        return torch.nn.functional.mish(x)


@triton.jit
def leaky(x, P: tl.constexpr):
    return tl.where(x > 0.0, x, P[0] * x)


@triton.jit
def leaky_derivative(y, P: tl.constexpr):
    return tl.where(y > 0.0, 1.0, P[0])


class Leaky(sf.Pointwise):
    """y = x where x > 0, else slope x; slope > 0."""

    reads = "output"
    value, derivative = leaky, leaky_derivative

    def __init__(self, slope: float = 0.125) -> None:
        super().__init__()
        self.slope = slope

    @property
    def P(self) -> tuple[float, ...]:
        return (self.slope,)

    def reference(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.slope * x)

    def derivative_reference(self, y: Tensor) -> Tensor:
        return torch.where(y > 0, 1.0, self.slope).to(y.dtype)


PLACES = (
    "forward+bias,gelu,pre ",
    "swiglu+bias,pre ",
    "dgrad+gelu,sums,emit ",
    "dgrad+swiglu,sums,emit ",
    "+pre_bias,seed,residual,act bf16 1024 ",
)
"""One configuration of each kernel that takes a device function, by a part of its name."""


def variants() -> Iterator[Variant]:
    for act in (Mish(), Leaky()):
        name = type(act).__name__
        steps = (pointwise.act, pointwise.dact, pointwise.gated, pointwise.dgated)
        for chain in (*((step(act),) for step in steps), (pointwise.dact(act), pointwise.column_sum())):
            one = pointwise.chain_variant(pointwise.Chain(*chain), torch.bfloat16, 4096)
            yield dataclasses.replace(one, name=f"{name} {one.name}")
        functions = {"VALUE": act.value, "DERIVATIVE": act.derivative, "P": act.P, "ACT_P": act.P}
        functions |= dict.fromkeys(("READS_OUTPUT", "OF_OUTPUT"), act.reads == "output")
        seen: set[tuple[str, tuple[str, ...]]] = set()
        for one in (*gemm.variants(), *norm.variants()):
            place = next((place for place in PLACES if place in one.name), None)
            if place is None or (place + one.kernel.__name__, one.targets) in seen:
                continue
            seen.add((place + one.kernel.__name__, one.targets))
            taken = {key: value for key, value in functions.items() if one.constexprs.get(key) is not None}
            if "ACT_P" in taken:
                taken.pop("P", None)
            yield dataclasses.replace(one, name=f"{name} {one.name}", constexprs={**one.constexprs, **taken})
