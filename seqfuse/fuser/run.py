"""The fuser: finds the plan for a call and runs it."""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import operation as operations
from ..env import Env, any_autocast, autocast_of
from ..errors import StateError
from ..fusion import FusedOperation, checked
from ..group import summed_gradient
from ..operation import FusableOperation, changes
from ..settings import fusing_now, settings
from .ahead import plan_ahead
from .apart import compare, tell_apart
from .bind import binder_of
from .enrolled import enroll
from .inputs import check_channel_devices, check_devices, expect_tensor, validate
from .items import flatten, has_own_graph, public_channels
from .known import Known
from .listing import Listing, Program, Region, collecting_later, with_entry
from .match import Matcher
from .plan import Plan, Wants, plan_region
from .reference import by_reference, check_channels, draw, random_positions, run_alone, transformed, walk_reference

KEPT_LISTS = 8
_requires, _dtype = operator.attrgetter("requires_grad"), operator.attrgetter("dtype")
_PLAIN = (Tensor, nn.Parameter)
_one_at_a_time = threading.RLock()
_planning = threading.RLock()


def _fresh_locks() -> None:
    global _one_at_a_time, _planning
    _one_at_a_time, _planning = threading.RLock(), threading.RLock()


# A forked child would wait for a thread it does not have; what the locks protect is swapped whole, so it is sound.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_locks)


class _Changed(StateError):
    """A parameter was taken away in place, `_parameters["bias"] = None`, which nobody was told of."""


