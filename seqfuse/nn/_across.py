"""What layers are told when several processes compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InputError
from ..group import Group
from ..operation import UnfusedOperation


def across(group: Any, sequence_dim: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the GEMM with which a region of several processes begins, and of the one with which it ends."""
    if group is None:
        return {}, {}
    shared: dict[str, Any] = {"group": group, "sequence_dim": sequence_dim}
    return {"parallel": "column", **shared}, {"parallel": "row", **shared}


def own_heads(heads: int, kv_heads: int, group: Group) -> tuple[int, int]:
    """How many of the heads each process has."""
    for name, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count % group.size:
            hint = "a key head is not held twice" if name == "kv_heads" and not heads % group.size else None
            message = f"expects {name} that {group.size} processes divide, got {count}"
            raise InputError(message, code="SF101", operation="Attention", hint=hint)
    return heads // group.size, kv_heads // group.size


def norm_on_rows(
    norm: Callable[..., UnfusedOperation], dim: int, group: Any, sequence_dim: int | None, made: dict[str, Any]
) -> UnfusedOperation:
    """A norm between regions: where each process has its shard of the tokens, its gradients are summed."""
    made_norm = norm(dim, **made)
    if group is not None and sequence_dim is not None:
        made_norm.sum_over = Group(group)
    return made_norm
