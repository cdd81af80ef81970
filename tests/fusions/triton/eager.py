"""Blocks and layers as they are written in eager torch, for counts of launches beside those of operations.

One GEMM makes queries, keys and values, one makes gate and up; cosine and sine are at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Once = Callable[[Callable[..., Any], int], Callable[..., Any]]


class Kernels(torch.autograd.Function):
    """What a GPU makes by so many launches forward and backward, where a CPU makes many calls of it; no numbers."""

    @staticmethod
    def forward(ctx: Any, own: Eager, ahead: int, back: int, *inputs: Tensor) -> Tensor:
        ctx.own, ctx.back, ctx.inputs = own, back, inputs
        return own.ahead(lambda: torch.empty_like(inputs[0]), ahead)()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, None, *ctx.own.back(lambda: [torch.empty_like(t) for t in ctx.inputs], ctx.back)()


class Eager:
    """Parameters made as they are first asked for, and functions of them.

    `ahead` and `back` count what a function does as so many launches of a pass.
    """

    def __init__(
        self, ahead: Once, back: Once, *, width: int, hidden: int, gated: bool, heads: int = 16, kv_heads: int = 16,
        llama: bool = False,
    ) -> None:  # fmt: skip
        self.ahead, self.back = ahead, back
        self.width, self.hidden, self.gated, self.llama = width, hidden, gated, llama
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.parameters: dict[str, Tensor] = {}

    def parameter(self, name: str, *shape: int) -> Tensor:
        if name not in self.parameters:
            self.parameters[name] = torch.empty(shape, dtype=torch.bfloat16).requires_grad_()
        return self.parameters[name]

    def linear(self, name: str, x: Tensor, features: int) -> Tensor:
        bias = None if self.llama else self.parameter(f"{name}.bias", features)
        return F.linear(x, self.parameter(name, features, x.shape[-1]), bias)

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.parameter(name, self.width)
        if self.llama:
            return Kernels.apply(self, 1, 2, x, weight)
        return F.layer_norm(x, (self.width,), weight, self.parameter(f"{name}.bias", self.width))

    def feedforward(self, at: str, x: Tensor) -> Tensor:
        h = self.linear(f"{at}.up", self.norm(f"{at}.norm", x), self.hidden * (1 + self.gated))
        if self.gated:
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        else:
            h = F.gelu(h)
        return x + self.linear(f"{at}.down", h, self.width)

    def attention(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        parts = [n * self.size for n in (self.heads, self.kv_heads, self.kv_heads)]
        qkv = self.linear("qkv", self.norm("attention.norm", x), sum(parts))
        q, k, v = (t.unflatten(-1, (-1, self.size)) for t in qkv.split(parts, -1))
        if self.llama:
            cos, sin = torch.empty(2, x.shape[-2], 1, self.size, dtype=x.dtype)
            q, k = (t * cos + self.turned(t) * sin for t in (q, k))
        if cache is not None:
            for whole, new in zip(cache, (k, v), strict=True):
                whole[:, -1:] = new
            k, v = cache
        y = Kernels.apply(self, 1, 1, q, k, v)
        return x + self.linear("out", y.flatten(-2), self.width)

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    def layer(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        return self.feedforward("feedforward", self.attention(x, cache))
