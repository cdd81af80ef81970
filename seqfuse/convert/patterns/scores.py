"""The scores of attention by hand: from a softmax back to the GEMM of queries and keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..graph import CASTS, ahead, alike, argument, either, example, narrow_of, operands, same_size, spelled
from ..masks import FILLING, KnownValues, scores_of
from ..normal import Writer
from .pointwise import as_scaled

CALL = "call F.scaled_dot_product_attention"
"""What to do instead of another spelling."""


class ScoreTerms(NamedTuple):
    """Scores as scale q k^T, capped, plus masks that are multiplied by numbers.

    Attributes:
        q: queries [B, H, S, D].
        k: keys [B, H, T, D].
        scale: what their product is multiplied by.
        softcap: the bound on that.
        masks: what is added behind it, and what that is multiplied by.
        factors: tensors with a number, or one for each head, which queries are multiplied by.
    """

    q: Node
    k: Node
    scale: float
    softcap: float | None
    masks: list[tuple[Node, float]]
    factors: list[Node]


def scores_behind(node: Any, how: dict[str, Any]) -> ScoreTerms | str:
    """What scores are made of, from their softmax back to the GEMM."""
    scale, softcap = 1.0, None
    masks, factors = list[tuple[Node, float]](), list[Node]()
    for _ in range(_FAR):
        node = narrow_of(node)
        total, product = operands(node, "add") or operands(node, "iadd"), operands(node, "mul")
        if total is not None and softcap is None and not factors:
            scores, mask = total if _leads_to_gemm(total[0]) else total[::-1]
            if not isinstance(mask, Node):
                break
            masks.append((mask, scale))
            node = scores
        elif (capped := as_scaled(node)) is not None and spelled(narrow_of(capped[0])) == "tanh" and softcap is None:
            divided = as_scaled(narrow_of(capped[0]).args[0])
            if divided is None or abs(divided[1] * capped[1] - 1) > 1e-6 or scale != 1:
                return "its scores go through tanh, but not as a soft cap, cap * tanh(scores / cap)"
            node, softcap = divided[0], capped[1]
        elif (factor := as_scaled(node)) is not None:
            node, scale = factor[0], scale * factor[1]
        elif product is not None and (of_heads := _factor(product)) is not None:
            node, number = of_heads
            factors.append(number)
        elif spelled(node) in FILLING:
            unmasked = None if masks or softcap or scale != 1 or factors or how else scores_of(node, how)
            if unmasked is None and not (masks or softcap or scale != 1 or factors) and (filled := _filled(node)):
                unmasked, mask, seen = filled
                masks.append((mask, 1.0))
                factors.append(seen)
            if unmasked is None:
                return f"its scores are masked by {spelled(node)} with a mask that is data: {CALL}, with attn_mask="
            node = unmasked
        else:
            break
    if spelled(node) != "matmul" or (e := example(node)) is None or e.ndim != 4:
        return f"its scores are made by {spelled(node) or 'the model'}, not by q @ k.transpose(-2, -1): {CALL}"
    q, keys = node.args[:2]
    swapped = spelled(keys) == "transpose" and set(keys.args[1:]) in ({2, 3}, {-1, -2}, {2, -1})
    k = keys.args[0] if swapped else Writer(node)("transpose", keys, -2, -1)
    return ScoreTerms(q, k, scale, softcap, masks, factors)


def _filled(node: Node) -> tuple[Node, Node, Node] | None:
    """Scores that are filled with a number where a mask hides them, what is added instead, and a factor of queries.

    A row that sees no key has equal weights, by which no gradient comes to its scores: its queries are multiplied by
    zero, and its mask hides nothing.
    """
    write = Writer(node)
    scores: Any
    if spelled(node) == "masked_fill":
        scores, hidden, fill = (argument(node, i, name) for i, name in enumerate(("input", "mask", "value")))
    else:
        scores, seen, fill = node.args if node.op == "call_method" else _swapped(node)
        hidden = write("logical_not", seen)
    known = KnownValues().choice(fill)
    e, m = example(scores), example(hidden)
    if e is None or m is None or m.dtype is not torch.bool or not alike(scores, node) or e.ndim != 4:
        return None
    number = float(known.yes) if known is not None and known.is_fixed else 0.0
    if not -math.inf < number <= max(-1e9, torch.finfo(e.dtype).min):  # infinity makes NaN
        return None
    zeros = write("torch.zeros_like", hidden, dtype=e.dtype)
    sees = write("any", write("logical_not", hidden), -1, True)
    mask = write("masked_fill", zeros, write("logical_and", hidden, sees), -math.inf)
    return scores, mask, write("to", sees, e.dtype)


def _swapped(where: Node) -> list[Any]:
    """X, c and y of torch.where(c, x, y)."""
    c, x, y = where.args
    return [x, c, y]


def _factor(product: tuple[Any, Any]) -> tuple[Node, Node] | None:
    """Scores, and a tensor [] or [H, 1, 1] that they are multiplied by."""
    for scores, factor in either(product):
        e, f = example(scores), example(factor)
        if e is None or f is None or e.ndim != 4 or f.ndim not in (0, 3, 4) or not _leads_to_gemm(scores):
            continue
        if all(same_size(size, 1) for size in (*f.shape[:-3], *f.shape[-2:])):
            return scores, factor
    return None


def _leads_to_gemm(node: Any, depth: int = 8) -> bool:
    """Whether a node is a GEMM of activations, but for what scores go through."""
    node = narrow_of(node)
    if spelled(node) == "matmul":
        return True
    passed = spelled(node) in {"add", "iadd", "mul", "truediv", "tanh", *FILLING}
    return passed and depth > 0 and any(_leads_to_gemm(n, depth - 1) for n in node.all_input_nodes)


def weighs(softmax: Node) -> bool:
    """Whether something is multiplied by what a softmax makes, as values are by the weights of attention."""
    node = softmax
    while (following := ahead(node, _BETWEEN)) is not None:
        node = following
    return any(spelled(user) in _GEMMS for user in node.users)


_GEMMS = ("matmul", "bmm", "einsum", "baddbmm")
_BETWEEN = {*CASTS, "dropout", "mul", "view", "reshape", "contiguous"}


def around(softmax: Node) -> list[Node]:
    """The GEMMs of attention by hand: that of its scores, and that of its weights and values."""
    found, stack, seen = list[Node](), [(softmax, True), (softmax, False)], set[Node]()
    for _ in range(_FAR):
        if not stack:
            break
        node, forward = stack.pop(0)
        for near in node.users if forward else node.all_input_nodes:
            if spelled(near) in _GEMMS:
                found.append(near)
            elif near not in seen and spelled(near) in _BETWEEN | {"add", "sub", "truediv", "tanh", *FILLING}:
                seen.add(near)
                stack.append((near, forward))
    return found


_FAR = 24
"""Calls that are looked at, at most."""
