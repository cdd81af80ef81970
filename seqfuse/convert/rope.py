"""RoPE of queries or keys, as models spell it."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .graph import argument, back, example, operands, spelled
from .matmuls import part_of


def rope_at(node: Any, took: list[Node]) -> tuple[Any, Any, Any, int, str] | None:
    """x, cosines [B or 1, S, R], sines, R and the style of x cos + rotate_half(x) sin, the rest of x beside it."""
    own: list[Node] = [node]
    size: Any = example(node).shape[-1] if example(node) is not None else 0  # pyright: ignore[reportOptionalMemberAccess]
    whole = None
    if spelled(node) == "cat" and argument(node, 1, "dim", 0) in (-1, 3):
        turned, rest = argument(node, 0, "tensors") if len(argument(node, 0, "tensors")) == 2 else (None, None)
        passed = part_of(rest, own)
        if turned is None or passed is None:
            return None
        whole, start, _ = passed
        node, size = turned, start
        own.append(node)
    total = operands(node, "add")
    if total is None:
        return None
    first, second = operands(total[0], "mul"), operands(total[1], "mul")
    if first is None or second is None:
        return None
    x, cos, half, sin = *first, *second
    own += [total[0], total[1]]
    turned_x = _rotated(half, own)
    x = back(x, own)
    if turned_x is None or turned_x is not x:
        return None
    cos, sin = _row(cos, own), _row(sin, own)
    if cos is None or sin is None:
        return None
    if whole is not None:
        part = part_of(x, own)
        if part is None or part[0] is not whole or part[1] != 0 or part[2] != size:
            return None
        x = whole
    took += own
    return x, cos, sin, size, "half"


def _rotated(node: Any, took: list[Node]) -> Any:
    """X of cat((-x[..., h:], x[..., :h]))."""
    if spelled(node) != "cat" or argument(node, 1, "dim", 0) not in (-1, 3):
        return None
    parts: Any = argument(node, 0, "tensors")
    if len(parts) != 2 or spelled(parts[0]) != "neg":
        return None
    own: list[Node] = [node, parts[0]]
    second, first = part_of(parts[0].args[0], own), part_of(parts[1], own)
    if first is None or second is None or first[0] is not second[0] or first[1] != 0:
        return None
    if first[2] != second[1] or first[2] != second[2]:
        return None
    took += own
    return back(first[0], took)


def _row(node: Any, took: list[Node]) -> Any:
    """Cosines or sines [B or 1, S, R], given [B or 1, 1, S, R]."""
    node = back(node, [])
    e = example(node)
    if spelled(node) == "unsqueeze" and argument(node, 1, "dim") in (1, -3) and e is not None and e.ndim == 4:
        took.append(node)
        return node.args[0]
    return None
