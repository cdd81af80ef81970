"""A flattened sequence, cut into regions, with their plans."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..group import Group
from ..operation import FusableOperation, UnfusedOperation
from ..plan.flatten import TWINS, Fingerprint, Node, flatten, plain_type, public_channels
from ..plan.native import TorchCall
from ..plan.plan import Plan
from ..plan.reference import number_seeds
from ..plan.step import Stretch
from .lower import Segment
from .shards import mark_shards

KEPT_LOWERINGS = 512

# By name: a node in a compiler's graph can only reference a fuser by name.
fusers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def callers_level() -> int:
    """The `stacklevel` with which a warning points at the user's line that called the library or torch."""
    frame, level = sys._getframe(1), 1  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").partition(".")[0] in ("seqfuse", "torch")
        or frame.f_code.co_filename.startswith("<eval_with_key>")  # a graph of torch.fx
    ):
        frame, level = frame.f_back, level + 1
    return level


Call = Callable[[Tensor, dict[str, Tensor], Tensor | None], Tensor | None]
"""Runs a region on x, channels and seeds; returns `None` if the state has changed."""


@dataclasses.dataclass(slots=True, eq=False)
class CompiledRegion:
    """The plan of a region, lowered to segments."""

    plan: Plan
    stretch: Stretch  # the stretch that was planned, without tensors
    segments: list[tuple[Segment, list[int]]]  # each with the indices of its parameters among the region's
    by_reference: bool = False
    native: Sequence[TorchCall] = ()  # the equivalent calls of torch, if no fusion is used


def with_entry(lowerings: dict[Any, Any], key: Any, lowering: Any) -> dict[Any, Any]:
    """A copy with one more entry, since readers hold no lock. A full cache starts empty again."""
    return {**(lowerings if len(lowerings) < KEPT_LOWERINGS else {}), key: lowering}


def _empty() -> dict[Any, Any]:
    """A new cache, in a form that Dynamo traces: torch 2.15 does not trace `dict[Any, Any]()`."""
    return {}


@dataclasses.dataclass(slots=True, eq=False)
class Region:
    """Operations between barriers, with their plans."""

    start: int
    stop: int
    slots: list[tuple[nn.Module, str]]
    channels: tuple[str, ...]
    summed: list[tuple[int, Group]]  # slots whose gradients are summed, and the group
    lowerings: dict[Any, CompiledRegion] = dataclasses.field(default_factory=_empty)
    # Plans by the exact state of a call, with the function that checks that state and runs the plan.
    states: dict[Any, tuple[CompiledRegion, Call | None]] = dataclasses.field(default_factory=_empty)
    latest: Call | None = None  # the function of the latest call
    lowering: CompiledRegion | None = None  # and what it runs
    compared: bool = False  # whether its plan was compared with those of other processes
    rehearsed: dict[Any, None] = dataclasses.field(default_factory=_empty)  # plans whose C kernels are compiled

    @property
    def positions(self) -> range:
        return range(self.start, self.stop)


class OpList:
    """The flattened sequence: nodes, regions, channels, and the fingerprint that detects changes."""

    def __init__(self, root: FusableOperation) -> None:
        modules: list[nn.Module] = []
        self.nodes = flatten(root, modules)
        mark_shards(self.nodes)
        self.fingerprint = Fingerprint(modules, root)
        self.inputs, self.outputs = public_channels(self.nodes)
        self.random = number_seeds(self.nodes)
        # Copies of operations as configured in a forward, by position: their backward runs on these.
        self.configured: dict[int, Any] = {}
        self.parametrized = any(parametrize.is_parametrized(m) for m in modules if len(m._modules))  # pyright: ignore[reportPrivateUsage]
        self.parts: list[Region | int] = []
        theirs = len(self.nodes) > 1 and all(plain_type(node.operation) in TWINS for node in self.nodes)
        if theirs and not torch.compiler.is_compiling():
            message = "nothing in this Sequential can be fused, as its modules are torch.nn's: use sf.nn.from_torch"
            warnings.warn(message, UserWarning, stacklevel=callers_level())
        for start, stop in stretches(self.nodes):
            self.parts.append(self._region(start, stop) if self.nodes[start].fusable else start)

        lone = self.parts[0] if len(self.parts) == 1 else None
        # The only region, if a call only has to run it: its guard reads the channels, and there are no seeds.
        special = self.random or self.parametrized
        self.whole = lone if isinstance(lone, Region) and not special else None

    def forget(self) -> None:
        """Drops all plans; the next call plans again."""
        for part in self.parts:
            if isinstance(part, Region):
                part.lowerings, part.states, part.latest = {}, {}, None

    def _region(self, start: int, stop: int) -> Region:
        inside = self.nodes[start:stop]
        slots = list(dict.fromkeys(slot for node in inside for slot in node.slots.values()))
        channels, _ = public_channels(self.nodes, start, stop)
        over = {slot: node.sum_over for node in inside for slot in node.slots.values() if node.sum_over is not None}
        summed = [(slots.index(slot), group) for slot, group in over.items() if group.size > 1]
        return Region(start, stop, slots, channels, summed)


def stretches(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Start and stop of each region, and of each module that runs eagerly."""
    cuts: list[tuple[int, int]] = []
    start = 0
    for position, node in enumerate(nodes):
        if not node.fusable:
            if position > start:
                cuts.append((start, position))
            cuts.append((position, position + 1))
            start = position + 1
        elif isinstance(node.operation, UnfusedOperation) and node.operation.y_dtype is not None:
            cuts.append((start, position + 1))
            start = position + 1
    return [*cuts, (start, len(nodes))] if start < len(nodes) else cuts


@contextlib.contextmanager
def collecting_later() -> Generator[None]:
    """Defers garbage collection, which would scan the many new objects of a long sequence repeatedly."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
