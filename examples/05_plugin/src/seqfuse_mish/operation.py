"""Mish, an activation that every kernel of seqfuse takes."""

import torch
from torch import Tensor

import seqfuse as sf

from .kernels import mish, mish_derivative


class Mish(sf.Pointwise):
    """y = x tanh(log(1 + exp(x))).  x, y: [*, H].  Saved: x.  Source: Misra 2019, arXiv:1908.08681."""

    value, derivative = mish, mish_derivative

    def reference(self, x: Tensor) -> Tensor:
        return torch.nn.functional.mish(x)
