# pyright: basic
# Schemas are text, and what is registered under them has no types of its own.
"""Decoding as operators, `torch.ops.seqfuse.decode_attention` and `cache_write`: what traces see.

Arguments are those of the functions; the second writes its caches and scales in place. Importing the kernels registers
them; eager code calls the functions, which call the operators where they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._operators import register as _register

_ATTENTION = (
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor lengths, float? scale=None, *, int? window=None, "
    "float? softcap=None, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor"
)
_WRITE = (
    "cache_write(Tensor k_new, Tensor v_new, Tensor(a!) k, Tensor(b!) v, Tensor lengths, *, "
    "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()"
)


def _fake(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return q.new_empty(q.shape)


def _fake_write(*_: Any, **__: Any) -> None:
    """Nothing but the caches is written."""


def _flops(q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    """Of its two GEMMs over the whole cache: how much of it is filled is known to the device alone."""
    return 4 * q.numel() * k.shape[2]


def register(decode_attention: Callable[..., Tensor], cache_write: Callable[..., None]) -> None:
    """Register operators that call these functions of `decode`."""
    _register(_ATTENTION, decode_attention, _fake, flops=_flops)
    _register(_WRITE, cache_write, _fake_write)


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float | None, **rest: Any) -> Tensor:
    """`decode.decode_attention` by its operator."""
    return torch.ops.seqfuse.decode_attention(q, k, v, lengths, scale, **rest)


def write(*tensors: Tensor, **rest: Any) -> None:
    """`decode.cache_write` by its operator."""
    torch.ops.seqfuse.cache_write(*tensors, **rest)
