"""The protocol of a cache of keys and values, and the active cache; `seqfuse.inference` creates it and sets it here."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from ._tensors import FAKE, dispatch_mode


class Cache(Protocol):
    """Keys and values of the tokens before those of this call."""

    def positions(self, x: Tensor) -> Tensor:
        """The positions of the rows of x [B, S, C], int64 [B, S]."""
        ...

    def attend(self, attention: Any, x: Tensor) -> Tensor:
        """The result [B, S, H D] of packed x [B, S, C] over all tokens so far; caches the keys and values of x."""
        ...

    def decode(self, attention: Any, x: Tensor, write: Callable[..., Tensor]) -> Tensor | None:
        """`attend` for one new token per sequence, by kernels; `None`, and nothing changed, where they do not apply.

        `write(row, k=, v=, lengths=, k_scale=, v_scale=)` caches the keys and values of rows [B, C] and returns
        queries [B, H, D].
        """
        ...


active: ContextVar[Cache | None] = ContextVar("seqfuse_cache", default=None)


def current() -> Cache | None:
    """The active cache; `None` in a traced graph and on tensors without data, which must not fill a cache."""
    if torch.compiler.is_dynamo_compiling():
        return None
    cache = active.get()
    return None if cache is None or torch.compiler.is_compiling() or dispatch_mode(FAKE) is not None else cache
