"""Spellings of LayerNorm and RMSNorm: calls of torch, and x divided by the root of its variance or mean square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.fx import Node

from ... import ops
from ..graph import (
    CASTS,
    ahead,
    argument,
    arguments,
    back,
    either,
    example,
    is_fixed,
    is_last,
    is_same,
    narrow_of,
    operands,
    same_shape,
    same_size,
    spelled,
)
from ..raising import META, Found, Inner, Raised, matcher, one
from .pointwise import as_scaled


class FoundNorm(NamedTuple):
    """An RMSNorm or a LayerNorm as it is found in a graph."""

    x: Any  # what it normalizes
    out: Node  # its result
    size: int  # the length of the last dimension
    # Added to the mean square, or to the variance; `None` is the least number that makes a difference.
    eps: float | None
    kind: Literal["rms", "layer"] = "rms"  # which of the two it is
    weight: Any = None  # the node of its weight
    bias: Any = None  # the node of its bias
    zero_centered: bool = False  # whether it multiplies by one more than its weight
    factor: float = 1.0  # what its result is multiplied by


def _operation(norm: FoundNorm | str | None) -> Found:
    if not isinstance(norm, FoundNorm):
        return norm
    w = example(norm.weight)
    about: dict[str, Any] = {
        "device": META,
        "dtype": None if w is None else w.dtype,
        "zero_centered": norm.zero_centered,
    }
    if norm.kind == "rms":
        made = ops.RMSNorm(norm.size, norm.eps, w is not None, **about)
    else:
        made = ops.LayerNorm(norm.size, norm.eps or 0.0, w is not None, norm.bias is not None, **about)
    return one(made, norm.x, norm.out, weight=norm.weight, bias=norm.bias)


NEGLIGIBLE = 1e-5
"""The largest eps of `F.normalize` that is taken as far below the length of every vector but zero."""


def raise_normalize(node: Node) -> Found:
    """F.normalize(x, dim=-1), also times a number and a weight: RMSNorm gives sqrt(D) times that.

    Torch divides by the larger of the length and eps, RMSNorm by the root of the sum of their squares: these are the
    same for all vectors but those of a length near eps, which is 1e-12 where it is left out.
    """
    norm = _normalized(node)
    if not isinstance(norm, FoundNorm):
        return norm
    product = next(iter(node.users)) if len(node.users) == 1 else node
    found = as_scaled(product)
    if found is not None and found[0] is node and abs(found[1] * norm.factor - 1) < 1e-6:
        return _operation(_gained(norm._replace(out=product)))
    raised = _operation(norm)
    if isinstance(raised, list):
        raised[0].out = Inner()
        raised.append(Raised(ops.Scale(norm.factor), raised[0].out, node, node))
    return raised


def _normalized(node: Any) -> FoundNorm | str | None:
    """The RMSNorm and the factor that F.normalize is."""
    if spelled(node) != "normalize":
        return None
    x, eps = argument(node, 0, "input"), argument(node, 3, "eps", 1e-12)
    e = example(x)
    if e is None or argument(node, 1, "p", 2.0) != 2 or not isinstance(eps, float) or argument(node, 4, "out"):
        return None
    if not is_last(argument(node, 2, "dim", 1), x) or not is_fixed(e.shape[-1]):
        return "it divides by the length along another dimension than the last"
    if eps > NEGLIGIBLE:
        return f"it divides by the larger of the length and an eps of {eps:g}, and RMSNorm adds eps"
    size: int = e.shape[-1]
    return FoundNorm(x, node, size, eps * eps / size, factor=size**-0.5)


def raise_norm(node: Node) -> Found:
    """F.layer_norm(x, shape, weight, bias, eps), F.rms_norm(x, shape, weight, eps)."""
    return _operation(_called(node))


def _called(node: Any) -> FoundNorm | str | None:
    """The norm of the last dimension that a call of torch is."""
    if spelled(node) not in ("layer_norm", "rms_norm"):
        return None
    x, shape, weight = arguments(node, "input", "normalized_shape", "weight")
    sizes: Sequence[Any] = cast("Sequence[Any]", shape) if isinstance(shape, list | tuple) else ()
    layer = spelled(node) == "layer_norm"
    bias = argument(node, 3, "bias") if layer else None
    eps = argument(node, 4, "eps", 1e-5) if layer else argument(node, 3, "eps")
    if len(sizes) != 1 or not isinstance(sizes[0], int) or (weight is None and bias is not None):
        return None
    if not isinstance(eps, int | float) and (layer or eps is not None):
        return "its eps is not a fixed number"
    return FoundNorm(x, node, sizes[0], eps, "layer" if layer else "rms", weight, bias)


def is_root(node: Any) -> bool:
    """Whether a call takes a square root, or one over it."""
    power = argument(node, 1, "exponent") if spelled(node) == "pow" else None
    return spelled(node) in ("sqrt", "rsqrt") or (isinstance(power, float) and abs(power) == 0.5)


def raise_norm_by_hand(node: Node) -> Found:
    """RMSNorm or LayerNorm as it is written by hand, if its result has the dtype of its input."""
    norm = _norm_at(node) if is_root(node) else None
    if norm is None and spelled(node) == "rsqrt":
        return "its root is not that of the mean square or the variance of what it multiplies"
    if not isinstance(norm, FoundNorm):
        return norm
    x, y = example(norm.x), example(norm.out)
    if x is None or y is None:
        return None
    if x.dtype is not y.dtype:
        return f"it gives {y.dtype} for an input in {x.dtype}: cast its result back to the dtype of its input"
    return _operation(norm)


def norm_ending_at(node: Any) -> FoundNorm | None:
    """The norm whose result a node is, its eps a number."""
    called, e = _called(node), example(node)
    if isinstance(called, FoundNorm) and (given := example(called.x)) is not None:
        least = torch.finfo(torch.promote_types(given.dtype, torch.float32)).eps
        return called if called.eps is not None else called._replace(eps=least)
    if isinstance(normalized := _normalized(node), FoundNorm):
        return normalized
    last = node
    for _ in range(_FAR):
        if not isinstance(last, Node) or e is None:
            return None
        roots = [n for n in last.all_input_nodes if is_root(n)]
        if roots:
            found = _norm_at(roots[0])
            return found if isinstance(found, FoundNorm) and found.out is node else None
        factors = [n for n in last.all_input_nodes if spelled(n) in ("mul", "to", "type_as", "float")]
        last = next((n for n in factors if (t := example(n)) is not None and same_shape(t.shape, e.shape)), None)
    return None


_FAR = 6
"""Calls between the root of a norm and its result, at most."""


class _Average(NamedTuple):
    """The mean square or the variance of a tensor, why no norm divides by its root, and what is added to it."""

    x: Any
    kind: Literal["rms", "layer"]
    trouble: str | None
    eps: float = 0.0


def _norm_at(root: Node) -> FoundNorm | str | None:
    """A norm whose root is taken here, with casts wherever a model has them.

    x / sqrt(mean(x^2) + eps) gain, or (x - mean) / sqrt(variance + eps) gain + bias; gain = weight or 1 + weight. The
    root is `rsqrt`, `sqrt` or a power; it divides, or one over it multiplies.

    Returns:
        The norm; the reason why it is none that an operation stands for; `None` for what is no norm.
    """
    average = _radicand(argument(root, 0, "input"))
    use = None if average is None else _use(root)
    if average is None or use is None:
        return None
    if average.trouble is not None:
        return average.trouble
    numerator, out = narrow_of(use[0]), use[1]
    size: Any = None if (e := example(average.x)) is None else e.shape[-1]
    if not isinstance(size, int):
        return "its size is not fixed"
    norm = FoundNorm(average.x, out, size, average.eps, average.kind)
    if _divided(numerator, norm):
        return _biased(_gained(norm))
    for gain, rest in either(operands(numerator, "mul")):
        if _divided(narrow_of(rest), norm) and (found := _with_gain(norm, gain)) is not None:
            return _biased(found._replace(out=_cast_ahead(out)))
    return "what it divides is not the tensor whose mean square or variance it takes"


def _radicand(node: Any) -> _Average | None:
    """The average in a sum with an eps, and what is wrong with it."""
    node = back(node)
    pair = operands(node, "add")
    if pair is None and spelled(node) in ("clamp", "clamp_min", "maximum"):
        trouble = "it takes the larger of eps and the average, a norm of torch their sum"
        return None if (found := _average(back(node.args[0]))) is None else found._replace(trouble=trouble)
    for eps, average in either(pair):
        if (found := _average(back(average))) is not None:
            number = isinstance(eps, int | float)
            return found._replace(eps=float(eps)) if number else found._replace(trouble="its eps is not a fixed number")
    return _average(node) if pair is None else None


def _average(node: Any) -> _Average | None:
    """The mean square or the variance that a node is."""
    name, source = ("var", node.args[0]) if _is_part(node, "var_mean", 0) else (spelled(node), node)
    if name not in ("mean", "var"):
        return None
    given = argument(source, 0, "input")
    keeps = argument(source, 2 if name == "mean" else 3, "keepdim", False)
    trouble = None if is_last(argument(source, 1, "dim"), given) else "it averages over other dimensions than the last"
    if argument(source, 1, "dim") is None or keeps is not True or source.kwargs.get("dtype") is not None:
        return None
    if name == "mean":
        if (x := _squared(back(given))) is None:
            return None
        x = narrow_of(x)
        centered = _centered(x)
        return _Average(x, "rms", trouble) if centered is None else _Average(centered, "layer", trouble)
    unbiased = argument(source, 2, "unbiased", True)
    if source.kwargs.get("correction", 1 if unbiased else 0) != 0:
        trouble = "its variance is of n - 1 elements, that of LayerNorm of n: unbiased=False or correction=0"
    return _Average(narrow_of(given), "layer", trouble)


def _is_part(node: Any, name: str, index: int) -> bool:
    """Whether a node is one of the results of a call."""
    return spelled(node) == "getitem" and spelled(node.args[0]) == name and node.args[1] == index


def _squared(node: Any) -> Any:
    if spelled(node) == "square" or (spelled(node) == "pow" and argument(node, 1, "exponent") == 2):
        return node.args[0]
    pair = operands(node, "mul")
    return pair[0] if pair is not None and pair[0] is pair[1] else None


def _centered(node: Any) -> Any:
    """X of x - mean(x)."""
    pair = operands(node, "sub")
    if pair is None:
        return None
    x, mean = map(narrow_of, pair)
    source, keepdim = (mean.args[0], 3) if _is_part(mean, "var_mean", 1) else (mean, 2)
    if source is mean and spelled(mean) != "mean":
        return None
    given = argument(source, 0, "input")
    kept = argument(source, keepdim, "keepdim", False) is True and source.kwargs.get("dtype") is None
    return x if kept and is_last(argument(source, 1, "dim"), given) and narrow_of(given) is x else None


def _use(root: Node) -> tuple[Any, Node] | None:
    """What is divided by the root, or multiplied by one over it, and the result."""
    inverse = spelled(root) == "rsqrt" or argument(root, 1, "exponent") == -0.5
    node = root
    while len(node.users) == 1:
        (user,) = node.users
        if not inverse and (spelled(user) == "reciprocal" or operands(user, "truediv") == (1, node)):
            inverse = True
        elif spelled(user) not in CASTS or user.args[:1] != (node,):
            pair = operands(user, "mul" if inverse else "truediv")
            if pair is None or pair[0] is pair[1] or (pair[0] is node and not inverse):
                return None
            return (pair[0] if pair[1] is node else pair[1]), user
        node = user
    return None


def _divided(numerator: Any, norm: FoundNorm) -> bool:
    """Whether a node is what a norm divides by its root."""
    return (_centered(numerator) if norm.kind == "layer" else numerator) is norm.x


def _with_gain(norm: FoundNorm, node: Any) -> FoundNorm | None:
    """The norm with a weight, if that is what it is multiplied by."""
    gain = narrow_of(node)
    pair = operands(gain, "add")
    zero_centered = pair is not None and 1.0 in pair
    if pair is not None and zero_centered:
        gain = narrow_of(pair[1] if pair[0] == 1.0 else pair[0])
    w = example(gain)
    fits = w is not None and w.ndim == 1 and same_size(w.shape[0], norm.size)
    return norm._replace(weight=gain, zero_centered=zero_centered) if fits else None


def _gained(norm: FoundNorm) -> FoundNorm:
    """The same with the weight that the result is multiplied by, and the cast back."""
    out = _cast_ahead(norm.out)
    users = list(out.users)
    if len(users) == 1 and is_same(users[0]) is out:
        users = list(users[0].users)
    if len(users) == 1 and spelled(product := users[0]) == "mul":
        gain: Any = product.args[1] if back(product.args[0]) is out else product.args[0]
        if (found := _with_gain(norm, gain)) is not None:
            return found._replace(out=_cast_ahead(product))
    return norm._replace(out=out)


def _biased(norm: FoundNorm) -> FoundNorm:
    """The same with the bias that is added to the result of a LayerNorm, and the cast back."""
    users = list(norm.out.users)
    pair = operands(users[0], "add") if len(users) == 1 else None
    if norm.kind == "rms" or norm.weight is None or pair is None:
        return norm
    bias = narrow_of(pair[1] if pair[0] is norm.out else pair[0])
    b, w = example(bias), example(norm.weight)
    if b is not None and w is not None and b.ndim == 1 and same_size(b.shape[0], norm.size) and b.dtype is w.dtype:
        return norm._replace(bias=bias, out=_cast_ahead(users[0]))
    return norm


def _cast_ahead(node: Node) -> Node:
    """What a node is cast to, if that is all that is done with it."""
    found = ahead(node, CASTS)
    return node if found is None or is_same(found) is not None else found


def raise_length(node: Node) -> Found:
    """Why a division by the length or the standard deviation of a vector stays."""
    deviates = spelled(node) == "std"
    dim = argument(node, 1, "dim") if deviates else argument(node, 2, "dim", 1)
    if not is_last(dim, argument(node, 0, "input")) or not _divides(node):
        return None
    if deviates:
        return "it divides by a standard deviation, LayerNorm by the root of variance and eps: use nn.LayerNorm"
    return "it divides by the length of a vector, RMSNorm by its root mean square: use nn.RMSNorm, with an eps"


def _divides(node: Node, depth: int = 3) -> bool:
    """Whether something is divided by a node, or by a sum, a product or the larger one of it and another value."""
    further = {"add", "mul", "clamp", "clamp_min", "maximum"} if depth else set[str]()
    return any(
        (operands(user, "truediv") or (None, None))[1] is node
        or (spelled(user) in further and _divides(user, depth - 1))
        for user in node.users
    )


MATCHERS = (
    matcher(raise_norm_by_hand, "rsqrt", "sqrt", "pow"),
    matcher(raise_norm, "layer_norm", "rms_norm"),
    matcher(raise_length, "norm", "linalg_vector_norm", "std"),
)

LENGTHS = (matcher(raise_normalize, "normalize"),)
"""Divisions by lengths, which are found before the factors behind them."""
