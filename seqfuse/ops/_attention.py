"""How attention is computed: by torch's kernels, by ours, or in plain torch, a block of rows at a time.

All of them save q, k, v, and the log-sum-exp of each row's scores in natural logarithms, 0 where all its keys are
masked. So forward and backward may use different kernels, and nothing of size S x S is saved.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import env
from ..compiler import CompileError
from ..group import divided
from ..hardware import C_ATTENTION_WORTHWHILE
from ..kernels import kernels_of, recording
from . import _sdpa
from ._philox import drop_mask, drop_spans, gave_up, has_c, masked, watched
from ._tensors import stats_dtype, unflatten

# torch's own binding for the forward and no overload for the backward: both cost less than calling an overload.
_flash_cpu: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore
_aten: Any = torch.ops.aten
_flash_cpu_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = (
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op
)

_HALF = (torch.float16, torch.bfloat16)
# The limits of `kernels.attention.takes_heads`, which cannot be imported where Triton is not installed.
_WIDEST = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}
# True in tests that run our Triton kernels on a CPU, in Triton's interpreter, instead of all other kernels.
interpreting = False
# True in the test kit: dropout masks depend on the seed only, on every device.
seeds_decide = False
Kernel = Literal["cpu", "c", "triton", "blocks"] | _sdpa.Backend
QKV = tuple[Tensor, Tensor, Tensor]
# The largest rounding error of a log-sum-exp from which weights may be computed.
_ROUNDED = 1e-5
# Dtypes for which torch's kernel has matrix instructions; our C kernel has none.
_IN_TILES = frozenset({torch.bfloat16} if torch.cpu._is_amx_tile_supported() else ())  # pyright: ignore
# With fewer keys than vector lanes, torch's kernel (and so the reference) returns zeros for a query with a NaN.
_LANES = 16
# Scores held at a time by the blocks in plain torch: 16 MiB in float32.
_HELD = 1 << 22


@dataclasses.dataclass(eq=False)
class Scores:
    """How the scores of one call are computed and limited.

    Args:
        scale: scores are q k^T times this.
        causal: whether row i sees only keys 0..i.
        window: how many keys a row sees on each side, including the key at its own position; `None` for all.
        softcap: scores become softcap tanh(score / softcap), if given.
        p: probability of dropping a weight.
        seed: int64 of one element, if weights are dropped; of two elements where it is the state of torch's generator
            from which FlashAttention dropped them.
        mask: of 4 dimensions, broadcast to [B, H, S, S]; bool or int: nonzero is seen; float: added to the scores.
        cu_seqlens: [N + 1] int, the first row of each packed sequence and the end; no row sees another sequence.
        decided: whether all that a C kernel depends on is decided by shapes, which makes its call cheap.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    p: float = 0.0
    seed: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    decided: bool = False

    def kernel(self, q: Tensor, k: Tensor | None = None) -> Kernel:
        """The kernel that computes all of this for q [B, H, S, D] and k, by default of the shape of q.

        On a GPU, the kernel that `scaled_dot_product_attention` chooses, or our Triton kernel where torch has none; on
        a CPU, our C kernel where it is faster or torch has none; blocks in plain torch otherwise.
        """
        shape = q.shape
        if 0 in shape:
            return "blocks"
        if self.seed is not None and self.seed.numel() == 2:
            return "flash"
        keys = shape[-2] if k is None else k.shape[-2]
        bounded, plain = self._bounded(keys), not self.p and self.softcap is None
        if q.device.type == "meta" and self.cu_seqlens is None and q.is_floating_point():
            return "cpu"  # meta tensors have no data to limit, and torch's kernel for CPUs returns the shapes at once
        cpu = q.device.type == "cpu"
        ours = (not cpu or interpreting) and shape[-1] <= _WIDEST.get(q.dtype, 0) and decoding_kernels_run(q, shape[-1])
        if cpu:
            if ours:
                return "triton"
            cheap = (self.decided and keys >= _LANES) or q.numel() * keys >= C_ATTENTION_WORTHWHILE
            if ((cheap and q.dtype not in _IN_TILES) or bounded or not plain) and self._in_c(q):
                return "c"
            return "cpu" if plain and not bounded and q.is_floating_point() else "blocks"
        if plain and self.mask is None and q.device.type == "cuda" and torch.version.hip is None:
            if bounded or self.cu_seqlens is not None or keys != q.shape[-2]:
                if q.dtype in _HALF and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and _sdpa.has_flash(q.device):
                    return "flash"
            elif (found := _sdpa.sdpa_backend(q, q if k is None else k, self.causal)) is not None:
                return found
        return "triton" if ours else "blocks"

    def _bounded(self, keys: int) -> bool:
        return self.window is not None and self.window < keys

    def fits(self, q: Tensor, k: Tensor) -> bool:
        """Whether all scores may be held at a time, as float32."""
        return q.numel() // q.shape[-1] * k.shape[-2] <= _HELD

    def beyond_torch(self, keys: int) -> bool:
        """Whether torch has no CPU kernel with these limits: dropout, soft-cap or sliding window."""
        return self.p > 0 or self.softcap is not None or self._bounded(keys)

    def _in_c(self, q: Tensor) -> bool:
        """Whether a C kernel computes this; only for plain tensors on a CPU."""
        if self.cu_seqlens is not None or self.p >= 1 or watched():
            return False
        if stats_dtype(q) is not torch.float32 or not has_c(q):
            return False
        attention, mask = kernels_of("c.attention"), kernels_of("c.mask")
        for t in (q, self.seed, self.mask):
            if t is not None and not mask.makes_mask(t):
                return False
        drops = self.seed is not None and self.p > 0
        if type(q) is not Tensor:  # tensors of a plan, which have no data
            attention.ask_for_both(drops, self.softcap is not None, q.dtype)
            return True
        try:
            attention.compile_both(drops, self.softcap is not None, q.dtype)
        except CompileError as error:
            gave_up("Attention", error)
            return False
        return True

    def draws(self, q: Tensor) -> bool:
        """Whether FlashAttention drops weights of q [B, H, S, D], by a mask drawn from torch's generator.

        Our kernel, which derives the mask from the seed, takes four times as long on an H200. The seed is used if
        algorithms must be deterministic, if the model is sharded over processes, and in a graph, where two calls that
        differ only in their seeds would be merged into one.
        """
        if not 0 < self.p < 1 or self.softcap is not None or self.mask is not None or q.device.type != "cuda":
            return False
        if seeds_decide or divided() or torch.compiler.is_compiling() or recording():
            return False
        # Wider heads have no backward with dropout on some GPUs.
        fits = q.dtype in _HALF and q.shape[-1] <= 192 and q.shape[-1] % 8 == 0 and 0 not in q.shape
        return fits and _sdpa.has_flash(q.device) and not torch.are_deterministic_algorithms_enabled()

    def loses_sums(self, lse: Tensor) -> bool:
        """Whether a large mask costs a log-sum-exp so many digits that weights from it do not add up to one."""
        if self.mask is None or not self.mask.is_floating_point() or type(lse) is not Tensor or not lse.numel():
            return False
        return bool(lse.abs().amax() * torch.finfo(lse.dtype).eps > _ROUNDED)

    def arguments(self) -> dict[str, Any]:
        """All but the scale, as arguments of our Triton kernel."""
        return self.arguments_in_c() | {"mask": self.mask, "cu_seqlens": self.cu_seqlens}

    def arguments_in_c(self) -> dict[str, Any]:
        """The same for the C kernels, which have no packed sequences, and masks of bool or float32."""
        mask = self.mask
        if mask is not None:
            mask = (mask if mask.dtype is torch.bool else additive(mask, torch.float32)).resolve_neg()
        limits = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        return {**limits, "mask": mask, "seed": self.seed, "p": self.p}


