"""RoPE of queries or keys, as models spell it, and its cosines and sines as `RotaryEmbedding` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import (
    CASTS,
    argument,
    back,
    either,
    elements_before,
    example,
    is_fixed,
    narrow_of,
    operands,
    part_of,
    same_shape,
    same_size,
    spelled,
    view_source,
)
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


class _PairMember(NamedTuple):
    """The first (0) or second (1) members of pairs of x."""

    x: Any
    member: int
    style: PairStyle


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
    found, whole = _turned(value), None
    if found is None and _is_cat(value):
        turned, rest = argument(value, 0, "tensors")
        passed = part_of(rest)
        if passed is None or passed[1] + passed[2] != size:
            return None
        whole, size, _ = passed
        found = _turned(_wide(turned))
    # As many cosines as elements, or as pairs of them.
    if found is None or not is_fixed(size) or found.size not in (size, size // 2):
        return None
    if whole is not None and part_of(found.x) != (whole, 0, size):
        return None
    x = found.x if whole is None else whole
    given, cos, sin = example(x), _row(found.cos, before_transpose, cosines), _row(found.sin, before_transpose, sines)
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


def _turned(node: Any) -> FoundRope | None:
    """RoPE in one of its forms, of as many elements as there are cosines."""
    return _of_sum(node) or _of_parts(node) or _of_complex(node)


def _found(x: Any, cos: Any, sin: Any, style: PairStyle) -> FoundRope | None:
    t = example(cos)
    return None if t is None else FoundRope(x, cos, sin, t.shape[-1], style)


def _of_sum(node: Any) -> FoundRope | None:
    """X cos + rotate(x) sin."""
    for first, second in either(operands(node, "add")):
        for half, sin in either(operands(second, "mul")):
            rotated = _rotated(narrow_of(half))
            for x, cos in either(operands(first, "mul")) if rotated is not None else ():
                if rotated is not None and narrow_of(x) is rotated[0] and example(cos) is not None:
                    return _found(rotated[0], cos, sin, rotated[1])
    return None


def _rotated(node: Any) -> tuple[Any, PairStyle] | None:
    """X of (-x2, x1), where x1 and x2 are the parts of x, and which elements they are."""
    joined = _joined(node)
    if joined is None or spelled(joined[0]) != "neg":
        return None
    negated, kept, style = joined
    second, first = _part(negated.args[0]), _part(kept)
    if first is None or first.style != style or second != (first.x, 1, style) or first.member != 0:
        return None
    return first.x, style


def _of_parts(node: Any) -> FoundRope | None:
    """The parts (x1 cos - x2 sin, x2 cos + x1 sin)."""
    joined = _joined(node)
    one, two = (operands(joined[0], "sub"), operands(joined[1], "add")) if joined is not None else (None, None)
    if joined is None or one is None or two is None:
        return None
    terms = [_term(product) for product in (*one, *two)]
    if any(term is None for term in terms):
        return None
    (x, cos), (x2, sin), *others = cast("list[tuple[_PairMember, Any]]", terms)
    wanted, style = [(x2, cos), (x, sin)], joined[2]
    if x[1:] != (0, style) or x2 != (x.x, 1, style) or others not in (wanted, wanted[::-1]):
        return None
    return _found(x.x, cos, sin, style)


def _term(product: Any) -> tuple[_PairMember, Any] | None:
    """A part of x, and what it is multiplied by."""
    for part, factor in either(operands(product, "mul")):
        if (found := _part(part)) is not None:
            return found, factor
    return None


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


def _part(node: Any) -> _PairMember | None:
    """Of which x a node is the first or second members of pairs."""
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
        return _PairMember(narrow_of(whole), start // size, "half")
    interleaved = same_size(e.stride(-1), 2 * w.stride(-1)) and start in (0, 1)
    return _PairMember(narrow_of(whole), start, "interleaved") if interleaved else None


def _of_pairs(node: Any) -> Any:
    """X of x.view(*, D / 2, 2)."""
    x = node.args[0] if spelled(node) in _VIEWS and node.args else None
    before, after = example(x), example(node)
    if before is None or after is None or after.ndim != before.ndim + 1 or after.shape[-1] != 2:
        return None
    return narrow_of(x) if same_shape(before.shape[:-1], after.shape[:-2]) else None


def _of_complex(node: Any) -> FoundRope | None:
    """view_as_real(view_as_complex(x in pairs) * (cos + i sin)), laid out flat."""
    real: Any = node.args[0] if spelled(node) in _VIEWS and node.args else None
    product: Any = real.args[0] if spelled(real) == "view_as_real" else None
    for pairs, angles in either(operands(product, "mul")):
        t = example(angles)
        x = _of_pairs(back(pairs.args[0])) if spelled(pairs) == "view_as_complex" else None
        if x is not None and t is not None and t.is_complex():
            return _found(x, angles, angles, "interleaved")
    return None


def _row(node: Node, before_transpose: bool, pick: Callable[[Tensor, int], Tensor]) -> Node | None:
    """Cosines or sines [B or 1, S, R] or [S, R], given with a dimension for heads, or as complex numbers."""
    node = back(node)
    e = example(node)
    if e is None or not 1 < e.ndim < 5 or (before_transpose and e.ndim == 2):
        return None
    heads = e.ndim - (2 if before_transpose else 3)  # where the dimension of heads is
    if heads >= 0 and not same_size(e.shape[heads], 1):
        return None
    if heads < 0 and not e.is_complex():
        return node
    if not e.is_complex() and spelled(node) == "unsqueeze" and argument(node, 1, "dim") in (heads, heads - e.ndim):
        return node.args[0]  # pyright: ignore[reportReturnType]
    function = pick if e.is_complex() else without_heads
    return written_behind(node, function, heads)


def without_heads(t: Tensor, dim: int) -> Tensor:
    """The same without the dimension of heads, if it has one."""
    return t.squeeze(dim) if dim >= 0 else t


def cosines(angles: Tensor, dim: int) -> Tensor:
    """The cosines in cos + i sin, without the dimension of heads."""
    return without_heads(torch.real(angles), dim)


def sines(angles: Tensor, dim: int) -> Tensor:
    """The sines in cos + i sin, without the dimension of heads."""
    return without_heads(torch.imag(angles), dim)
