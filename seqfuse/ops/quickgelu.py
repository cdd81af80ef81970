"""QuickGeLU: GeLU by a sigmoid."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import operation as sf
from ._aten import silu_backward

_K = 1.702


class QuickGeLU(sf.Pointwise):
    """y = x sigmoid(1.702 x).

    Backward: with t = 1.702 x and s = sigmoid(t), dx = dy s (1 + t (1 - s)), the derivative of SiLU at t.

    x, y: [*, H].  Saved: x.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """

    def reference(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(_K * x)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return silu_backward(dy, _K * saved.x), {}
