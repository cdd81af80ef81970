"""CrossAttention: queries of the chain, keys and values of channels."""

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
)
from ._attention_blocks import attend_blocks, attend_blocks_backward
from ._attention_plain import attend_plain
from ._sdpa import aligned
from ._tensors import broadcasts, stats_dtype, unflatten


class CrossAttention(sf.UnfusedOperation):
    """y = softmax(scale q k^T) v for each head, with q = x, and k and v the tensors of channels.

    Forward and backward are those of `Attention`, whose q, k and v are one tensor: for row i and key j of one head
    s = scale q_i . k_j, made softcap tanh(s / softcap) where there is one, plus the mask; w = exp(s - lse),
    lse = log sum_j exp(s); y_i = sum_j keep w v_j / (1 - p). Nothing of size S x N is kept.

    Backward: with dw = keep (dy . v) / (1 - p), ds = w (dw - sum_j w dw); dx = scale ds k, dk = scale ds^T q,
    dv = (keep w / (1 - p))^T dy, and the gradient of a float mask is the sum of ds over what it was broadcast to.

    x, y: [*, S, H D], k, v: [*, N, Hkv D], of one dtype, heads outermost. Heads H / Hkv at a time share a key head.
    Scores and sums are float32 (float64 for float64); under autocast x, k and v are cast to its dtype first.
    Saved: x, k, v, y, lse [*, H, S] in natural logarithms (0 for a row that sees no key), mask, seed and p.
    Dropout of weights is that of `Dropout` over a contiguous [*, H, S, N]; no mask is kept.
    Source: Vaswani et al. 2017, arXiv:1706.03762; Dao 2023, arXiv:2307.08691.

    Args:
        heads: H.
        kv_heads: Hkv, which divides H; H by default.
        k: channel of the keys.
        v: channel of the values.
        causal: whether row i sees keys 0..i alone, where S = N.
        dropout: probability of dropping a weight in training.
        scale: D^-1/2 by default.
        softcap: bound on the scores, none by default.
        mask: channel of a mask that broadcasts to [*, H, S, N]: bool or int, where not zero is seen, or float, added,
            as a relative position bias [1, H, S, N] is.

    Raises:
        ValueError: for numbers that do not fit together.
        InputError: (SF101) for keys and values that do not fit x, a mask that does not broadcast, or `causal` where S
            is not N.
    """

    class Saved(sf.Saved):
        x: Tensor  # [*, S, H D]
        k: Tensor  # [*, N, Hkv D]
        v: Tensor  # [*, N, Hkv D]
        y: Tensor | None  # [*, S, H D], for the kernels of torch; without it the backward pass is made in blocks
        lse: Tensor  # [*, H, S] float32
        mask: Tensor | None
        seed: Tensor | None  # [] int64
        p: float

    autocast = "lower"

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        *,
        k: str = "k",
        v: str = "v",
        causal: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
        mask: str | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {kv_heads} and {heads}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap must be positive, got {softcap}")
        self.heads, self.kv_heads, self.k, self.v = heads, kv_heads, k, v
        self.causal, self.dropout, self.scale, self.softcap, self.mask = causal, dropout, scale, softcap, mask

    @property
    def random(self) -> bool:
        return self.training and self.dropout > 0

    @property
    def channels(self) -> Mapping[str, str | None]:
        given = {"k": self.k, "v": self.v}
        return given if self.mask is None else {**given, "attn_mask": self.mask}

    def reference(
        self, x: Tensor, *, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, seed: Tensor | None = None
    ) -> Tensor:
        self._check(x, k, v, attn_mask)
        seed = seed if self.random else None
        if attn_mask is not None and not attn_mask.is_floating_point():
            attn_mask = attn_mask != 0
        qkv, how = self._batched(*(self._fit(t) for t in (x, k, v))), self._how(x, attn_mask, seed)
        y = None if seed is not None or (self.causal and attn_mask is not None) else by_torch(qkv, how, self.causal)
        if y is None:
            mask, stats = how.mask, stats_dtype(x)
            if self.causal:
                seen = torch.ones(x.shape[-2], k.shape[-2], dtype=torch.bool, device=x.device).tril_()
                if mask is None:
                    mask = seen
                else:
                    mask = mask.masked_fill(~seen, -torch.inf) if mask.is_floating_point() else mask & seen
            q, keys, values = (t.to(stats) for t in qkv)
            y = attend_plain((q, keys, values), how.scale, self.softcap, mask, seed, self.dropout).to(qkv[0].dtype)
        return y.transpose(-3, -2).reshape(x.shape)

    def fwd(
        self,
        x: Tensor,
        *,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        seed: Tensor | None = None,
        needs: frozenset[str] = frozenset(),
    ) -> tuple[Tensor, Saved]:
        self._check(x, k, v, attn_mask)
        seed = seed if self.random else None
        qkv, how = self._batched(*(self._fit(t) for t in (x, k, v))), self._how(x, attn_mask, seed)
        kernel = "blocks" if "attn_mask" in needs else how.kernel(*qkv[:2])
        y, lse = attend_blocks(qkv, how) if kernel == "blocks" else attend(qkv, how, kernel)
        y, lse = y.reshape(x.shape), lse.reshape(*x.shape[:-2], self.heads, x.shape[-2])
        kept = None if kernel == "blocks" else y
        return y, self.Saved(x=x, k=k, v=v, y=kept, lse=lse, mask=attn_mask, seed=seed, p=how.p)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        x, wants_mask, wants = saved.x, "attn_mask" in needs, bool(needs & {"x", "k", "v"})
        fit = tuple([self._fit(t) for t in (x, saved.k, saved.v)])
        qkv = q, k, v = self._batched(*fit)
        how = self._how(x, saved.mask, saved.seed, saved.p)
        dy = dy.to(q.dtype).reshape(q.shape[0], q.shape[2], self.heads, q.shape[3])
        lse, y, kernel, dmask = saved.lse.reshape(q.shape[:3]), saved.y, how.kernel(q, k), None
        if y is None or wants_mask or kernel == "blocks" or (kernel == "cpu" and how.loses_sums(lse)):
            made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in fit]
            dmask = attend_blocks_backward(dy, qkv, how, self._batched(*made) if wants else None, wants_mask)
        else:
            shared = q.shape[1] // k.shape[1] if kernel == "cpu" else 1  # it adds shared heads up in their own dtype
            every = qkv if shared == 1 else (q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1))
            given = dy.contiguous(), every, y.reshape(dy.shape), lse, how, kernel
            grads = attend_grads(*given)
            if grads is None:
                made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in fit]
                attend_backward(*given, self._batched(*made))
            else:
                if shared > 1:
                    grads = (grads[0], *[unflatten(d, 2, -1, shared).sum(3) for d in grads[1:]])
                made = [grad.reshape(t.shape) for grad, t in zip(grads, fit, strict=True)]
        found: dict[str, Tensor | None] = {
            name: d.to(t.dtype) for name, d, t in zip(("x", "k", "v"), made, (x, saved.k, saved.v), strict=True)
        }
        if dmask is not None and saved.mask is not None:
            dmask = dmask.view(*(x.shape[:-2] if x.ndim > 3 else dmask.shape[:1]), *dmask.shape[1:])
            found["attn_mask"] = dmask.sum_to_size(saved.mask.shape).to(saved.mask.dtype)
        dx = found.pop("x")
        return (dx if "x" in needs else None), {name: d for name, d in found.items() if name in needs}

    def _batched(self, x: Tensor, k: Tensor, v: Tensor) -> QKV:
        """Views [B, H, S, D] and [B, Hkv, N, D]."""
        q, k, v = (
            unflatten(t.reshape(math.prod(t.shape[:-2]), *t.shape[-2:]), -1, heads, -1).transpose(1, 2)
            for t, heads in ((x, self.heads), (k, self.kv_heads), (v, self.kv_heads))
        )
        return q, k, v

    @staticmethod
    def _fit(x: Tensor) -> Tensor:
        """In the dtype of autocast, laid out as the kernels read it: they skip no element of a head."""
        dtype = autocast_of(x.device.type)
        x = x if dtype is None or x.dtype is torch.float64 else x.to(dtype)
        if torch.compiler.is_dynamo_compiling():  # which traces no offset, and the reference reads any layout
            return x
        fits = x.stride(-1) == 1 and 0 not in x.stride() and aligned(x)
        return x if fits else x.clone(memory_format=torch.contiguous_format)

    def _how(self, x: Tensor, mask: Tensor | None, seed: Tensor | None, p: float | None = None) -> Scores:
        if mask is not None:
            mask = additive(mask, stats_dtype(x)) if mask.dtype is torch.float64 else mask
            mask = mask.reshape((1,) * (x.ndim + 1 - mask.ndim) + mask.shape)
            if x.ndim > 3:
                mask = mask.expand(*x.shape[:-2], *mask.shape[-3:])
            mask = mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
        scale = (x.shape[-1] // self.heads) ** -0.5 if self.scale is None else self.scale
        p = (self.dropout if seed is not None else 0.0) if p is None else p
        return Scores(scale, self.causal, None, self.softcap, p, seed, mask)

    def _check(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        width = self.kv_heads * (x.shape[-1] // self.heads) if x.ndim else 0
        alike = k.dtype is v.dtype is x.dtype or autocast_of(x.device.type) is not None
        fits = alike and x.is_floating_point() and k.is_floating_point() and k.shape == v.shape
        if not fits or k.shape[:-2] != x.shape[:-2] or k.ndim < 2 or k.shape[-1] != width:
            wanted = (
                f"{x.dtype} {(*x.shape[:-2], 'N', width)}" if x.is_floating_point() else "floating-point x, and alike"
            )
            got = f"{k.dtype} {tuple(k.shape)} and {v.dtype} {tuple(v.shape)}"
            message = f"expects k and v of {wanted}, got x {x.dtype} {tuple(x.shape)}, {got}"
            raise InputError(message, code="SF101", operation="CrossAttention")
        whole = (*x.shape[:-2], self.heads, x.shape[-2], k.shape[-2])
        if mask is not None and (mask.is_complex() or not broadcasts(mask.shape, whole)):
            message = f"expects a mask of real numbers that broadcasts to {whole}, got {mask.dtype} {tuple(mask.shape)}"
            raise InputError(message, code="SF101", operation="CrossAttention")
        if self.causal and x.shape[-2] != k.shape[-2]:
            message = f"causal needs as many keys as rows, got {k.shape[-2]} and {x.shape[-2]}"
            raise InputError(message, code="SF101", operation="CrossAttention", hint="say with a mask what a row sees")

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) < 2 or not shape[-1] or shape[-1] % self.heads:
            raise ValueError(f"expects [*, S, {self.heads} D] of {self.heads} query heads, got shape {tuple(shape)}")
        return shape

    @classmethod
    def example(cls, x: Tensor) -> CrossAttention:
        return cls(2 if x.shape[-1] % 2 == 0 else 1)

    def extra_repr(self) -> str:
        text = f"{self.heads}" + (f", {self.kv_heads}" if self.kv_heads != self.heads else "")
        named: dict[str, Any] = {
            "k": None if self.k == "k" else self.k, "v": None if self.v == "v" else self.v, "causal": self.causal,
            "dropout": self.dropout, "scale": self.scale, "softcap": self.softcap, "mask": self.mask,
        }  # fmt: skip
        return text + "".join(f", {name}={value!r}" for name, value in named.items() if value not in (None, False, 0.0))
