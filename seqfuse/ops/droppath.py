"""DropPath: stochastic depth, what a branch adds is dropped for whole samples."""

from __future__ import annotations

from torch import Tensor

from .. import operation as sf
from ._philox import drop_mask, masked


class DropPath(sf.UnfusedOperation):
    """y = 0 for a sample with probability p, in training, else x / (1 - p): stochastic depth, at the end of a branch.

    Backward: dx = 0 for these samples, else dy / (1 - p).

    x, y: [B, *], B samples.  Saved: the seed, of which both passes make the same mask, and p.
    Sample i is kept where `Dropout` keeps element i of [B]; dropped ones are 0 x: NaN where x is NaN or Inf.
    Source: Huang et al. 2016, arXiv:1603.09382.

    Args:
        p: probability of dropping a sample.
        scale_by_keep: whether what is kept is divided by 1 - p.

    Raises:
        ValueError: for a p that is no probability.
    """

    class Saved(sf.Saved):
        seed: Tensor | None  # [] int64; `None` where nothing is dropped
        p: float

    autocast = "same"

    def __init__(self, p: float = 0.1, scale_by_keep: bool = True) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must be between 0 and 1, got {p}")
        self.p, self.scale_by_keep = p, scale_by_keep

    @property
    def random(self) -> bool:
        return self.training and self.p > 0

    @property
    def is_view(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.random

    def reference(self, x: Tensor, *, seed: Tensor | None = None) -> Tensor:
        return self._dropped(x, seed if self.random else None, self.p)

    def fwd(self, x: Tensor, *, seed: Tensor | None = None) -> tuple[Tensor, Saved]:
        seed = seed if self.random else None
        return self._dropped(x, seed, self.p), self.Saved(seed=seed, p=self.p)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return self._dropped(dy, saved.seed, saved.p), {}

    def _dropped(self, x: Tensor, seed: Tensor | None, p: float) -> Tensor:
        """The map is linear and its own adjoint: both passes are this."""
        if seed is None:
            return x
        drop = drop_mask(seed, x.shape[:1], p).view(-1, *(1,) * (x.ndim - 1))
        return masked(x, drop, p, self.scale_by_keep)

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape:
            raise ValueError("expects a first dimension of samples, got a 0-d tensor")
        return shape

    @classmethod
    def examples(cls, x: Tensor) -> tuple[DropPath, ...]:
        return (cls(), cls(0.4, scale_by_keep=False), cls().eval())

    def extra_repr(self) -> str:
        return f"p={self.p:g}" + ("" if self.scale_by_keep else ", scale_by_keep=False")
