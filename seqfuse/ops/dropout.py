"""Dropout with a mask that is a function of a seed and a position."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .. import operation as sf
from ._philox import drop_mask, dropped, masked


class Dropout(sf.UnfusedOperation):
    """y = keep x / (1 - p) in training, keep an independent 0 or 1 with P(keep = 0) = p; y = x in evaluation.

    Forward, `mode="upscale_in_train"`: as above. `mode="downscale_in_infer"`: y = keep x in training and (1 - p) x in
    evaluation. As in torch keep multiplies x: a dropped Inf or NaN is NaN, a dropped negative number is -0. p = 1
    drops all.

    Backward: dx = keep dy / (1 - p), or keep dy; the mask is made again from the seed and never stored.

    x, y: any shape.  Saved: seed (`None` where nothing was dropped) and p as they were in the forward pass.
    keep of element i, counted in contiguous order whatever the layout: word i & 3 of Philox4x32-10 at counter i >> 2
    under the seed as key, kept iff the word is at least floor(p 2^32). One mask on every device, fused or not; on a
    Triton device each pass is one kernel.
    Source: Srivastava et al. 2014, JMLR 15; Salmon et al. 2011, SC'11.

    Args:
        p: probability of dropping an element.
        mode: where the scale is applied.

    Raises:
        ValueError: for p outside 0..1 or another mode.
    """

    class Saved(sf.Saved):
        seed: Tensor | None  # [] int64
        p: float

    autocast = "same"

    def __init__(
        self, p: float = 0.5, mode: Literal["upscale_in_train", "downscale_in_infer"] = "upscale_in_train"
    ) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must be between 0 and 1, got {p}")
        self.p, self.mode = p, mode

    @property
    def random(self) -> bool:
        return self.training and self.p > 0

    @property
    def is_view(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.random and (self.mode == "upscale_in_train" or self.p == 0)

    def reference(self, x: Tensor, *, seed: Tensor | None = None) -> Tensor:
        return self._dropped(x, seed if self.random else None, self.p)

    def fwd(self, x: Tensor, *, seed: Tensor | None = None) -> tuple[Tensor, Saved]:
        seed = seed if self.random else None
        return self._pass(x, seed, self.p), self.Saved(seed=seed, p=self.p)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return self._pass(dy, saved.seed, saved.p), {}

    def _pass(self, x: Tensor, seed: Tensor | None, p: float) -> Tensor:
        """The map is linear and its own adjoint: both passes are this, by a kernel where one can run."""
        made = None if seed is None else dropped(x, seed, p, self.mode == "upscale_in_train")
        return self._dropped(x, seed, p) if made is None else made

    def _dropped(self, x: Tensor, seed: Tensor | None, p: float) -> Tensor:
        upscale = self.mode == "upscale_in_train"
        if seed is None:
            return x if upscale or p == 0 else x * (1 - p)
        return x * 0 if p == 1 else masked(x, drop_mask(seed, x.shape, p), p, upscale)

    def extra_repr(self) -> str:
        return f"p={self.p:g}, mode={self.mode!r}"

    @classmethod
    def examples(cls, x: Tensor) -> tuple[Dropout, ...]:
        return (cls(), cls(0.2, "downscale_in_infer"), cls(0.2, "downscale_in_infer").eval())
