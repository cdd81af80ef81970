"""Spellings of `Linear`."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .graph import ahead, argument, example, same_shape, same_size, spelled
from .raising import Found, Transposed, linear, matcher, weight_of


@matcher("linear")
def raise_linear(node: Node) -> Found:
    """F.linear(x, weight, bias)."""
    weight: Any = argument(node, 1, "weight")
    return linear(argument(node, 0, "input"), weight, argument(node, 2, "bias"), node, [])


@matcher("addmm")
def raise_addmm(node: Node) -> Found:
    """addmm(bias, x.view(-1, in), weight [in, out]).view(*, out), as `Conv1D` of Hugging Face has it."""
    if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    bias, flat, right = (argument(node, i, name) for i, name in enumerate(("input", "mat1", "mat2")))
    took = [node]
    weight = weight_of(right, took)
    if weight is None:
        return None
    x, out = _unflattened(flat, node, took)
    return linear(x, weight, bias, out, took)


@matcher("matmul")
def raise_matmul(node: Node) -> Found:
    """X @ weight.T, the weight a parameter."""
    x, right = argument(node, 0, "input"), argument(node, 1, "other")
    took = [node]
    weight = weight_of(right, took)
    if weight is None:
        return None
    holder = weight.node if isinstance(weight, Transposed) else weight
    return linear(x, weight, None, node, took) if holder.op in ("placeholder", "get_attr") else None


def _unflattened(flat: Any, node: Node, took: list[Node]) -> tuple[Any, Node]:
    """X and y of a call upon x.view(-1, n), whose result is viewed as [*, m] at once."""
    out = ahead(node, {"view", "reshape"})
    if spelled(flat) in ("view", "reshape") and out is not None:
        x = flat.args[0]
        before, viewed, after = example(x), example(flat), example(out)
        if before is None or viewed is None or after is None or not same_size(before.shape[-1], viewed.shape[-1]):
            return flat, node
        if same_shape(before.shape[:-1], after.shape[:-1]):
            took += [flat, out]
            return x, out
    return flat, node


def linear_ending_at(node: Node) -> Found:
    """The `Linear` whose result a node is."""
    if spelled(node) in ("linear", "matmul"):
        return raise_linear(node) if spelled(node) == "linear" else raise_matmul(node)
    if spelled(node) in ("view", "reshape") and spelled(node.args[0]) == "addmm":
        found = raise_addmm(node.args[0])  # pyright: ignore[reportArgumentType]
        return found if isinstance(found, list) and found[0].out is node else None
    return None
