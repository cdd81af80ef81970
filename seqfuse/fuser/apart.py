"""Where along a list processes have different rows or features, and what follows from it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import PlanError, StateError
from ..operation import UnfusedOperation
from .items import Item

if TYPE_CHECKING:
    from .listing import Region
    from .plan import Plan


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


def compare(items: Sequence[Item], region: Region, plan: Plan, x: Tensor, seeds: Tensor | None) -> None:
    """Compare the plan of a region, and the seeds of its list, with those of the processes it meets.

    Once, when it first runs: a process may later go on without a fusion that failed there.

    Raises:
        StateError: (SF506) in every process of the group, if one of them has others.
    """
    region.compared = True
    met = [getattr(item.operation, "meeting", None) for item in items[region.start : region.stop]]
    groups = {m.group.name: m.group for m in met if m is not None and m.group.size > 1}
    steps = [(s.name, s.covers) for s in (*plan.forward, *plan.backward)]
    drawn = [] if seeds is None else [*map(int, seeds.cpu())]
    random = [item.rank for item in items if isinstance(item.operation, UnfusedOperation) and item.operation.random]
    common = [seed ^ rank for seed, rank in zip(drawn, random, strict=False)]
    about = (str((tuple(x.shape), str(plan.env), steps, plan.segments)), str(common))
    digests = [torch.frombuffer(bytearray(hashlib.sha256(t.encode()).digest()), dtype=torch.uint8) for t in about]
    for group in groups.values():
        what = f"{items[region.start].name} at position {region.start} and what follows"
        every = group.all_gather(torch.stack(digests).unsqueeze(0).to(x.device), 0, what).cpu()
        same = (every == every[0]).all(-1)
        for i, (of, hint) in enumerate(
            (
                ("another plan or input", "give all processes the same list, fusions, settings and measurements"),
                ("other seeds", "give the generators of all processes of the group one state"),
            )
        ):
            others = [rank for rank in range(group.size) if not same[rank, i]]
            if others:
                message = f"processes {', '.join(map(str, others))} of {group} have {of} than process 0 here"
                raise StateError(message, code="SF506", operation=what, hint=hint)
