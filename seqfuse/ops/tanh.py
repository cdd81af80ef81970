"""Tanh."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import pointwise as sf
from ._aten import tanh_backward
from ._device import device_functions


class Tanh(sf.Pointwise):
    """y = tanh(x).

    Backward: dx = dy (1 - y^2).

    x, y: [*, H].  Saved: y.
    Source: LeCun et al. 1998, Efficient BackProp.
    """

    native = True
    autocast = "same"
    value, derivative = device_functions("tanh")

    reads = "output"

    def reference(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def derivative_reference(self, y: Tensor) -> Tensor:
        return 1 - y * y

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return tanh_backward(dy, saved.y), {}
