"""Tracks how tensors are sharded along a sequence; checks that the processes of a group have the same plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import PlanError, StateError
from ..fake import is_fake
from ..group import Redistribution, Sharding
from ..operation import FusableOperation, UnfusedOperation
from ..plan.flatten import Node, inside_of
from ..plan.plan import Plan


def mark_shards(nodes: list[Node]) -> None:
    """Sets the rank and the group of each node according to the sharding at its position.

    Raises:
        PlanError: (SF201) for an eager module that would give wrong results on a shard.
    """
    collectives = [_redistribution(node) for node in nodes]
    first = next((c for c in collectives if c is not None), None)
    group, now = (None, "replicated") if first is None else (first.group, first.before)
    for position, (node, collective) in enumerate(zip(nodes, collectives, strict=True)):
        if collective is not None:
            group, _, now = collective
        elif node.eager is not None and now != "replicated":
            _check_eager_on_shard(node, position, now)
        if group is not None and now != "replicated":
            node.rank = group.rank
        if node.slots:
            node.sum_over = getattr(node.operation, "sum_over", None) or (group if now == "sequence" else None)


def _redistribution(node: Node) -> Redistribution | None:
    """The collective at a position; for an eager module the combination of its collectives."""
    operation = node.operation
    if isinstance(operation, UnfusedOperation) and (node.eager is None or operation.redistribution is not None):
        several = [operation.redistribution]
    elif isinstance(operation, FusableOperation):
        several = [_redistribution(inner) for inner in inside_of(operation)]
    else:
        return None
    found = [c for c in several if c is not None and c.group.size > 1]
    return Redistribution(found[-1].group, found[0].before, found[-1].after) if found else None


def _check_eager_on_shard(node: Node, position: int, sharding: Sharding) -> None:
    """Check that an eager module without collectives, on a shard, has no dropout and needs no summed gradients."""
    where: dict[str, Any] = {"code": "SF201", "operation": node.name, "position": position}
    inside: list[Any] = [*node.operation.modules()]
    if any(isinstance(m, UnfusedOperation) and m.random for m in inside):
        message = "it runs by itself where each process needs its own mask, and would draw the same in all"
        raise PlanError(message, hint="let it run in the sequence: take its hooks away", **where)
    own = [p for m in inside if getattr(m, "sum_over", None) is None for p in m.parameters(False)]
    if sharding == "sequence" and any(p.requires_grad for p in own):
        message = "it runs by itself on a sequence shard, so that its gradients are a part of the sum"
        raise PlanError(message, hint="set its sum_over", **where)


def check_agreement(nodes: Sequence[Node], positions: range, plan: Plan, x: Tensor, seeds: Tensor | None) -> None:
    """Check that all processes of a region's collectives have the same plan and seeds: `SEQFUSE_DEBUG=1`.

    Done when the region first runs: later a process may have fallen back from a fusion that failed there.
    """
    if is_fake(x):
        return
    collectives = [getattr(nodes[position].operation, "redistribution", None) for position in positions]
    groups = {c.group.name: c.group for c in collectives if c is not None and c.group.size > 1}
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
