"""Attention of a plain packed tensor on a CPU in C, with all decisions that depend on the shape cached.

Without a mask, packed sequences or autocast. In a small model, choosing a kernel and preparing its arguments would
take longer than the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..env import any_autocast
from . import _attention
from ._attention import Scores
from ._cache import active
from ._philox import has_c, watched
from ._tensors import dispatch_modes

_MOST = 512  # shapes whose decisions are cached


class InC(NamedTuple):
    """Both passes of one attention for x of one shape.

    Args:
        forward: from x [*, S, (H + 2 Hkv) D] and the seed of dropout, if any, to the result [*, S, H D] and the
            log-sum-exp [*, H, S].
        backward: from the contiguous gradient of the result, x, the log-sum-exp and the seed to the gradient of x.
        keeps_y: whether the result is saved: torch's kernel, which may run the backward pass instead, reads it.
    """

    forward: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    keeps_y: bool


_known: dict[Any, InC | None] = {}


def packed_in_c(attention: Any, x: Tensor, seed: Tensor | None, p: float) -> InC | None:
    """Both passes of an `Attention` (not of a subclass) for tensors like x; `None` where C does not run, or where the
    choice depends on more than the shape.
    """
    if type(x) is not Tensor or not x.is_contiguous() or x.is_neg() or not has_c(x):
        return None
    if watched() or any_autocast() or dispatch_modes() or active.get() is not None or (seed is not None) is not (p > 0):
        return None
    own: dict[str, Any] = attention.__dict__
    numbers = own["heads"], own["kv_heads"], own["causal"], own["window"], own["softcap"], own["scale"], p
    key = x.shape, x.dtype, _attention.interpreting, numbers
    try:
        return _known[key]
    except KeyError:
        if len(_known) >= _MOST:
            _known.clear()
        return _known.setdefault(key, _decided(attention, x, seed, p))


def _decided(attention: Any, x: Tensor, seed: Tensor | None, p: float) -> InC | None:
    q, k, v = attention.split((x,))
    causal, window, softcap = limits = attention.causal, attention.window, attention.softcap
    how = Scores(attention.scale_of(x), causal, window, softcap, p, seed, alone=True)
    if how.kernel(q, k) != "c":
        return None
    from ..kernels.c.attention import both_on_cpu

    forward, backward = both_on_cpu(q, k, v, x.shape, how.scale, *limits, p)
    return InC(forward, backward, not how.beyond_torch(k.shape[2]))
