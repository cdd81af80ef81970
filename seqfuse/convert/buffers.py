"""Causal masks in buffers of a model: recognized by their values, which are checked again in each call."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils.weak import WeakIdKeyDictionary

from .masks import TRIANGLE
from .rewrite import run_bodies

CHANGED = "a mask that was causal when they were captured has changed"


class Triangle(NamedTuple):
    """The numbers on and below the diagonal of a mask, and above it."""

    seen: float
    unseen: float


class _Known(NamedTuple):
    """A tensor's id, version and address when it was examined, and the result; changes in place raise the version."""

    tensor: int
    version: int
    address: int
    found: Triangle | None


_known: Any = WeakIdKeyDictionary()
"""By storage, since torch does not swap a tensor that has a weak reference, as when a state dict is loaded."""


def triangle_of(t: Any) -> Triangle | None:
    """The triangle of a tensor [1, ..., N, N], if it is one; cached until the tensor is modified in place."""
    square = type(t) is Tensor and t.ndim > 1 and 1 < t.shape[-1] == t.shape[-2] and t.shape[-1] ** 2 == t.numel()
    if not square or t.is_meta or t.requires_grad or t.is_inference():
        return None
    storage, now = t.untyped_storage(), (id(t), t._version, t.data_ptr())
    known: _Known | None = _known.get(storage)
    if known is None or known[:3] != now:
        known = _known[storage] = _Known(*now, _read(t.detach().view(t.shape[-2:])))
    return known.found


def _read(m: Tensor) -> Triangle | None:
    with _disable_current_modes():  # for example a counter of calls, around the model
        seen, unseen = m[-1, 0], m[0, -1]
        above = torch.ones(m.shape, dtype=torch.bool, device=m.device).triu(1)
        return Triangle(seen.item(), unseen.item()) if torch.equal(m, torch.where(above, unseen, seen)) else None


class Buffers:
    """The triangles among a captured graph's inputs from modules, before it is rewritten."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        self._nodes: list[tuple[int, Node, Triangle]] = []
        for i, (node, given) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False)):
            if _is_of_module(node) and (found := triangle_of(given)) is not None:
                node.meta[TRIANGLE] = found
                self._nodes.append((i, node, found))
        self._before = _copied(gm) if self._nodes else gm

    def checked(self, run: Callable[..., Any], missed: Counter[str]) -> Callable[..., Any]:
        """A function that runs the rewritten graph, or the captured one while a buffer has other values."""
        if not self._nodes:
            return run
        wanted, before = [(i, found) for i, _, found in self._nodes], self._before

        def checked(*args: Any) -> Any:
            if all(triangle_of(args[i]) == found for i, found in wanted):
                return run(*args)
            missed[CHANGED] += 1
            return before.forward(*args)

        return checked


def _is_of_module(node: Node) -> bool:
    """Whether Dynamo read an input of a graph from a module, as for buffers; other inputs are data of a call."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    kind: Any = getattr(source, "guard_source", None)
    return "NN_MODULE" in getattr(kind() if callable(kind) else kind, "name", "")


def _copied(gm: GraphModule) -> GraphModule:
    """A copy of a graph and of the bodies of its checkpoints, which runs without a compiler."""
    made = GraphModule(gm, copy.deepcopy(gm.graph))
    made.meta = dict(gm.meta)
    for node in made.graph.find_nodes(op="placeholder"):
        node.meta.pop("grapharg", None)  # has a weak reference to the input
    for name, body in gm.named_children():
        if isinstance(body, GraphModule):
            setattr(made, name, _copied(body))
    run_bodies(made)
    made.recompile()
    return made
