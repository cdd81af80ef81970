"""Shapes: operations that return x unchanged, or as a view with other dimensions."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .. import operation as sf


class Identity(sf.UnfusedOperation):
    """y = x.

    Backward: dx = dy.

    x, y: any shape.  Saved: nothing.

    Args:
        args: ignored, as in `torch.nn.Identity`.
        kwargs: ignored.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass only reads dy."""

    is_view = True
    native = True
    autocast = "same"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def reference(self, x: Tensor) -> Tensor:
        return x

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return x, self._saved()

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return dy, {}


class Reshape(sf.UnfusedOperation):
    """y = x with its last `dims` dimensions reshaped to `shape`.

    `Reshape(8, 64)` splits the last dimension 512 into heads; `Reshape(512, dims=2)` joins them again. One size may be
    -1.

    Backward: dx = dy with its last `len(shape)` dimensions reshaped to those of x.

    x: [*, d1..dn], n = `dims`; y: [*, *shape].  Saved: trailing, the sizes d1..dn.

    Args:
        shape: the new trailing sizes.
        dims: number of trailing dimensions of x to reshape.

    Raises:
        ValueError: for an empty shape, a size below -1, two sizes of -1, or `dims` below 1.
    """

    class Saved(sf.Saved):
        trailing: tuple[int, ...]

    is_view = True
    native = True
    autocast = "same"

    def __init__(self, *shape: int, dims: int = 1) -> None:
        super().__init__()
        if not shape or min(shape) < -1 or shape.count(-1) > 1 or dims < 1:
            raise ValueError(f"expects sizes with at most one -1, and dims >= 1, got {shape} and dims={dims}")
        self.shape, self.dims = shape, dims

    def reference(self, x: Tensor) -> Tensor:
        return x.reshape(self.infer(tuple(x.shape)))

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        shape = tuple(x.shape)
        return x.reshape(self.infer(shape)), self.Saved(trailing=shape[len(shape) - self.dims :])

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return dy.reshape(*dy.shape[: dy.ndim - len(self.shape)], *saved.trailing), {}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        kept = len(shape) - self.dims
        if kept < 0:
            raise ValueError(f"expects at least {self.dims} dimensions, got shape {tuple(shape)}")
        old, new = shape[kept:], self.shape
        total = math.prod(old)
        if -1 in new:
            # Computed here, because torch cannot infer a size of an empty tensor.
            known = math.prod([size for size in new if size != -1])
            if known:  # whether it fits is checked below
                new = tuple(total // known if size == -1 else size for size in new)
        if -1 in new or math.prod(new) != total:
            last = f"last dimension {old[0]}" if self.dims == 1 else f"last dimensions {tuple(old)}"
            raise ValueError(f"cannot make {last} into {self.shape}")
        return (*shape[:kept], *new)

    @classmethod
    def example(cls, x: Tensor) -> Reshape:
        return cls(1, -1)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape)) + (f", dims={self.dims}" if self.dims != 1 else "")


class Transpose(sf.UnfusedOperation):
    """y = x with dimensions `dim0` and `dim1` swapped, a view, as in an MLP-Mixer block.

    Backward: dx = dy with the same dimensions swapped.

    x: [*], with both dimensions; y: [*].  Saved: nothing.
    Source: Tolstikhin et al. 2021, arXiv:2105.01601.

    Args:
        dim0: a dimension; the last is -1.
        dim1: another dimension.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass only reads dy."""

    is_view = True
    native = True
    autocast = "same"

    def __init__(self, dim0: int, dim1: int) -> None:
        super().__init__()
        self.dim0, self.dim1 = dim0, dim1

    def reference(self, x: Tensor) -> Tensor:
        return x.transpose(self.dim0, self.dim1)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return x.transpose(self.dim0, self.dim1), self._saved()

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
