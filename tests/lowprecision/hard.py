"""Numbers that are hard to quantize, and numbers of different magnitudes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqfuse.testing import seeded_randn


def draw(*shape: int, seed: int, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """Asymmetric numbers of different magnitudes, the same on each machine."""
    return ((seeded_randn(shape, seed) * seeded_randn(shape, seed + 100).exp() + 0.2) * factor).to(dtype)


def hard(form: Any) -> list[Tensor]:
    """Numbers at every code, tie and neighbor of a format, at the limits of float32, zeros, and non-finite ones."""
    values = form.values
    middles = (values[1:] + values[:-1]) / 2
    numbers = np.concatenate([values, middles]).astype(np.float32)
    numbers = np.concatenate([numbers, np.nextafter(numbers, np.float32(np.inf)), np.nextafter(numbers, np.float32(0))])
    numbers = np.minimum(numbers, np.float32(values[-1]))
    found: list[Tensor] = []
    in_turn = np.where(np.arange(numbers.size) % 4 < 2, numbers, -numbers)
    for factor, signed in ((1.0, np.concatenate([numbers, -numbers])), (3e-3, in_turn), (2.0**90, -in_turn)):
        one = torch.from_numpy(signed * np.float32(factor))
        beside = torch.full((-(-one.numel() // 4), 4, 32), float(values[-1] * factor))  # each beside the largest
        beside.view(-1, 32)[: one.numel(), 0] = one
        found += [one[None], beside.flatten(1)]
    ends = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-126, 1e-30, 1.0, 448.0, 449.0, 57344.0, 1e30, 3.4028234e38]
    found += [torch.tensor(ends).repeat(40, 11), torch.tensor(ends)[:, None].repeat(1, 33), torch.zeros(3, 130)]
    for bad in (math.nan, math.inf, -math.inf):
        x = seeded_randn((130, 140), 0)
        x[3, 5] = bad
        found.append(x)
    return found
