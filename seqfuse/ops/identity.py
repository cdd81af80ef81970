"""Identity."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .. import operation as sf


class Identity(sf.UnfusedOperation):
    """y = x.

    Backward: dx = dy.

    x, y: any shape.  Saved: nothing.

    Args:
        args, kwargs: ignored, as in `torch.nn.Identity`.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy alone."""

    NOTHING: ClassVar[Saved] = Saved()

    is_view = True
    autocast = "same"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def reference(self, x: Tensor) -> Tensor:
        return x

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return x, self.NOTHING

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return dy, {}
