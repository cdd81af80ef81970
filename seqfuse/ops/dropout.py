"""Dropout of elements and of whole samples, with masks that are functions of a seed and a position."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .. import operation as sf
from ._philox import drop_mask, dropped, masked


class Dropping(sf.UnfusedOperation, open=True):
    """Drops parts of x in training. The map is linear and self-adjoint, so one function computes both passes."""

    class Saved(sf.Saved):
        seed: Tensor | None  # [] int64; `None` without dropout
        p: float

    autocast = "same"

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must be between 0 and 1, got {p}")
        self.p = p

    @property
    def random(self) -> bool:
        return self.training and self.p > 0

    def dropped(self, x: Tensor, seed: Tensor | None, p: float) -> Tensor:
        """Return x without the parts that the seed drops, or all of x if there is no seed. Differentiable."""
        raise NotImplementedError

    def run(self, x: Tensor, seed: Tensor | None, p: float) -> Tensor:
        """`dropped`, which need not be differentiable here."""
        return self.dropped(x, seed, p)

    def reference(self, x: Tensor, *, seed: Tensor | None = None) -> Tensor:
        return self.dropped(x, seed if self.random else None, self.p)

    def own_record(self, seed: Tensor | None) -> Saved:
        return self.Saved(seed=seed if self.random else None, p=self.p)

    def fwd(self, x: Tensor, *, seed: Tensor | None = None) -> tuple[Tensor, Saved]:
        saved = self.own_record(seed)
        return self.run(x, saved.seed, self.p), saved

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return self.run(dy, saved.seed, saved.p), {}


class Dropout(Dropping):
    """y = keep x / (1 - p) in training, keep an independent 0 or 1 with P(keep = 0) = p; y = x in evaluation.

    Forward, `mode="upscale_in_train"`: as above. `mode="downscale_in_infer"`: y = keep x in training and (1 - p) x in
    evaluation. As in torch, x is multiplied by keep: a dropped Inf or NaN is NaN, a dropped negative number is -0.

    Backward: dx = keep dy / (1 - p), or keep dy; the mask is recomputed from the seed.

    x, y: any shape.  Saved: seed (`None` without dropout) and p of the forward pass. keep of element i, in contiguous
    order for any strides: word i & 3 of Philox4x32-10 at counter i >> 2 with the seed as key; keep = 1 iff the word is
    at least floor(p 2^32). The mask is the same on every device, fused or not. With Triton each pass is one kernel.
    Source: Srivastava et al. 2014, JMLR 15; Salmon et al. 2011, SC'11.

    Args:
        p: probability of dropping an element.
        mode: when to scale, in training or in evaluation.

    Raises:
        ValueError: for p outside 0..1 or another mode.
    """

    def __init__(
        self, p: float = 0.5, mode: Literal["upscale_in_train", "downscale_in_infer"] = "upscale_in_train"
    ) -> None:
        super().__init__(p)
        self.mode = mode

    @property
    def is_view(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.random and (self.mode == "upscale_in_train" or self.p == 0)

    def run(self, x: Tensor, seed: Tensor | None, p: float) -> Tensor:
        made = None if seed is None else dropped(x, seed, p, self.mode == "upscale_in_train")
        return self.dropped(x, seed, p) if made is None else made

    def dropped(self, x: Tensor, seed: Tensor | None, p: float) -> Tensor:
        upscale = self.mode == "upscale_in_train"
        if seed is None:
            return x if upscale or p == 0 else x * (1 - p)
        return x * 0 if p == 1 else masked(x, drop_mask(seed, x.shape, p), p, upscale)

    def extra_repr(self) -> str:
        return f"p={self.p:g}, mode={self.mode!r}"

    @classmethod
    def examples(cls, x: Tensor) -> tuple[Dropout, ...]:
        return (cls(), cls(0.2, "downscale_in_infer"), cls(0.2, "downscale_in_infer").eval())


class DropPath(Dropping):
    """Stochastic depth: in training y = 0 for a sample with probability p, else x / (1 - p); in evaluation y = x.

    Backward: dx = 0 for these samples, else dy / (1 - p).

    x, y: [B, *], B samples.  Saved: seed and p.
    Sample i is dropped if `Dropout` drops element i of [B]. A dropped sample is 0 x: NaN where x is NaN or Inf.
    Source: Huang et al. 2016, arXiv:1603.09382.

    Args:
        p: probability of dropping a sample.
        scale_by_keep: whether the remaining samples are divided by 1 - p.

    Raises:
        ValueError: for p outside 0..1.
    """

    def __init__(self, p: float = 0.1, scale_by_keep: bool = True) -> None:
        super().__init__(p)
        self.scale_by_keep = scale_by_keep

    @property
    def is_view(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.random

    def dropped(self, x: Tensor, seed: Tensor | None, p: float) -> Tensor:
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
