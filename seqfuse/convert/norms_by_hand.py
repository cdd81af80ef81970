"""Norms that are written by hand: x divided by the root of its mean square or of its variance."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch.fx import Node

from .. import ops
from .graph import ahead, argument, back, example, is_last, is_same, narrow_of, operands, same_size, spelled
from .raising import META, Found, matcher, one


@dataclasses.dataclass
class Norm:
    """An RMSNorm or a LayerNorm as it is found in a graph.

    Attributes:
        x: what it normalizes.
        out: its result.
        took: the nodes that it stands for.
        size: the length of the last dimension.
        eps: added to the mean square, or to the variance.
        kind: `"rms"` or `"layer"`.
        weight: the node of its weight.
        bias: the node of its bias.
        zero_centered: whether it multiplies by one more than its weight.
    """

    x: Any
    out: Node
    took: list[Node]
    size: int
    eps: float
    kind: str = "rms"
    weight: Any = None
    bias: Any = None
    zero_centered: bool = False


_CASTS = {"to", "type_as", "float", "double", "half", "bfloat16"}


def is_root(node: Any) -> bool:
    """Whether a call takes a square root, or one over it."""
    power = argument(node, 1, "exponent") if spelled(node) == "pow" else None
    return spelled(node) in ("sqrt", "rsqrt") or (isinstance(power, float) and abs(power) == 0.5)


@matcher("rsqrt", "sqrt", "pow")
def raise_norm_by_hand(node: Node) -> Found:
    """RMSNorm or LayerNorm as it is written by hand, if its result has the dtype of its input."""
    norm = norm_at(node) if is_root(node) else None
    if norm is None and spelled(node) == "rsqrt":
        return "its root is not that of the mean square or the variance of what it multiplies"
    if not isinstance(norm, Norm):
        return norm
    x, y = example(norm.x), example(norm.out)
    if x is None or y is None:
        return None
    if x.dtype is not y.dtype:
        return f"it gives {y.dtype} for an input in {x.dtype}: cast its result back to the dtype of its input"
    w = example(norm.weight)
    dtype = None if w is None else w.dtype
    if norm.kind == "rms":
        made = ops.RMSNorm(norm.size, norm.eps, w is not None, META, dtype, zero_centered=norm.zero_centered)
    else:
        made = ops.LayerNorm(
            norm.size, norm.eps, w is not None, norm.bias is not None, META, dtype, zero_centered=norm.zero_centered
        )
    return one(made, norm.x, norm.out, norm.took, weight=norm.weight, bias=norm.bias)


class _Average(NamedTuple):
    """The mean square or the variance of a tensor, and why no norm divides by its root, if none does."""

    x: Any
    kind: str
    trouble: str | None


def norm_at(root: Node) -> Norm | str | None:
    """A norm whose root is taken here, with casts wherever a model has them.

    x / sqrt(mean(x^2) + eps) gain, or (x - mean) / sqrt(variance + eps) gain + bias; gain = weight or 1 + weight. The
    root is `rsqrt`, `sqrt` or a power; it divides, or one over it multiplies.

    Returns:
        The norm; the reason why it is none that an operation stands for; `None` for what is no norm.
    """
    took: list[Node] = [root]
    average, eps, trouble = _radicand(argument(root, 0, "input"), took)
    use = None if average is None else _use(root, took)
    if average is None or use is None:
        return None
    if (trouble := trouble or average.trouble) is not None:
        return trouble
    x, (numerator, out) = average.x, use
    size: Any = example(x).shape[-1] if example(x) is not None else None  # pyright: ignore[reportOptionalMemberAccess]
    if not isinstance(size, int):
        return "its size is not fixed"
    norm = Norm(x, out, took, size, eps, average.kind)
    numerator = narrow_of(numerator, took)
    if _divided(numerator, norm):
        return _biased(_gained(norm))
    pair = operands(numerator, "mul") or ()
    for gain, rest in (pair, pair[::-1]) if pair else ():
        own: list[Node] = [numerator]
        if _divided(narrow_of(rest, own), norm) and _is_gain(gain, norm, own):
            norm.took += own
            norm.out = _cast_ahead(out, took)
            return _biased(norm)
    return "what it divides is not the tensor whose mean square or variance it takes"


def _radicand(node: Any, took: list[Node]) -> tuple[_Average | None, float, str | None]:
    """The average in a sum with an eps, the eps, and what is wrong with it."""
    node = back(node, took)
    pair = operands(node, "add")
    if pair is None and spelled(node) in ("clamp", "clamp_min", "maximum"):
        average = _average(back(node.args[0], took), took)
        return average, 0.0, "it takes the larger of eps and the average, a norm of torch their sum"
    if pair is None:
        return _average(node, took), 0.0, None
    took.append(node)
    for eps, average in (pair, pair[::-1]):
        if (found := _average(back(average, took), took)) is not None:
            number = isinstance(eps, int | float)
            return found, float(eps) if number else 0.0, None if number else "its eps is no fixed number"
    return None, 0.0, None


def _average(node: Any, took: list[Node]) -> _Average | None:
    """The mean square or the variance that a node is."""
    name, source = spelled(node), node
    if name == "getitem" and spelled(node.args[0]) == "var_mean" and node.args[1] == 0:
        name, source = "var", node.args[0]
        took.append(source)
    if name not in ("mean", "var"):
        return None
    took.append(node)
    given = argument(source, 0, "input")
    keeps = argument(source, 2 if name == "mean" else 3, "keepdim", False)
    trouble = None if is_last(argument(source, 1, "dim"), given) else "it averages over other dimensions than the last"
    if argument(source, 1, "dim") is None or keeps is not True or source.kwargs.get("dtype") is not None:
        return None
    if name == "mean":
        square = back(given, took)
        if (x := _squared(square)) is None:
            return None
        took.append(square)
        x = narrow_of(x, took)
        centered = _centered(x, took)
        return _Average(x if centered is None else centered, "rms" if centered is None else "layer", trouble)
    unbiased = argument(source, 2, "unbiased", True)
    if source.kwargs.get("correction", 1 if unbiased else 0) != 0:
        trouble = "its variance is of n - 1 elements, that of LayerNorm of n: unbiased=False or correction=0"
    return _Average(narrow_of(given, took), "layer", trouble)


def _squared(node: Any) -> Any:
    if spelled(node) == "square" or (spelled(node) == "pow" and argument(node, 1, "exponent") == 2):
        return node.args[0]
    pair = operands(node, "mul")
    return pair[0] if pair is not None and pair[0] is pair[1] else None


def _centered(node: Any, took: list[Node]) -> Any:
    """X of x - mean(x)."""
    pair = operands(node, "sub")
    if pair is None:
        return None
    own: list[Node] = [node]
    x, mean = narrow_of(pair[0], own), narrow_of(pair[1], own)
    source, keepdim = mean, 2
    if spelled(mean) == "getitem" and spelled(mean.args[0]) == "var_mean" and mean.args[1] == 1:
        source, keepdim = mean.args[0], 3
    elif spelled(mean) != "mean":
        return None
    given = argument(source, 0, "input")
    kept = argument(source, keepdim, "keepdim", False) is True and source.kwargs.get("dtype") is None
    if not kept or not is_last(argument(source, 1, "dim"), given) or narrow_of(given, own) is not x:
        return None
    took += [*own, mean, source]
    return x


def _use(root: Node, took: list[Node]) -> tuple[Any, Node] | None:
    """What is divided by the root, or multiplied by one over it, and the result."""
    inverse = spelled(root) == "rsqrt" or argument(root, 1, "exponent") == -0.5
    node = root
    while len(node.users) == 1:
        (user,) = node.users
        if not inverse and (spelled(user) == "reciprocal" or operands(user, "truediv") == (1, node)):
            inverse = True
        elif spelled(user) not in _CASTS or user.args[:1] != (node,):
            pair = operands(user, "mul" if inverse else "truediv")
            if pair is None or pair[0] is pair[1] or (pair[0] is node and not inverse):
                return None
            return (pair[0] if pair[1] is node else pair[1]), user
        took.append(user)
        node = user
    return None


def _divided(numerator: Any, norm: Norm) -> bool:
    """Whether a node is what a norm divides by its root."""
    return (_centered(numerator, norm.took) if norm.kind == "layer" else numerator) is norm.x


def _is_gain(node: Any, norm: Norm, took: list[Node]) -> bool:
    """Whether a norm is multiplied by a node, which becomes its weight."""
    gain, zero_centered, pair = narrow_of(node, took), False, None
    if (pair := operands(gain, "add")) is not None and 1.0 in pair:
        took.append(gain)
        gain, zero_centered = narrow_of(pair[1] if pair[0] == 1.0 else pair[0], took), True
    w = example(gain)
    if w is None or w.ndim != 1 or not same_size(w.shape[0], norm.size):
        return False
    norm.weight, norm.zero_centered = gain, zero_centered
    return True


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
        if _is_gain(gain, norm, took):
            norm.took += took
            out = _cast_ahead(product, norm.took)
    norm.out = out
    return norm


def _biased(norm: Norm) -> Norm:
    """The same with the bias that is added to the result of a LayerNorm, and the cast back."""
    (total, *others) = [*norm.out.users] or [None]
    pair = operands(total, "add")
    if norm.kind == "rms" or norm.weight is None or pair is None or others:
        return norm
    took: list[Node] = []
    bias = narrow_of(pair[1] if pair[0] is norm.out else pair[0], took)
    b, w = example(bias), example(norm.weight)
    if b is not None and w is not None and b.ndim == 1 and same_size(b.shape[0], norm.size) and b.dtype is w.dtype:
        assert total is not None
        norm.took += took
        norm.bias, norm.out = bias, _cast_ahead(total, norm.took)
    return norm


def _cast_ahead(node: Node, took: list[Node]) -> Node:
    """What a node is cast to, if that is all that is done with it."""
    took.append(node)
    found = ahead(node, _CASTS)
    if found is None or is_same(found) is not None:
        return node
    took.append(found)
    return found
