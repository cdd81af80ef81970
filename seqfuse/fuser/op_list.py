"""A sequence as it was read once, cut into regions, with the programs made for them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..casts import cast_once
from ..group import Group
from ..operation import FusableOperation, UnfusedOperation
from .fingerprint import Fingerprint
from .flatten import TWINS, Node, flatten, plain_type, public_channels
from .lowering import Segment
from .node import apply_node, run_plain, taken
from .plan import Plan
from .reference import number_seeds
from .sharding import tell_apart

KEPT_PROGRAMS = 512

# By name, for a node in a compiler's graph, which can hold nothing but names.
fusers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enroll(fuser: Any) -> str:
    """A name by which the node finds a fuser; none for one that exists in a trace only."""
    if torch.compiler.is_compiling():
        return ""
    name = str(next(_numbers))
    fusers[name] = fuser
    return name


Call = Callable[[Tensor, dict[str, Tensor], Tensor | None], Tensor | None]
"""Runs a region: x, channels and seeds to the result; `None` where the state is another one."""


@dataclasses.dataclass(slots=True, eq=False)
class CompiledRegion:
    """A planned region, bound."""

    plan: Plan
    segments: list[tuple[Segment, list[int]]]  # with the indices of its parameters among the region's
    by_reference: bool = False
    native: Callable[[Tensor], Tensor] | None = None  # the reference of the one operation that it is

    def run(self, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None, parameters: Sequence[Tensor]) -> Tensor:
        """Run its segments, one after the other."""
        casts = self.plan.env.autocast is not None and any(segment.live for segment, _ in self.segments)
        with cast_once() if casts else contextlib.nullcontext():
            for segment, indices in self.segments:
                given = [segment, seeds, x, *[channels[name] for name in segment.inputs]]
                run, own = (apply_node, [parameters[i] for i in indices]) if segment.live else (run_plain, [])
                x = run(*given, *own)
                if segment.outputs:
                    x, *rest = taken(x)
                    channels.update(zip(segment.outputs, rest, strict=True))
                for name in segment.consumed:
                    del channels[name]
        return x


def with_entry(programs: dict[Any, Any], key: Any, program: Any) -> dict[Any, Any]:
    """A copy with one more entry: readers hold no lock. A full one starts anew."""
    return {**(programs if len(programs) < KEPT_PROGRAMS else {}), key: program}


@dataclasses.dataclass(slots=True, eq=False)
class Region:
    """A stretch of operations between barriers, with the programs made for it."""

    start: int
    stop: int
    slots: list[tuple[nn.Module, str]]
    plain: list[tuple[dict[str, Any], str]] | None  # where parameters can be read directly
    channels: tuple[str, ...]
    summed: list[tuple[int, Group]]  # of those slots, whose gradients are, and over which processes
    programs: dict[Any, CompiledRegion] = dataclasses.field(default_factory=lambda: dict[Any, CompiledRegion]())
    # The same by the whole state of a call, with the function that runs it.
    states: dict[Any, tuple[CompiledRegion, Call | None]] = dataclasses.field(
        default_factory=lambda: dict[Any, tuple[CompiledRegion, Call | None]]()
    )
    latest: Call | None = None  # the function of the latest call
    program: CompiledRegion | None = None  # and what it runs
    compared: bool = False  # with the plans of other processes

    @property
    def positions(self) -> range:
        """Those of its operations."""
        return range(self.start, self.stop)


class OpList:
    """The sequence as it was read once: nodes, regions, channels, and the fingerprint by which a change is noticed."""

    def __init__(self, root: FusableOperation) -> None:
        modules: list[nn.Module] = []
        self.nodes = flatten(root, modules)
        tell_apart(self.nodes)
        self.fingerprint = Fingerprint(modules, root)
        self.inputs, self.outputs = public_channels(self.nodes)
        self.random = number_seeds(self.nodes)
        # Operations as they were configured for a forward, by position: their backward runs on these.
        self.configured: dict[int, Any] = {}
        self.parametrized = any(map(parametrize.is_parametrized, modules))
        self.parts: list[Region | int] = []
        theirs = len(self.nodes) > 1 and all(plain_type(node.operation) in TWINS for node in self.nodes)
        if theirs and not torch.compiler.is_compiling():
            message = "nothing in this Sequential can be fused, as its modules are torch.nn's: use sf.nn.from_torch"
            warnings.warn(message, UserWarning, stacklevel=2)
        for start, stop in stretches(self.nodes):
            self.parts.append(self._region(start, stop) if self.nodes[start].fusable else start)

        lone = self.parts[0] if len(self.parts) == 1 else None
        special = self.random or self.inputs or self.outputs or self.parametrized
        # The one region that everything is, where a call needs nothing beside it.
        self.whole = lone if isinstance(lone, Region) and not special else None

    def forget(self) -> None:
        """Let go of every plan, to make it anew at the next call."""
        for part in self.parts:
            if isinstance(part, Region):
                part.programs, part.states, part.latest = {}, {}, None

    def _region(self, start: int, stop: int) -> Region:
        inside = self.nodes[start:stop]
        slots = list(dict.fromkeys(slot for node in inside for slot in node.slots.values()))
        channels, _ = public_channels(self.nodes, start, stop)
        direct = all(name in owner._parameters for owner, name in slots)  # pyright: ignore[reportPrivateUsage]
        plain = [(owner._parameters, name) for owner, name in slots] if direct else None  # pyright: ignore[reportPrivateUsage]
        over = {slot: node.sum_over for node in inside for slot in node.slots.values() if node.sum_over is not None}
        summed = [(slots.index(slot), group) for slot, group in over.items() if group.size > 1]
        return Region(start, stop, slots, plain, channels, summed)


def stretches(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Where each region begins and ends, and each operation that runs eagerly."""
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
    """Put garbage collection off: in a long sequence it would go through the many objects made here again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