def decoding_kernels_run(x: Tensor, size: int) -> bool:
    """Whether our kernels for decoding run with heads of this size, on the device and in the dtype of x."""
    kind, fits = x.device.type, size <= 256 and x.dtype in _WIDEST
    return fits and (kind == "cuda" or (kind == "cpu" and interpreting)) and env.triton_installed()


def is_readable(x: Tensor) -> bool:
    """Whether kernels read the heads of a tensor where they are: their elements are contiguous."""
    return x.is_contiguous() or (x.stride(-1) == 1 and 0 not in x.stride())


def numbers_in(ends: Tensor) -> list[int]:
    """The values of an int tensor; the host waits for the device."""
    return ends.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def head_size(shape: Sequence[int], heads: int, kv_heads: int) -> int:
    """The head size D of a packed [*, S, (H + 2 Hkv) D].

    Raises:
        ValueError: if the last dimension is not a positive multiple of the number of heads.
    """
    parts = heads + 2 * kv_heads
    if len(shape) < 2 or shape[-1] % parts or not shape[-1]:
        wanted = f"{heads} query, {kv_heads} key and {kv_heads} value heads"
        raise ValueError(f"expects [*, S, {parts} D] of {wanted}, got shape {tuple(shape)}")
    return shape[-1] // parts


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as an addend of the scores in `dtype`; float32 if a float mask has another dtype than a half `dtype`."""
    if mask.is_floating_point():
        if dtype in _HALF and mask.dtype is not dtype:
            dtype = torch.float32
        narrow = mask.to(dtype)
        # The least number of float64 becomes the least finite number of the narrower dtype, not -inf.
        wide = mask.dtype is torch.float64 and dtype is not torch.float64
        return narrow.clamp(min=torch.finfo(dtype).min).where(mask != -torch.inf, narrow) if wide else narrow
    added = torch.where(mask if mask.dtype is torch.bool else mask != 0, 0.0, -torch.inf)
    return added if added.dtype is dtype else added.to(dtype)


def attend_reference(qkv: QKV, how: Scores) -> Tensor:
    """The result [B, H, S, D], differentiable: by torch's function where it runs and is exact, else by the formula."""
    q, k, v = qkv
    every = slice(q.shape[2]), slice(k.shape[2])
    mask, hidden = how.mask, None
    if mask is not None and not mask.is_floating_point():
        mask = mask != 0
    if mask is not None or how.window is not None or how.cu_seqlens is not None:  # else torch applies `causal`
        hidden = _hidden(*every, how, q.device)
    if hidden is not None:
        added = mask is not None and mask.is_floating_point()
        mask = ~hidden if mask is None else mask.masked_fill(hidden, -torch.inf) if added else mask & ~hidden
    y = None if how.seed is not None else _by_torch(qkv, how, mask)
    if y is None:
        if how.causal and mask is None:
            mask = ~_hidden(*every, how, q.device)  # pyright: ignore[reportOptionalOperand]
        stats = stats_dtype(q)
        y = _plainly(q.to(stats), k.to(stats), v.to(stats), how, mask).to(q.dtype)
    return y


