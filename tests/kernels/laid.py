"""The same rows in other memory layouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


def _moves(t: Tensor) -> bool:
    return t.ndim == 2 and t.is_floating_point()


def apart(tensors: Mapping[str, Tensor], fixed: Collection[str] = (), more: int = 4) -> Tensors:
    """Each tensor at another offset, so that no vector load is aligned; the gaps are NaN."""
    return {
        name: F.pad(t, (1, more + i), value=torch.nan)[:, 1 : 1 + t.shape[1]] if _moves(t) and name not in fixed else t
        for i, (name, t) in enumerate(tensors.items())
    }


def far(tensors: Mapping[str, Tensor], fixed: Collection[str] = ()) -> Tensors:
    """The last row begins beyond 2^31 elements; on a CPU only the rows themselves take memory."""
    return {
        name: t.new_empty_strided(t.shape, (2**31 // (len(t) - 1) + 8, 1)).copy_(t)
        if _moves(t) and name not in fixed
        else t
        for name, t in tensors.items()
    }


def as_one(tensors: Mapping[str, Tensor], fixed: Collection[str] = ()) -> Tensors:
    """The first row, expanded to all rows."""
    return {name: t[:1].expand(t.shape) if _moves(t) and name not in fixed else t for name, t in tensors.items()}
