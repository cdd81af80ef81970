# pyright: basic
# Schemas are text, and what is registered under them has no types of its own.
"""Cross-entropy as an operator, `torch.ops.seqfuse.cross_entropy_`: what traces see.

Arguments are those of the function; results come as a list, the loss and the softmax, none where the softmax is
given. Importing this module registers it; eager code calls the function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .crossentropy import cross_entropy_

_library = torch.library.Library("seqfuse", "FRAGMENT")
_SCHEMA = (
    "cross_entropy_(Tensor(a!) logits, Tensor targets, *, int ignore_index=-100, float label_smoothing=0.0, "
    "float z_loss=0.0, float? softcap=None, Tensor? scale=None, Tensor? softmax=None, bool gradient=True) -> Tensor[]"
)


def _run(logits: Tensor, targets: Tensor, *, softmax: Tensor | None = None, **rest: Any) -> list[Tensor]:
    loss, made = cross_entropy_(logits, targets, softmax=softmax, **rest)
    return [] if loss is None else [loss, made]


def _fake(logits: Tensor, targets: Tensor, *, softmax: Tensor | None = None, **_: Any) -> list[Tensor]:
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    rows = logits.shape[0]
    return [] if softmax is not None else [logits.new_empty(shape, dtype=dtype) for shape in ((rows,), (2, rows))]


_library.define(_SCHEMA)
_library.impl("cross_entropy_", _run, "CompositeExplicitAutograd")
torch.library.register_fake("seqfuse::cross_entropy_", _fake, lib=_library)