def _by_torch(qkv: QKV, how: Scores, mask: Tensor | None) -> Tensor | None:
    """Attention by torch's differentiable function with `mask`, or `causal` without one; `None` where it is not exact.

    Float64, which all else is compared with, uses the formula. So does a float mask where a gradient may be needed:
    torch's kernels compute weights from a log-sum-exp, which has no digits left for the sum if all keys of a row have
    one large mask.
    """
    q, k, v = qkv
    added = mask is not None and mask.is_floating_point()
    limited = Scores(how.scale, how.causal, how.window, how.softcap, mask=mask)
    runs = q.dtype is not torch.float64 and limited.kernel(q, k) in ("cpu", *_sdpa.BACKENDS)
    if how.softcap is not None or not (torch.compiler.is_compiling() or runs) or (added and torch.is_grad_enabled()):
        return None
    shared = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(shared, 1) if shared > 1 else t for t in (k, v))
    given = additive(mask, q.dtype) if mask is not None and added else mask
    return F.scaled_dot_product_attention(q, k, v, given, is_causal=how.causal and mask is None, scale=how.scale)


def _plainly(q: Tensor, k: Tensor, v: Tensor, how: Scores, mask: Tensor | None) -> Tensor:
    """The formula of attention, which kernels are compared with. The mask includes all limits."""
    shared = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
    scores = ((q * how.scale) @ k.mT).to(q.dtype)
    if how.softcap is not None:
        scores = (scores / how.softcap).tanh() * how.softcap
    if mask is not None:
        added = mask.is_floating_point()
        scores = scores + additive(mask, q.dtype) if added else scores.masked_fill(~mask, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0)
    # An infinite score makes only the weight of its own key NaN, as in the kernels.
    infinite = (scores == torch.inf).any(-1, keepdim=True)
    spoiled = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    weights = torch.where(infinite, spoiled, scores.softmax(-1)).masked_fill(blind, 0)
    if how.seed is not None:
        weights = masked(weights, drop_mask(how.seed, weights.shape, how.p), how.p)
    return weights @ v


