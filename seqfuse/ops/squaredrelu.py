"""Squared ReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import pointwise as sf
from ._aten import threshold_backward
from ._device import device_functions


class SquaredReLU(sf.Pointwise):
    """y = max(x, 0)^2.

    Backward: dx = 2 dy x where x > 0, else 0.

    x, y: [*, H].  Saved: x.
    Source: So et al. 2021, arXiv:2109.08668.
    """

    autocast = "float32"
    value, derivative = device_functions("squared_relu")

    def reference(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return threshold_backward(dy * saved.x.mul(2), saved.x, 0), {}
