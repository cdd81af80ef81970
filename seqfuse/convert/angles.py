"""The cosines and sines of RoPE, as tensors that `RotaryEmbedding` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from .effects import are_changed
from .graph import argument, back, example, same_size, spelled


def row(node: Node, before_transpose: bool, pick: Callable[[Tensor, int], Tensor], took: list[Node]) -> Node | None:
    """Cosines or sines [B or 1, S, R] or [S, R], given with a dimension for heads, or as complex numbers."""
    node = back(node, [])
    e = example(node)
    if e is None or not 1 < e.ndim < 5 or (before_transpose and e.ndim == 2):
        return None
    heads = e.ndim - (2 if before_transpose else 3)  # where the dimension of heads is
    if heads >= 0 and not same_size(e.shape[heads], 1):
        return None
    if heads < 0 and not e.is_complex():
        return node
    if not e.is_complex() and spelled(node) == "unsqueeze" and argument(node, 1, "dim") in (heads, heads - e.ndim):
        took.append(node)
        return node.args[0]  # pyright: ignore[reportReturnType]
    function = pick if e.is_complex() else without_heads
    args = (node, heads)
    found = next((user for user in node.users if user.target is function and user.args == args), None)
    if found is None:
        with node.graph.inserting_after(node):
            found = node.graph.call_function(function, args)
        found.meta = {**node.meta, "example_value": function(e, heads)}
    return found


def is_same_value(a: Any, b: Any) -> bool:
    """Whether two nodes are made by the same calls of the same tensors, which nothing changes in place."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        first, second = cast("list[Any]", a), cast("list[Any]", b)
        return len(first) == len(second) and all(map(is_same_value, first, second))
    if not isinstance(a, Node) or not isinstance(b, Node) or a is b:
        return a is b or (not isinstance(a, Node) and a == b)
    pure = a.target == b.target and a.kwargs == b.kwargs and (a.target in ADDED or spelled(a) in PURE)
    return pure and is_same_value(a.args, b.args) and not are_changed([a, b])


def without_heads(t: Tensor, dim: int) -> Tensor:
    """The same without the dimension of heads, if it has one."""
    return t.squeeze(dim) if dim >= 0 else t


def cosines(angles: Tensor, dim: int) -> Tensor:
    """The cosines in cos + i sin, without the dimension of heads."""
    return without_heads(torch.real(angles), dim)


def sines(angles: Tensor, dim: int) -> Tensor:
    """The sines in cos + i sin, without the dimension of heads."""
    return without_heads(torch.imag(angles), dim)


ADDED = (without_heads, cosines, sines)
"""Calls that are added to a graph, where RoPE may turn out not to be raised."""

PURE = {
    "getitem", "unsqueeze", "squeeze", "view", "reshape", "flatten", "expand", "transpose", "permute", "contiguous",
    "cos", "sin", "conj", "to", "type_as", "float", "double", "half", "bfloat16",
}  # fmt: skip
"""Calls that models make again for queries and for keys, and that need not run if nobody reads them."""
