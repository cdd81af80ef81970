"""What the two norms share: their trailing shape, and dtypes in which ATen keeps its statistics in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import operation as sf
from ..casts import dtype_of
from ..env import Env, autocast_of


class Norm(sf.UnfusedOperation):
    """A normalization over the trailing dimensions `normalized_shape`, with a gain `weight`, or `1 + weight`."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    eps: Any  # a float; RMSNorm takes None as well
    autocast = "float32"
    any_dy = True

    def __init__(
        self, normalized_shape: int | Sequence[int], affine: bool, zero_centered: bool, **factory: Any
    ) -> None:
        super().__init__()
        sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not sizes:
            raise ValueError("normalized_shape needs at least one dimension")
        self.normalized_shape: tuple[int, ...] = sizes
        self.elementwise_affine, self.zero_centered = affine, zero_centered
        self.register_parameter("weight", nn.Parameter(torch.empty(sizes, **factory)) if affine else None)

    def reset_parameters(self) -> None:
        """Start from a gain of one, and no bias."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    @property
    def features(self) -> tuple[int, int] | None:
        sizes = self.normalized_shape
        return (sizes[0], sizes[0]) if len(sizes) == 1 else None

    def converts(self, env: Env) -> bool:
        """Whether ATen needs x in float32: its kernels for half inputs take parameters of their dtype only."""
        own = dtype_of(self, "weight")
        return env.dtype.itemsize == 2 and own is not None and (self.zero_centered or own is not env.dtype)

    def y_is_cast(self, env: Env) -> bool:
        """Whether y is cast for what comes next."""
        return bool(env.along) and env.leaving is not self.y_dtype_in(env)

    def y_dtype_in(self, env: Env) -> torch.dtype:
        """The dtype of y, unfused."""
        return torch.float32 if env.autocast is not None and env.device != "cpu" else env.dtype

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        # Float32 copies of x and y take 20 bytes per element where 4 would do. For the sums over tokens ATen's
        # backward reads dy and x again.
        copied = self.converts(env)
        if backward:
            return sf.Traffic(1, 2, 1 + (2 if self.elementwise_affine else 0) + (14 if copied else 0))
        return sf.Traffic(1 + 2 * copied + self.y_is_cast(env), 1, 1 + 8 * copied)

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = self.normalized_shape
        if tuple(shape[-len(sizes) :]) != sizes:
            wanted = f"last dimension {sizes[0]}" if len(sizes) == 1 else f"last dimensions {sizes}"
            short = len(shape) < len(sizes)
            got = f"{len(shape)}-d" if short else shape[-1] if len(sizes) == 1 else tuple(shape[-len(sizes) :])
            raise ValueError(f"expects {wanted}, got {got}")
        return shape

    def gain(self, weight: Tensor | None, stats: torch.dtype) -> Tensor | None:
        """What xhat is multiplied by; `1 + weight` in the dtype of the statistics, which keeps a small weight."""
        return weight.to(stats) + 1 if weight is not None and self.zero_centered else weight

    def as_parameter(self, gradient: Tensor, name: str) -> Tensor:
        """A gradient summed in the dtype of the statistics, rounded once to the dtype of its parameter."""
        own = dtype_of(self, name)
        return gradient if own is None or own is gradient.dtype else gradient.to(own)

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        return text + (", zero_centered=True" if self.zero_centered else "")

    @classmethod
    def examples(cls, x: Tensor) -> tuple[sf.UnfusedOperation, ...]:
        other: Any = cls.example(x)
        centered: Any = cls.example(x)
        other.eps, centered.zero_centered = 0.01, True
        return (cls.example(x), other, centered)


def stats_dtype(x: Tensor) -> torch.dtype:
    """The dtype statistics are computed and kept in: float32, or float64 for a float64 input."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def rows_summed(dy: Tensor, trailing: int) -> Tensor:
    """The sum over all but the last `trailing` dimensions, in a tensor of its own."""
    rows = tuple(range(dy.ndim - trailing))
    return dy.sum(rows) if rows else dy.clone()


def rounded(y: Tensor, x: Tensor) -> Tensor:
    """The result in the dtype of the input, except under autocast on an accelerator, where norms give float32."""
    if y.dtype is x.dtype or (x.device.type != "cpu" and autocast_of(x.device.type) is not None):
        return y
    return y.to(x.dtype)