def attend(qkv: QKV, how: Scores, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """The result [B, S, H, D] in the dtype of q, and the log-sum-exp [B, H, S].

    If FlashAttention drops weights, the state of torch's generator replaces the seed in `how`.
    q: [B, H, S, D], k and v: [B, Hkv, S, D], each with a contiguous last dimension.
    """
    q, k, v = qkv
    if kernel == "blocks":
        return attend_blocks(qkv, how)
    if kernel == "triton":
        return kernels_of("attention").attention_fwd(q, k, v, how.scale, **how.arguments())
    if kernel in _sdpa.BACKENDS:
        y, lse, state = _sdpa.forward(*qkv, kernel, how.scale, how.causal, how.window, how.cu_seqlens, how.p)
        how.seed = state if how.p else how.seed
        return y, lse
    _held: Tensor | None = None
    if kernel == "c":
        in_c = kernels_of("c.attention")
        if type(q) is Tensor:
            return in_c.attention_on_cpu(q, k, v, how.scale, **how.arguments_in_c())
        _held = in_c.scratch(*qkv)  # a plan reads only bytes, shapes and FLOPs, which are those of torch's kernel
    mask = None if how.mask is None else additive(how.mask, q.dtype)
    if how.cu_seqlens is None:
        y, lse = _flash_cpu(q, k, v, 0.0, how.causal, attn_mask=mask, scale=how.scale)
        return y.transpose(1, 2), lse.to(stats_dtype(q))  # torch 2.11 plans float32 for float64
    b, h, s, d = q.shape
    y = q.new_empty(b, s, h, d)
    lse = q.new_empty(b, h, s, dtype=stats_dtype(q))
    for rows in _sequences(how.cu_seqlens):
        parts = [t[:, :, rows] for t in qkv]
        own = None if mask is None else _part(mask, rows, rows)
        part, sums = _flash_cpu(*parts, 0.0, how.causal, attn_mask=own, scale=how.scale)
        y[:, rows], lse[:, :, rows] = part.transpose(1, 2), sums
    return y, lse


def attend_grads(
    dy: Tensor, qkv: QKV, y: Tensor | None, lse: Tensor, how: Scores, kernel: Kernel, apart: bool = False
) -> tuple[Tensor, ...] | None:
    """The gradients of q, k and v, [B, S, heads, D], by one call of a torch kernel; `None` if no such kernel runs.

    On a CPU the kernel sums the gradients of GQA heads in their own dtype, except with `apart`.
    dy and y: [B, S, H, D].
    """
    if kernel in _sdpa.BACKENDS:
        assert y is not None
        limits = how.scale, how.causal, how.window, how.cu_seqlens
        return _sdpa.backward(dy, *qkv, y, lse, kernel, *limits, how.p, how.seed)
    if kernel in ("triton", "c") or how.cu_seqlens is not None:
        return None
    assert y is not None
    q, k, v = qkv
    mask = None if how.mask is None else additive(how.mask, q.dtype)
    shared = q.shape[1] // k.shape[1] if apart else 1
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    dq, *others = _flash_backward((dy.transpose(1, 2), q, k, v, y.transpose(1, 2), lse), how, mask)
    others = [unflatten(d, 1, -1, shared).sum(2) for d in others] if shared > 1 else others
    return tuple([d.transpose(1, 2) for d in (dq, *others)])


def attend_backward(
    dy: Tensor, qkv: QKV, y: Tensor | None, lse: Tensor, how: Scores, kernel: Kernel, out: QKV, dmask: Tensor | None
) -> None:
    """Write dq, dk and dv into `out`, shaped as q, k and v, where `attend_grads` returns `None`.

    dy and y: [B, S, H, D]. A C kernel does not read y; it alone can write `dmask`, the gradient of an added mask before
    it is summed over broadcast dimensions, float32 [B, H, S, N].
    """
    if kernel == "triton":
        assert y is not None
        kernels_of("attention").attention_bwd(dy, *qkv, y, lse.contiguous(), out, how.scale, **how.arguments())
        return
    if kernel == "c":
        kernels_of("c.attention").attention_on_cpu_bwd(dy, *qkv, out, how.scale, dmask=dmask, **how.arguments_in_c())
        return
    assert y is not None
    assert how.cu_seqlens is not None
    mask = None if how.mask is None else additive(how.mask, qkv[0].dtype)
    read = (dy.transpose(1, 2), *qkv, y.transpose(1, 2), lse)
    for rows in _sequences(how.cu_seqlens):
        own = None if mask is None else _part(mask, rows, rows)
        grads = _flash_backward([t[:, :, rows] for t in read], how, own)
        for mine, grad in zip(out, grads, strict=True):
            mine[:, :, rows] = grad


def _flash_backward(read: Sequence[Tensor], how: Scores, mask: Tensor | None) -> Iterable[Tensor]:
    """The gradients of q, k and v from dy, q, k, v, y and the log-sum-exp, by torch's kernel for a CPU."""
    if read[0].dtype in env.WIDENED:
        # A float mask may have the dtype of q or float32.
        mask = mask if mask is None or mask.dtype is torch.bool else mask.float()
        wide = _flash_cpu_backward(*(t.float() for t in read), 0.0, how.causal, attn_mask=mask, scale=how.scale)
        return [grad.to(read[0].dtype) for grad in wide]
    return _flash_cpu_backward(*read, 0.0, how.causal, attn_mask=mask, scale=how.scale)


def _sequences(cu_seqlens: Tensor) -> Iterator[slice]:
    return (slice(a, b) for a, b in itertools.pairwise(numbers_in(cu_seqlens)) if b > a)


def attend_blocks(qkv: QKV, how: Scores) -> tuple[Tensor, Tensor]:
    """`attend` with any limits, in plain torch on any device, a block of rows at a time, which bounds memory."""
    q = qkv[0]
    batch, heads, length, size = q.shape
    y = q.new_empty(batch, length, heads, size)
    lse = q.new_empty(batch, heads, length, dtype=stats_dtype(q))
    grouped = _grouped(qkv, how)
    for rows, keys in _blocks(qkv, how):
        weights, sums, _ = _weights(_scores(grouped, rows, keys, how)[0])
        drop = _drop(qkv, rows, keys, how)
        if drop is not None:
            weights = masked(weights, drop, how.p)
        lse[:, :, rows] = sums.flatten(1, 2).squeeze(-1)
        y[:, rows] = (weights @ grouped[2][..., keys, :]).flatten(1, 2).transpose(1, 2).to(y.dtype)
    return y, lse


def attend_blocks_backward(dy: Tensor, qkv: QKV, how: Scores, out: QKV | None, needs_mask: bool) -> Tensor | None:
    """Write dq, dk and dv into `out`, if given; return the mask's gradient, if needed, in the dtype of the scores."""
    grouped = q, k, v = _grouped(qkv, how)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dmask = q.new_zeros(how.mask.shape) if needs_mask and how.mask is not None else None
    dy = unflatten(dy.transpose(1, 2), 1, *q.shape[1:3]).to(q.dtype)
    for rows, keys in _blocks(qkv, how):
        scores, bent, hidden = _scores(grouped, rows, keys, how)
        d = dy[..., rows, :]
        dweights = d @ v[..., keys, :].mT
        # A NaN or Inf must not reach the gradient of a hidden key.
        weights, _, blind = _weights(scores)
        kept, drop = weights, _drop(qkv, rows, keys, how)
        if drop is not None:
            dweights, kept = masked(dweights, drop, how.p), masked(weights, drop, how.p)
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        dscores = dscores.masked_fill_(blind if hidden is None else blind | hidden, 0)
        if dmask is not None:
            own = _part(dmask, rows, keys)
            own.add_(dscores.flatten(1, 2).sum_to_size(own.shape))
        if out is None:
            continue
        if bent is not None:
            dscores = dscores * (1 - bent * bent)
        dv[..., keys, :] += (kept.mT @ d).sum(2, keepdim=True)
        dk[..., keys, :] += (dscores.mT @ q[..., rows, :]).sum(2, keepdim=True)
        out[0][:, :, rows] = ((dscores @ k[..., keys, :]) * how.scale).flatten(1, 2).to(out[0].dtype)
    if out is not None:
        out[1].copy_(dk.squeeze(2))
        out[2].copy_(dv.squeeze(2))
    return dmask


def _grouped(qkv: QKV, how: Scores) -> QKV:
    """Scaled queries [B, Hkv, G, S, D], and k and v as [B, Hkv, 1, S, D], in the dtype of the scores."""
    q, k, v = qkv
    stats = stats_dtype(q)
    q = unflatten(q, 1, k.shape[1], q.shape[1] // k.shape[1]).to(stats) * how.scale
    return q, k.unsqueeze(2).to(stats), v.unsqueeze(2).to(stats)


def _blocks(qkv: QKV, how: Scores) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of rows, each with the range of keys that any of them may see."""
    batch, heads, length, _ = qkv[0].shape
    keys = qkv[1].shape[2]
    count = max(1, _HELD // max(1, batch * heads * keys))
    for first in range(0, length if batch * heads else 0, count):
        stop = min(first + count, length)
        begin = 0 if how.window is None else max(0, first - how.window + 1)
        end = stop if how.causal else keys if how.window is None else min(keys, stop + how.window - 1)
        yield slice(first, stop), slice(begin, end)


def _scores(grouped: QKV, rows: slice, keys: slice, how: Scores) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores [B, Hkv, G, rows, keys], -inf where hidden; tanh(score / softcap) if there is a soft-cap; the hidden mask,
    without float masks.
    """
    q, k, _ = grouped
    # Autocast would run these GEMMs in 16 bits, which loses more digits of the weights than the kernels do.
    scores, bent = (q[..., rows, :] @ k[..., keys, :].mT).to(q.dtype), None
    if how.softcap is not None:
        bent = (scores / how.softcap).tanh_()
        scores = bent * how.softcap
    hidden = _hidden(rows, keys, how, scores.device)
    if how.mask is not None:
        mask = _part(how.mask, rows, keys)
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else unflatten(mask, 1, *q.shape[1:3])
        if mask.is_floating_point():
            scores = scores + additive(mask, scores.dtype)
        else:
            hidden = mask == 0 if hidden is None else hidden | (mask == 0)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf), bent, hidden


def _weights(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of the scores, zeros for a row that sees no key; the log-sum-exp; and which rows see no key.

    The scores are overwritten.

    Greatest score and sum are separate: with a large mask on all keys of a row, the log-sum-exp loses the logarithm of
    the sum, and weights computed from it would not add up to one.
    """
    most = scores.amax(-1, keepdim=True)
    blind = most == -torch.inf
    most.masked_fill_(blind, 0)
    weights = scores.sub_(most).exp_()
    total = weights.sum(-1, keepdim=True)
    # An infinite score makes only the weight of its own key NaN.
    total.masked_fill_((total == 0) | (most == torch.inf), 1)
    return weights.div_(total), most + total.log(), blind


def _hidden(rows: slice, keys: slice, how: Scores, device: torch.device) -> Tensor | None:
    if not how.causal and how.window is None and how.cu_seqlens is None:
        return None
    row = torch.arange(rows.start or 0, rows.stop, device=device).unsqueeze(1)
    key = torch.arange(keys.start or 0, keys.stop, device=device)
    hidden = key > row if how.causal else torch.zeros_like(key > row)
    if how.window is not None:
        hidden = hidden | (row - key >= how.window) | (key - row >= how.window)
    if how.cu_seqlens is not None:
        first = how.cu_seqlens.to(key.dtype)
        apart = torch.searchsorted(first, row, right=True) != torch.searchsorted(first, key, right=True)
        hidden = hidden | apart
    return hidden


def _drop(qkv: QKV, rows: slice, keys: slice, how: Scores) -> Tensor | None:
    """True where a weight is dropped, [B, Hkv, G, rows, keys]: elements of one mask over [B, H, S, S]."""
    if not how.p or how.seed is None:
        return None
    (batch, heads, length, _), of = qkv[0].shape, qkv[1].shape
    taken = rows.stop - rows.start
    starts = (torch.arange(batch * heads, device=how.seed.device) * length + rows.start) * of[2]
    drop = drop_spans(how.seed, starts, taken * of[2], how.p)
    return drop.view(batch, of[1], heads // of[1], taken, of[2])[..., keys]


def _part(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    """The part of a broadcast mask for these rows and keys."""
    whole = slice(None)
    return mask[..., rows if mask.shape[-2] != 1 else whole, keys if mask.shape[-1] != 1 else whole]
