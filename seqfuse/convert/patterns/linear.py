"""Spellings of `Linear`, of several side by side, and of gated units act(gate) * up behind two of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ... import ops
from ...operation import FusableOperation
from ...ops.mergedlinear import MAX_PARTS
from ..dtensor import shards_of
from ..effects import Effects
from ..graph import (
    argument,
    arguments,
    back,
    either,
    example,
    is_fixed,
    is_last,
    numbers,
    operands,
    part_of,
    same_size,
    spelled,
    swapped,
)
from ..launches import are_saved
from ..raising import META, Found, Inner, Raised, View, matcher, one


def raise_linear(node: Node) -> Found:
    """F.linear(x, weight, bias), if the sizes are numbers."""
    x, weight, bias = arguments(node, "input", "weight", "bias")
    w, given = example(weight), example(x)
    if w is None or w.ndim != 2 or given is None or given.ndim < 1 or not is_fixed(*w.shape):
        return None
    rows, columns = w.shape
    if bias is not None and ((b := example(bias)) is None or b.ndim != 1 or not same_size(b.shape[0], rows)):
        return None
    operation = ops.Linear(columns, rows, bias is not None, device=META, dtype=w.dtype)
    operation.shards = shards_of([weight])
    return one(operation, x, node, weight=weight, bias=bias)


_UNITS: dict[str, Callable[..., FusableOperation]] = {
    "gelu": ops.GEGLU, "silu": ops.SwiGLU, "relu": ops.ReGLU, "sigmoid": ops.GLU,
}  # fmt: skip


def raise_gated(node: Node) -> Found:
    """act(gate) * up."""
    for activation, up in either(operands(node, "mul")):
        name = spelled(activation)
        if name not in _UNITS or len(activation.users) != 1 or argument(activation, 1, "inplace", False) is True:
            continue
        how = {"approximate": argument(activation, 1, "approximate", "none")} if name == "gelu" else {}
        unit = functools.partial(_UNITS[name], **how)
        gate, up = back(activation.args[0]), back(up)
        found = _of_linears(unit(), gate, up, node) or _of_halves(unit(), gate, up, node)
        found = found or _of_halves(unit(packing="up_gate"), up, gate, node)
        if found is not None:
            return found
    return None


def raise_glu(node: Node) -> Found:
    """F.glu(x), whose second half is the gate."""
    x = argument(node, 0, "input")
    if not is_last(argument(node, 1, "dim", -1), x):
        return "it gates along another dimension than the last"
    return one(ops.GLU(packing="up_gate"), x, node)


def merged(linears: list[Node], out: Inner) -> Raised | None:
    """The `Linear`s of one input as a `MergedLinear`, or a `Linear` where it is one."""
    if any(spelled(p) != "linear" or not isinstance(raise_linear(p), list) for p in linears):
        return None
    inputs, weights, biases = zip(*(arguments(p, "input", "weight", "bias") for p in linears), strict=True)
    x, first = back(inputs[0]), example(weights[0])
    shapes = [w.shape for t in weights if (w := example(t)) is not None]
    if any(back(other) is not x for other in inputs) or first is None:
        return None
    sizes, biased = [s[0] for s in shapes], [b is not None for b in biases]
    made = ops.MergedLinear(shapes[0][1], sizes, biased, device=META, dtype=first.dtype)
    made.shards = shards_of(weights)
    given = {f"weight_{i}": w for i, w in enumerate(weights)} | {f"bias_{i}": b for i, b in enumerate(biases)}
    found = one(made, x, linears[0], **given)
    if not isinstance(found, list):
        return None
    found[0].out = out
    return found[0]


def _of_linears(unit: FusableOperation, gate: Any, up: Any, node: Node) -> list[Raised] | None:
    linears = [gate, up]
    if any(spelled(p) != "linear" or len(p.users) != 1 for p in linears):
        return None
    inner = Inner()
    first = merged(linears, inner)
    if first is None or example(node) is None:
        return None
    first.node = node
    return [first, Raised(unit, inner, node, node)]


def _of_halves(unit: FusableOperation, one_half: Any, other_half: Any, node: Node) -> Found:
    first, second = part_of(one_half), part_of(other_half)
    if first is None or second is None or first[0] is not second[0]:
        return None
    (x, start, size), (_, middle, other) = first, second
    e = example(x)
    if e is None or start != 0 or middle != size or size != other or not same_size(e.shape[-1], 2 * size):
        return None
    return one(unit, x, node)


def beside(operations: list[Raised], effects: Effects) -> list[Raised]:
    """The same operations, where the `Linear`s of one tensor whose results nothing else reads are one.

    A result that a call saves for its backward pass would keep the memory of one that no call saves.
    """
    read = {r.x for r in operations}
    groups: dict[tuple[Any, bool], list[Raised]] = {}
    for r in operations:
        plain = type(r.operation) is ops.Linear and spelled(r.out) == "linear" and r.out not in read
        plain = plain and all(_reads_in_place(user, r.out) for user in r.out.users)  # pyright: ignore
        plain = plain and effects.stays(r.out)  # pyright: ignore[reportArgumentType]  # one tensor for all has one version
        if plain and all(p.op in ("placeholder", "get_attr") for p in r.parameters.values()):
            groups.setdefault((r.x, r.reached), []).append(r)
    gone: dict[Raised, Raised | None] = {}
    for group in (part for whole in groups.values() if len(whole) > 1 for part in _saved_alike(whole)):
        if not 1 < len(group) <= MAX_PARTS or not effects.allow(t for r in group for t in r.took):
            continue
        inner = Inner()
        linears: Any = [r.out for r in group]
        found = merged(linears, inner)
        if found is None:
            continue
        found.took = frozenset[Node]().union(*(r.took for r in group))
        found.reached, place = group[0].reached, 0
        for linear_node in linears:
            size: int = example(linear_node).shape[-1]  # pyright: ignore[reportOptionalMemberAccess]
            inner.views.append(View(linear_node, place, None, size))
            place += size
        gone |= dict.fromkeys(group) | {group[0]: found}
    return [kept for r in operations if (kept := gone.get(r, r)) is not None]


def turned(operations: list[Raised], effects: Effects) -> list[Raised]:
    """The same operations, with the transposes that lead from one to others, as in an MLP-Mixer."""
    made: dict[Any, Raised] = {r.out: r for r in operations}
    read = dict.fromkeys(n for r in operations for n in (r.x, *r.channels.values()) if isinstance(n, Node))
    found = list[Raised]()
    for node in read:
        dims, e = swapped(node), example(node)
        source: Any = back(node.args[0]) if dims is not None and e is not None and e.ndim > 2 else None
        if dims is not None and source in made and node not in made and effects.stays(node) and effects.allow({node}):
            between = Raised(ops.Transpose(*dims), source, node, node, took=frozenset({node}))
            between.reached = node in effects.reached
            found.append(between)
    return [*operations, *found]


def _saved_alike(group: list[Raised]) -> tuple[list[Raised], list[Raised]]:
    """Those whose results the calls that read them save, and the others."""
    saved = [r for r in group if isinstance(r.out, Node) and are_saved(r.out)]
    return saved, [r for r in group if r not in saved]


def _reads_in_place(user: Node, linear_node: Node) -> bool:
    """Whether a call can read what it reads as part of a wider tensor; what leaves the graph stays as it was."""
    before, after = example(linear_node), example(user)
    if spelled(user) != "view" or before is None or after is None:
        return spelled(user) is not None
    *rows, size = numbers(before.shape)
    try:
        torch.empty(*rows, 2 * size, device=META)[..., :size].view(numbers(after.shape))
    except RuntimeError:
        return False
    return True


GATED = (matcher(raise_gated, "mul"),)
"""Gated units: behind activations that are spelled out, before those that are calls."""

MATCHERS = (
    matcher(raise_glu, "glu"),
    matcher(raise_linear, "linear"),
)
