"""Attention: softmax of scaled dot products of queries and keys, with heads packed in one tensor or in three."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

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
    attend_blocks_backward,
    attend_grads,
    attend_reference,
    head_size,
    is_readable,
    numbers_in,
)
from ._attention_on_cpu import MASKS, passes_in_c
from ._cache import current
from ._sdpa import aligned
from ._tensors import broadcasts, stats_dtype, unflatten


class SoftmaxAttention(sf.UnfusedOperation, open=True):
    """Base of `Attention` and `CrossAttention`, which differ in the inputs that hold queries, keys and values."""

    autocast = "lower"
    costly = True
    window: int | None = None
    apart: ClassVar[bool] = False  # as an argument of `attend_grads`

    def __init__(
        self,
        heads: int,
        kv_heads: int | None,
        causal: bool,
        dropout: float,
        scale: float | None,
        softcap: float | None,
        mask: str | None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {kv_heads} and {heads}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap must be positive, got {softcap}")
        self.heads, self.kv_heads, self.causal, self.dropout = heads, kv_heads, causal, dropout
        self.scale, self.softcap, self.mask = scale, softcap, mask

    @property
    def random(self) -> bool:
        return self.training and self.dropout > 0

    def split(self, inputs: Sequence[Tensor]) -> QKV:
        """Views q [B, H, S, D], k and v [B, Hkv, N, D] of the inputs, or of tensors with their shapes."""
        raise NotImplementedError

    def _check(self, inputs: Sequence[Tensor], mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        """Raise an `InputError` for inputs that do not fit."""
        raise NotImplementedError

    def joined(self, grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the inputs, from the gradients of q, k and v, [B, S, heads, D]."""
        raise NotImplementedError

    def _fit(self, x: Tensor) -> Tensor:
        """An input in the dtype of autocast, in a layout that kernels support: heads have contiguous elements."""
        dtype = autocast_of(x.device.type)
        if dtype is not None and x.dtype is not torch.float64 and x.is_floating_point():
            x = x.to(dtype)
        if torch.compiler.is_dynamo_compiling():  # it traces no storage offset, and the reference reads any strides
            return x
        return x if is_readable(x) and aligned(x) else x.clone(memory_format=torch.contiguous_format)

    def _scores(
        self, x: Tensor, size: int, mask: Tensor | None, cu_seqlens: Tensor | None, seed: Tensor | None, p: float
    ) -> Scores:
        """How scores are computed and limited, for heads of this size; the mask in four dimensions."""
        if mask is not None:
            if mask.dtype is torch.float64:
                mask = additive(mask, stats_dtype(x))
            if not mask.ndim == x.ndim + 1 == 4:
                mask = mask.reshape((1,) * (x.ndim + 1 - mask.ndim) + mask.shape)
                if x.ndim > 3:
                    mask = mask.expand(*x.shape[:-2], *mask.shape[-3:])
                mask = mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
        scale = size**-0.5 if self.scale is None else self.scale
        decided = cu_seqlens is None and type(self) in _IN_C and (mask is None or mask.dtype in MASKS)
        return Scores(scale, self.causal, self.window, self.softcap, p, seed, mask, cu_seqlens, decided)

    def _plain(
        self, inputs: Sequence[Tensor], mask: Tensor | None, cu_seqlens: Tensor | None, seed: Tensor | None
    ) -> Tensor:
        """The reference."""
        x, qkv = inputs[0], self.split([*map(self._fit, inputs)])
        seed = seed if self.random else None
        p = 0.0 if seed is None else self.dropout
        y = attend_reference(qkv, self._scores(x, qkv[0].shape[-1], mask, cu_seqlens, seed, p))
        return y.transpose(-3, -2).reshape(self.infer(x.shape))

    def _attend(
        self,
        inputs: Sequence[Tensor],
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        seed: Tensor | None,
        needs: frozenset[str],
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, float]:
        """Return y, y again if it is saved (else `None`), the log-sum-exp, and the seed and p of dropout."""
        x = inputs[0]
        seed = None if seed is None or not self.random else seed
        if cu_seqlens is None and type(self) in _IN_C:
            p = 0.0 if seed is None else self.dropout
            both = passes_in_c(self, inputs, mask, seed, p, "attn_mask" in needs)
            if both is not None:
                y, lse = both.forward(inputs, mask, seed)
                return y, y if both.keeps_y else None, lse, seed, p
        self._check(inputs, mask, cu_seqlens)
        q, k, _ = qkv = self.split([*map(self._fit, inputs)])
        how = self._scores(x, q.shape[-1], mask, cu_seqlens, seed, 0.0 if seed is None else self.dropout)
        kernel = "flash" if how.draws(q) else how.kernel(q, k)
        if "attn_mask" in needs and kernel != "c":  # its gradient is computed in blocks
            kernel = "blocks"
        y, lse = attend(qkv, how, kernel)
        y = y.flatten(2)
        if x.ndim != 3:
            y, lse = y.reshape(self.infer(x.shape)), lse.reshape(*x.shape[:-2], self.heads, x.shape[-2])
        # y is saved only if the backward kernel reads it.
        made_again = kernel == "blocks" or (kernel == "c" and ("attn_mask" in needs or how.beyond_torch(k.shape[-2])))
        return y, None if made_again else y, lse, how.seed, how.p

    def _gradients(
        self, dy: Tensor, inputs: Sequence[Tensor], saved: Any, cu_seqlens: Tensor | None, needs: frozenset[str]
    ) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """The gradients of the inputs, and the mask's gradient if it is needed."""
        x, needs_mask, lse = inputs[0], "attn_mask" in needs, saved.lse
        if cu_seqlens is None and type(self) in _IN_C and dy.dtype is x.dtype:
            both = passes_in_c(self, inputs, saved.mask, saved.seed, saved.p, needs_mask)
            if both is not None:
                return both.backward(dy.contiguous().resolve_neg(), inputs, saved.mask, saved.seed)
        fit = [*map(self._fit, inputs)]
        q, k, _ = qkv = self.split(fit)
        how = self._scores(x, q.shape[-1], saved.mask, cu_seqlens, saved.seed, saved.p)
        batch, heads, length, size = q.shape
        dy = (dy if dy.dtype is q.dtype else dy.to(q.dtype)).reshape(batch, length, heads, size)
        lse = lse if x.ndim == 3 else lse.reshape(batch, heads, length)
        y, kernel, dmask, made = saved.y, how.kernel(q, k), None, list[Tensor]()
        all_at_once = needs_mask and kernel == "c" and how.fits(q, k)
        needed = all_at_once or bool(needs - {"attn_mask"})
        in_blocks = kernel != "c" and (
            needs_mask or y is None or kernel == "blocks" or (kernel == "cpu" and how.loses_sums(lse))
        )
        if all_at_once:
            dmask = q.new_empty(batch, heads, length, k.shape[-2], dtype=torch.float32)
        elif needs_mask or in_blocks:
            made = self._new(fit) if needed and in_blocks else made
            dmask = attend_blocks_backward(dy, qkv, how, self.split(made) if made else None, needs_mask)
        if needed and not in_blocks:
            given = dy.contiguous(), qkv, None if y is None else y.reshape(dy.shape), lse, how, kernel
            grads = attend_grads(*given, self.apart)
            if grads is not None:
                made = self.joined(grads, fit)
            else:
                made = self._new(fit)
                attend_backward(*given, self.split(made), dmask if all_at_once else None)
        if dmask is not None and saved.mask is not None:
            dmask = dmask.view(*(x.shape[:-2] if x.ndim > 3 else dmask.shape[:1]), *dmask.shape[1:])
            dmask = dmask.sum_to_size(saved.mask.shape).to(saved.mask.dtype)
        grads = [d if d.dtype is t.dtype else d.to(t.dtype) for d, t in zip(made, inputs, strict=False)]
        return grads or [None] * len(inputs), dmask

    @staticmethod
    def _new(inputs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]

    def extra_repr(self) -> str:
        text = f"{self.heads}" + (f", {self.kv_heads}" if self.kv_heads != self.heads else "")
        plain = (None, False, 0.0)
        return text + "".join(f", {name}={value!r}" for name, value in self._named().items() if value not in plain)

    def _named(self) -> dict[str, Any]:
        """The arguments that `extra_repr` shows by keyword."""
        return {name: getattr(self, name) for name in ("causal", "window", "dropout", "scale", "softcap", "mask")}


