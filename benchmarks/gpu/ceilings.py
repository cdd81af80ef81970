"""What the machine can do at most: bytes copied and products made in a second, measured in the same run."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .clock import Clock, interleaved


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Bytes per microsecond of a copy, read and written; FLOPs per microsecond of cuBLAS, by dtype."""

    bandwidth: float
    rates: dict[str, float]

    def floor(self, least: int, flops: float, dtype: torch.dtype) -> float:
        """The fewest microseconds: memory alone, or products alone."""
        return max(least / self.bandwidth, flops / self.rates[name_of(dtype)])

    def stated(self) -> dict[str, Any]:
        """As it is written down."""
        return {
            "copy_TB_per_s": self.bandwidth / 1e6,
            "cublas_TFLOP_per_s": {k: r / 1e6 for k, r in self.rates.items()},
        }


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` and the like."""
    return str(dtype).removeprefix("torch.")


def measure(
    clock: Clock, device: torch.device, dtypes: tuple[torch.dtype, ...], *, numel: int = 2**29, side: int = 8192
) -> Ceilings:
    """Copy `numel` elements of two bytes, and multiply square matrices, of random numbers."""
    sources = [torch.randn(numel, device=device, dtype=torch.bfloat16) for _ in range(2)]
    targets = [torch.empty_like(t) for t in sources]
    copies = [lambda s=s, t=t: t.copy_(s) for s, t in zip(sources, targets, strict=True)]
    times = interleaved({"copy": copies}, clock, seconds=1.0)
    bandwidth = 2 * sources[0].numel() * sources[0].element_size() / times["copy"].median
    del sources, targets, copies
    rates: dict[str, float] = {}
    for dtype in dtypes:
        n = side if dtype.itemsize == 2 else side // 2
        pairs = [[torch.randn(n, n, device=device).to(dtype) for _ in range(2)] for _ in range(2)]
        products = [lambda a=a, b=b: a @ b for a, b in pairs]
        rates[name_of(dtype)] = 2 * n**3 / interleaved({"mm": products}, clock, seconds=1.0)["mm"].median
    return Ceilings(bandwidth, rates)
