"""GeLU, exact and by tanh."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from .. import pointwise as sf
from ._aten import gelu_backward
from ._device import device_functions


class GeLU(sf.Pointwise):
    """y = x Phi(x), Phi the distribution function of N(0, 1).

    Forward: `"none"`: Phi(x) = (1 + erf(x / sqrt(2))) / 2; `"tanh"`: Phi(x) = (1 + tanh(u)) / 2 with
    u = sqrt(2 / pi) (x + 0.044715 x^3). They differ by up to 4.7e-4, so `approximate` is part of what the operation is.

    Backward: dx = dy (Phi(x) + x Phi'(x)).

    x, y: [*, H].  Saved: x.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.

    Args:
        approximate: `"none"` or `"tanh"`.

    Raises:
        ValueError: for any other `approximate`.
    """

    native = True
    autocast = "same"
    value, derivative = device_functions()

    @property
    def device_name(self) -> str:
        """The name of its device functions."""
        return "gelu_tanh" if self.approximate == "tanh" else "gelu"

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def reference(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)

    def fwd(self, x: Tensor) -> tuple[Tensor, sf.Saved]:
        return F.gelu(x, approximate=self.approximate), self._saved(x)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        if self.approximate == "none":  # the default, which is read faster than a text
            return gelu_backward(dy, saved.x), {}
        return gelu_backward(dy, saved.x, approximate=self.approximate), {}

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"

    @classmethod
    def examples(cls, x: Tensor) -> tuple[GeLU, ...]:
        return (cls(), cls("tanh"))


GELU = GeLU
