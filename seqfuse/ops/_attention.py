"""Softmax attention over heads by the kernels that torch has, with nothing of size S x S kept.

What is kept is one for all kernels, those of `_attention_blocks` included: q, k, v, and the log-sum-exp of each row's
scores in natural logarithms, 0 where all its keys are masked. So one may run forward and another backward.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import env
from . import _sdpa
from ._tensors import stats_dtype

# The forward by torch's own binding and the backward without its overload: both cost less than a call of an overload.
flash_cpu: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore
_aten: Any = torch.ops.aten
flash_cpu_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = (
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op
)

_HALF = (torch.float16, torch.bfloat16)
# What `kernels.attention.takes`, which cannot be asked where Triton is not installed.
_WIDEST = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}
# Whether our kernels run on a CPU, in Triton's interpreter, in place of all others: tests say so.
interpreting = False
Kernel = Literal["cpu", "triton", "blocks"] | _sdpa.Backend
QKV = tuple[Tensor, Tensor, Tensor]
# The largest rounding error of a log-sum-exp that weights may be made of.
_ROUNDED = 1e-5


@dataclasses.dataclass(eq=False)
class Scores:
    """How the scores of one call are made and limited.

    Args:
        scale: scores are q k^T times this.
        causal: whether row i sees keys 0..i alone.
        window: how many keys a row sees on each side, its own included; `None` for all.
        softcap: scores become softcap tanh(score / softcap), if given.
        p: probability of dropping a weight.
        seed: int64 of one element, if any weight is dropped.
        mask: of 4 dimensions, broadcast to [B, H, S, S]; bool or int, where not zero is seen, or float, added.
        cu_seqlens: [N + 1] int, the first row of each packed sequence and the end; no row sees another sequence.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    p: float = 0.0
    seed: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def kernel(self, q: Tensor, k: Tensor | None = None) -> Kernel:
        """Which kernel does all of this for q [B, H, S, D] and k, of the shape of q by default.

        Torch's own where it does: on a GPU the one that `scaled_dot_product_attention` takes. Ours on a Triton device
        for what none of these does; blocks in plain torch for the rest.
        """
        shape = q.shape
        if 0 in shape:
            return "blocks"
        keys = shape[-2] if k is None else k.shape[-2]
        bounded = self.window is not None and self.window < keys
        plain = not self.p and self.softcap is None
        if q.device.type == "meta" and self.cu_seqlens is None and q.is_floating_point():
            return "cpu"  # which has no numbers to limit, and makes the shapes at once
        cpu = q.device.type == "cpu"
        ours = (not cpu or interpreting) and shape[-1] <= _WIDEST.get(q.dtype, 0) and kernels_run(q, shape[-1])
        if cpu:
            if ours:
                return "triton"
            return "cpu" if plain and not bounded and q.is_floating_point() else "blocks"
        if plain and self.mask is None and q.device.type == "cuda" and torch.version.hip is None:
            if bounded or self.cu_seqlens is not None or keys != q.shape[-2]:
                if q.dtype in _HALF and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and _sdpa.has_flash(q.device):
                    return "flash"
            elif (found := _sdpa.backend(q, q if k is None else k, self.causal)) is not None:
                return found
        return "triton" if ours else "blocks"

    def loses_sums(self, lse: Tensor) -> bool:
        """Whether a large mask leaves so few digits in a log-sum-exp that weights made of it do not add up to one."""
        if self.mask is None or not self.mask.is_floating_point() or type(lse) is not Tensor or not lse.numel():
            return False
        return bool(lse.abs().amax() * torch.finfo(lse.dtype).eps > _ROUNDED)

    def arguments(self) -> dict[str, Any]:
        """All but the scale, as our kernels take it."""
        fields = ("causal", "window", "softcap", "mask", "cu_seqlens", "seed", "p")
        return {name: getattr(self, name) for name in fields}


