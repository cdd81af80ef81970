"""Whether what attends in a model met a cache."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..ops import Attention


def attention_met(model: Any, met: int, *, first: bool) -> str:
    """How much attention met the cache where compiled graphs left some out; empty where none did.

    Later calls are held to the number of the first one, so the model is looked through at that one alone.
    """
    if not isinstance(model, nn.Module) or (met and not first):
        return ""
    there = sum(isinstance(part, Attention) for part in model.modules())
    if not met or not there:
        return "no" if there else ""
    return f"only {met} of {there} parts with" if met < there and any(map(_compiled, model.modules())) else ""


def _compiled(part: nn.Module) -> bool:
    """Whether it is what `torch.compile` gave, or its `compile` was called."""
    compiled: object = getattr(part, "_compiled_call_impl", None)
    return compiled is not None or hasattr(part, "_orig_mod")
