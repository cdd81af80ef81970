"""Multiplication by a constant."""

from __future__ import annotations

from torch import Tensor

from .. import operation as sf


class Scale(sf.UnfusedOperation):
    """y = factor x, the factor a constant of the operation and no parameter.

    Backward: dx = factor dy.

    x, y: any shape.  Saved: factor, so that one changed between the passes does no harm.

    Args:
        factor: any float.
    """

    class Saved(sf.Saved):
        factor: float

    autocast = "same"

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = float(factor)

    def reference(self, x: Tensor) -> Tensor:
        return x * self.factor

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return x * self.factor, self.Saved(factor=self.factor)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return dy * saved.factor, {}

    @classmethod
    def example(cls, x: Tensor) -> Scale:
        return cls(-0.75)

    def extra_repr(self) -> str:
        return f"factor={self.factor:g}"
