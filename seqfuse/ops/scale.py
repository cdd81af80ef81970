"""Factors: one constant for all features, or a learned factor per feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import operation as sf
from ._parameters import required
from ._tensors import check_last, rows_summed


class Scale(sf.UnfusedOperation):
    """y = factor x, with a constant factor.

    Backward: dx = factor dy.

    x, y: any shape.  Saved: factor, as of the forward pass.

    Args:
        factor: any float.
    """

    class Saved(sf.Saved):
        factor: float

    native = True
    autocast = "same"

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = float(factor)

    def reference(self, x: Tensor) -> Tensor:
        return x * self.factor

    def own_record(self, seed: Tensor | None = None) -> Saved:
        return self.Saved(factor=self.factor)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return x * self.factor, self.own_record()

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return dy * saved.factor, {}

    @classmethod
    def example(cls, x: Tensor) -> Scale:
        return cls(-0.75)

    def extra_repr(self) -> str:
        return f"factor={self.factor:g}"


class LayerScale(sf.UnfusedOperation):
    """y = x gamma, a learned factor per feature.

    Backward: dx = dy gamma;  dgamma = sum of dy x over all tokens.

    x, y: [*, size], gamma: [size]. Dtypes promote as in torch.  Saved: x for dgamma, gamma for dx.
    Source: Touvron et al. 2021, arXiv:2103.17239.

    Args:
        size: length of the last dimension.
        init_value: initial value of gamma.
    """

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="gamma")  # [*, size]
        gamma: Tensor = sf.field(for_="x")  # [size], the parameter

    native = True
    autocast = "promote"

    def __init__(
        self, size: int, init_value: float = 1e-5, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.size, self.init_value = size, init_value
        self.gamma = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize with `init_value`."""
        nn.init.constant_(self.gamma, self.init_value)

    def reference(self, x: Tensor) -> Tensor:
        return x * self.gamma

    def torch_call(self) -> Callable[..., Tensor] | None:
        return None if self._parameters.get("gamma") is None else torch.mul

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        gamma = required(self, "gamma")
        return x * gamma, self.Saved(x=x, gamma=gamma)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        dx = dy * saved.gamma.conj() if "x" in needs else None
        dgamma = None
        if "gamma" in needs:
            dgamma = rows_summed(dy * saved.x.conj(), 1)
            if dgamma.is_complex() and not required(self, "gamma").is_complex():
                dgamma = dgamma.real.contiguous()
        return dx, {"gamma": dgamma}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        check_last(shape, self.size)
        return shape

    @classmethod
    def example(cls, x: Tensor) -> LayerScale:
        self = cls(x.shape[-1], device=x.device, dtype=x.dtype)
        nn.init.normal_(self.gamma)
        return self

    def extra_repr(self) -> str:
        return f"{self.size}, init_value={self.init_value:g}"
