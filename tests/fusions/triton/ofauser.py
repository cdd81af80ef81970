"""Activations that a user defines, and kernels compiled with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import seqfuse as sf
from seqfuse.kernels import norm, pointwise
from seqfuse.testing.compile import Variant
from tools.launches import SEED, launching


class Mish(sf.Pointwise):
    """y = x tanh(log(1 + exp(x)))."""

    @triton.jit
    def value(x):
        e = tl.exp(tl.where(x > 40.0, 40.0, x))
        return x * (e * (e + 2.0) / (e * (e + 2.0) + 2.0))

    @triton.jit
    def derivative(x):
        e = tl.exp(tl.where(x > 40.0, 40.0, x))  # of 40 the square of n overflows, and the factor of x is 0
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


def variants(target: str) -> Iterator[Variant]:
    """Each kernel that takes a device function, compiled with these."""
    for act in (Mish(), Leaky()):
        name = type(act).__name__
        for call in _calls(act):
            with launching(target) as found:
                call()
            for launch in found:
                if "column_sums" not in launch.kernel.__name__:
                    yield launch.variant(f"{name} {launch.kernel.__name__}")


def _calls(act: Any) -> Iterator[Callable[[], Any]]:
    p = pointwise
    x, b, wide = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((512, 1024), (1024,), (512, 2048)))
    rows = torch.empty(512)
    for step, first, given in ((p.act, x, ()), (p.dact, x, (x,)), (p.gated, wide, ()), (p.dgated, x, (wide,))):
        yield functools.partial(p.pointwise, first, p.Chain(step(act)), given)
    yield functools.partial(p.pointwise, x, p.Chain(p.dact(act), p.column_sum()), (x,))
    around: dict[str, Any] = {"pre_bias": b, "seed": SEED, "p": 0.1, "residual": x, "act": act}
    yield functools.partial(norm.norm_fwd, x, b, b, 1e-5, **around)
    yield functools.partial(
        norm.norm_bwd, x, x, rows, rows, b, b, act=act, seed=SEED, p=0.1, dweight=b.dtype, dbias=b.dtype,
        dpre_bias=b.dtype, dbranch=True,
    )  # fmt: skip
