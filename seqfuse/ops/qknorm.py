"""QKNorm: normalizes queries and keys, per head or all heads together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import operation as sf
from ..casts import dtype_of
from ..env import Env
from ._parameters import parameter
from ._tensors import check_last, floating, rows_summed, stats_dtype, unflatten
from .norm import layer_norm_backward


class QKNorm(sf.UnfusedOperation):
    """An RMSNorm or LayerNorm of each query and key head, in x = [q; k; v] packed along the last dimension.

    Forward, for each head: y = xhat gain, xhat = x rstd, rstd = (E[x^2] + eps)^-1/2 over its D elements; the gain is
    `q_weight` for queries and `k_weight` for keys, or 1 + weight with `zero_centered=True`. Values are unchanged. With
    `kind="layer"` xhat = (x - mean) rstd, mean = E[x], rstd = (E[(x - mean)^2] + eps)^-1/2, and
    y = xhat gain + bias. With `full_width` one mean is over all query heads, and one over all key heads.

    Backward: with g = dy gain, dx = rstd (g - xhat E[g xhat]), and for LayerNorm dx = rstd (g - E[g] - xhat E[g xhat]);
    dq_weight and dk_weight are sums of dy xhat over tokens and heads, dq_bias and dk_bias of dy.

    x, y: [*, S, (H + 2 Hkv) D], q_weight, k_weight, q_bias, k_bias: [D], at full width [H D] and [Hkv D]; mean, rstd:
    [*, S, H + Hkv], at full width [*, S, 2].
    Saved: x, rstd, for LayerNorm mean, and the weights for dx.
    Computed in float32 (float64 for a float64 input) and rounded to the dtype of x once.
    Source: Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442; at full width: OLMo et al.
    2024, arXiv:2501.00656.

    Args:
        head_dim: D.
        heads: H.
        kv_heads: Hkv; default H.
        eps: added to the mean square, or to the variance.
        elementwise_affine: whether there are weights.
        kind: `"rms"` or `"layer"`.
        full_width: whether all heads are normalized together.
        zero_centered: whether the weights are stored minus one.
        bias: whether a LayerNorm has biases.

    Raises:
        ValueError: for another kind, or a bias without LayerNorm and weights.
        InputError: (SF101) for a non-floating x.
    """

    class Saved(sf.Saved):
        x: Tensor  # [*, S, (H + 2 Hkv) D]
        rstd: Tensor  # [*, S, H + Hkv] float32, at full width [*, S, 2]
        q_weight: Tensor | None = sf.field(for_="x")  # the parameter
        k_weight: Tensor | None = sf.field(for_="x")  # the parameter
        mean: Tensor | None  # like rstd; LayerNorm only

    autocast = "same"
    packs = True

    q_weight: nn.Parameter | None
    k_weight: nn.Parameter | None
    q_bias: nn.Parameter | None
    k_bias: nn.Parameter | None

    def __init__(
        self,
        head_dim: int,
        heads: int,
        kv_heads: int | None = None,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        kind: Literal["rms", "layer"] = "rms",
        full_width: bool = False,
        zero_centered: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if bias and (kind != "layer" or not elementwise_affine):
            raise ValueError("only a LayerNorm with weights has a bias")
        self.head_dim, self.heads, self.kv_heads = head_dim, heads, heads if kv_heads is None else kv_heads
        self.eps, self.kind, self.full_width, self.zero_centered = eps, kind, full_width, zero_centered
        for name, owned in (("weight", elementwise_affine), ("bias", bias)):
            for prefix, count in (("q", self.heads), ("k", self.kv_heads)):
                shape = head_dim * count if full_width else head_dim
                made = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if owned else None
                self.register_parameter(f"{prefix}_{name}", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize with gains of 1 and biases of 0."""
        for name, own in self.named_parameters(recurse=False):
            nn.init.constant_(own, 1.0 if name.endswith("weight") and not self.zero_centered else 0.0)

    def reference(self, x: Tensor) -> Tensor:
        if self._by_torch(x, self.q_weight, self.k_weight):
            return self._layer_norms(x, self.q_weight, self.k_weight)[0]
        normed = self._normed(x, self.q_weight, self.k_weight)[0].to(x.dtype)
        heads = unflatten(x, -1, -1, self.head_dim)
        return torch.cat((normed, heads[..., self.heads + self.kv_heads :, :]), -2).flatten(-2)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        q_weight, k_weight = parameter(self, "q_weight"), parameter(self, "k_weight")
        if self._by_torch(x, q_weight, k_weight):
            return self._layer_norms(x, q_weight, k_weight)
        normed, rstd, mean = self._normed(x, q_weight, k_weight)
        y, known = torch.empty_like(x, memory_format=torch.contiguous_format), self.heads + self.kv_heads
        out = unflatten(y, -1, -1, self.head_dim)
        out[..., :known, :] = normed
        out[..., known:, :] = unflatten(x, -1, -1, self.head_dim)[..., known:, :]
        return y, self.Saved(x=x, rstd=rstd, q_weight=q_weight, k_weight=k_weight, mean=mean)

    def _by_torch(self, x: Tensor, *weights: Tensor | None) -> bool:
        """Whether torch's LayerNorm computes both passes, once for queries and once for keys."""
        if self.kind != "layer" or self.full_width or x.device.type != "cpu":
            return False
        own = *weights, parameter(self, "q_bias"), parameter(self, "k_bias")
        return x.dtype is stats_dtype(x) and all(t is None or t.dtype is x.dtype for t in own)

    def _layer_norms(self, x: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> tuple[Tensor, Saved]:
        *parts, values = self._parts(x)
        biases, made = (parameter(self, "q_bias"), parameter(self, "k_bias")), list[tuple[Tensor, Tensor, Tensor]]()
        for t, weight, bias in zip(parts, (q_weight, k_weight), biases, strict=True):
            made.append(torch.native_layer_norm(t, (self.head_dim,), self._one_gain(weight), bias, self.eps))
        (q, q_mean, q_rstd), (k, k_mean, k_rstd) = made
        mean, rstd = (torch.cat(each, -2).squeeze(-1) for each in ((q_mean, k_mean), (q_rstd, k_rstd)))
        y = torch.cat((q, k, values), -2).flatten(-2)
        return y, self.Saved(x=x, rstd=rstd, q_weight=q_weight, k_weight=k_weight, mean=mean)

    def _layer_norm_grads(
        self, dy: Tensor, saved: Saved, mean: Tensor, weights: Sequence[Tensor | None], needs: frozenset[str]
    ) -> tuple[Tensor | None, sf.Grads]:
        *d_parts, d_values = self._parts(dy)
        parts, each, wanted = self._parts(saved.x), (self.heads, self.kv_heads), "x" in needs
        means, rstds = (t.unsqueeze(-1).split_with_sizes(each, -2) for t in (mean, saved.rstd))
        grads: dict[str, Tensor | None] = {}
        dx: list[Tensor] = []
        for i, prefix in enumerate("qk"):
            gain = self._one_gain(weights[i])
            if gain is None and f"{prefix}_weight" in needs:
                gain = mean.new_ones(self.head_dim)  # where dx is not needed, only its shape and dtype are read
            d, mask = d_parts[i].contiguous(), [wanted, f"{prefix}_weight" in needs, False]
            # ATen's kernel reads contiguous statistics.
            read = parts[i], (self.head_dim,), means[i].contiguous(), rstds[i].contiguous(), gain, None
            d_in, d_weight, _ = layer_norm_backward(d, *read, mask)
            if mask[1]:
                grads[f"{prefix}_weight"] = d_weight
            if f"{prefix}_bias" in needs:
                grads[f"{prefix}_bias"] = rows_summed(d, 1)
            dx.append(d_in)
        return torch.cat((*dx, d_values), -2).flatten(-2) if wanted else None, grads

    def _parts(self, t: Tensor) -> Sequence[Tensor]:
        """The heads of queries, keys and values."""
        return unflatten(t, -1, -1, self.head_dim).split_with_sizes((self.heads, self.kv_heads, self.kv_heads), -2)

    def _one_gain(self, weight: Tensor | None) -> Tensor | None:
        return weight + 1 if weight is not None and self.zero_centered else weight

    def _normed(
        self, x: Tensor, q_weight: Tensor | None, k_weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The query and key heads of y in the dtype of the statistics, [*, S, H + Hkv, D], with rstd and mean."""
        floating(x, "QKNorm")
        stats, mean = stats_dtype(x), None
        t = unflatten(x, -1, -1, self.head_dim)[..., : self.heads + self.kv_heads, :].to(stats)
        if self.kind == "layer":
            mean = self._means(t)
            t = t - self._spread(mean)
        rstd = (self._means(t.square()) + self.eps).rsqrt()
        t = t * self._spread(rstd)
        gain = self._gain(q_weight, k_weight, stats)
        bias = self._heads(parameter(self, "q_bias"), parameter(self, "k_bias"), stats)
        t = t if gain is None else t * gain
        return t if bias is None else t + bias, rstd, mean

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        weights = (saved.q_weight, saved.k_weight) if "x" in needs else (None, None)
        if saved.mean is not None and dy.dtype is saved.x.dtype and self._by_torch(dy, *weights):
            return self._layer_norm_grads(dy, saved, saved.mean, weights, needs)
        x, rstd, known = saved.x, self._spread(saved.rstd), self.heads + self.kv_heads
        d = unflatten(dy, -1, -1, self.head_dim)[..., :known, :]
        xhat = unflatten(x, -1, -1, self.head_dim)[..., :known, :]
        xhat = (xhat if saved.mean is None else xhat - self._spread(saved.mean)) * rstd
        product = d * xhat
        grads: dict[str, Tensor | None] = {}
        over = 2 if self.full_width else 1
        for prefix, part in (("q", slice(self.heads)), ("k", slice(self.heads, known))):
            for name, t in ((f"{prefix}_weight", product), (f"{prefix}_bias", d)):
                if name in needs and (own := dtype_of(self, name)) is not None:
                    grads[name] = rows_summed(t[..., part, :].to(rstd.dtype), over).flatten().to(own)
        if "x" not in needs:
            return None, grads
        gain = self._gain(*weights, rstd.dtype)
        g = d.to(rstd.dtype)
        if gain is not None:
            g, product = g * gain, product * gain
        if saved.mean is not None:  # subtracted first, so that equal gradients cancel
            g = g - self._spread(self._means(g))
            product = g * xhat
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        out = unflatten(dx, -1, -1, self.head_dim)
        out[..., :known, :] = torch.addcmul(g, xhat, self._spread(self._means(product)), value=-1).mul_(rstd)
        out[..., known:, :] = unflatten(dy, -1, -1, self.head_dim)[..., known:, :]
        return dx, grads

    def _means(self, t: Tensor) -> Tensor:
        """Means of [*, H + Hkv, D] over each head, or over all query heads and all key heads."""
        if not self.full_width:
            return t.mean(-1)
        return torch.stack([part.mean((-2, -1)) for part in (t[..., : self.heads, :], t[..., self.heads :, :])], -1)

    def _spread(self, means: Tensor) -> Tensor:
        """These means for each head, [*, H + Hkv, 1] or broadcast to that."""
        if self.full_width:
            q, k = means[..., :1], means[..., 1:]
            means = torch.cat((q.expand(*q.shape[:-1], self.heads), k.expand(*k.shape[:-1], self.kv_heads)), -1)
        return means.unsqueeze(-1)

    def _gain(self, q_weight: Tensor | None, k_weight: Tensor | None, stats: torch.dtype) -> Tensor | None:
        """The gain of each query and key head, [H + Hkv, D]."""
        weights = self._heads(q_weight, k_weight, stats)
        return weights + 1 if weights is not None and self.zero_centered else weights

    def _heads(self, q: Tensor | None, k: Tensor | None, stats: torch.dtype) -> Tensor | None:
        """A parameter for queries and one for keys, expanded to all heads, [H + Hkv, D]."""
        if q is None or k is None:
            return None
        each = ((q, self.heads), (k, self.kv_heads))
        return torch.cat([t.to(stats).view(-1, self.head_dim).expand(count, -1) for t, count in each])

    @property
    def features(self) -> tuple[int, int]:
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        return width, width

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        return sf.Traffic(8, 7, 7)  # mostly copies to float32 and back

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        wanted = (self.heads + 2 * self.kv_heads) * self.head_dim
        check_last(shape, wanted)
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
        text += f", eps={self.eps}, elementwise_affine={self._parameters.get('q_weight', self) is not None}"
        text += f", kind={self.kind!r}" if self.kind != "rms" else ""
        flags = {
            "full_width": self.full_width,
            "zero_centered": self.zero_centered,
            "bias": self._parameters.get("q_bias", self) is not None,
        }
        return text + "".join(f", {name}=True" for name, value in flags.items() if value)
