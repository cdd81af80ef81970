"""Attention of plain tensors on a CPU in C, with all decisions that depend on the shapes cached.

Without packed sequences or autocast. In a small model, choosing a kernel and preparing its arguments would take longer
than the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..env import any_autocast
from . import _attention
from ._cache import active
from ._philox import has_c, watched
from ._tensors import dispatch_modes

MASKS = (torch.float32, torch.bool)
"""The dtypes of masks that C kernels read."""

_MOST = 512  # shapes whose decisions are cached


class InC(NamedTuple):
    """Both passes of one attention for inputs of these shapes: x [*, S, (H + 2 Hkv) D], or x, k and v.

    Args:
        forward: from the inputs, the mask, and the seed of dropout, `None` where absent, to the result [*, S, H D] and
            the log-sum-exp [*, H, S].
        backward: from the contiguous gradient of the result, the inputs, mask and seed to the gradients of the inputs
            and of the mask, `None` if that is not needed.
        keeps_y: whether the result is saved: torch's kernel, which may run the backward pass instead, reads it.
    """

    forward: Callable[[Sequence[Tensor], Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Sequence[Tensor], Tensor | None, Tensor | None], tuple[Sequence[Tensor], Tensor | None]]
    keeps_y: bool


_known: dict[Any, InC | None] = {}


def passes_in_c(
    attention: Any, inputs: Sequence[Tensor], mask: Tensor | None, seed: Tensor | None, p: float, needs_mask: bool
) -> InC | None:
    """Both passes of an attention, with the mask's gradient if `needs_mask`, for tensors like these; `None` where C
    does not run, or where the choice depends on more than shapes.
    """
    x, given = inputs[0], inputs if mask is None else (*inputs, mask)
    for t in given:
        if type(t) is not Tensor or not t.is_cpu or t.is_neg():
            return None
    if not has_c(x) or watched() or any_autocast() or dispatch_modes() or active.get() is not None:
        return None
    if (seed is not None) is not (p > 0):
        return None
    own: dict[str, Any] = attention.__dict__
    numbers = own["heads"], own["kv_heads"], own["causal"], own.get("window"), own["softcap"], own["scale"], p
    key: Any = x.shape, x.stride(), x.dtype, numbers, _attention.interpreting
    if len(given) > 1:
        key = key, needs_mask, *[(t.shape, t.stride(), t.dtype) for t in given[1:]]
    try:
        return _known[key]
    except KeyError:
        if len(_known) >= _MOST:
            _known.clear()
        return _known.setdefault(key, _decided(attention, inputs, mask, seed, p, needs_mask))


def _decided(
    attention: Any, inputs: Sequence[Tensor], mask: Tensor | None, seed: Tensor | None, p: float, needs_mask: bool
) -> InC | None:
    attention._check(inputs, mask, None)
    if not all(map(_attention.is_readable, inputs)):
        return _of_copies(_decided(attention, [t.contiguous() for t in inputs], mask, seed, p, needs_mask))
    x = inputs[0]
    q, k, _ = qkv = attention.split(inputs)
    how = attention._scores(x, q.shape[-1], mask, None, seed, p)
    if mask is not None and (mask.dtype not in MASKS or how.mask.data_ptr() != mask.data_ptr()):
        return None
    for t, of in zip(qkv, inputs if len(inputs) == 3 else (x, x, x), strict=True):
        if t.dtype is not x.dtype or t.untyped_storage().data_ptr() != of.untyped_storage().data_ptr():  # a copy
            return None
    if how.kernel(q, k) != "c" or (needs_mask and not how.fits(q, k)):
        return None
    from ..kernels.c.attention import both_on_cpu

    new = attention.split([torch.empty(t.shape, dtype=t.dtype, device="meta") for t in inputs])
    limits: dict[str, Any] = {"causal": how.causal, "window": how.window, "softcap": how.softcap, "mask": how.mask}
    shape, keeps_y = attention.infer(x.shape), not needs_mask and not how.beyond_torch(k.shape[2])
    forward, backward = both_on_cpu(inputs, qkv, new, shape, how.scale, **limits, p=p, needs_mask=needs_mask)
    if not needs_mask:
        return InC(forward, backward, keeps_y)
    leading = x.shape[:-2]

    def summed(
        dy: Tensor, inputs: Sequence[Tensor], mask: Tensor | None, seed: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        grads, dmask = backward(dy, inputs, mask, seed)
        assert mask is not None
        assert dmask is not None
        return grads, dmask.view(*leading, *dmask.shape[1:]).sum_to_size(mask.shape)

    return InC(forward, summed, keeps_y)


def _of_copies(found: InC | None) -> InC | None:
    """The same passes for inputs that the kernels cannot read as they are."""
    if found is None:
        return None
    forward, backward, keeps_y = found

    def run(inputs: Sequence[Tensor], mask: Tensor | None, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        return forward([t.contiguous() for t in inputs], mask, seed)

    def run_back(
        dy: Tensor, inputs: Sequence[Tensor], mask: Tensor | None, seed: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        return backward(dy, [t.contiguous() for t in inputs], mask, seed)

    return InC(run, run_back, keeps_y)
