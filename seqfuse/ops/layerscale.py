"""LayerScale: a factor for each feature, learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import operation as sf
from ._norm import rows_summed
from ._read import required


class LayerScale(sf.UnfusedOperation):
    """y = x gamma, a factor for each feature, at the end of a branch; `Scale` has one constant for all.

    Backward: dx = dy gamma;  dgamma = sum of dy x over all rows.

    x, y: [*, size], gamma: [size]. Dtypes promote as in torch.  Saved: x for dgamma, gamma for dx.
    Source: Touvron et al. 2021, arXiv:2103.17239.

    Args:
        size: length of the last dimension.
        init_value: what gamma starts from.
    """

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="gamma")  # [*, size]
        gamma: Tensor = sf.field(for_="x")  # [size], the parameter itself

    autocast = "promote"

    def __init__(
        self, size: int, init_value: float = 1e-5, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.size, self.init_value = size, init_value
        self.gamma = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start from `init_value`."""
        nn.init.constant_(self.gamma, self.init_value)

    def reference(self, x: Tensor) -> Tensor:
        return x * self.gamma

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
        if not shape or shape[-1] != self.size:
            raise ValueError(f"expects last dimension {self.size}, got {shape[-1] if shape else 'a 0-d tensor'}")
        return shape

    @classmethod
    def example(cls, x: Tensor) -> LayerScale:
        self = cls(x.shape[-1], device=x.device, dtype=x.dtype)
        nn.init.normal_(self.gamma)
        return self

    def extra_repr(self) -> str:
        return f"{self.size}, init_value={self.init_value:g}"
