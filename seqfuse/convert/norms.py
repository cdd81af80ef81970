"""Norms that are calls of torch, and why others are none that an operation stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from .. import ops
from .graph import argument, example, is_last, operands, spelled
from .norms_by_hand import Norm
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


def norm_of(node: Any) -> Norm | None:
    """The norm of the last dimension that a call of torch is."""
    if spelled(node) not in ("layer_norm", "rms_norm"):
        return None
    x, shape, kind = argument(node, 0, "input"), _shape(node), "layer" if spelled(node) == "layer_norm" else "rms"
    weight, e, last = argument(node, 2, "weight"), example(x), 4 if kind == "layer" else 3
    bias, eps = argument(node, 3, "bias") if kind == "layer" else None, argument(node, last, "eps", _EPS[kind])
    if e is None or len(shape) != 1 or not isinstance(shape[0], int) or (weight is None and bias is not None):
        return None
    if eps is None:
        eps = torch.finfo(torch.promote_types(e.dtype, torch.float32)).eps
    return Norm(x, node, [node], shape[0], eps, kind, weight, bias) if isinstance(eps, int | float) else None


_EPS = {"layer": 1e-5, "rms": None}
"""What torch adds where no eps is given; `None` is the least number that makes a difference."""


@matcher("norm", "linalg_vector_norm", "normalize", "std")
def raise_length(node: Node) -> Found:
    """Why a division by the length or the standard deviation of a vector stays."""
    if spelled(node) == "std":
        if not is_last(argument(node, 1, "dim"), argument(node, 0, "input")) or not _divides(node):
            return None
        return "it divides by a standard deviation, LayerNorm by the root of variance and eps: use nn.LayerNorm"
    if not is_last(argument(node, 2, "dim", 1), argument(node, 0, "input")):
        return None
    if spelled(node) != "normalize" and not _divides(node):
        return None
    return "it divides by the length of a vector, RMSNorm by its root mean square: use nn.RMSNorm, with an eps"


def _divides(node: Node, depth: int = 3) -> bool:
    """Whether something is divided by a node, or by a sum, a product or the larger one of it and another value."""
    further = {"add", "mul", "clamp", "clamp_min", "maximum"} if depth else set[str]()
    return any(
        (operands(user, "truediv") or (None, None))[1] is node
        or (spelled(user) in further and _divides(user, depth - 1))
        for user in node.users
    )
