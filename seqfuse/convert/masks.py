"""Masks of attention: one that is causal or a sliding window, which is proved for all sizes, becomes an option."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .effects import are_changed
from .graph import alike, back, example, numbers, same_size, spelled
from .indices import constant, fixed
from .positions import Values


def limited(mask: Any, how: dict[str, Any], qkv: tuple[Any, Any, Any], by_hand: bool, window: bool) -> Any:
    """What attention reads of a mask: nothing, where options say the same, which are added to `how`.

    Args:
        mask: what the scores are masked by, or `None`.
        how: the options.
        qkv: queries, keys and values.
        by_hand: whether weights are made by `softmax`, which gives NaN for rows of nothing but -inf.
        window: whether there is an option for a sliding window.
    """
    rows, keys = example(qkv[0]), example(qkv[1])
    if rows is None or keys is None or mask is None:
        return mask
    found = limits_of(mask, rows.shape[-2], keys.shape[-2])
    if found is not None:
        how["causal"] = found.causal or how.get("causal", False)
        # Torch's kernel for a CPU has no window; what runs in its place takes longer than that kernel with a mask.
        slow = rows.device.type == "cpu" and not how["dropout"] and how.get("softcap") is None
        if found.window is not None and (not window or (slow and found.window < numbers(rows.shape)[-2])):
            found = found._replace(exact=False)
        if found.exact:
            how |= {} if found.window is None else {"window": found.window}
            return None
    mask = back(mask)
    return _with_nan(mask) if by_hand else mask


def scores_of(filled: Any, how: dict[str, Any]) -> Node | None:
    """The scores that a call fills where rows do not see, if options say the same, which are added to `how`."""
    e, name = example(filled), spelled(filled)
    scores = next((n for n in filled.all_input_nodes if alike(n, filled)), None) if name in FILLING else None
    if e is None or scores is None:
        return None
    found = limits_of(filled, e.shape[-2], e.shape[-1], scores)
    if found is None or not found.exact:
        return None
    how |= {"causal": found.causal, "window": found.window}
    return scores


FILLING = ("masked_fill", "where")


def nan_in_rows_of_nothing(mask: Tensor) -> Tensor:
    """A mask whose rows of nothing but -inf are NaN: what softmax makes of them, where attention gives zeros."""
    return mask.masked_fill((mask == -torch.inf).all(-1, keepdim=True), torch.nan)


def _with_nan(mask: Node) -> Node:
    """The node of a mask with these rows, one for all that read it."""
    found = next((user for user in mask.users if user.target is nan_in_rows_of_nothing), None)
    if found is None:
        with mask.graph.inserting_after(mask):
            found = mask.graph.call_function(nan_in_rows_of_nothing, (mask,))
        found.meta = dict(mask.meta)
    return found


class Limits(NamedTuple):
    """Which keys row i sees: none behind i if `causal`, fewer than `window` on each side; all of these if `exact`."""

    causal: bool
    window: int | None
    exact: bool


def limits_of(mask: Any, rows: Any, keys: Any, scores: Node | None = None) -> Limits | None:
    """What is proved of a mask, or of scores that are masked, for so many rows and keys; `None` if that is nothing."""
    e, values = example(mask), Values()
    if scores is not None:
        values.found[scores] = constant(0, torch.float64)  # what is added to them
    made = None if e is None or (e.requires_grad and scores is None) else values.choice(mask)
    if e is None or made is None:
        return None
    added, exact = e.is_floating_point(), made.exact
    seen, unseen = (0.0, torch.finfo(e.dtype).min) if added else (True, False)
    found = next((c for c in made.spellings if c.yes == seen and (c.no <= unseen or not c.where)), None)
    if found is None:
        return None
    reach: dict[int, int] = {}  # how many keys a row sees before it (1) and behind it (-1)
    for limit in found.where:
        start = fixed(limit.start)
        if limit.is_natural(e.shape):
            continue
        if start is None or start < 0 or limit.steps not in ({-2: 1, -1: -1}, {-2: -1, -1: 1}):
            exact = False
        else:
            way = limit.steps[-1]
            reach[way] = min(start, reach.get(way, start))
    before, behind = reach.get(1), reach.get(-1)
    fits = (not reach or same_size(rows, keys)) and (exact or not added)
    if not fits or not (behind == 0 or (exact and before == behind)):
        return None
    if are_changed([node for node, value in values.found.items() if value is not None]):
        return None
    return Limits(behind == 0, None if before is None else before + 1, exact)
