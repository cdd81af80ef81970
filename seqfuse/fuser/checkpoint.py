"""Tensors that a node saves, and what a checkpointed forward must not change between its two runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import CheckpointError

from ..errors import StateError
from .lowering import Segment

saving_hooks: Any = _top_saved_tensors_default_hooks


def save(ctx: Any, segment: Segment, tensors: list[Any], fell: Sequence[int] = ()) -> None:
    """Save tensors; under a checkpoint with an empty one whose shape, which torch compares, says what ran."""
    hooks: Any = saving_hooks(False)
    if tensors and hooks is not None and getattr(hooks[1], "__module__", None) == "torch.utils.checkpoint":
        ran = hash((segment.signature, *fell)) % (1 << 62)
        tensors = [*tensors, torch.empty((0, ran), dtype=torch.uint8, device="cpu")]
        ctx.mark = tensors[-1].shape
    ctx.save_for_backward(*tensors)


def saved_tensors(ctx: Any) -> Sequence[Any]:
    """What a node saved.

    Raises:
        StateError: (SF503) where a checkpointed forward ran another plan the second time.
    """
    if ctx.mark is None:
        return ctx.saved_tensors
    # Reading them recomputes a checkpointed forward, which must run the plan this node was made by.
    try:
        *tensors, mark = ctx.saved_tensors
    except CheckpointError as error:
        raise _replanned() from error
    if mark.shape != ctx.mark:
        raise _replanned()
    return tensors


def _replanned() -> StateError:
    message = "a checkpointed forward was recomputed under another plan, or did not save again what it had saved"
    return StateError(message, code="SF503", hint="do not change fusions, modes or hooks between forward and backward")
