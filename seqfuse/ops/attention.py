"""Attention: softmax of scaled products of queries with keys, over packed heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import operation as sf
from ..env import autocast_of
from ..errors import InputError
from ._attention import (
    QKV,
    Scores,
    additive,
    attend,
    attend_backward,
    attend_grads,
    by_torch,
    head_size,
    numbers,
)
from ._attention_blocks import attend_blocks, attend_blocks_backward
from ._attention_plain import attend_plain
from ._cache import current
from ._sdpa import aligned
from ._tensors import broadcasts, stats_dtype


class Attention(sf.UnfusedOperation):
    """y = softmax(scale q k^T) v for each head, with x = [q; k; v] packed along the last dimension.

    Forward, for row i and key j of one head: s = scale q_i . k_j; with `softcap` c, s = c tanh(s / c); plus the mask;
    w = exp(s - lse), lse = log sum_j exp(s) over the keys that row i sees; y_i = sum_j keep w v_j / (1 - p). A row that
    sees no key gives zeros, and so do its gradients.

    Backward: with dw = keep (dy . v) / (1 - p), ds = w (dw - sum_j w dw); dq = scale ds k, dk = scale ds^T q,
    dv = (keep w / (1 - p))^T dy, and the gradient of a float mask is the sum of ds over what it was broadcast to.
    Weights are made again: nothing of size S x S is kept.

    x: [*, S, (H + 2 Hkv) D] with heads outermost in each part, y: [*, S, H D]. Heads H / Hkv at a time share a key
    head. Scores and sums are float32 (float64 for float64); under autocast x is cast to its dtype first.
    Saved: x, y, lse [*, H, S] in natural logarithms (0 for a row that sees no key), mask, sequence ends, seed and p.
    Dropout of weights is that of `Dropout` over a contiguous [*, H, S, S]; no mask is kept.
    Source: Vaswani et al. 2017, arXiv:1706.03762; Dao 2023, arXiv:2307.08691; GQA: Ainslie et al. 2023,
    arXiv:2305.13245.

    Args:
        heads: H.
        kv_heads: Hkv, which divides H; H by default.
        causal: whether row i sees keys 0..i alone.
        window: how many keys a row sees on each side, its own included; all by default.
        dropout: probability of dropping a weight in training.
        scale: D^-1/2 by default.
        softcap: bound on the scores, none by default.
        mask: channel of a mask that broadcasts to [*, H, S, S]: bool or int, where not zero is seen, or float, added.
        cu_seqlens: channel of the ends of sequences packed along S, int [N + 1], from 0 to S; no row sees another
            sequence. x is then [S, ...].

    Raises:
        ValueError: for numbers that do not fit together.
        InputError: (SF101) for a mask that does not broadcast, or what is not of real numbers, (SF107) for ends that do
            not run from 0 to S.
    """

    class Saved(sf.Saved):
        x: Tensor  # [*, S, (H + 2 Hkv) D]
        y: Tensor | None  # [*, S, H D], for the kernels of torch; without it the backward pass is made in blocks
        lse: Tensor  # [*, H, S] float32
        mask: Tensor | None
        cu_seqlens: Tensor | None
        seed: Tensor | None  # [] int64
        p: float

    autocast = "lower"

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = False,
        window: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
        mask: str | None = None,
        cu_seqlens: str | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {kv_heads} and {heads}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap must be positive, got {softcap}")
        self.heads, self.kv_heads, self.causal, self.window = heads, kv_heads, causal, window
        self.dropout, self.scale, self.softcap = dropout, scale, softcap
        self.mask, self.cu_seqlens = mask, cu_seqlens

    @property
    def random(self) -> bool:
        return self.training and self.dropout > 0

    @property
    def repeatable(self) -> bool:
        return current() is None  # a second run would write its keys and values behind those of the first

    @property
    def channels(self) -> Mapping[str, str | None]:
        given = {"attn_mask": self.mask, "cu_seqlens": self.cu_seqlens}
        return {name: channel for name, channel in given.items() if channel is not None}

    def reference(
        self,
        x: Tensor,
        *,
        attn_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        cache = current()
        if cache is not None:
            return cache.attend(self, x)
        self._check_dtypes(x, attn_mask)
        x = self._cast(x)
        dropping = seed is not None and self.random
        mask = self._limits(x, attn_mask, cu_seqlens)
        causal = self.causal and mask is None
        how = self._how(x, mask, None, seed, self.dropout if dropping else 0.0)
        y = None if dropping else by_torch(self._batched(x), how, causal)
        if y is not None:
            return y.transpose(-3, -2).reshape(self.infer(x.shape))
        if causal:
            mask = ~_later(x.shape[-2], x.device)
        qkv = self.heads_of(x.to(stats_dtype(x)))
        y = attend_plain(qkv, self.scale_of(x), self.softcap, mask, seed if dropping else None, self.dropout)
        return y.to(x.dtype).transpose(-3, -2).flatten(-2)

    def fwd(
        self,
        x: Tensor,
        *,
        attn_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        seed: Tensor | None = None,
        needs: frozenset[str] = frozenset(),
    ) -> tuple[Tensor, Saved]:
        cache = current()
        if cache is not None:
            y = cache.attend(self, x)
            return y, self.Saved(x=x, y=None, lse=y, mask=None, cu_seqlens=None, seed=None, p=0.0)
        if attn_mask is not None or cu_seqlens is not None or not x.is_floating_point():
            self._check(x, attn_mask, cu_seqlens)
        seed = None if seed is None or not self.random else seed
        p = 0.0 if seed is None else self.dropout
        fit = self._fit(x)
        qkv = self._batched(fit)
        how = self._how(fit, attn_mask, cu_seqlens, seed, p)
        kernel = "blocks" if "attn_mask" in needs else how.kernel(qkv[0], qkv[1])
        y, lse = attend_blocks(qkv, how) if kernel == "blocks" else attend(qkv, how, kernel)
        y = y.flatten(2)
        if x.ndim != 3:
            y, lse = y.view(self.infer(x.shape)), lse.reshape(*x.shape[:-2], self.heads, x.shape[-2])
        return y, self._saved(x, None if kernel == "blocks" else y, lse, attn_mask, cu_seqlens, seed, p)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        x, wants_mask = saved.x, "attn_mask" in needs
        fit = self._fit(x)
        qkv = q, k, _ = self._batched(fit)
        how = self._how(fit, saved.mask, saved.cu_seqlens, saved.seed, saved.p)
        batch, heads, length, size = q.shape
        dy = (dy if dy.dtype is fit.dtype else dy.to(fit.dtype)).reshape(batch, length, heads, size)
        lse = saved.lse if fit.ndim == 3 else saved.lse.reshape(batch, heads, length)
        y, kernel, dx, dmask = saved.y, how.kernel(q, k), None, None
        if y is None or wants_mask or kernel == "blocks" or (kernel == "cpu" and how.loses_sums(lse)):
            dx = torch.empty_like(fit, memory_format=torch.contiguous_format) if "x" in needs else None
            dmask = attend_blocks_backward(dy, qkv, how, None if dx is None else self._batched(dx), wants_mask)
        elif "x" in needs:
            given = dy.contiguous(), qkv, y.reshape(dy.shape), lse, how, kernel
            grads = attend_grads(*given)
            if grads is None:
                dx = torch.empty_like(fit, memory_format=torch.contiguous_format)
                attend_backward(*given, self._batched(dx))
            else:
                dx = torch.cat(grads, 2).view(fit.shape)
        if dmask is not None and saved.mask is not None:
            dmask = dmask.view(*(x.shape[:-2] if x.ndim > 3 else dmask.shape[:1]), *dmask.shape[1:])
            dmask = dmask.sum_to_size(saved.mask.shape).to(saved.mask.dtype)
        dx = dx if dx is None or dx.dtype is x.dtype else dx.to(x.dtype)
        return dx, {"attn_mask": dmask} if wants_mask else {}

    def heads_of(self, x: Tensor) -> QKV:
        """Views of a packed x: q [*, H, S, D], k and v [*, Hkv, S, D]."""
        *rows, features = x.shape
        own, shared = self.heads, self.kv_heads
        total = own + 2 * shared
        heads = x.view(*rows, total, features // total).transpose(-3, -2)
        q, k, v = heads.split_with_sizes((own, shared, shared), -3)
        return q, k, v

    def _batched(self, x: Tensor) -> QKV:
        return self.heads_of(x if x.ndim == 3 else x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]))

    @staticmethod
    def _cast(x: Tensor) -> Tensor:
        dtype = autocast_of(x.device.type)
        return x if dtype is None or x.dtype is torch.float64 or not x.is_floating_point() else x.to(dtype)

    def _fit(self, x: Tensor) -> Tensor:
        """The input in the dtype of autocast, laid out as the kernels read it: they skip no element of a head."""
        x = self._cast(x)
        fits = (x.is_contiguous() or (x.stride(-1) == 1 and 0 not in x.stride())) and aligned(x)
        return x if fits else x.clone(memory_format=torch.contiguous_format)

    def scale_of(self, x: Tensor) -> float:
        """The factor of the scores, queries times keys."""
        return (x.shape[-1] // (self.heads + 2 * self.kv_heads)) ** -0.5 if self.scale is None else self.scale

    def _how(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, seed: Tensor | None, p: float) -> Scores:
        if mask is not None and mask.dtype is torch.float64:
            mask = additive(mask, stats_dtype(x))
        if mask is not None and not mask.ndim == x.ndim + 1 == 4:
            mask = mask.reshape((1,) * (x.ndim + 1 - mask.ndim) + mask.shape)
            if x.ndim > 3:
                mask = mask.expand(*x.shape[:-2], *mask.shape[-3:])
            mask = mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
        return Scores(self.scale_of(x), self.causal, self.window, self.softcap, p, seed, mask, cu_seqlens)

    def _limits(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
        """All that limits what a row sees as one mask, or `None` where that is at most being causal."""
        length = x.shape[-2]
        seen: Tensor | None = None
        if self.causal and (mask is not None or cu_seqlens is not None or self.window is not None):
            seen = ~_later(length, x.device)
        row = torch.arange(length, device=x.device)
        if self.window is not None:
            near = (row.unsqueeze(1) - row).abs() < self.window
            seen = near if seen is None else seen & near
        if cu_seqlens is not None:
            sequence = torch.searchsorted(cu_seqlens.to(row.dtype), row, right=True)
            same = sequence.unsqueeze(1) == sequence
            seen = same if seen is None else seen & same
        if mask is None or seen is None:
            return seen if mask is None else mask if mask.is_floating_point() else mask != 0
        return mask.masked_fill(~seen, -torch.inf) if mask.is_floating_point() else (mask != 0) & seen

    def _check_dtypes(self, x: Tensor, mask: Tensor | None) -> None:
        if not x.is_floating_point() or (mask is not None and mask.is_complex()):
            got = x.dtype if mask is None else f"{x.dtype} and a mask of {mask.dtype}"
            message = f"expects floating-point x, and a mask of real numbers, if any, got {got}"
            raise InputError(message, code="SF101", operation="Attention")

    def _check(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        self._check_dtypes(x, mask)
        if mask is not None:
            whole = (*x.shape[:-2], self.heads, x.shape[-2], x.shape[-2])
            if not broadcasts(mask.shape, whole):
                message = f"expects a mask that broadcasts to {whole}, got {tuple(mask.shape)}"
                raise InputError(message, code="SF101", operation="Attention")
        if cu_seqlens is not None:
            if x.ndim != 2 or cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
                got = f"x {tuple(x.shape)} and {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
                message = f"expects x [S, C] and integer cu_seqlens [N + 1], got {got}"
                raise InputError(message, code="SF101", operation="Attention")
            if cu_seqlens.device.type == "cpu" and type(cu_seqlens) is Tensor:
                ends = numbers(cu_seqlens)
                if not ends or ends[0] != 0 or ends[-1] != x.shape[0] or sorted(ends) != ends:
                    message = f"expects cu_seqlens that run from 0 to {x.shape[0]}, got {ends}"
                    raise InputError(message, code="SF107", operation="Attention")

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], self.heads * head_size(shape, self.heads, self.kv_heads))

    @classmethod
    def example(cls, x: Tensor) -> Attention:
        parts: Any = next((n for n in (4, 3) if x.shape[-1] % n == 0), None)
        if parts is None:
            raise ValueError(f"no heads fit in a last dimension of {x.shape[-1]}; give the operation explicitly")
        return cls(2 if parts == 4 else 1, 1)

    def extra_repr(self) -> str:
        text = f"{self.heads}" + (f", {self.kv_heads}" if self.kv_heads != self.heads else "")
        named = {
            "causal": self.causal, "window": self.window, "dropout": self.dropout, "scale": self.scale,
            "softcap": self.softcap, "mask": self.mask, "cu_seqlens": self.cu_seqlens,
        }  # fmt: skip
        return text + "".join(f", {name}={value!r}" for name, value in named.items() if value not in (None, False, 0.0))


def _later(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
