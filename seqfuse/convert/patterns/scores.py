"""The scores of attention by hand: from a softmax back to the GEMM of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import (
    CASTS,
    NAMED,
    ahead,
    alike,
    argument,
    example,
    is_last,
    narrow_of,
    operands,
    same_shape,
    same_size,
    size_before,
    spelled,
    swapped,
)
from ..masks import FILLING, KnownValues, limits_of, scores_of
from ..writer import Writer
from .pointwise import as_scaled

CALL = "call F.scaled_dot_product_attention"
"""What to do instead of another spelling."""


class ScoreTerms(NamedTuple):
    """Scores as scale q k^T, capped, plus masks that are multiplied by numbers."""

    q: Node  # queries [B, H, S, D]
    k: Node  # keys [B, H, T, D]
    scale: float  # what their product is multiplied by
    softcap: float | None  # the bound on that
    masks: list[tuple[Node, float]]  # what is added behind it, and what that is multiplied by
    factors: list[Node]  # tensors with a number, or one for each head, which queries are multiplied by


def without_maximum(logits: Any) -> Any:
    """What a softmax is of, without the maximum of each row that is taken from it first, which makes no difference."""
    node = narrow_of(logits)
    x, largest = operands(node, "sub") or (None, None)
    while isinstance(largest, Node) and (spelled(largest) == "detach" or largest.args[1:] in ((0,), ("values",))):
        largest = largest.args[0]
    if not isinstance(largest, Node) or spelled(largest) not in ("max", "amax") or largest.args[:1] != (x,):
        return node
    kept = argument(largest, 2, "keepdim", False) is True
    return narrow_of(x) if kept and is_last(argument(largest, 1, "dim"), x) else node


def scores_behind(node: Any, how: dict[str, Any], write: Writer) -> ScoreTerms | str:
    """What scores are made of, from their softmax back to the GEMM; `write` writes calls before the softmax."""
    scale, softcap, has_factor = 1.0, None, False
    masks, factors = list[tuple[Node, float]](), list[Node]()
    hidden, fill = list[Node](), 0.0
    for _ in range(_FAR):
        node = narrow_of(node)
        total, product = operands(node, "add") or operands(node, "iadd"), operands(node, "mul")
        outermost = not (masks or softcap or scale != 1 or factors)
        filled = _filled(node, write) if outermost and not how else None
        if filled is not None and (not hidden or filled[2] == fill):
            known = None if hidden else scores_of(node, how)
            if known is None:
                hidden.append(filled[1])
            node, fill = known or filled[0], filled[2]
            continue
        if hidden:
            mask, seen = _of_hidden(hidden, write, node)
            masks.append((mask, 1.0))
            factors.append(seen)
            hidden.clear()
        less = operands(node, "sub")
        if less is not None and softcap is None and _is_less(*less, node):
            node = _added_to(less, -scale, masks, factors, write)
        elif total is not None and softcap is None:
            total = total if _leads_to_gemm(total[0]) else total[::-1]
            node = _added_to(total, scale, masks, factors, write)
        elif softcap is None and (windowed := _windowed(node, write)) is not None:
            node = _added_to(windowed, scale, masks, factors, write)
        elif (capped := as_scaled(node)) is not None and spelled(narrow_of(capped[0])) == "tanh" and softcap is None:
            divided = as_scaled(narrow_of(capped[0]).args[0])
            if divided is None or abs(divided[1] * capped[1] - 1) > 1e-6 or scale != 1 or has_factor:
                return "its scores go through tanh, but not as a soft cap, cap * tanh(scores / cap)"
            node, softcap = divided[0], capped[1]
        elif (factor := as_scaled(node)) is not None:
            node, scale = factor[0], scale * factor[1]
        elif product is not None and (of_heads := _factor(product)) is not None:
            node, number = of_heads
            factors.append(number)
            has_factor = True
        elif outermost and (least := _bounded(node)) is not None:
            node = least
        elif spelled(node) in FILLING:
            plain = not (softcap or scale != 1 or factors or how)
            unmasked = (_filled_within(node, masks) if masks else scores_of(node, how)) if plain else None
            if unmasked is None:
                return f"its scores are masked by {spelled(node)} with a mask that is data: {CALL}, with attn_mask="
            node = unmasked
        else:
            break
    e = example(node)
    if spelled(node) != "matmul" or e is None or e.ndim not in (3, 4):
        made = node.meta.get(NAMED, spelled(node)) or "the model"
        return f"its scores are made by {made}, not by q @ k.transpose(-2, -1): {CALL}"
    q, keys = node.args[:2]
    while (found := as_scaled(keys := narrow_of(keys))) is not None:
        keys, scale = found[0], scale * found[1]
    k = keys.args[0] if swapped(keys) == (e.ndim - 2, e.ndim - 1) else Writer(node)("transpose", keys, -2, -1)
    if any((t := example(given)) is None or t.ndim != e.ndim for given in (q, k)):
        return f"its scores are of tensors of several dimensions: {CALL}"
    return ScoreTerms(q, k, scale, softcap, masks, factors)


def _is_less(scores: Any, term: Any, node: Node) -> bool:
    """Whether a difference is scores without a number, or without a tensor that has a number for each key."""
    t, e = example(term), example(node)
    if not isinstance(scores, Node) or not isinstance(term, Node):
        return isinstance(scores, Node)
    return t is not None and e is not None and t.ndim > 0 and same_size(t.shape[-1], e.shape[-1])


def _added_to(
    total: tuple[Any, Any], scale: float, masks: list[tuple[Node, float]], factors: Sequence[Node], write: Writer
) -> Any:
    """The scores in a sum with a mask, which is added to those known; a number is the same for all keys of a row."""
    scores, mask = total
    if isinstance(mask, Node):
        for factor in factors:
            mask = write("mul", mask, factor)
        masks.append((mask, scale))
    return scores


def _windowed(node: Node, write: Writer) -> tuple[Node, Node] | None:
    """Scores [B W, H, S, T] to which a mask is added as [B, W, H, S, T], and that mask for all B W windows."""
    total: Any = narrow_of(node.args[0]) if spelled(node) in _RESHAPES else None
    e, mask = example(total), None
    while e is not None and e.ndim == 5 and (terms := operands(total, "add") or operands(total, "iadd")):
        m = example(terms[1])
        if m is None or m.ndim > 5 or not alike(terms[0], total):
            return None
        total, mask = terms[0], terms[1] if mask is None else write("add", mask, terms[1])
    if e is None or mask is None or spelled(total) not in _RESHAPES:
        return None
    scores: Any = narrow_of(total.args[0])
    if not alike(scores, node) or not same_shape(e.shape[2:], _shape(node)[1:]):
        return None
    own = ((1,) * (5 - len(_shape(mask))) + _shape(mask))[2:]
    sizes = [size_before(write.node, size) for size in (*e.shape[:2], *own)]
    return None if None in sizes else (scores, write("flatten", write("expand", mask, *sizes), 0, 1))


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(cast("Tensor", example(node)).shape)


_RESHAPES = ("view", "reshape", "unflatten")


def _filled(node: Node, write: Writer) -> tuple[Any, Any, float] | None:
    """Scores that are filled with a number, where they are, and the number, which is so low that it hides them."""
    scores: Any
    if spelled(node) == "masked_fill":
        scores, hidden, fill = (argument(node, i, name) for i, name in enumerate(("input", "mask", "value")))
    elif spelled(node) == "where":
        scores, seen, fill = node.args if node.op == "call_method" else (node.args[i] for i in (1, 0, 2))
        hidden = write("logical_not", seen) if example(seen) is not None else seen
    else:
        return None
    known = KnownValues().choice(fill)
    e, m = example(scores), example(hidden)
    if e is None or m is None or m.dtype is not torch.bool or not alike(scores, node):
        return None
    number = float(known.yes) if known is not None and known.is_fixed else 0.0
    low = -math.inf < number <= max(-1e9, torch.finfo(e.dtype).min)  # infinity makes NaN
    return (scores, hidden, number) if low else None


def _of_hidden(hidden: list[Node], write: Writer, scores: Any) -> tuple[Node, Node]:
    """What is added to scores where they are hidden, and a factor of queries.

    A row that sees no key has equal weights, by which no gradient comes to its scores: its queries are multiplied by
    zero, and its mask hides nothing.
    """
    whole, *others = hidden
    for other in others:
        whole = write("logical_or", whole, other)
    dtype = cast("Tensor", example(scores)).dtype
    sees = write("any", write("logical_not", whole), -1, True)
    zeros = write("torch.zeros_like", whole, dtype=dtype)
    return write("masked_fill", zeros, write("logical_and", whole, sees), -math.inf), write("to", sees, dtype)


def _filled_within(node: Node, masks: list[tuple[Node, float]]) -> Node | None:
    """The scores of a call that hides what a mask behind it hides: what comes later than a row, for all sizes."""
    inside, e = dict[str, Any](), example(node)
    unmasked = None if e is None else scores_of(node, inside)
    if e is None or unmasked is None or inside != {"causal": True, "window": None}:
        return None
    limits = (limits_of(mask, e.shape[-2], e.shape[-1]) for mask, _ in masks)
    return unmasked if any(found is not None and found.causal for found in limits) else None


def _bounded(node: Any) -> Node | None:
    """Scores with a mask by which each row sees a key, without a bound below them that is the least number."""
    if spelled(node) not in ("max", "maximum", "clamp", "clamp_min") or len(node.args) + len(node.kwargs) != 2:
        return None
    scores: Any = narrow_of(node.args[0])
    bound = KnownValues().choice(argument(node, 1, "other", node.kwargs.get("min")))
    e, total = example(scores), operands(scores, "add")
    if e is None or total is None or bound is None or not bound.is_fixed:
        return None
    low = float(bound.yes) <= torch.finfo(e.dtype).min
    return scores if low and any(limits_of(term, e.shape[-2], e.shape[-1]) is not None for term in total) else None


def _factor(product: tuple[Any, Any]) -> tuple[Node, Node] | None:
    """Scores, and a tensor [] or [H, 1, 1] that they are multiplied by."""
    for scores, factor in (product, product[::-1]):
        e, f = example(scores), example(factor)
        if e is None or f is None or e.ndim not in (3, 4) or f.ndim not in (0, 3, e.ndim):
            continue
        if _leads_to_gemm(scores) and all(same_size(size, 1) for size in (*f.shape[:-3], *f.shape[-2:])):
            return scores, factor
    return None


def _leads_to_gemm(node: Any, depth: int = 8) -> bool:
    """Whether a node is a GEMM of activations, but for what scores go through."""
    node = narrow_of(node)
    if spelled(node) == "matmul":
        return True
    passed = spelled(node) in {"add", "iadd", "sub", "mul", "truediv", "tanh", "max", *FILLING}
    return passed and depth > 0 and any(_leads_to_gemm(n, depth - 1) for n in node.all_input_nodes)


def weighs(softmax: Node) -> bool:
    """Whether something is multiplied by what a softmax makes, as values are by the weights of attention."""
    node = softmax
    while (following := ahead(node, _BETWEEN | {"transpose", "permute"})) is not None:
        node = following
    return any(spelled(user) in _GEMMS for user in node.users)


_GEMMS = ("matmul", "bmm", "einsum", "baddbmm")
_BETWEEN = {*CASTS, "dropout", "mul", "view", "reshape", "contiguous", "getitem"}


def around(softmax: Node) -> list[Node]:
    """The GEMMs of attention by hand: that of its scores, and that of its weights and values."""
    found, stack, seen = list[Node](), [(softmax, True), (softmax, False)], set[Node]()
    further = _BETWEEN | {"add", "sub", "truediv", "tanh", "transpose", "permute", *FILLING}
    for _ in range(_FAR):
        if not stack:
            break
        node, forward = stack.pop(0)
        for near in node.users if forward else node.all_input_nodes:
            if spelled(near) in _GEMMS:
                found.append(near)
            elif near not in seen and spelled(near) in further:
                seen.add(near)
                stack.append((near, forward))
    return found


_FAR = 24
"""Calls that are looked at, at most."""
