"""What stands in for keys and values of earlier calls; `seqfuse.inference` makes it and puts it here for a call."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from ._tensors import FAKE, dispatch_mode


class Cache(Protocol):
    """Keys and values of the rows before those of this call."""

    def positions(self, x: Tensor) -> Tensor:
        """The positions of the rows of x [B, S, C], int64 [B, S]."""
        ...

    def attend(self, attention: Any, x: Tensor) -> Tensor:
        """The result [B, S, H D] of packed x [B, S, C] over all rows so far, which it keeps."""
        ...

    def decode(self, attention: Any, x: Tensor, write: Callable[..., Tensor]) -> Tensor | None:
        """The same of one row of each sequence by kernels; `None` where they do not do it, and nothing has changed.

        `write(row, k=, v=, lengths=, k_scale=, v_scale=)` keeps the keys and values of rows [B, C] and gives queries
        [B, H, D].
        """
        ...


active: ContextVar[Cache | None] = ContextVar("seqfuse_cache", default=None)


def current() -> Cache | None:
    """The cache of this call; a traced graph knows none, and a rehearsal on tensors without data must not fill one."""
    if torch.compiler.is_dynamo_compiling():
        return None
    cache = active.get()
    return None if cache is None or torch.compiler.is_compiling() or dispatch_mode(FAKE) is not None else cache
