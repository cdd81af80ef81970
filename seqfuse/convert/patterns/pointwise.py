"""Spellings of activations, dropout, sums and factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from torch.fx import Node

from ... import ops
from ...operation import FusableOperation
from ..dtensor import collective
from ..effects import in_place
from ..graph import (
    alike,
    argument,
    back,
    channel,
    either,
    example,
    is_fixed,
    is_same,
    operands,
    same_shape,
    same_size,
    spelled,
)
from ..masks import KnownValues
from ..normal import Writer
from ..raising import META, Found, matcher, one

_ACTIVATIONS: dict[str, Callable[..., FusableOperation]] = {
    "gelu": ops.GeLU, "silu": ops.SiLU, "relu": ops.ReLU, "tanh": ops.Tanh, "sigmoid": ops.Sigmoid,
}  # fmt: skip


def raise_gelu_by_hand(node: Node) -> Found:
    """0.5 x (1 + t), t = tanh(sqrt(2 / pi) (x + 0.044715 x^3)), as GPT-2 writes it, or t = erf(x / sqrt(2))."""
    tanh = spelled(node) == "tanh"
    inner = as_scaled(node.args[0])
    if inner is None or abs(inner[1] - (math.sqrt(2 / math.pi) if tanh else math.sqrt(0.5))) > 1e-6:
        return None
    x = _cubic(inner[0]) if tanh else inner[0]
    plus = next((u for u in node.users if (p := operands(u, "add")) is not None and 1.0 in p), None)
    if x is None or plus is None or len(node.users) != 1:
        return None
    out = plus
    while (found := ahead_of_product(out)) is not None:
        out = found
        number, factors = _factors(out, plus)
        if number == 0.5 and len(factors) == 2 and {*map(back, factors)} == {back(x), plus}:
            return one(ops.GeLU("tanh" if tanh else "none"), x, out)
    return None


def _cubic(node: Any) -> Any:
    """X of x + 0.044715 x^3."""
    total = operands(node, "add")
    if total is None:
        return None
    x, cubed = total if as_scaled(total[1]) is not None else (total[1], total[0])
    cube = as_scaled(cubed)
    if cube is None or abs(cube[1] - 0.044715) > 1e-9 or spelled(cube[0]) != "pow":
        return None
    return x if cube[0].args[0] is x and argument(cube[0], 1, "exponent") == 3.0 else None


def ahead_of_product(node: Node) -> Node | None:
    """The product that a node is a factor of, if that is all that reads it."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    return user if spelled(user) in ("mul", "truediv") else None


def _factors(node: Any, stop: Node) -> tuple[float, list[Any]]:
    """The number and the tensors that a product is made of, as far as a node."""
    if node is not stop and (found := as_scaled(node)) is not None:
        number, factors = _factors(found[0], stop)
        return number * found[1], factors
    pair = operands(node, "mul")
    if node is stop or pair is None:
        return 1.0, [node]
    (a, first), (b, second) = (_factors(part, stop) for part in pair)
    return a * b, first + second


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


def raise_quick_gelu(node: Node) -> Found:
    """X sigmoid(1.702 x)."""
    found = as_scaled(node.args[0])
    if found is None or found[1] != 1.702 or len(node.users) != 1:
        return None
    out = next(iter(node.users))
    pair = operands(out, "mul")
    if pair is None or found[0] not in pair:
        return None
    return one(ops.QuickGeLU(), found[0], out)


def raise_squared_relu(node: Node) -> Found:
    """relu(x)^2."""
    users = list(node.users)
    if len(users) != 1 or argument(node, 1, "inplace", False):
        return None
    out = users[0]
    squares = spelled(out) == "square" or (spelled(out) == "pow" and argument(out, 1, "exponent") == 2)
    return one(ops.SquaredReLU(), node.args[0], out) if squares else None


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
    if not p or not argument(node, 2, "training", True) or argument(node, 3, "inplace", False) or isinstance(p, Node):
        return None
    return one(ops.Dropout(p), argument(node, 0, "input"), node)


def raise_add(node: Node) -> Found:
    """The sum of two tensors of one shape."""
    pair = operands(node, "add") or operands(node, "iadd")
    if pair is None or not all(_fits(p, node) for p in pair):
        return None
    if in_place(node) and not (spelled(node) == "iadd" and alike(*pair) and _is_fresh(pair[0], node)):
        return None
    return _beside(ops.Add(channel(back(pair[1]))), pair[0], pair[1], node)


def _fits(term: Any, total: Node) -> bool:
    """Whether a term has the shape of a sum, and a dtype of floating-point numbers."""
    a, b = example(term), example(total)
    return a is not None and b is not None and a.is_floating_point() and same_shape(a.shape, b.shape)


def _is_fresh(changed: Node, node: Node) -> bool:
    """Whether a tensor that is changed in place was made by a call and is read by nobody else."""
    fresh = {"linear", "dropout", "layer_norm", "addmm", "matmul", "gelu", "add", "mul"}
    while list(changed.users) == [node]:
        source = is_same(changed)
        if source is None:
            return spelled(changed) in fresh and not in_place(changed) and example(changed) is not None
        changed, node = source, changed
    return False


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


def raise_product(node: Node) -> Found:
    """A tensor times a vector of its last dimension, or times another tensor, such as a gate."""
    for x, other in either(operands(node, "mul")):
        given, factor = example(x), example(other)
        if given is None or factor is None or not alike(x, node) or not factor.is_floating_point() or given.ndim < 2:
            continue
        if factor.ndim == 1 and is_fixed(size := given.shape[-1]) and same_size(factor.shape[0], size):
            return one(ops.LayerScale(size, device=META, dtype=factor.dtype), x, node, gamma=other)
        return _beside(ops.Multiply(channel(back(other))), x, other, node)
    return None


def raise_shift(node: Node) -> Found:
    """A tensor plus a vector of its last dimension, or plus another tensor that is repeated for it."""
    for x, other in either(operands(node, "add")):
        given, term = example(x), example(other)
        if given is None or term is None or not alike(x, node) or term.dtype is not given.dtype or given.ndim < 2:
            continue
        if term.ndim == 1 and is_fixed(size := given.shape[-1]) and same_size(term.shape[0], size):
            return one(ops.Bias(size, device=META, dtype=term.dtype), x, node, bias=other)
        if not is_fixed(*given.shape) or given.device != term.device:
            continue
        repeated = Writer(node)("expand", other, *given.shape)
        return _beside(ops.Add(channel(repeated)), x, repeated, node)
    return None


def _beside(operation: FusableOperation, x: Any, other: Any, node: Node) -> Found:
    """An operation with another tensor as its channel."""
    other = back(other)
    found = one(operation, x, node)
    if isinstance(found, list):
        found[0].channels = {channel(other): other}
    return found


SPELLED_OUT = (
    matcher(raise_gelu_by_hand, "tanh", "erf"),
    matcher(raise_quick_gelu, "sigmoid"),
    matcher(raise_squared_relu, "relu"),
)
"""Activations that several calls spell."""

MATCHERS = (
    matcher(raise_activation, *_ACTIVATIONS),
    matcher(raise_dropout, "dropout"),
    matcher(raise_add, "add", "iadd"),
    matcher(raise_scale, "mul", "truediv"),
    matcher(raise_collective, "copy_to_tensor_parallel", "all_reduce", "all_gather", "reduce_scatter"),
)

PRODUCTS = (matcher(raise_product, "mul"), matcher(raise_shift, "add"))
"""Products and sums that norms by hand and `Linear`s may also end with."""
