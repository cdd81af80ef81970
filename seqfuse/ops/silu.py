"""SiLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .. import pointwise as sf
from ._aten import silu_backward
from ._device import device_functions


class SiLU(sf.Pointwise):
    """y = x sigmoid(x).

    Backward: with s = sigmoid(x), dx = dy s (1 + x (1 - s)).

    x, y: [*, H].  Saved: x.
    Source: Elfwing et al. 2017, arXiv:1702.03118.
    """

    native = True
    autocast = "same"
    value, derivative = device_functions("silu")

    def reference(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return silu_backward(dy, saved.x), {}
