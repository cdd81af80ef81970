"""What stands in for keys and values of earlier calls; `seqfuse.inference` makes it and puts it here for a call."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .attention import Attention


class Cache(Protocol):
    """Keys and values of the rows before those of this call."""

    def positions(self, x: Tensor) -> Tensor:
        """The positions of the rows of x [B, S, C], int64 [B, S]."""
        ...

    def attend(self, attention: Attention, x: Tensor) -> Tensor:
        """The result [B, S, H D] of packed x [B, S, C] over all rows so far, which it keeps."""
        ...


active: ContextVar[Cache | None] = ContextVar("seqfuse_cache", default=None)


def current() -> Cache | None:
    """The cache of this call; a traced graph knows none."""
    return None if torch.compiler.is_compiling() else active.get()
