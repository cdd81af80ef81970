"""Patterns: spellings of operations as Python functions of torch calls, matched against a captured graph.

The arguments of such a function are holes. It is traced once and matched from its result backwards, ignoring the order
of operands of sums and products and calls that change nothing, in the normal forms of `Spelled.of`. Write the operand
that matches fewer values first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from .graph import CASTS, argument, is_last, is_same, narrow_of, positional, spelled


class Pattern(NamedTuple):
    """A spelling, and the function that checks a match of it."""

    spelling: Callable[..., Any]  # a function of holes that calls torch, `any_of` and readers
    # Gets each hole by name: a node or number of the graph, or `None` in an alternative that is not used. Returns
    # `None` to reject the match.
    check: Callable[..., Any]


def matched(node: Any, patterns: Iterable[Pattern], *about: Any) -> Any:
    """The first result of a check, over all matches of all patterns that end with a node; `None` without a match."""
    for spelling, check in patterns:
        whole, holes = _traced(spelling)
        for found in _matches(whole, node, {}):
            if (result := check(*about, **holes | found)) is not None:
                return result
    return None


def any_of(*ways: Any) -> Any:
    """In a spelling: one of several values."""
    return _written(any_of, *ways)


def reader(read: Callable[[Any], tuple[Any, ...] | None]) -> Callable[..., Any]:
    """In a spelling: a call whose arguments `read` finds for a node of the graph; it returns `None` for other nodes."""
    return functools.partial(_written, read)


def _written(function: Callable[..., Any], *args: Any) -> Any:
    tracer = next(arg.tracer for arg in args if isinstance(arg, Proxy))
    return tracer.create_proxy("call_function", function, args, {})


def _alone(node: Any, cast: bool = True) -> tuple[Any] | None:
    if isinstance(node, Node) and len(node.users) != 1:
        return None
    if (source := is_same(node)) is not None:
        return _alone(source, cast)
    return _alone(node.args[0], False) if cast and spelled(node) in CASTS else (node,)


wide = reader(lambda node: (narrow_of(node),))
"""In a spelling: a value, or a cast of it to a wider dtype."""
recast = reader(_alone)
"""In a spelling: a value that nothing else reads, or a cast of it to any dtype."""


class Spelled(NamedTuple):
    """A torch call in its normal form; in a pattern also `any_of` and readers; holes are strings."""

    name: Any
    args: tuple[Any, ...]

    @classmethod
    def of(cls, node: Any) -> Spelled | None:
        """The normal form of a call, equal for all spellings of the same computation."""
        name: Any = node.name if isinstance(node, Spelled) else spelled(node)
        if name is None:
            return None
        args: Any = node.args
        if not isinstance(node, Spelled) and node.kwargs:
            args += tuple(value for key, value in node.kwargs.items() if (key, value) != ("alpha", 1))
        if name == "mul" and args[0] is args[1]:
            return cls("square", args[:1])
        if name == "truediv" and len(args) == 2:
            inverse = cls("reciprocal", args[1:])
            return cls.of(inverse) if args[0] == 1 else cls("mul", (args[0], inverse))
        if name == "reciprocal" and (root := cls.of(*_alone(args[0]) or (None,))) is not None and root.name == "sqrt":
            return cls("rsqrt", root.args)
        if name == "pow" and isinstance(args[1], int | float):
            power = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}.get(args[1])
            return cls(name, args) if power is None else cls(power, args[:1])
        if name == "getitem" and spelled(args[0]) == "var_mean":
            name, node = "mean" if args[1] else "var", args[0]
        if name in ("mean", "var"):
            return cls(name, _reduced(node, name))
        return cls("clamp" if name == "clamp_min" else name, args)


def _reduced(node: Any, name: str) -> tuple[Any, ...]:
    """The arguments of a mean or variance: x, the dimension (-1 for the last), keepdim, and the dtype or correction."""
    x, dim = argument(node, 0, "input"), argument(node, 1, "dim")
    kept = argument(node, 2 if spelled(node) == "mean" else 3, "keepdim", False)
    which, default = ("dtype", None) if name == "mean" else ("correction", argument(node, 2, "unbiased", True) * 1)
    return x, -1 if is_last(dim, x) else dim, kept, node.kwargs.get(which, default)


@functools.cache
def _traced(spelling: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
    """Traces a spelling: its calls, and its holes."""
    graph, names = Graph(), inspect.signature(spelling).parameters
    tracer = GraphAppendingTracer(graph)
    result = spelling(*(Proxy(graph.placeholder(name), tracer) for name in names))
    positional(graph)
    return _normalized(result.node), dict.fromkeys(names)


def _normalized(node: Any) -> Any:
    """Converts a traced value to calls in normal form."""
    if not isinstance(node, Node | Spelled):
        return node
    if isinstance(node, Node) and node.op == "placeholder":
        return node.target
    call = Spelled.of(node) or Spelled(getattr(node, "target", None), node.args)
    return Spelled(call.name, tuple(map(_normalized, call.args)))


def _matches(part: Any, value: Any, holes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All matches of a value with a part of a pattern: the values of its holes."""
    if isinstance(part, str):
        fits = part not in holes or narrow_of(value) == narrow_of(holes[part])
        if fits and value is not None and not isinstance(value, Spelled):
            yield {part: value, **holes}
    elif not isinstance(part, Spelled):
        if type(value) in (int, float, bool, type(None)) and value == part:
            yield holes
    elif part.name is any_of:
        for way in part.args:
            yield from _matches(way, value, holes)
    elif not isinstance(part.name, str):
        yield from _all(part.args, part.name(value), holes)
    elif (call := Spelled.of(value)) is None or call.name != part.name:
        if (source := is_same(value)) is not None:
            yield from _matches(part, source, holes)
    else:
        yield from _all(part.args, call.args, holes)
        if call.name in ("add", "mul", "maximum"):
            yield from _all(part.args, call.args[::-1], holes)


def _all(parts: tuple[Any, ...], values: tuple[Any, ...] | None, holes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All matches of several values."""
    if not parts and not values:
        yield holes
    elif values is not None and len(parts) == len(values):
        for found in _matches(parts[0], values[0], holes):
            yield from _all(parts[1:], values[1:], found)