class Fuser:
    """Operations x fusions x `Env` -> `Plan`, and the code that runs a plan.

    Args:
        root: a container, or one operation.
        fusions: the rule set, in order of preference between equals.
        owned: whether `root` holds this fuser, which then does not keep it alive.
    """

    views = True  # stretches of nothing but views run under plain autograd

    def __init__(
        self, root: FusableOperation, fusions: Sequence[type[FusedOperation]] = (), owned: bool = False
    ) -> None:
        self._root, self._held = weakref.ref(root), None if owned else root
        self.fusions = checked(fusions)
        self._reset()

    def _reset(self) -> None:
        self._listings: tuple[Listing, ...] = ()
        self._name = enroll(self)
        self._matcher = Matcher(self.fusions)

    def __getstate__(self) -> dict[str, Any]:
        return {"_root": self.root, "_held": self._held, "fusions": self.fusions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _root=weakref.ref(state["_root"]))
        self._reset()

    @property
    def root(self) -> Any:
        """The container, or the one operation: there as long as somebody holds it."""
        return self._root()

    def __call__(self, x: Tensor, **channels: Tensor) -> Any:
        """Run the list: `y`, or `(y, *outputs)` where it makes public extra outputs."""
        if torch.compiler.is_compiling():
            return self._traced(x, channels)
        listings = self._listings
        listing = listings[0] if listings and listings[0].fingerprint.holds() else self.listing()
        if x.__class__ not in _PLAIN or transformed():
            if not listing.fingerprint.holds_in_full():  # a parameter was taken away in place
                listing = self._changed()
            if listing.items and listing.items[0].fusable:
                expect_tensor(listing.items[0], x)
            return by_reference(listing.items, listing.random, listing.inputs, listing.outputs, x, channels)
        return self.run(listing, x, channels)

    def run(self, listing: Listing, x: Tensor, channels: dict[str, Tensor]) -> Any:
        """Run the planned list on plain tensors."""
        if listing.whole is not None and not channels:
            try:
                return self.run_region(listing, listing.whole, x, channels, None)
            except _Changed:
                return self.run(self._changed(), x, channels)
        if channels or listing.inputs:
            check_channels(listing.items, listing.inputs, channels)
        seeds = draw(listing.items, listing.random, x) if listing.random else None
        if listing.parametrized:
            # The cache is the process's, so that one thread would read tensors of another's graph.
            with _one_at_a_time, parametrize.cached():
                x = self._run_parts(listing, x, channels, seeds)
        else:
            x = self._run_parts(listing, x, channels, seeds)
        if listing.outputs:
            return (x, *[channels[name] for name in listing.outputs])
        return x

    def _run_parts(
        self, listing: Listing, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None, first: int = 0
    ) -> Tensor:
        for i, part in enumerate(listing.parts[first:], first):
            if part.__class__ is Region:
                try:
                    x = self.run_region(listing, part, x, channels, seeds)  # pyright: ignore[reportArgumentType]
                except _Changed:
                    return self._run_parts(self._changed(), x, channels, seeds, i)
            else:
                x = run_alone(listing.items, part, x, channels)  # pyright: ignore[reportArgumentType]
        return x

    def run_region(
        self, listing: Listing, region: Region, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None
    ) -> Tensor:
        """Run a region as it is planned for these tensors."""
        plain = region.plain
        try:
            if plain is not None:
                parameters = [owned[name] for owned, name in plain]
            else:
                parameters = [getattr(owner, name) for owner, name in region.slots]
            signature = _signature(parameters)
        except (AttributeError, KeyError):
            if listing.fingerprint.holds_in_full():
                raise
            raise _Changed("a parameter was taken away in place from a model in stages", code="SF506") from None
        for i, group in region.summed:
            if parameters[i].requires_grad and torch.is_grad_enabled():
                parameters[i] = summed_gradient(group, parameters[i])
        key = (
            x.shape,
            x.dtype,
            x.device,
            x.requires_grad,
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            autocast_of(x.device.type) if any_autocast() else None,
            fusing_now(),
            signature,
            _signature([channels[c] for c in region.channels]) if region.channels else None,
        )
        latest, program = region.latest
        if latest != key:
            program = self._program(listing, region, key, x, channels, parameters)
            if settings().debug and not region.compared:
                compare(listing, region, program.plan, x, seeds)
        if program.by_reference:
            return walk_reference(listing.items, range(region.start, region.stop), listing.random, x, channels, seeds)
        return program.run(x, channels, seeds, parameters)

    def _program(
        self,
        listing: Listing,
        region: Region,
        key: Any,
        x: Tensor,
        channels: dict[str, Tensor],
        parameters: Sequence[Tensor],
    ) -> Program:
        shape, *state, parameter_state, channel_state = key
        rows = Env.like(x).rows
        exact_key = (shape, *state, tuple(parameter_state), tuple(channel_state or ()))
        bucket_key = (rows, shape[-1:], *exact_key[1:])
        with _planning:
            program = region.shapes.get(exact_key)
            if program is None:
                validate(listing, region, shape)
                program = region.programs.get(bucket_key)
                if program is None:
                    with collecting_later():
                        program = self.bind(listing, region, x, channels, parameters)
                    region.programs = with_entry(region.programs, bucket_key, program)
                region.shapes = with_entry(region.shapes, exact_key, program)
            region.latest = key, program
            return program

    def bind(
        self,
        listing: Listing,
        region: Region,
        x: Tensor,
        channels: dict[str, Tensor],
        parameters: Sequence[Tensor],
        plain: tuple[type[Tensor], ...] = _PLAIN,
        plan: Plan | None = None,
    ) -> Program:
        """Plan a region for these tensors, or take a plan of it; what is not `plain` goes by reference."""
        env, fusing = Env.like(x), fusing_now()
        exact = all(p.__class__ in plain for p in parameters)
        if x.__class__ in plain:  # else fake tensors measure what plain ones would do
            exact = exact and all(channels[c].__class__ in plain for c in region.channels)
        exact = exact and not has_own_graph(self.root)
        for item in listing.items[region.start : region.stop]:
            check_devices(listing.items, item, x)
        check_channel_devices(listing, region, x, channels)
        given = {c: channels[c].requires_grad for c in region.channels}
        wants = Wants.of(listing.items, region.start, region.stop, x.requires_grad, given, env.grad)
        shapes = validate(listing, region, x.shape)
        if plan is None:
            known = Known(listing.items, wants, env, region.start, None if env.rows is None else shapes)
            plan = plan_region(listing.items, region.start, region.stop, wants, env, fusing, self._matcher, known)
        note = weakref.WeakMethod(self._note_failure)
        binder = binder_of(listing, region, x, channels, parameters, shapes, wants, env, fusing.on_error, note)
        index = {(id(owner), name): i for i, (owner, name) in enumerate(region.slots)}
        bound = binder.segments(plan) if exact else []
        chosen = [[index[id(owner), name] for owner, name in s.parameters] for s in bound]
        whole = [*range(len(parameters))]
        segments = [(s, None if indices == whole else indices) for s, indices in zip(bound, chosen, strict=True)]
        inside: list[Any] = [item.operation for item in listing.items[region.start : region.stop]]
        views = self.views and not any(plan.fused) and all(operation.is_view for operation in inside)
        return Program(plan, segments, views or not exact)

    def _changed(self) -> Listing:
        changes.note()
        return self.listing()

    def _note_failure(self, fusion: str, at: int, reason: str) -> None:
        with _planning:
            if self._matcher.note_failure(fusion, at, reason):
                for listing in self._listings:
                    listing.forget()

    def listing(self) -> Listing:
        """The list as it is now; read again only if its fingerprint no longer holds."""
        for listing in self._listings:
            if listing.fingerprint.holds():
                self._listings = (listing, *(other for other in self._listings if other is not listing))
                return listing
        with _planning:
            for listing in self._listings:
                if listing.fingerprint.holds():
                    return listing
            kept = [known for known in self._listings if known.fingerprint.differs_in_training_only()]
            with collecting_later():
                listing = Listing(self.root)
            self._matcher.failures.clear()  # they are known by their positions
            self._listings = (listing, *kept[: KEPT_LISTS - 1])
            return listing

    def plan(self, x: Tensor | None = None, *, env: Env | None = None, **channels: Tensor) -> Plan:
        """The plan for an input, or for an environment.

        Without an input, gradients are taken to be wanted for parameters but not for the input. Behind a barrier the
        tensor is taken to be as it was before it, with a gradient wanted if one was wanted before.
        """
        with collecting_later():
            return plan_ahead(self, self._matcher, self._changed(), x, env, channels)

    def _traced(self, x: Tensor, channels: dict[str, Tensor]) -> Any:
        """A call that a compiler traces: the list is read afresh, in code it can follow."""
        from .traced import has_graph_inside, plannable, run_planned

        items = flatten(self.root)
        tell_apart(items)
        random = random_positions(items)
        inputs, outputs = public_channels(items)
        # The name last, and given to nobody else: a graph that has read it is this list's alone.
        if type(self) is Fuser and plannable(items, x) and self._name and not has_graph_inside(self._name):
            return run_planned(self._name, items, random, inputs, outputs, x, channels)
        return by_reference(items, random, inputs, outputs, x, channels)


def _signature(tensors: Sequence[Tensor]) -> list[Any]:
    return [*map(_requires, tensors), *map(_dtype, tensors), *map(type, tensors)]


operations.alone = Fuser
