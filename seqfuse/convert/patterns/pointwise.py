"""Spellings of activations, dropout, sums and factors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ... import ops
from ...operation import FusableOperation
from ..dtensor import COLLECTIVES, collective
from ..effects import in_place, is_fresh, is_state
from ..experts import ACTIVATIONS, has_slope, made, unit_like
from ..graph import (
    CASTS,
    alike,
    argument,
    back,
    called,
    channel,
    either,
    example,
    following,
    is_fixed,
    is_same,
    operands,
    same_shape,
    same_size,
    size_before,
    spelled,
)
from ..masks import KnownValues
from ..raising import META, Found, matcher, one
from ..writer import Writer

_ACTIVATIONS: dict[str, Callable[..., FusableOperation]] = {
    "gelu": ops.GeLU, "silu": ops.SiLU, "relu": ops.ReLU, "tanh": ops.Tanh, "sigmoid": ops.Sigmoid,
}  # fmt: skip
_EACH = {
    "add", "sub", "mul", "truediv", "neg", "pow", "square", "reciprocal", "exp", "erf", "tanh", "sigmoid", "relu",
    *CASTS,
}  # fmt: skip
"""Calls that compute each element by itself."""
_FAR = 8
"""Calls before and behind one of these that are looked at, at most."""


def raise_spelled_out(node: Node) -> Found:
    """Several calls that compute an activation of one tensor, however a model spells it, found by trying them."""
    outs = following(node, _EACH, _FAR)
    inputs = node.all_input_nodes if len(outs) > 1 else []
    for before in inputs:  # which grows
        if spelled(before) in _EACH and len(inputs) < _FAR:
            inputs += [n for n in before.all_input_nodes if n not in inputs]
    calls = {x: _computed(x, outs[-1]) for x in inputs if alike(x, node)}
    for out in outs[:0:-1]:
        for x in calls:
            if out in calls[x] and (unit := unit_like(functools.partial(_tried, x, calls[x], out), ACTIVATIONS)):
                return one(made(unit), x, out)
    return None


def raise_function(node: Node) -> Found:
    """A custom autograd function whose passes are those of an activation, found by trying them."""
    users, (first, second, *given), owner = list(node.users), cast("Any", node.args), node.graph.owning_module
    if len(given) != 1 or len(users) != 1 or users[0].args[1:] != (0,) or not alike(given[0], users[0]) or not owner:
        return None
    fwd, bwd = (cast("GraphModule", owner.get_submodule(body.target)) for body in (first, second))
    if not all(map(_is_of_each, (*fwd.graph.nodes, *bwd.graph.nodes))):
        return None

    def slope(drawn: Tensor) -> Tensor:
        results, saved = fwd(drawn)
        return bwd(torch.ones_like(drawn), *[None] * (len(results) - 1), *saved)[0]  # torch 2.11 has further results

    unit = unit_like(lambda drawn: fwd(drawn)[0][0], ACTIVATIONS)
    return one(made(unit), given[0], users[0]) if unit and has_slope(unit, slope) else None


def _is_of_each(node: Node) -> bool:
    """Whether a node is an input, a result, a mode, or a call that computes a new tensor, each element by itself."""
    return node.op in ("placeholder", "output") or is_state(node) or (spelled(node) in _EACH and not in_place(node))


def _computed(x: Node, last: Node) -> list[Node]:
    """The calls up to the last one that compute something of each element of a tensor and of numbers alone."""
    found, node = [x], x
    while node is not last and node.op != "output":
        node = node.next
        if spelled(node) in _EACH and all(n in found or _number(n) is not None for n in node.all_input_nodes):
            found.append(node)
    return found


def _tried(x: Node, calls: list[Node], out: Node, drawn: Tensor) -> Tensor:
    """What calls give for numbers."""
    values: dict[Node, Any] = {x: drawn}
    for call in calls[1:]:
        values[call] = called(call, lambda n: values[n] if n in values else _number(n))
    return values[out]


def as_scaled(node: Any) -> tuple[Any, float] | None:
    """A tensor and the number that it is multiplied by."""
    pair = operands(node, "truediv")
    if pair is not None:
        number = _number(pair[1])
        return (pair[0], 1 / number) if isinstance(pair[0], Node) and number else None
    for x, factor in either(operands(node, "mul")):
        if isinstance(x, Node) and (number := _number(factor)) is not None:
            return x, number
    return None


def _number(given: Any) -> float | None:
    """A number, or that of a tensor that is one number in all calls."""
    if isinstance(given, int | float):
        return float(given)
    e = example(given)
    known = KnownValues().choice(given) if e is not None and e.ndim == 0 and not e.requires_grad else None
    return float(known.yes) if known is not None and known.is_fixed else None


def raise_activation(node: Node) -> Found:
    """An activation."""
    name = spelled(node)
    if name is None or argument(node, 1, "inplace", False) is True:
        return None
    configuration = {"approximate": argument(node, 1, "approximate", "none")} if name == "gelu" else {}
    return one(_ACTIVATIONS[name](**configuration), argument(node, 0, "input"), node)


def raise_dropout(node: Node) -> Found:
    """F.dropout(x, p, training)."""
    p = argument(node, 1, "p", 0.5)
    if is_same(node) is not None or argument(node, 3, "inplace", False) or isinstance(p, Node):
        return None
    return one(ops.Dropout(p), argument(node, 0, "input"), node)


def raise_add(node: Node) -> Found:
    """The sum of two tensors of one shape."""
    pair = operands(node, "add") or operands(node, "iadd")
    if pair is None or not all(_fits(p, node) for p in pair):
        return None
    if in_place(node) and not (spelled(node) == "iadd" and alike(*pair) and is_fresh(pair[0], node)):
        return None
    return _beside(ops.Add, *pair, node)


def _fits(term: Any, total: Node) -> bool:
    """Whether a term has the shape of a sum, and a dtype of floating-point numbers."""
    a, b = example(term), example(total)
    return a is not None and b is not None and a.is_floating_point() and same_shape(a.shape, b.shape)


def raise_collective(node: Node) -> Found:
    """A collective of tensor parallelism."""
    x, *given = cast("Any", node.args)
    return one(collective(spelled(node) or "", *given), x, node)


def raise_scale(node: Node) -> Found:
    """A tensor times a number, in either order, or divided by one."""
    found = as_scaled(node)
    if found is None or not alike(found[0], node):
        return None
    return one(ops.Scale(found[1]), found[0], node)


def raise_repeated(node: Node) -> Found:
    """A tensor times or plus a vector of its last dimension, or another tensor that is repeated for it."""
    name = spelled(node) or ""
    for x, other in either(operands(node, name)):
        given, t = example(x), example(other)
        if given is None or t is None or not _fits(x, node) or not t.is_floating_point() or given.ndim < 2:
            continue
        size = given.shape[-1]
        is_vector = t.ndim == 1 and is_fixed(size) and same_size(t.shape[0], size)
        if name == "mul":
            scale = ops.LayerScale(size, device=META, dtype=t.dtype) if is_vector else None
            return one(scale, x, node, gamma=other) if scale else _beside(ops.Multiply, x, other, node)
        if is_vector and t.dtype is given.dtype:
            return one(ops.Bias(size, device=META, dtype=t.dtype), x, node, bias=other)
        sizes = [size_before(node, size) for size in given.shape]
        if None not in sizes and given.device == t.device:
            return _beside(ops.Add, x, Writer(node)("expand", other, *sizes), node)
    return None


def _beside(kind: Callable[[str], FusableOperation], x: Any, other: Any, node: Node) -> Found:
    """An operation with another tensor as its channel."""
    other = back(other)
    found = one(kind(channel(other)), x, node)
    if isinstance(found, list):
        found[0].channels = {channel(other): other}
    return found


SPELLED_OUT = (matcher(raise_spelled_out, "tanh", "erf", "sigmoid", "relu"),)
"""Activations that several calls spell."""

MATCHERS = (
    matcher(raise_activation, *_ACTIVATIONS),
    matcher(raise_function, "autograd_function_apply"),
    matcher(raise_dropout, "dropout"),
    matcher(raise_add, "add", "iadd"),
    matcher(raise_scale, "mul", "truediv"),
    matcher(raise_collective, *COLLECTIVES),
)

PRODUCTS = (matcher(raise_repeated, "mul", "add"),)
"""Products and sums that norms by hand and `Linear`s may also end with."""
