"""QuickGeLU: GeLU by a sigmoid."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import pointwise as sf
from ._aten import sigmoid_backward
from ._device import device_functions
from ._takes import real

_K = 1.702


class QuickGeLU(sf.Pointwise):
    """y = x sigmoid(1.702 x).

    Backward: with s = sigmoid(1.702 x), dx = dy (s + 1.702 x s (1 - s)).

    x, y: [*, H].  Saved: x.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """

    autocast = "same"
    value, derivative = device_functions("quickgelu")

    def reference(self, x: Tensor) -> Tensor:
        real(x, "QuickGeLU")
        wide = sf.widened(x)
        return (wide * torch.sigmoid(_K * wide)).to(x.dtype)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        # Not silu_backward at 1.702 x, which overflows before x does.
        x = sf.widened(saved.x)
        s = torch.sigmoid(_K * x)
        return torch.add(dy * s, sigmoid_backward(dy * x, s), alpha=_K).to(saved.x.dtype), {}