class Attention(SoftmaxAttention):
    """y = softmax(scale q k^T) v for each head, with x = [q; k; v] packed along the last dimension.

    Forward, for row i and key j of one head: s = scale q_i . k_j; with `softcap` c, s = c tanh(s / c); plus the mask; w
    = exp(s - lse), lse = log sum_j exp(s) over the keys visible to row i; y_i = sum_j keep w v_j / (1 - p). A row
    without visible keys gives zeros and zero gradients.

    Backward: with dw = keep (dy . v) / (1 - p), ds = w (dw - sum_j w dw); dq = scale ds k, dk = scale ds^T q, dv =
    (keep w / (1 - p))^T dy, and the gradient of a float mask is the sum of ds over broadcast dimensions. Attention
    weights are recomputed; nothing of size S x S is saved.

    x: [*, S, (H + 2 Hkv) D] with heads outermost in q, k and v, y: [*, S, H D]. Each key head serves H / Hkv query
    heads (GQA). Scores and sums are float32 (float64 for float64); under autocast x is cast first.
    Saved: x, y, lse [*, H, S] in natural logarithms (0 for a row without visible keys), mask, cu_seqlens, seed and p.
    Attention weights are dropped as by `Dropout` on a contiguous [*, H, S, S]; the dropout mask is not saved. In 16
    bits on an NVIDIA GPU, without mask, softcap or deterministic algorithms, FlashAttention drops them instead; `seed`
    is then the state of torch's generator, int64 [2].
    Source: Vaswani et al. 2017, arXiv:1706.03762; Dao 2023, arXiv:2307.08691; GQA: Ainslie et al. 2023,
    arXiv:2305.13245.

    Args:
        heads: H.
        kv_heads: Hkv, a divisor of H; default H.
        causal: whether row i attends only to keys 0..i.
        window: sliding window, the number of keys on each side including the own position; default all.
        dropout: probability of dropping an attention weight in training.
        scale: factor of the scores; default D^-1/2.
        softcap: soft cap c of the scores; default none.
        mask: channel of a mask, broadcast to [*, H, S, S]: bool or int (nonzero attends), or float (added).
        cu_seqlens: channel of the cumulative lengths of sequences packed along S (varlen), int [N + 1], from 0 to S. x
            is then [S, ...].

    Raises:
        ValueError: for inconsistent numbers.
        InputError: (SF101) for a mask that does not broadcast or complex tensors, (SF102) for a mask on another device,
            (SF107) for `cu_seqlens` that do not run from 0 to S.
    """

    class Saved(sf.Saved):
        x: Tensor  # [*, S, (H + 2 Hkv) D]
        y: Tensor | None  # [*, S, H D]; `None` if no backward kernel reads it
        lse: Tensor  # [*, H, S] float32
        mask: Tensor | None
        cu_seqlens: Tensor | None
        seed: Tensor | None  # [] int64, [2] with FlashAttention
        p: float

    packs = True

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
        super().__init__(heads, kv_heads, causal, dropout, scale, softcap, mask)
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.window, self.cu_seqlens = window, cu_seqlens

    @property
    def repeatable(self) -> bool:
        return current() is None  # a second run would append its keys and values after those of the first

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
        return self._plain((x,), attn_mask, cu_seqlens, seed)

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
        y, kept, lse, seed, p = self._attend((x,), attn_mask, cu_seqlens, seed, needs)
        return y, self._saved(x, kept, lse, attn_mask, cu_seqlens, seed, p)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        (dx,), dmask = self._gradients(dy, (saved.x,), saved, saved.cu_seqlens, needs)
        return dx if "x" in needs else None, {"attn_mask": dmask} if "attn_mask" in needs else {}

    def split(self, inputs: Sequence[Tensor]) -> QKV:
        (x,) = inputs
        return self.heads_of(x if x.ndim == 3 else x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]))

    def joined(self, grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat([*grads], 2).view(inputs[0].shape)]

    def heads_of(self, x: Tensor) -> QKV:
        """Views of a packed x: q [*, H, S, D], k and v [*, Hkv, S, D]."""
        *rows, features = x.shape
        own, shared = self.heads, self.kv_heads
        total = own + 2 * shared
        heads = x.view(*rows, total, features // total).transpose(-3, -2)
        q, k, v = heads.split_with_sizes((own, shared, shared), -3)
        return q, k, v

    def scale_of(self, x: Tensor) -> float:
        """The factor of the scores q k^T."""
        return (x.shape[-1] // (self.heads + 2 * self.kv_heads)) ** -0.5 if self.scale is None else self.scale

    def _check_dtypes(self, x: Tensor, mask: Tensor | None) -> None:
        _check_devices("Attention", x, mask)
        if not x.is_floating_point() or (mask is not None and mask.is_complex()):
            got = x.dtype if mask is None else f"{x.dtype} and a mask of {mask.dtype}"
            message = f"expects floating-point x, and a mask of real numbers, if any, got {got}"
            raise InputError(message, code="SF101", operation="Attention")

    def _check(self, inputs: Sequence[Tensor], mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        (x,) = inputs
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
                ends = numbers_in(cu_seqlens)
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

    def _named(self) -> dict[str, Any]:
        return {**super()._named(), "cu_seqlens": self.cu_seqlens}


class CrossAttention(SoftmaxAttention):
    """y = softmax(scale q k^T) v for each head, with q = x, and k and v from channels.

    Forward and backward as in `Attention`: for row i and key j of one head s = scale q_i . k_j, with `softcap` s =
    softcap tanh(s / softcap), plus the mask; w = exp(s - lse), lse = log sum_j exp(s); y_i = sum_j keep w v_j / (1 -
    p). Nothing of size S x N is saved.

    Backward: with dw = keep (dy . v) / (1 - p), ds = w (dw - sum_j w dw); dx = scale ds k, dk = scale ds^T q, dv =
    (keep w / (1 - p))^T dy, and the gradient of a float mask is the sum of ds over broadcast dimensions.

    x, y: [*, S, H D], k, v: [*, N, Hkv D], of one dtype, heads outermost. Each key head serves H / Hkv query heads
    (GQA). Scores and sums are float32 (float64 for float64); under autocast x, k and v are cast first.
    Saved: x, k, v, y, lse [*, H, S] in natural logarithms (0 for a row without visible keys), mask, seed and p.
    Attention weights are dropped as by `Dropout` on a contiguous [*, H, S, N], or by FlashAttention as in `Attention`.
    Source: Vaswani et al. 2017, arXiv:1706.03762; Dao 2023, arXiv:2307.08691.

    Args:
        heads: H.
        kv_heads: Hkv, a divisor of H; default H.
        k: channel of the keys.
        v: channel of the values.
        causal: whether row i attends only to keys 0..i; needs S = N.
        dropout: probability of dropping an attention weight in training.
        scale: factor of the scores; default D^-1/2.
        softcap: soft cap of the scores; default none.
        mask: channel of a mask, broadcast to [*, H, S, N]: bool or int (nonzero attends), or float (added), such as a
            relative position bias [1, H, S, N].

    Raises:
        ValueError: for inconsistent numbers.
        InputError: (SF101) for keys and values that do not fit x, a mask that does not broadcast, or `causal` with S
            other than N, (SF102) for tensors on two devices.
    """

    class Saved(sf.Saved):
        x: Tensor  # [*, S, H D]
        k: Tensor  # [*, N, Hkv D]
        v: Tensor  # [*, N, Hkv D]
        y: Tensor | None  # [*, S, H D]; `None` if no backward kernel reads it
        lse: Tensor  # [*, H, S] float32
        mask: Tensor | None
        seed: Tensor | None  # [] int64, [2] with FlashAttention
        p: float

    apart = True

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
        super().__init__(heads, kv_heads, causal, dropout, scale, softcap, mask)
        self.k, self.v = k, v

    @property
    def channels(self) -> Mapping[str, str | None]:
        given = {"k": self.k, "v": self.v}
        return given if self.mask is None else {**given, "attn_mask": self.mask}

    def reference(
        self, x: Tensor, *, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, seed: Tensor | None = None
    ) -> Tensor:
        self._check((x, k, v), attn_mask, None)
        return self._plain((x, k, v), attn_mask, None, seed)

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
        y, kept, lse, seed, p = self._attend((x, k, v), attn_mask, None, seed, needs)
        return y, self._saved(x, k, v, kept, lse, attn_mask, seed, p)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        grads, dmask = self._gradients(dy, (saved.x, saved.k, saved.v), saved, None, needs)
        named = zip(("x", "k", "v", "attn_mask"), (*grads, dmask), strict=True)
        dx, *others = [(name, d if name in needs else None) for name, d in named]
        return dx[1], {name: d for name, d in others if d is not None}

    def split(self, inputs: Sequence[Tensor]) -> QKV:
        q, k, v = (
            unflatten(t.reshape(math.prod(t.shape[:-2]), *t.shape[-2:]), -1, heads, -1).transpose(1, 2)
            for t, heads in zip(inputs, (self.heads, self.kv_heads, self.kv_heads), strict=True)
        )
        return q, k, v

    def joined(self, grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [grad.reshape(t.shape) for grad, t in zip(grads, inputs, strict=True)]

    def _check(self, inputs: Sequence[Tensor], mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        x, k, v = inputs
        _check_devices("CrossAttention", x, k, v, mask)
        width = self.kv_heads * (x.shape[-1] // self.heads) if x.ndim else 0
        alike = k.dtype is v.dtype is x.dtype or autocast_of(x.device.type) is not None
        fits = alike and x.is_floating_point() and k.is_floating_point() and k.shape == v.shape
        if not fits or k.shape[:-2] != x.shape[:-2] or k.ndim < 2 or k.shape[-1] != width:
            wanted = f"{x.dtype} ({', '.join(map(str, (*x.shape[:-2], 'N', width)))})"
            wanted = wanted if x.is_floating_point() else "floating-point x, and alike"
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

    def _named(self) -> dict[str, Any]:
        channels = {name: None if channel == name else channel for name, channel in (("k", self.k), ("v", self.v))}
        return {**channels, **super()._named()}


def _check_devices(operation: str, x: Tensor, *others: Tensor | None) -> None:
    """Raise an `InputError` for tensors elsewhere, which C kernels would read as if they were here."""
    for t in others:
        if t is not None and t.device != x.device:
            message = f"expects tensors on one device, got {x.device} and {t.device}"
            raise InputError(message, code="SF102", operation=operation)


_IN_C = (Attention, CrossAttention)  # subclasses may compute scores in other ways
