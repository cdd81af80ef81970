"""Plans ahead of a call: for an input that is not run, or for a machine that is not here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..env import Env
from ..errors import InputError
from ..operation import UnfusedOperation
from ..settings import fusing_now
from .inputs import clearer, expect_tensor, validate, validate_all
from .items import Item
from .known import Known
from .listing import Listing, Region
from .match import Matcher
from .plan import Plan, Wants, merge, plan_region
from .reference import check_channels, draw, walk_reference
from .show import Memory, measure

if TYPE_CHECKING:
    from .run import Fuser


def plan_ahead(
    fuser: Fuser,
    matcher: Matcher,
    listing: Listing,
    x: Tensor | None,
    env: Env | None,
    channels: dict[str, Tensor],
) -> Plan:
    """The plan of a whole list, for an input or for an environment; the fuser only measures what it keeps."""
    if x is not None:
        if listing.items:
            expect_tensor(listing.items[0], x)
        check_channels(listing.items, listing.inputs, channels)
        validate_all(listing, x.shape)
        _validate_channels(listing, x, channels)
    env = here = env or (Env.like(x) if x is not None else Env())
    follows = x is not None and env == Env.like(x)
    shape = None if x is None else tuple(x.shape)  # up to the first barrier, behind which it is not known
    wanted = x is not None and x.requires_grad and env.grad
    known = {name: value.requires_grad for name, value in channels.items()}
    plans: list[Plan] = []
    alone: list[tuple[int, Item]] = []
    for part in listing.parts:
        if isinstance(part, Region):
            wants = Wants.of(listing.items, part.start, part.stop, wanted, known, env.grad)
            shapes = None if shape is None else validate(listing, part, shape)
            shape = None if shapes is None else shapes[-1]
            look_up = Known(listing.items, wants, here, part.start, shapes)
            stretch = listing.items, part.start, part.stop
            plans.append(plan_region(*stretch, wants, here, fusing_now(), matcher, look_up))
            wanted = wanted or wants.live_from < part.stop
            last: Any = listing.items[part.stop - 1].operation
            if follows and last.y_dtype is not None and shape is not None:
                here = here.entered_by(shape, last.y_dtype)
            for position in range(part.start, part.stop):
                known.update((c, position >= wants.live_from) for _, c in listing.items[position].outputs)
        else:
            item, shape = listing.items[part], None
            alone.append((part, item))
            wanted = wanted or (env.grad and any(p.requires_grad for p in item.operation.parameters()))
            known.update((channel, wanted) for _, channel in item.outputs)
    plan = merge(plans, alone, env, listing.items)
    if x is None or not follows or listing.parametrized:
        return plan  # a parametrization is the user's code, which printing must not run

    tensors = [x, *channels.values()] + [t for item in listing.items for t in item.operation.parameters()]
    asked = [t.requires_grad for t in tensors]

    def memory(_: Plan, held: Any = fuser.root) -> Memory | None:  # the plan holds the model
        if [t.requires_grad for t in tensors] != asked:
            return None  # what is kept now is not what this plan says
        return measure(functools.partial(_run_regions, fuser, listing, plans), x, channels, env)

    return dataclasses.replace(plan, measure=memory)


def _validate_channels(listing: Listing, x: Tensor, channels: Mapping[str, Tensor]) -> None:
    """Check what operations up to the first barrier say of the channels that the call passes, by their references."""
    shape, device = tuple(x.shape), torch.device("meta")
    given = {name: torch.empty(value.shape, dtype=value.dtype, device=device) for name, value in channels.items()}
    for part in listing.parts:
        if not isinstance(part, Region) or not given:
            return
        shapes = validate(listing, part, shape)
        for position, shape in zip(range(part.start, part.stop), shapes, strict=False):
            item = listing.items[position]
            if item.inputs and all(channel in given for _, channel in item.inputs):
                entering, run = torch.empty(shape, dtype=x.dtype, device=device), range(position, position + 1)
                try:
                    walk_reference(listing.items, run, listing.random, entering, {**given}, None)
                except InputError as error:
                    raise clearer(listing.items, run, error, entering) from None
                except Exception:  # what needs numbers, or parameters that are elsewhere, says nothing of shapes
                    continue
        shape = shapes[-1]


def _run_regions(
    fuser: Fuser,
    listing: Listing,
    plans: Sequence[Plan],
    x: Tensor,
    channels: dict[str, Tensor],
    planned: bool,
) -> None:
    """Run these plans, or what would be run now, and nothing else: a barrier is taken to return what it got."""
    left = iter(plans)
    seeds = draw(listing.items, listing.random, x) if listing.random else None
    for part in listing.parts:
        if isinstance(part, Region):
            plan = next(left)
            if planned:
                parameters = [getattr(owner, name) for owner, name in part.slots]
                program = fuser.bind(listing, part, x, channels, parameters, plan=plan)
                x = program.run(x, channels, seeds, parameters)
            else:
                x = fuser.run_region(listing, part, x, channels, seeds)
            continue
        item = listing.items[part]
        wanted = x.requires_grad or any(p.requires_grad for p in item.operation.parameters())
        if isinstance(item.operation, UnfusedOperation):
            x = x.new_empty(item.operation.infer(tuple(x.shape)))
        x = x.detach().requires_grad_(wanted and torch.is_grad_enabled())
        channels.update((channel, x) for _, channel in item.outputs)
