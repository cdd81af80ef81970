"""Spellings of norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Node

from .. import ops
from .graph import ahead, argument, back, example, is_same, narrow_of, operands, same_size, spelled
from .raising import META, Found, matcher, one


def _shape(node: Node) -> tuple[Any, ...]:
    """The sizes that a norm is given; none if they are read from a tensor."""
    shape = argument(node, 1, "normalized_shape")
    return tuple(cast("Sequence[Any]", shape)) if isinstance(shape, list | tuple) else ()


@matcher("layer_norm")
def raise_layer_norm(node: Node) -> Found:
    """F.layer_norm(x, shape, weight, bias, eps)."""
    x, shape = argument(node, 0, "input"), _shape(node)
    weight, bias, eps = argument(node, 2, "weight"), argument(node, 3, "bias"), argument(node, 4, "eps", 1e-5)
    if len(shape) != 1 or not isinstance(shape[0], int) or (weight is None and bias is not None):
        return None
    if not isinstance(eps, int | float):
        return "its eps is no fixed number"
    w = example(weight)
    made = ops.LayerNorm(shape, eps, weight is not None, bias is not None, META, None if w is None else w.dtype)
    return one(made, x, node, [], weight=weight, bias=bias)


@matcher("rms_norm")
def raise_rms_norm(node: Node) -> Found:
    """F.rms_norm(x, shape, weight, eps)."""
    x, shape = argument(node, 0, "input"), _shape(node)
    weight, eps = argument(node, 2, "weight"), argument(node, 3, "eps")
    if len(shape) != 1 or not isinstance(shape[0], int) or isinstance(eps, Node):
        return None
    w = example(weight)
    made = ops.RMSNorm(shape, eps, weight is not None, META, None if w is None else w.dtype)
    return one(made, x, node, [], weight=weight)


@dataclasses.dataclass
class Norm:
    """An RMSNorm as it is found in a graph."""

    x: Any
    out: Node
    took: list[Node]
    size: int
    eps: float
    weight: Any = None
    zero_centered: bool = False


def rms_norm_at(node: Node) -> Norm | None:
    """X rsqrt(mean(x^2) + eps) gain, gain = weight or 1 + weight, with casts wherever a model has them."""
    took: list[Node] = [node]
    total = operands(argument(node, 0, "input"), "add")
    if total is None or not isinstance(total[1], float):
        return None
    took.append(node.args[0])  # pyright: ignore[reportArgumentType]
    mean, eps = total
    if spelled(mean) != "mean" or argument(mean, 1, "dim") not in (-1, [-1], (-1,)) or not argument(mean, 2, "keepdim"):
        return None
    square, x = mean.args[0], None
    if (spelled(square) == "pow" and argument(square, 1, "exponent") == 2) or spelled(square) == "square":
        x = square.args[0]
    elif (pair := operands(square, "mul")) is not None and pair[0] is pair[1]:
        x = pair[0]
    if x is None:
        return None
    took += [mean, square]
    x = narrow_of(x, took)
    scaled = next((u for u in node.users if spelled(u) == "mul"), None)
    if scaled is None or len(node.users) != 1:
        return None
    factor = scaled.args[1] if scaled.args[0] is node else scaled.args[0]
    if narrow_of(factor, took) is not x:
        return None
    took.append(scaled)
    size: Any = example(x).shape[-1] if example(x) is not None else None  # pyright: ignore[reportOptionalMemberAccess]
    if not isinstance(size, int):
        return None
    return _gained(Norm(x, scaled, took, size, eps))


def _gained(norm: Norm) -> Norm:
    """The same with the weight that the result is multiplied by, and the cast back."""
    out = _cast_ahead(norm.out, norm.took)
    users = list(out.users)
    if len(users) == 1 and is_same(users[0]) is out:
        norm.took.append(users[0])
        users = list(users[0].users)
    product = users[0] if len(users) == 1 and spelled(users[0]) == "mul" else None
    if product is not None:
        gain: Any = product.args[1] if back(product.args[0], []) is out else product.args[0]
        took: list[Node] = [product]
        gain = narrow_of(gain, took)
        zero_centered, pair = False, operands(gain, "add")
        if pair is not None and 1.0 in pair:
            took.append(gain)
            gain, zero_centered = narrow_of(pair[1] if pair[0] == 1.0 else pair[0], took), True
        w = example(gain)
        if w is not None and w.ndim == 1 and same_size(w.shape[0], norm.size):
            norm.took += took
            norm.weight, norm.zero_centered, out = gain, zero_centered, _cast_ahead(product, norm.took)
    norm.out = out
    return norm


def _cast_ahead(node: Node, took: list[Node]) -> Node:
    """What a node is cast to, if that is all that is done with it."""
    took.append(node)
    found = ahead(node, {"to", "type_as", "float", "half", "bfloat16"})
    if found is None or is_same(found) is not None:
        return node
    took.append(found)
    return found


@matcher("rsqrt")
def raise_rms_norm_by_hand(node: Node) -> Found:
    """RMSNorm as it is written by hand, if its result has the dtype of its input."""
    norm = rms_norm_at(node)
    x, y = (example(norm.x), example(norm.out)) if norm is not None else (None, None)
    if norm is None or x is None or y is None or x.dtype is not y.dtype:
        return None
    w = example(norm.weight)
    made = ops.RMSNorm(
        norm.size, norm.eps, norm.weight is not None, META, None if w is None else w.dtype,
        zero_centered=norm.zero_centered,
    )  # fmt: skip
    return one(made, norm.x, norm.out, norm.took, weight=norm.weight)
