"""Where the stages of a pipeline begin."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn

from ..errors import PlanError
from ..operation import UnfusedOperation
from ..plan.flatten import Node, located


def begins(root: nn.Module, nodes: Sequence[Node], stages: int | Sequence[str]) -> dict[str, int]:
    """The names of the modules at which the second stage and those after it begin, and their positions.

    Raises:
        PlanError: (SF202) for a name at which none can begin, or names that are not in the order of the sequence.
    """
    places = _places(root, nodes)
    if isinstance(stages, int):
        return _balanced(nodes, places, stages)
    for name in stages:
        if name not in places:
            inside = next((node for node in nodes if node.eager and name.startswith(f"{node.path}.")), None)
            close = difflib.get_close_matches(name, places, 1)
            why = f": {inside.path!r} runs through its own call ({inside.eager})" if inside else ""
            hint = f"did you mean {close[0]!r}?" if close else None
            raise PlanError(f"no stage can begin at {name!r}{why}", code="SF202", hint=hint)
    at = [places[name] for name in stages]
    for name, position, before in zip(stages, at, [0, *at], strict=False):
        if position <= before:
            message = f"stages begin in the order of the sequence, and each has operations; {name!r} does not fit"
            raise PlanError(message, code="SF202", **located(nodes, position))
    return dict(zip(stages, at, strict=True))


def _places(root: nn.Module, nodes: Sequence[Node]) -> dict[str, int]:
    """The names of the modules a stage can begin at, and the positions they begin at; the outermost comes first."""
    first: dict[str, int] = {}
    for position, node in enumerate(nodes):
        parts = node.path.split(".")
        for depth in range(1, len(parts) + 1):
            first.setdefault(".".join(parts[:depth]), position)
    operations = {node.path for node in nodes}
    places: dict[str, int] = {}
    for name, _ in cast(Iterable[tuple[str, Any]], root.named_modules(remove_duplicate=False)):
        parts = name.split(".")
        above = {".".join(parts[:depth]) for depth in range(1, len(parts))}
        if name in first and not above & operations:
            places[name] = first[name]
    return places


def _balanced(nodes: Sequence[Node], places: dict[str, int], stages: int) -> dict[str, int]:
    """Begin stages where a single tensor crosses, so that the most parameters in one of them are as few as can be."""
    names: dict[int, str] = {}
    for name, position in places.items():
        if position and not nodes[position].crossing:
            names.setdefault(position, name)
    at = [0, *sorted(names), len(nodes)]
    if stages < 1:
        raise PlanError(f"stages must be at least 1, got {stages}", code="SF202")
    if stages > len(at) - 1:
        message = f"a sequence of {len(at) - 1} parts that a single tensor leaves cannot be cut into {stages} stages"
        raise PlanError(message, code="SF202", hint="name the modules that stages begin at, inside of residuals too")
    weight = [sum(_weight(node) for node in nodes[a:b]) for a, b in itertools.pairwise(at)]
    ends = [0]
    for total in weight:
        ends.append(ends[-1] + total)
    # best[n]: for n parts the heaviest of the stages so far at its lightest, and where those stages begin.
    best = {n: (ends[n], list[int]()) for n in range(1, len(at))}
    for stage in range(2, stages + 1):
        best = {
            n: min((max(best[k][0], ends[n] - ends[k]), [*best[k][1], k]) for k in range(stage - 1, n))
            for n in range(stage, len(at))
        }
    return {names[at[k]]: at[k] for k in best[len(at) - 1][1]}


def _weight(node: Node) -> int:
    if isinstance(node.operation, UnfusedOperation) and node.fusable:
        return 1 + sum(getattr(owner, name).numel() for owner, name in node.slots.values())
    return 1 + sum(p.numel() for p in node.operation.parameters())
