"""Heads: from queries, keys or values as attention reads them back to what they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Node

from .graph import argument, back, example, is_fixed, narrow_of, same_shape, same_size, spelled
from .matmuls import part_of
from .norms import norm_of
from .norms_by_hand import Norm, is_root, norm_at
from .pointwise import scaled
from .rope import Turned, rope_at

_TRANSPOSED = ((1, 2), (2, 1), (-2, -3), (-3, -2), (1, -2), (-2, 1))

_LIKE_ROPE = ("add", "sub", "cat", "flatten")
"""What RoPE may end with."""


@dataclasses.dataclass
class Heads:
    """Queries, keys or values [B, H, S, D] and what they are made of.

    Attributes:
        seen: the node that attention reads, but for calls that change nothing and copies for groups of heads.
        source: what their elements are taken from, [B, S, *].
        start: where they start in its last dimension.
        heads, size: H and D.
        rope: that of each head.
        norm: of each head, or before they are heads.
        factor: what they are multiplied by.
        part: which of the `of` parts of each head of the source they are, where queries, keys and values interleave.
    """

    seen: Node
    source: Any
    start: int
    heads: int
    size: int
    rope: Turned | None
    norm: Norm | None
    factor: float
    part: int = 0
    of: int = 1


def heads_of(node: Any, took: list[Node]) -> Heads | str:
    """What attention reads as queries, keys or values, or why it cannot be raised."""
    e = example(node)
    if e is None or e.ndim != 4 or not e.is_floating_point() or not is_fixed(e.shape[-1]):
        return "not of four dimensions, the last of a fixed size"
    size = e.shape[-1]
    node = _ungrouped(narrow_of(node, took), took)
    seen, factor = node, 1.0
    rope, norm = None, None
    transposed = False
    part, of, cut, first = 0, 1, None, 0
    while True:
        node = narrow_of(node, took)
        name = spelled(node)
        if not transposed and is_transpose(node):
            took.append(node)
            node, transposed = node.args[0], True
        elif rope is None and norm is None and (turned := rope_at(node, transposed, took)) is not None:
            node, rope = turned.x, turned
        elif norm is None and (found := _norm_ending_at(node)) is not None:
            norm = found
            took += found.took
            node = found.x
        elif norm is None and factor == 1 and (number := scaled(node)) is not None:
            took.append(node)
            node, factor = number
        elif of == 1 and cut is None and (packed := _packed(node, transposed, took)) is not None:
            node, heads, part, of = packed
            first = 0 if of == 3 else part * heads * size
            break
        elif transposed and name in ("view", "reshape", "unflatten") and _splits_heads(node, size * of):
            took.append(node)
            heads: Any = example(node).shape[-2]  # pyright: ignore[reportOptionalMemberAccess]
            node = node.args[0]
            break
        elif transposed and of == 1 and cut is None and (cut := _cut(node)) is not None:
            took.append(node)
            node = node.args[0]
        elif name == "getitem" and of == 1 and cut is None and (third := _third(node, size, took)) is not None:
            node, part = third
            of = 3
        elif name == "getitem" and part_of(node, []) is not None:
            return "queries, keys and values lie within each head of one GEMM's result, not side by side"
        else:
            nor = ", nor by RoPE in a spelling that is known" if name in _LIKE_ROPE else ""
            return f"made by {name or 'the model'}, not by a GEMM whose last dimension is split into heads{nor}"
    if norm is None and (found := _norm_ending_at(back(node, took))) is not None:
        norm = found
        took += found.took
        node = found.x
    node = narrow_of(node, took)
    if norm is None and (found := scaled(node)) is not None:
        took.append(node)
        node, factor = narrow_of(found[0], took), factor * found[1]
    stretch = part_of(node, took)
    source, start = (node, first) if stretch is None else (back(stretch[0], took), first + stretch[1])
    if cut is not None:
        start, heads = start + cut[0] * size, cut[1]
    return Heads(seen, source, start, heads, size, rope, norm, factor, part, of)


def _cut(node: Any) -> tuple[int, int] | None:
    """The first of some heads that are taken of [B, S, H, D], and how many they are."""
    e = example(node)
    if spelled(node) != "getitem" or e is None or e.ndim != 4 or not isinstance(node.args[1], tuple):
        return None
    *before, index, after = cast("tuple[Any, ...]", node.args[1])
    whole = example(node.args[0])
    every = before == [Ellipsis] or before == [slice(None), slice(None)]
    if not every or after != slice(None) or whole is None or whole.ndim != 4 or not is_fixed(whole.shape[2]):
        return None
    heads: list[int] = list(range(whole.shape[2]))
    found: list[int] = []
    if isinstance(index, slice):
        stretch = cast("slice[Any, Any, Any]", index)
        fixed = all(n is None or isinstance(n, int) for n in (stretch.start, stretch.stop))
        found = heads[stretch] if fixed and stretch.step in (None, 1) else []
    elif isinstance(index, list):
        several = cast("list[Any]", index)
        found = [heads[several[0]]] if len(several) == 1 and isinstance(several[0], int) else []
    return (found[0], len(found)) if found else None


def _packed(node: Any, transposed: bool, took: list[Node]) -> tuple[Any, int, int, int] | None:
    """Queries, keys or values as one of three that share a view of five dimensions, [B, S, 3, H, D] or [B, S, H, 3, D].

    Returns:
        What is viewed so, H, which of the three they are, and 3 if these interleave head by head, otherwise 1.
    """
    if spelled(node) != "getitem":
        return None
    own: list[Node] = [node]
    view, index, dim = node.args[0], node.args[1], 0
    if spelled(view) == "unbind":
        own.append(view)
        view, dim = view.args[0], argument(view, 1, "dim", 0)
    elif isinstance(index, tuple):
        *every, index = cast("tuple[Any, ...]", index)
        dim = len(every) if all(i == slice(None) for i in every) else None
    e, order = example(view), list(range(5))
    if e is None or e.ndim != 5 or type(index) is not int or type(dim) is not int:
        return None
    view = back(view, own)
    if spelled(view) == "permute":
        own.append(view)
        dims: Any = argument(view, 1, "dims")
        order = [d % 5 for d in (cast("Sequence[int]", dims) if isinstance(dims, list | tuple) else view.args[1:])]
        view = view.args[0]
    before, e = example(view.args[0]) if spelled(view) in ("view", "reshape", "unflatten") else None, example(view)
    if before is None or e is None or before.ndim != 3 or e.ndim != 5 or not same_shape(before.shape[:2], e.shape[:2]):
        return None
    third = order.pop(dim)
    heads = {2: 3, 3: 2}.get(third)
    if heads is None or not is_fixed(*e.shape[2:]) or e.shape[third] != 3:
        return None
    if order != ([0, 1, heads, 4] if transposed else [0, heads, 1, 4]):
        return None
    took += [*own, view]
    return view.args[0], e.shape[heads], index % 3, 3 if third == 3 else 1


def _third(node: Any, size: int, took: list[Node]) -> tuple[Any, int] | None:
    """What a node is the first, second or third part of, along the last dimension, and which of them."""
    own: list[Node] = []
    found = part_of(node, own)
    e = None if found is None else example(found[0])
    if found is None or e is None or found[2] != size or not same_size(e.shape[-1], 3 * size) or found[1] % size:
        return None
    took += own
    return found[0], found[1] // size


def _ungrouped(node: Node, took: list[Node]) -> Node:
    """Keys or values [B, H, S, D] before each of their heads was repeated for a group of query heads."""
    if spelled(node) == "repeat_interleave":
        inner, after = example(node.args[0]), example(node)
        by_number = is_fixed(argument(node, 1, "repeats")) and argument(node, 2, "dim") in (1, -3)
        if inner is None or after is None or not by_number:
            return node
        took.append(node)
        return back(node.args[0], took)
    if spelled(node) != "reshape" or spelled(node.args[0]) != "expand":
        return node
    expanded: Any = node.args[0]
    inserted = expanded.args[0]
    source: Any = inserted.args[0] if spelled(inserted) in ("getitem", "unsqueeze") else None
    s, i, e, r = example(source), example(inserted), example(expanded), example(node)
    if s is None or i is None or e is None or r is None or s.ndim != 4 or e.ndim != 5:
        return node
    if not _only_inserts(inserted) or not same_shape(i.shape, (*s.shape[:2], 1, *s.shape[2:])):
        return node
    if not same_shape((*e.shape[:2], *e.shape[3:]), s.shape) or not same_shape(r.shape[2:], s.shape[2:]):
        return node
    took += [node, expanded, inserted]
    return back(source, took)


def _only_inserts(node: Node) -> bool:
    """Whether a call adds a dimension of one element and takes every element."""
    if spelled(node) == "unsqueeze":
        return True
    index: Any = node.args[1]
    indices = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (0,)
    return all(i is None or i is Ellipsis or i == slice(None) for i in indices)


def is_transpose(node: Node) -> bool:
    """Whether a call swaps the second and the third of four dimensions."""
    name = spelled(node)
    if name == "transpose":
        return tuple(node.args[1:]) in _TRANSPOSED
    order: Any = argument(node, 1, "dims")
    order = cast("Sequence[Any]", order) if isinstance(order, list | tuple) else node.args[1:]
    return name == "permute" and tuple(order) == (0, 2, 1, 3)


def _splits_heads(node: Node, size: int) -> bool:
    before, after = example(node.args[0]), example(node)
    if before is None or after is None or before.ndim != 3 or after.ndim != 4:
        return False
    heads = after.shape[-2]
    same = same_shape(before.shape[:2], after.shape[:2]) and same_size(after.shape[-1], size)
    return same and is_fixed(heads) and same_size(before.shape[-1], heads * size)


def _norm_ending_at(node: Any) -> Norm | None:
    """The norm whose result a node is."""
    if (called := norm_of(node)) is not None:
        return called
    seen: list[Any] = [node]
    for _ in range(6):
        last = seen[-1]
        if not isinstance(last, Node):
            return None
        for candidate in last.all_input_nodes:
            if is_root(candidate):
                found = norm_at(candidate)
                return found if isinstance(found, Norm) and found.out is node else None
        factors = [n for n in last.all_input_nodes if spelled(n) in ("mul", "to", "type_as", "float")]
        e = example(node)
        inside = [
            n for n in factors if (t := example(n)) is not None and e is not None and same_shape(t.shape, e.shape)
        ]
        if not inside:
            return None
        seen.append(inside[0])
    return None