def kernels_run(x: Tensor, size: int) -> bool:
    """Whether heads of this size, on the device and of the dtype of x, can be left to our kernels for decoding."""
    kind, fits = x.device.type, size <= 256 and x.dtype in _WIDEST
    return fits and (kind == "cuda" or (kind == "cpu" and interpreting)) and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def numbers(ends: Tensor) -> list[int]:
    """What an int tensor holds; the host waits for it."""
    return ends.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def head_size(shape: Sequence[int], heads: int, kv_heads: int) -> int:
    """D of a packed [*, S, (H + 2 Hkv) D].

    Raises:
        ValueError: if there is none.
    """
    parts = heads + 2 * kv_heads
    if len(shape) < 2 or shape[-1] % parts or not shape[-1]:
        wanted = f"{heads} query, {kv_heads} key and {kv_heads} value heads"
        raise ValueError(f"expects [*, S, {parts} D] of {wanted}, got shape {tuple(shape)}")
    return shape[-1] // parts


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mask adds to the scores, in `dtype`, or in float32 where it is given in another than a half `dtype`."""
    if mask.is_floating_point():
        if dtype in _HALF and mask.dtype is not dtype:
            dtype = torch.float32
        narrow = mask.to(dtype)
        # The least number of float64 stays a number.
        wide = mask.dtype is torch.float64 and dtype is not torch.float64
        return narrow.clamp(min=torch.finfo(dtype).min).where(mask != -torch.inf, narrow) if wide else narrow
    added = torch.where(mask if mask.dtype is torch.bool else mask != 0, 0.0, -torch.inf)
    return added if added.dtype is dtype else added.to(dtype)


def by_torch(qkv: QKV, how: Scores, causal: bool) -> Tensor | None:
    """The result [B, H, S, D] by torch's own differentiable attention, where it runs and is right.

    No weight is dropped, and all that limits scores is `causal` or the mask. Float64 is left to plain math, which the
    rest is compared with, and so is a mask that is added where a gradient may be needed: torch's kernels make weights
    from a log-sum-exp, which has no digit left for the sum where all keys of a row have one large mask.
    """
    q, k, v = qkv
    added = how.mask is not None and how.mask.is_floating_point()
    fits = torch.compiler.is_compiling() or (
        q.dtype is not torch.float64 and how.kernel(q, k) in ("cpu", *_sdpa.BACKENDS)
    )
    if how.softcap is not None or not fits or (added and torch.is_grad_enabled()):
        return None
    shared = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(shared, 1) if shared > 1 else t for t in (k, v))
    mask = additive(how.mask, q.dtype) if how.mask is not None and added else how.mask
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=how.scale)


def attend(qkv: QKV, how: Scores, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """The result [B, S, H, D] in the dtype of q, and the log-sum-exp [B, H, S].

    q: [B, H, S, D], k and v: [B, Hkv, S, D], each with a contiguous last dimension.
    """
    q, k, v = qkv
    if kernel == "triton":
        from ..kernels.attention import attention_fwd

        return attention_fwd(q, k, v, how.scale, **how.arguments())
    if kernel in _sdpa.BACKENDS:
        return _sdpa.forward(*qkv, kernel, how.scale, how.causal, how.window, how.cu_seqlens)
    mask = None if how.mask is None else additive(how.mask, q.dtype)
    if how.cu_seqlens is None:
        y, lse = flash_cpu(q, k, v, 0.0, how.causal, attn_mask=mask, scale=how.scale)
        return y.transpose(1, 2), lse
    b, h, s, d = q.shape
    y = q.new_empty(b, s, h, d)
    lse = q.new_empty(b, h, s, dtype=stats_dtype(q))
    for rows in _sequences(how.cu_seqlens):
        parts = [t[:, :, rows] for t in qkv]
        part, sums = flash_cpu(*parts, 0.0, how.causal, attn_mask=_cut(mask, rows), scale=how.scale)
        y[:, rows], lse[:, :, rows] = part.transpose(1, 2), sums
    return y, lse


def attend_grads(
    dy: Tensor, qkv: QKV, y: Tensor, lse: Tensor, how: Scores, kernel: Kernel
) -> tuple[Tensor, ...] | None:
    """The gradients of q, k and v, [B, S, heads, D], by a kernel of torch in one call; `None` where none does it.

    dy and y: [B, S, H, D].
    """
    if kernel in _sdpa.BACKENDS:
        return _sdpa.backward(dy, *qkv, y, lse, kernel, how.scale, how.causal, how.window, how.cu_seqlens)
    if kernel == "triton" or how.cu_seqlens is not None:
        return None
    mask = None if how.mask is None else additive(how.mask, qkv[0].dtype)
    read = (dy.transpose(1, 2), *qkv, y.transpose(1, 2), lse)
    grads = _flash_backward(read, how, mask)
    return tuple([grad.transpose(1, 2) for grad in grads])


def attend_backward(dy: Tensor, qkv: QKV, y: Tensor, lse: Tensor, how: Scores, kernel: Kernel, out: QKV) -> None:
    """Write dq, dk and dv into `out`, shaped as q, k and v, where `attend_grads` does not make them.

    dy and y: [B, S, H, D].
    """
    if kernel == "triton":
        from ..kernels.attention import attention_bwd

        attention_bwd(dy, *qkv, y, lse.contiguous(), out, how.scale, **how.arguments())
        return
    assert how.cu_seqlens is not None
    mask = None if how.mask is None else additive(how.mask, qkv[0].dtype)
    read = (dy.transpose(1, 2), *qkv, y.transpose(1, 2), lse)
    for rows in _sequences(how.cu_seqlens):
        grads = _flash_backward([t[:, :, rows] for t in read], how, _cut(mask, rows))
        for mine, grad in zip(out, grads, strict=True):
            mine[:, :, rows] = grad


def _flash_backward(read: Sequence[Tensor], how: Scores, mask: Tensor | None) -> Iterable[Tensor]:
    """The gradients of q, k and v of dy, q, k, v, y and the log-sum-exp, by torch's kernel for a CPU."""
    if read[0].dtype in env.WIDENED:
        # A mask that is added may be of the dtype of q or float32.
        mask = mask if mask is None or mask.dtype is torch.bool else mask.float()
        wide = flash_cpu_backward(*(t.float() for t in read), 0.0, how.causal, attn_mask=mask, scale=how.scale)
        return [grad.to(read[0].dtype) for grad in wide]
    return flash_cpu_backward(*read, 0.0, how.causal, attn_mask=mask, scale=how.scale)


def _sequences(cu_seqlens: Tensor) -> Iterator[slice]:
    return (slice(a, b) for a, b in itertools.pairwise(numbers(cu_seqlens)) if b > a)


def _cut(mask: Tensor | None, rows: slice) -> Tensor | None:
    """The part of a mask that belongs to rows and keys alike; dimensions of size one stay."""
    if mask is None or rows == slice(None):
        return mask
    for dim in (-1, -2):
        if mask.shape[dim] != 1:
            mask = mask.narrow(dim, rows.start, rows.stop - rows.start)
    return mask
