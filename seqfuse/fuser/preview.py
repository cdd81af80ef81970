"""Plans ahead of a call: for an input that is not run, or for a machine that is not here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..env import Env, tokens_of
from ..errors import InputError
from ..operation import UnfusedOperation
from .budget import MODES, Budget, Choice, MemoryChoice
from .dtypes import Border, borders_of, under_autocast
from .flatten import Node
from .footprint import Footprint
from .inputs import clearer, expect_tensor, validate
from .match import Matcher
from .memory import Memory, measure
from .op_list import OpList, Region, Runner
from .plan import Plan, merge, plan_region
from .reference import check_channels, check_surplus, draw, walk_reference
from .stretch import Stretch
from .wants import Wants


def plan_ahead(
    fuser: Runner,
    matcher: Matcher,
    op_list: OpList,
    x: Tensor | None,
    env: Env | None,
    channels: dict[str, Tensor],
    memory: Choice = "save",
) -> Plan:
    """The plan of a whole sequence, for an input or for an environment; the fuser only measures what it keeps."""
    if x is not None:
        if op_list.nodes:
            expect_tensor(op_list.nodes[0], x)
        check_channels(op_list.nodes, op_list.inputs, channels)
        _validate(op_list, x, channels)
    else:
        check_surplus(op_list.nodes, op_list.inputs, channels)
    env = here = env or (Env.like(x) if x is not None else Env())
    follows = x is not None and env == Env.like(x)
    shape = None if x is None else tuple(x.shape)  # up to the first barrier, behind which it is not known
    wanted = x is not None and x.requires_grad and env.grad
    known = {name: value.requires_grad for name, value in channels.items()}
    places = list(dict.fromkeys(p.device for node in op_list.nodes for p in node.operation.parameters()))
    places = places or [torch.device("cpu") if x is None else x.device]
    planners: list[tuple[Callable[[Choice], Plan], Footprint | None]] = []
    eager: list[tuple[int, Node]] = []
    for part in op_list.parts:
        if isinstance(part, Region):
            wants = Wants.of(op_list.nodes, part.start, part.stop, wanted, known, env.grad)
            shapes = None if shape is None else validate(op_list.nodes, part.positions, shape)
            shape = None if shapes is None else shapes[-1]
            borders = _borders(op_list, part, x if part.start == 0 else None, channels, here)
            first = x if part is op_list.parts[0] else None
            first = _entering(op_list.nodes[part.start : part.stop], here, shapes) if first is None else first
            about = op_list.nodes, part.positions, here, wants, shapes, borders, first, channels, places[0]
            stretch = Stretch(*about)
            look = None if first is None else Footprint(stretch)
            planners.append((functools.partial(_planned, op_list, part, stretch, matcher, look), look))
            wanted = wanted or wants.live_from < part.stop
            last: Any = op_list.nodes[part.stop - 1].operation
            if follows and last.y_dtype is not None and shape is not None:
                here = here.entered_by(shape, last.y_dtype)
            for position in range(part.start, part.stop):
                known.update((c, position >= wants.live_from) for _, c in op_list.nodes[position].outputs)
        else:
            node, shape = op_list.nodes[part], None
            eager.append((part, node))
            wanted = wanted or (env.grad and any(p.requires_grad for p in node.operation.parameters()))
            known.update((channel, wanted) for _, channel in node.outputs)
    plans = [planner(memory) for planner, _ in planners]
    plan = merge(plans, eager, env, op_list.nodes)
    plan = plan if x is None else dataclasses.replace(plan, tokens=tokens_of(x))
    if x is None or op_list.parametrized:
        return plan  # a parametrization is the user's code, which printing must not run

    parameters = [t for node in op_list.nodes for t in node.operation.parameters()]
    tensors = [x, *channels.values(), *parameters]
    asked = [t.requires_grad for t in tensors]

    def measured(_: Plan, held: Any = fuser.root) -> Memory | str | None:  # the plan holds the model
        if [t.requires_grad for t in tensors] != asked:
            return None  # what is kept now is not what this plan says
        if len(places) > 1:
            return "the parameters are on several devices"
        return measure(functools.partial(_run_regions, fuser, op_list, plans), x, channels, env, places[0], parameters)

    def compared(_: Plan) -> tuple[MemoryChoice, ...]:
        every = {choice: [planner(choice) for planner, _ in planners] for choice in dict.fromkeys((*MODES, memory))}
        if len({tuple((plan.forward, plan.backward) for plan in several) for several in every.values()}) == 1:
            return ()
        found = [None if look is None else look.kept for _, look in planners]
        least, choices = sum(plan.cost for plan in every["save"]), list[MemoryChoice]()
        for choice, several in every.items():
            sizes = [k.saved_by(plan.forward) for k, plan in zip(found, several, strict=True) if k is not None]
            more = (sum(plan.cost for plan in several) - least) / 1000
            choices.append(MemoryChoice(str(choice), sum(sizes), more, choice == memory))
        return tuple(choices)

    has_choice = env.grad and any(fusion.saves_memory for fusion in matcher.fusions)
    return dataclasses.replace(plan, measure=measured, compare=compared if has_choice else None)


def choice_in(memory: Choice, op_list: OpList, region: Region) -> Choice:
    """What a choice of memory for a whole sequence is for a region of it."""
    if not isinstance(memory, Budget):
        return memory
    planned = sum(len(part.positions) for part in op_list.parts if isinstance(part, Region))
    return memory.over(len(region.positions) / planned)


def _planned(
    op_list: OpList, region: Region, stretch: Stretch, matcher: Matcher, look: Footprint | None, memory: Choice
) -> Plan:
    return plan_region(stretch, matcher, look, choice_in(memory, op_list, region))


def _entering(nodes: Sequence[Node], env: Env, shapes: Sequence[Sequence[int]] | None) -> Tensor | None:
    """What stands for the input of a region; where no shape is known, as wide as the first parameter says."""
    if shapes is not None:
        return torch.empty(tuple(shapes[0]), dtype=env.dtype, device="meta")
    for node in nodes:
        operation: Any = node.operation
        last: Any = getattr(operation, "in_features", None) or getattr(operation, "normalized_shape", None)
        if last is not None:
            width = (last,) if isinstance(last, int) else tuple(last)
            return torch.empty(env.rows or 1024, *width, dtype=env.dtype, device="meta")
        if operation.parameter_slots():
            return None
    return None


def _borders(
    op_list: OpList, region: Region, x: Tensor | None, channels: Mapping[str, Tensor], env: Env
) -> tuple[Border, ...]:
    """The dtypes along a region, as far as they are known without what enters it."""
    given = {c: channels[c] for c in region.channels if c in channels}
    if x is not None and env == Env.like(x):
        parameters = [getattr(owner, name) for owner, name in region.slots] if not op_list.parametrized else []
        return borders_of(op_list.nodes, region.positions, x, given, parameters, env)
    if env.autocast is None:
        return ()
    return under_autocast(op_list.nodes, region.positions, env, {c: t.dtype for c, t in given.items()})


def _validate(op_list: OpList, x: Tensor, channels: Mapping[str, Tensor]) -> None:
    """Check shapes, and channels that the call passes, up to the first barrier, behind which they are not known."""
    shape, device = tuple(x.shape), torch.device("meta")
    given = {name: torch.empty(value.shape, dtype=value.dtype, device=device) for name, value in channels.items()}
    for part in op_list.parts:
        if not isinstance(part, Region):
            return
        shapes = validate(op_list.nodes, part.positions, shape)
        for position, shape in zip(range(part.start, part.stop), shapes, strict=False):
            node = op_list.nodes[position]
            if node.inputs and all(channel in given for _, channel in node.inputs):
                entering, run = torch.empty(shape, dtype=x.dtype, device=device), range(position, position + 1)
                try:
                    walk_reference(op_list.nodes, run, entering, {**given}, None)
                except InputError as error:
                    raise clearer(op_list.nodes, run, error, entering) from None
                except Exception:  # what needs numbers, or parameters that are elsewhere, says nothing of shapes
                    continue
        shape = shapes[-1]


def _run_regions(
    fuser: Runner,
    op_list: OpList,
    plans: Sequence[Plan],
    x: Tensor,
    channels: dict[str, Tensor],
    planned: bool,
) -> None:
    """Run these plans, or what would be run now, and nothing else: a barrier is taken to return what it got."""
    left = iter(plans)
    seeds = draw(op_list.nodes, x)
    for part in op_list.parts:
        if isinstance(part, Region):
            plan = next(left)
            if planned:
                parameters = [getattr(owner, name) for owner, name in part.slots]
                program = fuser.bind(op_list, part, x, channels, parameters, plan=plan)
                if program.segments:
                    x = program.run(x, channels, seeds, parameters)
                else:  # of subclasses of tensors, which no plan is run for
                    x = fuser.run_region(op_list, part, x, channels, seeds)
            else:
                x = fuser.run_region(op_list, part, x, channels, seeds)
            continue
        node = op_list.nodes[part]
        wanted = x.requires_grad or any(p.requires_grad for p in node.operation.parameters())
        if isinstance(node.operation, UnfusedOperation):
            x = x.new_empty(node.operation.infer(tuple(x.shape)))
        x = x.detach().requires_grad_(wanted and torch.is_grad_enabled())
        channels.update((channel, x) for _, channel in node.outputs)
