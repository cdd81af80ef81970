"""GEMMs of one tensor: gated units act(gate) * up, and `Linear`s side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from .. import ops
from ..operation import FusableOperation
from ..ops.mergedlinear import MAX_PARTS
from .effects import Effects
from .graph import argument, back, example, is_fixed, numbers, operands, same_size, spelled
from .launches import are_saved
from .raising import META, Found, Inner, Raised, View, matcher, one

_UNITS: dict[str, Callable[..., FusableOperation]] = {
    "gelu": ops.GEGLU, "silu": ops.SwiGLU, "relu": ops.ReGLU, "sigmoid": ops.GLU,
}  # fmt: skip


@matcher("mul", rank=2)  # after the activations that are spelled out
def raise_gated(node: Node) -> Found:
    """act(gate) * up."""
    pair = operands(node, "mul")
    for activation, up in (pair, pair[::-1]) if pair is not None else ():
        name = spelled(activation)
        if name not in _UNITS or len(activation.users) != 1 or argument(activation, 1, "inplace", False) is True:
            continue
        unit = _UNITS[name](argument(activation, 1, "approximate", "none")) if name == "gelu" else _UNITS[name]()
        took: list[Node] = [activation]
        gate, up = back(activation.args[0], took), back(up, took)
        found = _of_linears(unit, gate, up, node, took) or _of_halves(unit, gate, up, node, took)
        if found is not None:
            return found
        if _of_halves(unit, up, gate, node, []) is not None:
            return "it gates with the second half of its input"
    return None


@matcher("glu")
def raise_glu(node: Node) -> Found:
    """F.glu(x): the second half is the gate, so its halves must be of two GEMMs, or it stays."""
    return "torch's GLU gates with its second half"


def merged(linears: list[Node], out: Inner, took: list[Node]) -> Raised | None:
    """The `Linear`s of one input as a `MergedLinear`, or a `Linear` where it is one."""
    if any(spelled(p) != "linear" for p in linears):
        return None
    x, *others = (back(argument(p, 0, "input"), took) for p in linears)
    if any(other is not x for other in others):
        return None
    weights = [argument(p, 1, "weight") for p in linears]
    biases = [argument(p, 2, "bias") for p in linears]
    shapes = [w.shape for weight in weights if (w := example(weight)) is not None]
    first = example(weights[0])
    if first is None or example(x) is None or len(shapes) != len(weights) or any(len(s) != 2 for s in shapes):
        return None
    if not is_fixed(*(size for shape in shapes for size in shape)):
        return None
    sizes, biased = [s[0] for s in shapes], [b is not None for b in biases]
    made = ops.MergedLinear(shapes[0][1], sizes, biased, device=META, dtype=first.dtype)
    given: dict[str, Any] = {f"weight_{i}": w for i, w in enumerate(weights)}
    given |= {f"bias_{i}": b for i, b in enumerate(biases) if b is not None}
    found = one(made, x, linears[0], [*took, *linears], **given)
    if not isinstance(found, list):
        return None
    found[0].out = out
    return found[0]


def _of_linears(unit: FusableOperation, gate: Any, up: Any, node: Node, took: list[Node]) -> list[Raised] | None:
    linears = [gate, up]
    if any(spelled(p) != "linear" or len(p.users) != 1 for p in linears):
        return None
    inner = Inner()
    first = merged(linears, inner, [])
    e = example(node)
    if first is None or e is None:
        return None
    return _together([first, Raised(unit, inner, node, [*took, node], node)], node)


def _of_halves(unit: FusableOperation, gate: Any, up: Any, node: Node, took: list[Node]) -> Found:
    first, second = part_of(gate, took), part_of(up, took)
    if first is None or second is None or first[0] is not second[0]:
        return None
    (x, start, size), (_, middle, other) = first, second
    e = example(x)
    if e is None or start != 0 or middle != size or size != other or not same_size(e.shape[-1], 2 * size):
        return None
    return one(unit, x, node, took)


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
        if plain and all(isinstance(p, Node) and p.op in ("placeholder", "get_attr") for p in r.parameters.values()):
            groups.setdefault((r.x, r.reached), []).append(r)
    gone: dict[Raised, Raised | None] = {}
    for group in (part for whole in groups.values() if len(whole) > 1 for part in _saved_alike(whole)):
        if not 1 < len(group) <= MAX_PARTS or not effects.allow(t for r in group for t in r.took):
            continue
        inner = Inner()
        linears: Any = [r.out for r in group]
        found = merged(linears, inner, [t for r in group for t in r.took])
        if found is None:
            continue
        found.node, found.reached, place = linears[0], group[0].reached, 0
        for linear_node in linears:
            size: int = example(linear_node).shape[-1]  # pyright: ignore[reportOptionalMemberAccess]
            inner.views.append(View(linear_node, place, None, size))
            place += size
        gone |= dict.fromkeys(group) | {group[0]: found}
    return [kept for r in operations if (kept := gone.get(r, r)) is not None]


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


def part_of(node: Any, took: list[Node]) -> tuple[Any, int, int] | None:
    """Of which tensor a node is a stretch of the last dimension, where it starts, and its length."""
    e = example(node)
    if e is None or spelled(node) != "getitem" or not is_fixed(e.shape[-1]):
        return None
    source, index = node.args
    indices = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else ()
    name, size = spelled(source), e.shape[-1]
    if name in ("chunk", "split", "split_with_sizes") and isinstance(index, int) and source.args:
        whole = source.args[0]
        w = example(whole)
        dim = argument(source, 2, "dim", 0)
        if w is None or dim not in (-1, w.ndim - 1) or not is_fixed(w.shape[-1]):
            return None
        named = {"split_size", "split_size_or_sections", "split_sizes", "chunks"} & set(source.kwargs)
        sizes: Any = source.kwargs[named.pop()] if named else argument(source, 1, "")
        if isinstance(sizes, list | tuple):
            start: int = sum(cast("Sequence[int]", sizes)[:index])
        elif isinstance(sizes, int) and index >= 0:
            each = sizes if name == "split" else -(-w.shape[-1] // sizes)
            start = each * index
        else:
            return None
        took += [node, source]
        return whole, start, size
    if indices and isinstance(indices[-1], slice):
        last = cast("slice[Any, Any, Any]", indices[-1])
        if any(i is not Ellipsis and i != slice(None) for i in indices[:-1]) or last.step not in (None, 1):
            return None
        w = example(source)
        if w is None or w.ndim != e.ndim or not is_fixed(w.shape[-1]):
            return None
        if Ellipsis not in indices and len(indices) != w.ndim:
            return None  # a stretch of another dimension
        if any(isinstance(i, Node) for i in (last.start, last.stop)):
            return None
        took.append(node)
        return source, slice(last.start, last.stop).indices(w.shape[-1])[0], size
    return None


def _together(found: list[Raised], node: Node) -> list[Raised]:
    for r in found:
        r.node = node
    return found
