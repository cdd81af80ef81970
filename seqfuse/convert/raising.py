"""Raising: replaces the nodes of a captured graph that spell an operation by the operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from .. import ops
from ..errors import one_line
from ..operation import FusableOperation
from .effects import Effects
from .graph import CASTS, VIEWS, WRITTEN, back, example, is_same, narrow_of, read_by, spelled

META = torch.device("meta")


@dataclasses.dataclass
class View:
    """A node that is a part, from `start` on, of a value without a node: [*, D], or heads [B, H, S, D] of [B, S, *]."""

    node: Node
    start: int
    heads: int | None
    size: int


class Inner:
    """An intermediate value of operations that are raised together; it has no node, but nodes may be views of it."""

    def __init__(self) -> None:
        self.views: list[View] = []


Value = Node | Inner


@dataclasses.dataclass(eq=False)
class Raised:
    """An operation that replaces nodes of a graph."""

    # Its parameters are on `meta`; a channel has the name of its node.
    operation: FusableOperation
    x: Value  # what it reads
    out: Value  # what it returns
    node: Node  # the node that determines its name and position
    # The nodes of its parameters, by name.
    parameters: Mapping[str, Node] = dataclasses.field(default_factory=dict[str, Node])
    # The nodes that are its extra inputs, by channel.
    channels: Mapping[str, Node] = dataclasses.field(default_factory=dict[str, Node])
    reached: bool = True  # whether a gradient may come back to it
    # All nodes that were replaced together with it; they are removed unless other nodes read them.
    took: frozenset[Node] = frozenset()
    why: str | None = None  # why it was not fused further, for the report

    @property
    def counts(self) -> bool:
        """Whether it makes a chain worthwhile: it has a parameter, or is attention."""
        return bool(self.parameters) or isinstance(self.operation, ops.Attention | ops.CrossAttention)

    @property
    def ends(self) -> list[Node]:
        """The node of its result, or the nodes that are views of it."""
        return [self.out] if isinstance(self.out, Node) else [view.node for view in self.out.views]

    @property
    def inputs(self) -> list[Node]:
        """The nodes whose values it reads."""
        return [*([self.x] if isinstance(self.x, Node) else []), *self.channels.values(), *self.parameters.values()]


Found = list[Raised] | str | None
"""The operations that a matcher found; the reason why a known spelling cannot be raised; or `None`: not its spelling.
"""


class GraphMatcher(NamedTuple):
    """A function that raises operations."""

    match: Callable[[Node], Found]  # gets a call that ends or identifies a spelling
    calls: frozenset[str]  # the names of such calls


def matcher(match: Callable[[Node], Found], *calls: str) -> GraphMatcher:
    """A matcher for calls of these names."""
    return GraphMatcher(match, frozenset(calls))


def raised(
    graph: Graph,
    matchers: Sequence[GraphMatcher],
    allowed: Callable[[Node], bool],
    effects: Effects,
    reasons: dict[Node, str],
) -> Iterator[Raised]:
    """Runs the matchers one after another over a graph; `reasons` gets why a spelling was not raised."""
    taken: set[Node] = set()
    for match, calls in matchers:
        for node in list(graph.nodes):
            if node in taken or spelled(node) not in calls or WRITTEN in node.meta or not allowed(node):
                continue
            try:
                found = match(node)
            except Exception as error:  # an unexpected spelling stays as it is
                found = one_line(error)
            if isinstance(found, str):
                reasons.setdefault(node, found)
            elif found is not None:
                took = _between(found)
                if any(t in taken for t in took if not is_cheap(t)):
                    continue
                last = found[-1].ends[0]
                if _inner(found, took) & effects.returned:
                    reasons.setdefault(node, "a value between its calls leaves the model")
                elif last not in effects.reached and any(t in effects.reached for r in found[:-1] for t in r.ends):
                    reasons.setdefault(node, "a gradient comes back to a value between its calls, not to its result")
                elif last not in effects.unread and effects.allow(took):
                    taken |= took
                    for r in found:
                        r.reached, r.took = last in effects.reached, took
                    yield from found
                else:
                    reasons.setdefault(node, "between its calls a mode or a tensor changes, or nobody reads it")


def behind(nodes: Iterable[Node], until: Container[Node] = ()) -> set[Node]:
    """Nodes and all nodes that their values are computed from, up to `until`."""
    found, stack = set[Node](), [*nodes]
    while stack:
        node = stack.pop()
        if node not in found and node not in until:
            found.add(node)
            stack += read_by(node)
    return found


def _between(found: list[Raised]) -> frozenset[Node]:
    """The nodes that operations replace: those on a path from their inputs to the last one's result."""
    inputs = {n for r in found for given in r.inputs for n in _written_of(given)}
    inside = behind(found[-1].ends, inputs)
    took, stack = set[Node](), [*inputs]
    while stack:
        node = stack.pop()
        ahead = [user for user in node.users if user in inside and user not in took and node in read_by(user)]
        took.update(ahead)
        stack += ahead
    parts = (user for node in took for user in node.users if spelled(user) == "getitem" and not user.users)
    return frozenset(took | {part for part in parts if isinstance(part.args[1], int)})  # unread results


def _written_of(given: Node) -> Iterator[Node]:
    """An input of operations and, if a matcher wrote its node, the inputs of that node."""
    yield given
    if WRITTEN in given.meta:
        for node in given.all_input_nodes:
            yield from _written_of(node)


def _inner(found: list[Raised], took: frozenset[Node]) -> set[Node]:
    """The replaced values that are not inputs, results or views of results."""
    views = {view.node for r in found if isinstance(r.out, Inner) for view in r.out.views}
    read = (node for r in found for n in r.inputs for node in _written_of(n))
    known = {*read, *(r.out for r in found), *views}
    return {t for t in took if narrow_of(t) not in known}


def is_cheap(node: Node) -> bool:
    """Whether a call costs little compared with a GEMM; then other nodes may read it, too."""
    return is_same(node) is not None or spelled(node) in CHEAP


CHEAP = VIEWS | CASTS | {"contiguous", "t", "expand_as"}
"""Calls that are cheap for any arguments."""


def in_turn(steps: Sequence[tuple[Any, ...]], x: Value, out: Value, node: Node) -> list[Raised]:
    """A chain of operations, each with its parameters and channels, from x to out."""
    values = [x, *(Inner() for _ in steps[1:]), out]
    return [Raised(step[0], a, b, node, *step[1:]) for step, a, b in zip(steps, values, values[1:], strict=False)]


def one(operation: FusableOperation, x: Any, out: Node, **parameters: Any) -> Found:
    """One operation, if x and its parameters are floating-point tensors on one device."""
    x = back(x)
    e = example(x)
    if e is None or not e.is_floating_point():
        return None
    given = {name: p for name, p in parameters.items() if p is not None}
    for p in given.values():
        t = example(p)
        if t is None or t.device != e.device or not t.is_floating_point():
            return None
    return [Raised(operation, x, out, out, given)]
