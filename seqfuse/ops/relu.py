"""ReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import pointwise as sf
from ._aten import threshold_backward
from ._device import device_functions


class ReLU(sf.Pointwise):
    """y = max(x, 0); NaN stays NaN.

    Backward: dx = dy where y > 0, else 0.

    x, y: [*, H].  Saved: y, which the next GEMM saves anyway.
    Source: Nair and Hinton 2010, ICML.
    """

    native = True
    autocast = "same"
    value, derivative = device_functions("relu")

    reads = "output"

    def reference(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def derivative_reference(self, y: Tensor) -> Tensor:
        return (~(y <= 0)).to(y.dtype)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return threshold_backward(dy, saved.y, 0), {}
