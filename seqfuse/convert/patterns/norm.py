"""Spellings of LayerNorm and RMSNorm: calls of torch, and x divided by the root of its variance or mean square."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.fx import Node

from ... import ops
from ..graph import (
    CASTS,
    argument,
    arguments,
    example,
    following,
    is_fixed,
    is_last,
    is_same,
    narrow_of,
    operands,
    same_size,
    spelled,
)
from ..pattern import Pattern, any_of, matched, recast, wide
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
    about: Any = {"device": META, "dtype": None if w is None else w.dtype, "zero_centered": norm.zero_centered}
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
    if (scaled := _last(node, _PRODUCT)) is not None:
        return _operation(scaled)
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
    norm: Any = (_last(node, *_BY_HAND) or _last(node, _DIVIDED)) if is_root(node) else None
    if norm is None and spelled(node) == "rsqrt":
        return "its root is not that of the mean square or the variance of what it multiplies"
    if not isinstance(norm, FoundNorm):
        return norm
    x, y = example(norm.x), example(norm.out)
    if x is not None and y is not None and x.dtype is not y.dtype:
        return f"it gives {y.dtype} for an input in {x.dtype}: cast its result back to the dtype of its input"
    return _operation(norm)


def norm_ending_at(node: Any) -> FoundNorm | None:
    """The norm whose result a node is, its eps a number."""
    called = _called(node)
    if isinstance(called, FoundNorm) and (given := example(called.x)) is not None:
        least = torch.finfo(torch.promote_types(given.dtype, torch.float32)).eps
        return called if called.eps is not None else called._replace(eps=least)
    if isinstance(normalized := _normalized(node), FoundNorm):
        return normalized
    return _at(node, *_BY_HAND)


def _at(out: Any, *patterns: Pattern) -> Any:
    """What a node is by the first of some patterns, or a cast of that."""
    return matched(out.args[0] if spelled(out) in CASTS and len(out.args[0].users) == 1 else out, patterns, out)


def _last(node: Node, *patterns: Pattern) -> Any:
    """The same of the last call behind a node that is something by one of them."""
    outs = following(node, {"mul", "truediv", "add", "reciprocal", *CASTS}, 8)[:0:-1]
    return next((norm for out in outs if is_same(out) is None and (norm := _at(out, *patterns)) is not None), None)


def _gained(y: Any, weight: Any, offset: Any) -> Any:
    return y * wide(any_of(1 + offset, weight))


def _scaled(x: Any, average: Any, eps: Any, weight: Any, offset: Any) -> Any:
    root = recast(torch.rsqrt(any_of(average + eps, average)))
    return any_of(_gained(recast(x * root), weight, offset), wide(_gained(x, weight, offset)) * root, x * root)


def _rms_norm(x: Any, eps: Any, weight: Any, offset: Any) -> Any:
    return _scaled(x, x.square().mean(-1, True), eps, weight, offset)


def _layer_norm(x: Any, eps: Any, weight: Any, offset: Any, bias: Any) -> Any:
    centered = wide(x - wide(x.mean(-1, True)))
    variance = any_of(x.var(-1, correction=0, keepdim=True), centered.square().mean(-1, True))
    y = _scaled(centered, variance, eps, weight, offset)
    return any_of(recast(y) + bias, y)


def _norm_of(kind: Any, out: Node, x: Any, eps: Any, bias: Any = None, **gain: Any) -> FoundNorm | None:
    e = example(x)
    if e is None or not is_fixed(e.shape[-1]) or isinstance(eps, Node):
        return None
    return _with_gain(FoundNorm(narrow_of(x), out, e.shape[-1], float(eps or 0), kind), bias, **gain)


def _with_gain(norm: FoundNorm, bias: Any, weight: Any, offset: Any) -> FoundNorm | None:
    """The norm with a weight and a bias, if these are vectors of its size and of one dtype."""
    gain, bias = narrow_of(weight if offset is None else offset), narrow_of(bias)
    given = [p for p in (gain, bias) if p is not None]
    vectors = [e for p in given if (e := example(p)) is not None and e.ndim == 1 and same_size(e.shape[0], norm.size)]
    if len(vectors) != len(given) or len({e.dtype for e in vectors}) > 1 or (gain is None and bias is not None):
        return None
    return norm._replace(weight=gain, bias=bias, zero_centered=offset is not None)


def _divided(x: Any, other: Any, dim: Any, correction: Any, eps: Any, least: Any) -> Any:
    average = any_of(x.square().mean(dim, True), x.var(dim, correction=correction, keepdim=True))
    average = any_of(average + eps, average.clamp(least), torch.maximum(average, least), average)
    return recast(torch.rsqrt(average)) * other


def _why_not(out: Node, x: Any, other: Any, dim: Any, correction: Any, eps: Any, least: Any) -> str:
    """Why a division by the root of an average is not a norm."""
    if least is not None:
        return "it takes the larger of eps and the average, a norm of torch their sum"
    if isinstance(eps, Node):
        return "its eps is not a fixed number"
    if correction:
        return "its variance is of n - 1 elements, that of LayerNorm of n: unbiased=False or correction=0"
    if dim != -1:
        return "it averages over other dimensions than the last"
    if (e := example(x)) is None or not is_fixed(e.shape[-1]):
        return "its size is not fixed"
    return "what it divides is not the tensor whose mean square or variance it takes"


def _product(product: Any, weight: Any, offset: Any) -> Any:
    return any_of(_gained(recast(product), weight, offset), product)


def _normalized_by(out: Node, product: Any, **gain: Any) -> FoundNorm | None:
    """`F.normalize` times the root of the size, and a weight."""
    x, factor = as_scaled(product) or (None, 0.0)
    norm = _normalized(x)
    if not isinstance(norm, FoundNorm) or abs(factor * norm.factor - 1) > 1e-6:
        return None
    return _with_gain(norm._replace(out=out), None, **gain)


_BY_HAND = (Pattern(_layer_norm, partial(_norm_of, "layer")), Pattern(_rms_norm, partial(_norm_of, "rms")))
_DIVIDED = Pattern(_divided, _why_not)
_PRODUCT = Pattern(_product, _normalized_by)


def raise_length(node: Node) -> Found:
    """Why a division by the length or the standard deviation of a vector stays."""
    deviates = spelled(node) == "std"
    dim = argument(node, 1, "dim") if deviates else argument(node, 2, "dim", 1)
    if not is_last(dim, argument(node, 0, "input")) or not _divides(node):
        return None
    if deviates:
        return "it divides by a standard deviation, LayerNorm by the root of variance and eps: use nn.LayerNorm"
    return "it computes the length of a vector, RMSNorm the root of mean square and eps: use nn.RMSNorm, with an eps"


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
