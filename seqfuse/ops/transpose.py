"""Transpose of two dimensions."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .. import operation as sf


class Transpose(sf.UnfusedOperation):
    """y = x with dimensions `dim0` and `dim1` swapped, a view: as between the two halves of an MLP-Mixer's block.

    Backward: dx = dy with the same two swapped.

    x: [*], with both dimensions; y: [*].  Saved: nothing.
    Source: Tolstikhin et al. 2021, arXiv:2105.01601.

    Args:
        dim0: a dimension; the last is -1.
        dim1: another.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy alone."""

    NOTHING: ClassVar[Saved] = Saved()

    is_view = True
    autocast = "same"

    def __init__(self, dim0: int, dim1: int) -> None:
        super().__init__()
        self.dim0, self.dim1 = dim0, dim1

    def reference(self, x: Tensor) -> Tensor:
        return x.transpose(self.dim0, self.dim1)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return x.transpose(self.dim0, self.dim1), self.NOTHING

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return dy.transpose(self.dim0, self.dim1), {}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        swapped, dims = list(shape), len(shape)
        if not all(-dims <= dim < dims for dim in (self.dim0, self.dim1)):
            raise ValueError(f"swaps dimensions {self.dim0} and {self.dim1}, got shape {tuple(shape)}")
        swapped[self.dim0], swapped[self.dim1] = swapped[self.dim1], swapped[self.dim0]
        return tuple(swapped)

    @classmethod
    def example(cls, x: Tensor) -> Transpose:
        return cls(0, -1)

    def extra_repr(self) -> str:
        return f"{self.dim0}, {self.dim1}"
