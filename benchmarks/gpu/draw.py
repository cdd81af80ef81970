"""Fresh random inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def generator(device: torch.device, seed: int) -> torch.Generator:
    """What numbers are drawn from."""
    return torch.Generator(device).manual_seed(seed)


def normal(
    shapes: Mapping[str, tuple[int, ...]], seed: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Tensors of normal numbers; rows alone, such as weights, are near one."""
    draw = generator(device, seed)
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        t = torch.empty(shape, device=device, dtype=dtype).normal_(generator=draw)
        found[name] = t.mul_(0.1).add_(1) if len(shape) == 1 else t
    return found


def seed_tensor(seed: int, device: torch.device) -> Tensor:
    """A seed as kernels read it: on the device."""
    return torch.tensor(0x1234_5678_9ABC + seed, device=device)
