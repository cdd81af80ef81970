"""Where along a sequence processes have different rows or features, and what follows from it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import PlanError, StateError
from ..group import Meeting
from ..operation import FusableOperation, UnfusedOperation
from .fake import is_fake
from .flatten import Node, inside_of
from .plan import Plan


def tell_apart(nodes: list[Node]) -> None:
    """Say of each position whether other processes have other rows or features there.

    Raises:
        PlanError: (SF201) for what runs by itself there and could not know.
    """
    met = [_meeting(node) for node in nodes]
    first = next((m for m in met if m is not None), None)
    group, has = (first.group, first.before) if first is not None else (None, "whole")
    for position, (node, meeting) in enumerate(zip(nodes, met, strict=True)):
        if meeting is not None:
            group, _, has = meeting
        elif node.eager is not None and has != "whole":
            _expect_to_know(node, position, has == "rows")
        if group is not None and has != "whole":
            node.rank = group.rank
        if node.slots:
            node.sum_over = getattr(node.operation, "sum_over", None) or (group if has == "rows" else None)


def _meeting(node: Node) -> Meeting | None:
    """What processes exchange at a position, or in what runs by itself there."""
    operation = node.operation
    if isinstance(operation, UnfusedOperation) and (node.eager is None or operation.meeting is not None):
        met = [operation.meeting]
    elif isinstance(operation, FusableOperation):
        met = [_meeting(inner) for inner in inside_of(operation)]
    else:
        return None
    found = [m for m in met if m is not None and m.group.size > 1]
    return Meeting(found[-1].group, found[0].before, found[-1].after) if found else None


def _expect_to_know(node: Node, position: int, rows: bool) -> None:
    """Check that what runs by itself, and holds no collective, needs nothing that only the whole sequence tells it."""
    where: dict[str, Any] = {"code": "SF201", "operation": node.name, "position": position}
    inside: list[Any] = [*node.operation.modules()]
    if any(isinstance(m, UnfusedOperation) and m.random for m in inside):
        message = "it runs by itself where each process needs a mask of its own, and would draw the same in all"
        raise PlanError(message, hint="let it run in the sequence: take its hooks away", **where)
    own = [p for m in inside if getattr(m, "sum_over", None) is None for p in m.parameters(False)]
    if rows and any(p.requires_grad for p in own):
        message = "it runs by itself on a share of the rows, so that its gradients are a part of the sum"
        raise PlanError(message, hint="set its sum_over", **where)


def compare(nodes: Sequence[Node], positions: range, plan: Plan, x: Tensor, seeds: Tensor | None) -> None:
    """Compare the plan of a region, and the seeds of its list, with those of the processes it meets.

    Once, when it first runs: a process may later go on without a fusion that failed there.
    """
    if is_fake(x):
        return
    met = [getattr(nodes[position].operation, "meeting", None) for position in positions]
    groups = {m.group.name: m.group for m in met if m is not None and m.group.size > 1}
    steps = [(s.name, s.covers) for s in (*plan.forward, *plan.backward)]
    common = [] if seeds is None else [int(seeds[n.seed]) ^ n.rank for n in nodes if n.seed is not None]
    about = (str((tuple(x.shape), str(plan.env), steps, plan.segments)), str(common))
    digests = [torch.frombuffer(bytearray(hashlib.sha256(t.encode()).digest()), dtype=torch.uint8) for t in about]
    for group in groups.values():
        what = f"{nodes[positions.start].name} at position {positions.start} and what follows"
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
