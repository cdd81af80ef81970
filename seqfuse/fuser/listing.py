"""A list as it was read once, cut into regions, with the programs made for them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..autograd import apply
from ..group import Group
from ..operation import FusableOperation, UnfusedOperation
from .apart import tell_apart
from .fingerprint import Fingerprint
from .items import Item, flatten, public_channels
from .plan import Plan
from .reference import random_positions
from .segment import Segment

KEPT_PROGRAMS = 512


@dataclasses.dataclass(slots=True, eq=False)
class Program:
    """A planned region, bound."""

    plan: Plan
    segments: list[tuple[Segment, list[int] | None]]  # with its parameters among the region's; None for all in order
    by_reference: bool = False

    def run(self, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None, parameters: Sequence[Tensor]) -> Tensor:
        """Run its segments, one after the other."""
        for segment, indices in self.segments:
            x = apply(segment, x, channels, seeds, parameters if indices is None else [parameters[i] for i in indices])
        return x


def with_entry(programs: dict[Any, Program], key: Any, program: Program) -> dict[Any, Program]:
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
    programs: dict[Any, Program] = dataclasses.field(default_factory=lambda: dict[Any, Program]())
    shapes: dict[Any, Program] = dataclasses.field(default_factory=lambda: dict[Any, Program]())
    latest: tuple[Any, Any] = (None, None)
    compared: bool = False  # with the plans of other processes


class Listing:
    """The list as it was read once: items, regions, channels, and the fingerprint that says whether it still holds."""

    def __init__(self, root: FusableOperation) -> None:
        modules: list[nn.Module] = []
        self.items = flatten(root, modules)
        tell_apart(self.items)
        self.fingerprint = Fingerprint(modules, root)
        self.inputs, self.outputs = public_channels(self.items)
        self.random = random_positions(self.items)
        # Operations as they were configured for a forward, by position: their backward runs on these.
        self.configured: dict[int, Any] = {}
        self.parametrized = any(map(parametrize.is_parametrized, modules))
        self.parts: list[Region | int] = []
        for start, stop in stretches(self.items):
            self.parts.append(self._region(start, stop) if self.items[start].fusable else start)

        lone = self.parts[0] if len(self.parts) == 1 else None
        special = self.random or self.inputs or self.outputs or self.parametrized
        # The one region that everything is, where a call needs nothing beside it.
        self.whole = lone if isinstance(lone, Region) and not special else None

    def forget(self) -> None:
        """Let go of every plan, to make it anew at the next call."""
        for part in self.parts:
            if isinstance(part, Region):
                part.programs, part.shapes, part.latest = {}, {}, (None, None)

    def _region(self, start: int, stop: int) -> Region:
        inside = self.items[start:stop]
        slots = list(dict.fromkeys(slot for item in inside for slot in item.slots.values()))
        made = {c for item in inside for _, c in item.outputs}
        channels = tuple(dict.fromkeys(c for item in inside for _, c in item.inputs if c not in made))
        direct = all(name in owner._parameters for owner, name in slots)  # pyright: ignore[reportPrivateUsage]
        plain = [(owner._parameters, name) for owner, name in slots] if direct else None  # pyright: ignore[reportPrivateUsage]
        over = {slot: item.sum_over for item in inside for slot in item.slots.values() if item.sum_over is not None}
        summed = [(slots.index(slot), group) for slot, group in over.items() if group.size > 1]
        return Region(start, stop, slots, plain, channels, summed)


def stretches(items: Sequence[Item]) -> list[tuple[int, int]]:
    """Where each region begins and ends, and each operation that runs alone."""
    cuts: list[tuple[int, int]] = []
    start = 0
    for position, item in enumerate(items):
        if not item.fusable:
            if position > start:
                cuts.append((start, position))
            cuts.append((position, position + 1))
            start = position + 1
        elif isinstance(item.operation, UnfusedOperation) and item.operation.y_dtype is not None:
            cuts.append((start, position + 1))
            start = position + 1
    return [*cuts, (start, len(items))] if start < len(items) else cuts


@contextlib.contextmanager
def collecting_later() -> Generator[None]:
    """Put garbage collection off: in a long list it would go through the many objects made here again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
