"""What the machine can do at most: bytes copied and products made in a second, measured in the same run."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from .clock import Clock, interleaved


class Ceilings(NamedTuple):
    """Bytes per microsecond of a copy, read and written; FLOPs per microsecond of cuBLAS, by dtype."""

    bandwidth: float
    rates: dict[str, float]

    def floor(self, least: int, flops: float, dtype: torch.dtype) -> float:
        """The fewest microseconds: memory alone, or products alone."""
        return max(least / self.bandwidth, flops / self.rates[name_of(dtype)])

    def stated(self) -> dict[str, Any]:
        """As it is written down."""
        rates = {k: r / 1e6 for k, r in self.rates.items()}
        return {"copy_TB_per_s": self.bandwidth / 1e6, "cublas_TFLOP_per_s": rates}


def of(stated: dict[str, Any]) -> Ceilings:
    """What was written down."""
    rates = {k: r * 1e6 for k, r in stated["cublas_TFLOP_per_s"].items()}
    return Ceilings(stated["copy_TB_per_s"] * 1e6, rates)


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` and the like."""
    return str(dtype).removeprefix("torch.")


def measure(
    clock: Clock, device: torch.device, dtypes: tuple[torch.dtype, ...], *, numel: int = 2**29, side: int = 8192
) -> Ceilings:
    """Copy `numel` elements of two bytes, and multiply square matrices, of random numbers."""
    sources = [torch.randn(numel, device=device, dtype=torch.bfloat16) for _ in range(2)]
    copies = [functools.partial(torch.empty_like(source).copy_, source) for source in sources]
    bandwidth = 4 * numel / interleaved({"copy": copies}, clock, seconds=1.0)["copy"].median
    del sources, copies
    rates: dict[str, float] = {}
    for dtype in dtypes:
        n = side if dtype.itemsize == 2 else side // 2
        pairs = [[torch.randn(n, n, device=device).to(dtype) for _ in range(2)] for _ in range(2)]
        products = [lambda a=a, b=b: a @ b for a, b in pairs]
        rates[name_of(dtype)] = 2 * n**3 / interleaved({"mm": products}, clock, seconds=1.0)["mm"].median
    return Ceilings(bandwidth, rates)
