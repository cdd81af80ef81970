"""Scale and the Add that follows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fusion import ForwardFusion
from ..ops import Add, Scale


class ScaleAdd(ForwardFusion):
    """y = factor x + other in one pass over memory, on any device.

    x, other, y: one shape. Saves what `Scale` and `Add` save. In half dtypes factor x is not rounded before the sum.
    """

    scale: Scale
    add: Add

    layout = "any"

    def fwd(self, x: Tensor, *, add_other: Tensor) -> tuple[Tensor, dict[str, Any]]:
        factor = self.scale.factor
        if x.shape == add_other.shape and x.is_floating_point():
            y = torch.add(add_other, x, alpha=factor)
        else:
            y, _ = self.add.fwd(x * factor, other=add_other)
        return y, {}
