"""Sigmoid."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import pointwise as sf
from ._aten import sigmoid_backward
from ._device import device_functions


class Sigmoid(sf.Pointwise):
    """y = 1 / (1 + exp(-x)).

    Backward: dx = dy y (1 - y).

    x, y: [*, H].  Saved: y.
    Source: Rumelhart, Hinton and Williams 1986, Nature 323.
    """

    native = True
    autocast = "same"
    value, derivative = device_functions("sigmoid")

    reads = "output"

    def reference(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def derivative_reference(self, y: Tensor) -> Tensor:
        return y * (1 - y)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return sigmoid_backward(dy, saved.y), {}
