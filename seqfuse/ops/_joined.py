"""Parameters that lie one behind the other in one storage, taken as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def one_gemm(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None] | None:
    """The one weight and the one bias of which these are the parts; `None` where they lie apart."""
    given = [bias for bias in biases if bias is not None]
    whole, start = joined(weights), joined(given) if len(given) == len(biases) else None
    return None if whole is None or (start is None and given) else (whole, start)


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie one behind the other in one storage as one view along their first dimension; else `None`."""
    if not tensors or torch.compiler.is_compiling():
        return None
    first = tensors[0]
    if len(tensors) == 1:
        return first
    end = first.storage_offset() + first.numel()
    for t in tensors[1:]:
        if t.storage_offset() != end:
            return None
        end += t.numel()
    storage = first.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    dtype = first.dtype
    for t in tensors:
        same = type(t) in (Tensor, nn.Parameter) and t.is_contiguous() and t.dtype is dtype
        if not same or t.untyped_storage()._cdata != storage:  # pyright: ignore[reportPrivateUsage]
            return None
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride(), first.storage_offset())
