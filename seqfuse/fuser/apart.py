"""Where along a list processes have different rows or features, and what follows from it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import PlanError
from ..operation import UnfusedOperation
from .items import Item


def tell_apart(items: list[Item]) -> None:
    """Say of each position whether other processes have other rows or features there."""
    met = [i.operation.meeting for i in items if isinstance(i.operation, UnfusedOperation)]
    first = next((m for m in met if m is not None and m.group.size > 1), None)
    group, has = (first.group, first.before) if first is not None else (None, "whole")
    for position, item in enumerate(items):
        operation = item.operation
        if has == "rows" and item.alone is not None:
            _expect_sums(operation, item, position)
        if not isinstance(operation, UnfusedOperation):
            continue
        if operation.meeting is not None and operation.meeting.group.size > 1:
            group, _, has = operation.meeting
        if group is not None and has != "whole":
            item.rank = group.rank
        if item.slots:
            item.sum_over = operation.sum_over or (group if has == "rows" else None)


def _expect_sums(module: nn.Module, item: Item, position: int) -> None:
    """Check that what runs by itself on a share of the rows knows that its gradients are to be summed."""
    inside: list[Any] = list(module.modules())
    if any(getattr(m, "meeting", None) is not None or getattr(m, "shares", None) for m in inside):
        return  # it has a list of its own that says so
    if any(p.requires_grad for m in inside if getattr(m, "sum_over", None) is None for p in m.parameters(False)):
        message = "it runs by itself on a share of the rows, so that its gradients are a part of the sum"
        raise PlanError(message, code="SF201", operation=item.name, position=position, hint="set its sum_over")
