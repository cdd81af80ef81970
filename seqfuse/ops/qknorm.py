"""QKNorm: queries and keys normalized head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import operation as sf
from ._attention import unflatten
from ._norm import stats_dtype
from ._read import parameter
from ._takes import floating


class QKNorm(sf.UnfusedOperation):
    """An RMSNorm of each query and key head, in x = [q; k; v] packed along the last dimension.

    Forward, for each head: y = xhat gain, xhat = x rstd, rstd = (E[x^2] + eps)^-1/2 over its D elements; the gain is
    `q_weight` for queries and `k_weight` for keys. Values pass as they are.

    Backward: with g = dy gain, dx = rstd (g - xhat E[g xhat]);  dq_weight and dk_weight are sums of dy xhat over all
    rows and over the heads that share them.

    x, y: [*, S, (H + 2 Hkv) D], q_weight, k_weight: [D]; rstd: [*, S, H + Hkv].
    Saved: x, rstd, and the weights for dx.
    All is computed in float32 (float64 for a float64 input) and rounded to the dtype of x once.
    Source: Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442.

    Args:
        head_dim: D.
        heads: H.
        kv_heads: Hkv; H by default.
        eps: added to the mean square.
        elementwise_affine: whether there are weights.
    """

    class Saved(sf.Saved):
        x: Tensor  # [*, S, (H + 2 Hkv) D]
        rstd: Tensor  # [*, S, H + Hkv] float32
        q_weight: Tensor | None = sf.field(for_="x")  # [D], the parameter itself
        k_weight: Tensor | None = sf.field(for_="x")  # [D], the parameter itself

    q_weight: nn.Parameter | None
    k_weight: nn.Parameter | None

    def __init__(
        self,
        head_dim: int,
        heads: int,
        kv_heads: int | None = None,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = head_dim, heads, heads if kv_heads is None else kv_heads
        self.eps = eps
        for name in ("q_weight", "k_weight"):
            weight = nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype)) if elementwise_affine else None
            self.register_parameter(name, weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start from gains of one."""
        for weight in self.parameters(recurse=False):
            nn.init.ones_(weight)

    def reference(self, x: Tensor) -> Tensor:
        floating(x, "QKNorm")
        stats = stats_dtype(x)
        heads = unflatten(x, -1, -1, self.head_dim)
        known = heads[..., : self.heads + self.kv_heads, :].to(stats)
        known = known * (known.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        gain = self._gain(self.q_weight, self.k_weight, stats)
        known = known if gain is None else known * gain
        return torch.cat((known.to(x.dtype), heads[..., self.heads + self.kv_heads :, :]), -2).flatten(-2)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        floating(x, "QKNorm")
        stats, known = stats_dtype(x), self.heads + self.kv_heads
        q_weight, k_weight = parameter(self, "q_weight"), parameter(self, "k_weight")
        heads = unflatten(x, -1, -1, self.head_dim)
        t = heads[..., :known, :].to(stats)
        rstd = (t.square().mean(-1) + self.eps).rsqrt()
        xhat = t * rstd.unsqueeze(-1)
        gain = self._gain(q_weight, k_weight, stats)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        out = unflatten(y, -1, -1, self.head_dim)
        out[..., :known, :] = xhat if gain is None else xhat * gain
        out[..., known:, :] = heads[..., known:, :]
        return y, self.Saved(x=x, rstd=rstd, q_weight=q_weight, k_weight=k_weight)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        x, rstd, known = saved.x, saved.rstd.unsqueeze(-1), self.heads + self.kv_heads
        d = unflatten(dy, -1, -1, self.head_dim)
        xhat = unflatten(x, -1, -1, self.head_dim)[..., :known, :] * rstd
        product = d[..., :known, :] * xhat
        grads: dict[str, Tensor | None] = {}
        for name, first, stop in (("q_weight", 0, self.heads), ("k_weight", self.heads, known)):
            owner = parameter(self, name)
            if name in needs and owner is not None:
                grads[name] = product[..., first:stop, :].sum(tuple(range(product.ndim - 1))).to(owner.dtype)
        if "x" not in needs:
            return None, grads
        gain = self._gain(saved.q_weight, saved.k_weight, rstd.dtype)
        g = d[..., :known, :].to(rstd.dtype)
        if gain is not None:
            g, product = g * gain, product * gain
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        out = unflatten(dx, -1, -1, self.head_dim)
        out[..., :known, :] = torch.addcmul(g, xhat, product.mean(-1, keepdim=True), value=-1).mul_(rstd)
        out[..., known:, :] = d[..., known:, :]
        return dx, grads

    def _gain(self, q_weight: Tensor | None, k_weight: Tensor | None, stats: torch.dtype) -> Tensor | None:
        """The gain of each query and key head, [H + Hkv, D]."""
        if q_weight is None or k_weight is None:
            return None
        each = (q_weight.expand(self.heads, -1), k_weight.expand(self.kv_heads, -1))
        return torch.cat(each).to(stats)

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        wanted = (self.heads + 2 * self.kv_heads) * self.head_dim
        if not shape or shape[-1] != wanted:
            raise ValueError(f"expects last dimension {wanted}, got {shape[-1] if shape else 'a 0-d tensor'}")
        return shape

    @classmethod
    def example(cls, x: Tensor) -> QKNorm:
        if x.shape[-1] % 3:
            raise ValueError(f"no heads fit in a last dimension of {x.shape[-1]}; give the operation explicitly")
        self = cls(x.shape[-1] // 3, 1, device=x.device, dtype=x.dtype)
        for weight in self.parameters():
            nn.init.normal_(weight)
        return self

    def extra_repr(self) -> str:
        text = f"{self.head_dim}, {self.heads}" + (f", {self.kv_heads}" if self.kv_heads != self.heads else "")
        return f"{text}, eps={self.eps}, elementwise_affine={self._parameters.get('q_weight', self) is not None}"
