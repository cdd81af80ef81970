"""Simulated kernels: plain torch that loads, computes and stores like a fused kernel, with a seeded bug on request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from seqfuse.testing import in_regime

Tensors = dict[str, Tensor]

# Each is right, and each rounds differently.
VARIANTS = (
    "float32 inside",
    "float64 inside",
    "sums in reverse",
    "sums in blocks",
    "fused multiply-add",
    "intermediates rounded to the working dtype",
    "other algebra",
)


@dataclass(frozen=True)
class Chain:
    """A chain of operations: `forward` as a user writes it, `fused` as a kernel computes it and all its gradients."""

    name: str
    bugs: tuple[str, ...]
    draw: Callable[[str, int], Tensors]
    forward: Callable[[Tensors], Tensors]
    fused: Callable[[Tensors, Kernel], Tensors]

    def inputs(self, regime: str, dtype: torch.dtype, seed: int) -> Tensors:
        return {key: t if t.dtype == torch.bool else t.to(dtype) for key, t in self.draw(regime, seed).items()}

    def unfused(self, inputs: Tensors) -> Tensors:
        """Outputs and every gradient by autograd, in the dtype of the inputs; `d_*` are the incoming gradients."""
        leaves = {k: t.clone().requires_grad_() for k, t in inputs.items() if k[:2] != "d_" and t.dtype != torch.bool}
        outputs = self.forward(inputs | leaves)
        incoming = [inputs[f"d_{key}"] for key in outputs]
        grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), incoming)
        return {k: t.detach() for k, t in outputs.items()} | {
            f"{k}.grad": g for k, g in zip(leaves, grads, strict=True)
        }

    @cache  # noqa: B019 - three chains, alive as long as the tests
    def expected(self, regime: str, dtype: torch.dtype, seed: int) -> tuple[Tensors, Tensors, Tensors]:
        """Inputs, the unfused results in `dtype`, and the float64 reference from the same representable inputs."""
        inputs = self.inputs(regime, dtype, seed)
        exact = {key: t if t.dtype == torch.bool else t.double() for key, t in inputs.items()}
        return inputs, self.unfused(inputs), self.unfused(exact)

    def simulate(self, inputs: Tensors, change: str, dtype: torch.dtype) -> Tensors:
        assert change in (*self.bugs, *VARIANTS)
        return self.fused(inputs, Kernel(change, dtype))


def rows_in(regime: str, shape: tuple[int, ...], seed: int) -> Tensor:
    return in_regime(regime, shape, seed, dtype=torch.float64)


class Kernel:
    """The arithmetic of one simulated kernel: float32 between a load and a store, unless `change` says otherwise."""

    def __init__(self, change: str, dtype: torch.dtype) -> None:
        self.change, self.dtype = change, dtype
        wide = change in ("float64 inside", "truncating store")
        self.compute = torch.float64 if wide else torch.float32

    def has(self, change: str) -> bool:
        return self.change == change

    def load(self, *tensors: Tensor) -> list[Tensor]:
        return [t.to(self.compute) for t in tensors]

    def store(self, t: Tensor) -> Tensor:
        return toward_zero(t, self.dtype) if self.has("truncating store") else t.to(self.dtype)

    def keep(self, t: Tensor) -> Tensor:
        """An intermediate value, which unfused operations would round to the working dtype."""
        rounds = self.has("intermediates rounded to the working dtype")
        return t.to(self.dtype).to(self.compute) if rounds else t

    def fma(self, a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
        if self.has("fused multiply-add"):
            wide = [t.double() if isinstance(t, Tensor) else t for t in (a, b, c)]
            return (wide[0] * wide[1] + wide[2]).to(self.compute)
        return a * b + c

    def sum(self, t: Tensor, dim: int) -> Tensor:
        if self.has("low-precision accumulation"):
            total = torch.zeros_like(t.select(dim, 0), dtype=torch.bfloat16)
            for part in t.unbind(dim):
                total = (total + part).bfloat16()
            return total.to(self.compute)
        if self.has("sums in reverse"):
            return t.flip(dim).sum(dim)
        if self.has("sums in blocks"):
            return torch.stack([block.sum(dim) for block in t.split(16, dim)]).sum(0)
        return t.sum(dim)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """a [M, K] times b [K, N], by the same sums."""
        if self.has("low-precision accumulation"):
            return self.sum(a[:, :, None] * b[None], 1)
        if self.has("sums in reverse"):
            return a.flip(1) @ b.flip(0)
        if self.has("sums in blocks"):
            return torch.stack([p @ q for p, q in zip(a.split(16, 1), b.split(16, 0), strict=True)]).sum(0)
        return a @ b


def toward_zero(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded toward zero, like a store that drops the low bits."""
    near = t.to(dtype)
    beyond = near.double().abs() > t.double().abs()
    return torch.where(beyond, torch.nextafter(near, torch.zeros_like(near)), near)


def coarse(t: Tensor, digits: int = 11) -> Tensor:
    """To 11 binary digits: an approximation without its Newton step."""
    mantissa, exponent = torch.frexp(t)
    return torch.ldexp((mantissa * 2**digits).round() / 2**digits, exponent)


def power_of_two_above(n: int) -> int:
    return 1 << math.ceil(math.log2(n))


def without_last_row(t: Tensor) -> Tensor:
    return torch.cat((t[:-1], torch.zeros_like(t[-1:])))
