# pyright: basic
# Schemas are text, and what is registered under them has no types of its own.
"""Cross-entropy as operators, `torch.ops.seqfuse.cross_entropy` and `cross_entropy_backward`: what traces see.

The first gives the losses and the softmax, and writes the gradient over the logits where it is asked to; the second
takes that softmax and writes the gradient alone. Importing the kernels registers them; eager code calls the function,
which calls the operators where they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._launch import inner_contiguous
from ._operators import register as _register

MAX_CLASSES = 2**30
"""The widest row."""

_OPTIONS = "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, float? softcap=None"
_FORWARD = (
    f"cross_entropy(Tensor(a!) logits, Tensor targets, *, {_OPTIONS}, Tensor? scale=None, bool gradient=True) "
    "-> (Tensor, Tensor)"
)
_BACKWARD = (
    f"cross_entropy_backward(Tensor(a!) logits, Tensor targets, Tensor softmax, *, {_OPTIONS}, Tensor? scale=None) "
    "-> ()"
)


def check(logits: Tensor, targets: Tensor, scale: Tensor | None, softmax: Tensor | None) -> None:
    """Raise `ValueError` for what no kernel takes."""
    if logits.ndim != 2 or not 0 < logits.shape[1] <= MAX_CLASSES:
        raise ValueError(f"logits must be [R, V], 0 < V <= {MAX_CLASSES}, got {tuple(logits.shape)}")
    R = logits.shape[0]
    for name, row in (("targets", targets), ("scale", scale)):
        if row is not None and (tuple(row.shape) != (R,) or (R > 1 and row.stride(0) != 1)):
            raise ValueError(f"{name} must be contiguous, of shape ({R},), got {tuple(row.shape)}, {row.stride()}")
    inner_contiguous("logits", logits)
    if softmax is not None and tuple(inner_contiguous("softmax", softmax).shape) != (2, R):
        raise ValueError(f"softmax must have shape (2, {R}), got {tuple(softmax.shape)}")


def _fake(logits: Tensor, targets: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    dtype, rows = torch.float64 if logits.dtype is torch.float64 else torch.float32, logits.shape[0]
    return logits.new_empty((rows,), dtype=dtype), logits.new_empty((2, rows), dtype=dtype)


def _fake_backward(logits: Tensor, targets: Tensor, softmax: Tensor, **_: Any) -> None:
    """Nothing but the logits is written."""


def register(cross_entropy_: Callable[..., Any]) -> None:
    """Register operators that call this function of `crossentropy`."""

    def run_backward(logits: Tensor, targets: Tensor, softmax: Tensor, **rest: Any) -> None:
        cross_entropy_(logits, targets, softmax=softmax, **rest)

    _register(_FORWARD, cross_entropy_, _fake)
    _register(_BACKWARD, run_backward, _fake_backward)


def recorded(
    logits: Tensor, targets: Tensor, softmax: Tensor | None, gradient: bool, **rest: Any
) -> tuple[Tensor | None, Tensor]:
    """`cross_entropy_` by its operators."""
    if softmax is None:
        return torch.ops.seqfuse.cross_entropy(logits, targets, **rest, gradient=gradient)
    if gradient:
        torch.ops.seqfuse.cross_entropy_backward(logits, targets, softmax, **rest)
    return None, softmax
