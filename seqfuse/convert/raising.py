"""Raising: the nodes of a captured graph that spell one operation, and the operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import ops
from ..errors import one_line
from ..operation import FusableOperation
from .effects import Effects
from .graph import back, example, is_fixed, is_same, narrow_of, same_size, spelled

META = torch.device("meta")


@dataclasses.dataclass(frozen=True)
class Transposed:
    """The transpose of a matrix, such as the weight of GPT-2's `Conv1D`."""

    node: Node


Given = Node | Transposed
"""What stands for a parameter in a graph."""


@dataclasses.dataclass
class View:
    """A node that is part of a value that no node holds: [*, D], or heads [B, H, S, D] of [B, S, *], from start on."""

    node: Node
    start: int
    heads: int | None
    size: int


class Inner:
    """A value inside of several operations that are raised together; no node holds it, but some may be views of it."""

    def __init__(self) -> None:
        self.views: list[View] = []


Value = Node | Inner


@dataclasses.dataclass(eq=False)
class Raised:
    """An operation that stands for nodes of a graph.

    Attributes:
        operation: the operation, its parameters on `meta`; a channel has the name of the node whose value it carries.
        x: what it reads.
        out: what it returns.
        parameters: what stands for its parameters in the graph, by name.
        channels: the nodes that are its extra inputs, by channel.
        took: the nodes that need not run any more, if nobody else reads them.
        node: the node that it is named after and placed at.
        reached: whether a gradient may come back to it.
    """

    operation: FusableOperation
    x: Value
    out: Value
    took: list[Node]
    node: Node
    parameters: Mapping[str, Given] = dataclasses.field(default_factory=dict[str, Given])
    channels: Mapping[str, Node] = dataclasses.field(default_factory=dict[str, Node])
    reached: bool = True

    @property
    def counts(self) -> bool:
        """Whether it makes a chain worth a call: it has a parameter, or is attention."""
        return bool(self.parameters) or isinstance(self.operation, ops.Attention | ops.CrossAttention)

    @property
    def inputs(self) -> list[Node]:
        """The nodes whose values it reads."""
        given = [p.node if isinstance(p, Transposed) else p for p in self.parameters.values()]
        return [*([self.x] if isinstance(self.x, Node) else []), *self.channels.values(), *given]


Found = list[Raised] | str | None
"""The operations that a matcher found, the reason why what it knows cannot be raised, or `None`: not what it knows."""

Matcher = Callable[[Node], Found]
_MATCHERS: list[tuple[int, frozenset[str], Matcher]] = []


def matcher(*anchors: str, rank: int = 3) -> Callable[[Matcher], Matcher]:
    """Declare that a function raises what ends, or is known by, one of these calls; those of low rank come first."""

    def declare(function: Matcher) -> Matcher:
        _MATCHERS.append((rank, frozenset(anchors), function))
        _MATCHERS.sort(key=lambda entry: entry[0])
        return function

    return declare


def raised(
    graph: Graph, allowed: Callable[[Node], bool], effects: Effects, reasons: dict[Node, str]
) -> Iterator[Raised]:
    """The operations of a graph, large patterns first; why one was not raised is added to `reasons`."""
    taken: set[Node] = set()
    for _, anchors, function in _MATCHERS:
        for node in list(graph.nodes):
            if node in taken or spelled(node) not in anchors or not allowed(node):
                continue
            try:
                found = function(node)
            except Exception as error:  # a spelling that nobody thought of: it runs as it did
                found = one_line(error)
            if isinstance(found, str):
                reasons.setdefault(node, found)
            elif found is not None and not any(t in taken for r in found for t in r.took if not _is_cheap(t)):
                took = {t for r in found for t in r.took}
                if _inner(found, took) & effects.returned:
                    reasons.setdefault(node, "a value between its calls leaves the model")
                elif found[-1].out not in effects.unread and effects.allow(took):
                    taken |= took
                    for r in found:
                        r.reached = found[-1].out in effects.reached
                    yield from found
                else:
                    reasons.setdefault(node, "between its calls a mode or a tensor changes, or nobody reads it")


def _inner(found: list[Raised], took: set[Node]) -> set[Node]:
    """The values that operations replace, but for those that they read, return or have a view of."""
    views = {view.node for r in found if isinstance(r.out, Inner) for view in r.out.views}
    known = {*(n for r in found for n in r.inputs), *(r.out for r in found), *views}
    return {t for t in took if narrow_of(t, []) not in known}


def _is_cheap(node: Node) -> bool:
    return is_same(node) is not None or spelled(node) in CHEAP


CHEAP = {
    "view", "reshape", "transpose", "permute", "contiguous", "to", "float", "type_as", "getitem", "unsqueeze", "chunk",
    "split", "unbind", "expand", "flatten", "t", "half", "bfloat16", "expand_as", "type",
}  # fmt: skip
"""Calls that launch nothing, or little beside a GEMM; they may be read by others, too."""


def one(
    operation: FusableOperation, x: Any, out: Node, took: list[Node], anchor: Node | None = None, **parameters: Any
) -> Found:
    """One operation, unless it reads no tensor of floating-point numbers, or its parameters are of another kind."""
    x = back(x, took)
    e = example(x)
    if e is None or not e.is_floating_point():
        return None
    given = {name: p for name, p in parameters.items() if p is not None}
    for p in given.values():
        t = example(p.node if isinstance(p, Transposed) else p)
        if t is None or t.device != e.device or not t.is_floating_point():
            return None
    return [Raised(operation, x, out, list(dict.fromkeys([*took, out])), anchor or out, given)]


def linear(x: Any, weight: Given, bias: Any, out: Node, took: list[Node]) -> Found:
    """A `Linear`, if the sizes are numbers."""
    w = example(weight.node if isinstance(weight, Transposed) else weight)
    if w is None or w.ndim != 2 or example(x) is None or example(x).ndim < 1:  # pyright: ignore[reportOptionalMemberAccess]
        return None
    rows, columns = (w.shape[1], w.shape[0]) if isinstance(weight, Transposed) else (w.shape[0], w.shape[1])
    if not is_fixed(rows, columns):
        return None
    if bias is not None and ((b := example(bias)) is None or b.ndim != 1 or not same_size(b.shape[0], rows)):
        return None
    operation = ops.Linear(columns, rows, bias is not None, device=META, dtype=w.dtype)
    return one(operation, x, out, took, weight=weight, bias=bias)


def weight_of(node: Any, took: list[Node]) -> Given | None:
    """What stands for a weight [out, in], given the right operand [in, out] of a GEMM."""
    if not isinstance(node, Node):
        return None
    method = spelled(node)
    if method == "t" or (method == "transpose" and set(node.args[1:]) in ({0, 1}, {-1, -2})) or _is_attribute_t(node):
        took.append(node)
        return node.args[0]  # pyright: ignore[reportReturnType]
    return Transposed(node)


def _is_attribute_t(node: Node) -> bool:
    return node.target is getattr and node.args[1] in ("T", "mT")
