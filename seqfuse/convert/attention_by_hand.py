"""Attention that is written by hand: softmax(scale q k^T, capped, plus a mask) v."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .attention import CALL, attention_of
from .graph import ahead, argument, back, example, is_same, narrow_of, operands, spelled
from .masks import FILLING, scores_of
from .pointwise import scaled
from .raising import Found, matcher


@matcher("softmax", rank=0)
def raise_attention_by_hand(node: Node) -> Found:
    """softmax(scale q k^T, capped, plus a mask) v, as models have it that do not call torch's function."""
    if not weighs(node):
        return None
    if argument(node, 1, "dim") not in (-1, 3):
        return "its softmax is not over the last dimension of scores [B, H, S, S]"
    took: list[Node] = [node]
    how: dict[str, Any] = {}
    scores, mask, softcap, scale = narrow_of(node.args[0], took), None, None, 1.0
    total = operands(scores, "add")
    if total is not None:
        took.append(scores)
        scores, mask = back(total[0], took), total[1]
        if (m := example(mask)) is None or not m.is_floating_point():
            return "what is added to its scores is no tensor of floating-point numbers"
    elif (unmasked := scores_of(scores, how)) is not None:
        took.append(scores)
        scores = back(unmasked, took)
    if (capped := scaled(scores)) is not None and spelled(capped[0]) == "tanh":
        divided = scaled(capped[0].args[0])
        if divided is None or abs(divided[1] * capped[1] - 1) > 1e-6:
            return "its scores are bent by tanh, which is no soft cap: that is cap * tanh(scores / cap)"
        took += [scores, capped[0], capped[0].args[0]]
        scores, softcap = back(divided[0], took), capped[1]
    if (factor := scaled(scores)) is not None:
        took.append(scores)
        scores, scale = back(factor[0], took), factor[1]
    if spelled(scores) in FILLING:
        return f"its scores are masked by {spelled(scores)} with a mask that is data: {CALL}, with attn_mask="
    if spelled(scores) != "matmul":
        return f"its scores are made by {spelled(scores) or 'the model'}, not by q @ k.transpose(-2, -1): {CALL}"
    took.append(scores)
    q, keys = scores.args[:2]
    if spelled(keys) != "transpose" or set(keys.args[1:]) not in ({2, 3}, {-1, -2}, {2, -1}):
        return f"its keys are not transposed where queries meet them: {CALL}"
    took.append(keys)
    weights, dropout = node, 0.0
    while (following := ahead(weights, {"to", "type_as", "float", "half", "bfloat16", "dropout"})) is not None:
        if spelled(following) == "dropout" and is_same(following) is None:
            if dropout:
                return "its weights are dropped twice"
            dropout = argument(following, 1, "p", 0.5)
        took.append(following)
        weights = following
    out = ahead(weights, {"matmul"})
    if out is None:
        return f"its weights are read by more, or by something else, than weights @ v: {CALL}"
    how |= {"dropout": dropout, "scale": scale, "softcap": softcap}
    return attention_of((q, keys.args[0], out.args[1]), mask, how, out, [*took, out])


def weighs(softmax: Node) -> bool:
    """Whether something is multiplied by what a softmax makes, as values are by the weights of attention."""
    node = softmax
    while (following := ahead(node, _BETWEEN)) is not None:
        node = following
    return any(spelled(user) in _GEMMS for user in node.users)


_GEMMS = ("matmul", "bmm", "einsum", "baddbmm")
_BETWEEN = {"to", "type_as", "float", "half", "bfloat16", "dropout", "mul", "view", "reshape", "contiguous"}


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
