"""RoPE of queries or keys, as models spell it, and its cosines and sines as `RotaryEmbedding` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import (
    CASTS,
    argument,
    back,
    elements_before,
    example,
    is_fixed,
    narrow_of,
    part_of,
    same_shape,
    same_size,
    spelled,
    view_source,
)
from ..pattern import Pattern, matched, reader, wide
from ..writer import written_behind

PairStyle = Literal["half", "interleaved"]
_VIEWS = {"view", "reshape", "flatten", "unflatten"}


class FoundRope(NamedTuple):
    """Elements of heads that have RoPE."""

    x: Any  # all elements of the heads
    cos: Node  # cosines, [B or 1, S, R] or [S, R], or half as many for pairs
    sin: Node  # sines, the same
    size: int  # R, how many elements of a head have RoPE
    style: PairStyle  # which of them are a pair


def rope_at(node: Any, before_transpose: bool) -> FoundRope | None:
    """RoPE whose result a node is, in the dtype of what has it.

    Args:
        node: heads [B, H, S, D].
        before_transpose: whether it is [B, S, H, D].
    """
    e, value = example(node), _wide(node)
    if e is None:
        return None
    size: Any = e.shape[-1]
    found, whole = matched(value, _ROPE), None
    if found is None and _is_cat(value):
        rotated, rest = argument(value, 0, "tensors")
        passed = part_of(rest)
        if passed is None or passed[1] + passed[2] != size:
            return None
        whole, size, _ = passed
        found = matched(_wide(rotated), _ROPE)
    # As many cosines as elements, or as pairs of them.
    if found is None or not is_fixed(size) or found.size not in (size, size // 2):
        return None
    if whole is not None and part_of(found.x) != (whole, 0, size):
        return None
    x = found.x if whole is None else whole
    pairs_of = ((found.cos, torch.real), (found.sin, torch.imag))
    given, (cos, sin) = example(x), (_row(t, before_transpose, pick) for t, pick in pairs_of)
    if given is None or not same_shape(given.shape, e.shape) or cos is None or sin is None:
        return None
    if given.dtype is not e.dtype and (whole is not None or value is not node):
        return None
    return FoundRope(x, cos, sin, size, found.style)


def _is_cat(node: Any) -> bool:
    """Whether two tensors are put side by side along the last of four dimensions."""
    return spelled(node) == "cat" and argument(node, 1, "dim", 0) in (-1, 3) and len(argument(node, 0, "tensors")) == 2


def _wide(node: Any) -> Any:
    """What a node is cast from to a narrower dtype, if it is."""
    source = node.args[0] if spelled(node) in CASTS and node.args else None
    before, after = example(source), example(node)
    if before is None or after is None or before.dtype is after.dtype or not before.is_floating_point():
        return node
    return back(source)


def _part(node: Any) -> tuple[Any, int, PairStyle] | None:
    """Of which x a node is the first (0) or second (1) members of pairs, and which elements are pairs."""
    node = narrow_of(node)
    e, whole = example(node), view_source(node)
    while whole is not None and (w := example(whole)) is not None and e is not None and w.ndim == e.ndim + 1:
        whole = view_source(whole)
    w = example(whole)
    if e is None or w is None or not is_fixed(size := e.shape[-1]):
        return None
    if not same_shape((*e.shape[:-1], 2 * size), w.shape):
        return None
    if not same_shape(e.stride()[:-1], w.stride()[:-1]) or (start := elements_before(e, w)) is None:
        return None
    if same_size(e.stride(-1), w.stride(-1)) and start in (0, size):
        return whole, start // size, "half"
    interleaved = same_size(e.stride(-1), 2 * w.stride(-1)) and start in (0, 1)
    return (whole, start, "interleaved") if interleaved else None


def _joined(node: Any) -> tuple[Any, Any, PairStyle] | None:
    """First and second members of pairs that are put together, and which elements they become."""
    if _is_cat(node):
        return (*argument(node, 0, "tensors"), "half")
    stack: Any = node.args[0] if spelled(node) in _VIEWS and node.args else None
    e, laid = example(stack), example(node)
    if spelled(stack) != "stack" or e is None or laid is None or argument(stack, 1, "dim", 0) not in (-1, e.ndim - 1):
        return None
    if len(argument(stack, 0, "tensors")) != 2 or not same_shape(laid.shape[:-1], e.shape[:-2]):
        return None
    return (*argument(stack, 0, "tensors"), "interleaved")


def _pairs_of(node: Any) -> tuple[Any] | None:
    """X of x.view(*, D / 2, 2)."""
    x = node.args[0] if spelled(node := back(node)) in _VIEWS and node.args else None
    before, after = example(x), example(node)
    if before is None or after is None or after.shape[-1] != 2:
        return None
    return (x,) if same_shape(before.shape[:-1], after.shape[:-2]) else None


part, joined, pairs = map(reader, (_part, _joined, _pairs_of))
viewed = reader(lambda node: node.args[:1] if spelled(node) in _VIEWS else None)


def _sum(x: Any, cos: Any, sin: Any, style: Any) -> Any:
    return wide(joined(-part(x, 1, style), part(x, 0, style), style)) * sin + x * cos


def _parts(x: Any, cos: Any, sin: Any, style: Any) -> Any:
    first, second = part(x, 0, style), part(x, 1, style)
    return joined(first * cos - second * sin, second * cos + first * sin, style)


def _complex(x: Any, cos: Any) -> Any:
    return viewed(torch.view_as_real(torch.view_as_complex(pairs(x)) * cos))


def _found(x: Any, cos: Any, sin: Any = None, style: PairStyle = "interleaved") -> FoundRope | None:
    t = example(cos)
    if t is None or t.is_complex() is not (sin is None):
        return None
    return FoundRope(narrow_of(x), cos, cos if sin is None else sin, t.shape[-1], style)


_ROPE = tuple(Pattern(spelling, _found) for spelling in (_sum, _parts, _complex))


def _row(node: Node, before_transpose: bool, pick: Callable[[Tensor], Tensor]) -> Node | None:
    """Cosines or sines [B or 1, S, R] or [S, R], given with a dimension for heads, or as complex numbers."""
    node = back(node)
    e = example(node)
    if e is None or not 1 < e.ndim < 5 or (before_transpose and e.ndim == 2):
        return None
    heads = e.ndim - (2 if before_transpose else 3)  # where the dimension of heads is
    if heads >= 0 and not same_size(e.shape[heads], 1):
        return None
    if e.is_complex():
        node = written_behind(node, pick)
    elif heads >= 0 and spelled(node) == "unsqueeze" and argument(node, 1, "dim") in (heads, heads - e.ndim):
        return node.args[0]  # pyright: ignore[reportReturnType]
    return node if heads < 0 else written_behind(node, torch.squeeze, heads)
