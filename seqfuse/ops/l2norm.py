"""L2Norm: a row divided by its length."""

from __future__ import annotations

from typing import ClassVar

from ..fusion import Fusions
from ..run import Sequential
from .norm import RMSNorm
from .scale import Scale


class L2Norm(Sequential):
    """y = x / sqrt(sum of x^2 + eps), over the last dimension: `RMSNorm(size, eps / size), Scale(size^-1/2)`.

    Backward: with r = 1 / sqrt(sum of x^2 + eps), dx = r (dy - y (y . dy)).

    x, y: [*, size]. No parameters. It fuses as `RMSNorm` and `Scale` do.
    Source: Wang et al. 2017, arXiv:1704.06369.

    Args:
        size: length of the last dimension.
        eps: added to the sum of squares.
        fusions: the fusion set when called by itself; by default `sf.fusions.default`.

    Raises:
        ValueError: for a size below 1.
    """

    inlines: ClassVar[bool] = True

    def __init__(self, size: int, eps: float = 1e-6, *, fusions: Fusions | None = None) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        norm = RMSNorm(size, eps=eps / size, elementwise_affine=False)
        super().__init__(norm, Scale(size**-0.5), fusions=fusions)
        self.size, self.eps = size, eps

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps:g}"
