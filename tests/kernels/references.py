"""What activations are in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS_IN_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x * 1,
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "quickgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamped_silu": lambda x: x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7)),
    "clamp": lambda x: x.clamp(-7, 7) + 1,
}
"""Those of `seqfuse.kernels.activations`, by their names there."""
