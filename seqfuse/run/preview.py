"""Plans without a call: for an example input, or for another machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..env import Env, bucket, rows_of, tokens_of
from ..errors import InputError
from ..fake import recorded
from ..operation import FusableOperation, UnfusedOperation
from ..plan.arriving import Arriving
from ..plan.facts import look
from ..plan.flatten import Node
from ..plan.inputs import borders_of, clearer, expect_tensor, validate
from ..plan.match import Matcher, is_own
from ..plan.plan import Plan, merge
from ..plan.reference import check_channels, check_surplus, walk_reference
from ..plan.schedule import MODES, Budget, Choice, MemoryChoice, Share
from ..plan.search import Search, held_by, plan_region
from ..plan.step import Stretch, Wants
from ..plan.tally import Memory
from ..settings import Fusing, fusing_now
from .regions import OpList, Region
from .trial import Weighing

HALF = Budget(part=0.5)
"""A plan lists the memory of this choice beside that of the named ones."""


def preview(
    root: FusableOperation,
    matcher: Matcher,
    op_list: OpList,
    x: Tensor | None,
    env: Env | None,
    channels: dict[str, Tensor],
    memory: Choice,
) -> Plan:
    """The plan of a whole sequence for an input or an environment."""
    if x is not None:
        if op_list.nodes:
            expect_tensor(op_list.nodes[0], x)
        check_channels(op_list.nodes, op_list.inputs, channels)
    else:
        check_surplus(op_list.nodes, op_list.inputs, channels)
    env = here = env or (Env.like(x) if x is not None else Env())
    follows = x is not None and env == Env.like(x)
    shape = None if x is None else tuple(x.shape)
    wanted = x is not None and x.requires_grad
    known = {name: value.requires_grad for name, value in channels.items()}
    parameters = [p for node in op_list.nodes for p in node.operation.parameters()]
    places = list(dict.fromkeys(p.device for p in parameters)) or [torch.device("cpu") if x is None else x.device]
    stretches: list[tuple[Region, Stretch]] = []
    parts: list[Stretch | Node] = []
    unread = op_list.parametrized and memory == "fast"  # a parametrization is the user's code: printing does not run it
    several = len(op_list.parts) > 1 and not unread
    arriving = Arriving(x, channels, env, places[0]) if x is not None and several else None
    counts = x is not None and env.rows in (Env.like(x).rows, bucket(tokens_of(x) or 0))  # the tokens of this input
    entering, given = x, channels
    for part in op_list.parts:
        if isinstance(part, Region):
            wants = Wants.of(op_list.nodes, part.start, part.stop, wanted, known, env.grad)
            shapes = None if shape is None else validate(op_list.nodes, part.positions, shape, given)
            shape = None if shapes is None else shapes[-1]
            if entering is not None and shapes is not None:
                _check_channels(op_list.nodes, part.positions, entering, shapes, given, env.autocast is not None)
            own = [getattr(owner, name) for owner, name in part.slots] if follows and not op_list.parametrized else []
            entered, beside = entering if follows else None, given
            if entered is not None and arriving is not None and part.start > 0:
                entered, beside = arriving.x, arriving.channels  # meta tensors do not fit parameters on other devices
            beside = {c: beside[c] for c in part.channels if c in beside}
            borders = borders_of(op_list.nodes, part.positions, entered, beside, own, here)
            width = _entering_width(op_list.nodes[part.start : part.stop])
            if x is None and width is not None:  # a substitute for an input that is not given
                entering = torch.empty(here.tokens, *width, dtype=here.dtype, device="meta")
            about = op_list.nodes, part.positions, here, wants, shapes, borders, entering, given, places[0]
            why = None if arriving is None else arriving.unknown
            stretches.append((part, Stretch(*about, fusing=_fusing(part), unknown=why)))
            parts.append(stretches[-1][1])
            wanted = wanted or wants.live_from < part.stop
            last: Any = op_list.nodes[part.stop - 1].operation
            if follows and last.y_dtype is not None and shape is not None:
                here = dataclasses.replace(here, dtype=last.y_dtype, rows=bucket(rows_of(shape)))
            for position in range(part.start, part.stop):
                known.update((c, position >= wants.live_from) for _, c in op_list.nodes[position].outputs)
        else:
            node, shape = op_list.nodes[part], None
            parts.append(node)
            wanted = wanted or any(p.requires_grad for p in node.operation.parameters())
            known.update((channel, wanted) for _, channel in node.outputs)
        entering = None
        if arriving is not None:
            arriving.run(op_list.nodes, part.positions if isinstance(part, Region) else range(part, part + 1))
            if arriving.unknown is None:
                entering, given = arriving.apart()
                wanted, shape = entering.requires_grad, tuple(entering.shape)
                known.update((name, t.requires_grad) for name, t in given.items())
                like = Env.like(entering)
                here = dataclasses.replace(
                    here, dtype=like.dtype if follows else here.dtype, rows=like.rows if counts else here.rows
                )

    eager = [(part, op_list.nodes[part]) for part in op_list.parts if not isinstance(part, Region)]
    searches = [Search(stretch, matcher, Weighing, near=True) for _, stretch in stretches]

    def planned(choice: Choice) -> Plan:
        each = zip(stretches, searches, strict=True)
        plans = [plan_region(search, choice_in(choice, op_list, part, own.x)) for (part, own), search in each]
        return merge(plans, eager, env if largest is None else largest.env)

    largest = max((stretch for _, stretch in stretches), key=lambda stretch: len(stretch.positions), default=None)
    plan = planned(memory)
    plan = dataclasses.replace(plan, unmatched=tuple(_unmatched(matcher, plan)))
    if x is None or op_list.parametrized:
        return plan  # a parametrization is the user's code, which printing must not run

    def tensors() -> list[Any]:
        of_model = [p for node in op_list.nodes for p in node.operation.parameters()]
        return [(t.requires_grad, t.dtype, t.device, t.shape) for t in (x, *channels.values(), *of_model)]

    planned_for = tensors()

    def has_changed() -> bool:
        """Whether the model is not that of this plan any more."""
        return not op_list.fingerprint.same_modules() or tensors() != planned_for

    def measured(plan: Plan, held: Any = root) -> Memory | str | None:  # the plan keeps the model alive
        if has_changed():
            return None
        if len(places) > 1:
            return "the parameters are on several devices"
        for stretch in (stretch for _, stretch in stretches if stretch.fusing.off != Fusing.off):
            return f"{stretch.fusing.off}, so that autograd chooses what is saved"
        if largest is None:
            return Memory(0, 0, 0)
        kind = places[0].type
        if env.autocast is not None and (env.device != kind or not torch.amp.is_autocast_available(kind)):
            return f"autocast on {env.device} saves other tensors than on {kind}, where the parameters are"
        entered = dataclasses.replace(largest, positions=range(len(op_list.nodes)), x=x, channels=channels, env=env)
        kept = look(entered, [step for step in plan.forward if step.fused], parts)
        if isinstance(kept, str):
            return kept
        memory = Memory(kept.saved(plan.forward), kept.unfused, kept.flops)
        held = held_by(plan, searches)
        if isinstance(held, str):
            return dataclasses.replace(memory, peak_unknown=held)
        return dataclasses.replace(memory, saved=held[0] if plan.recomputed else memory.saved, peak=held[1])

    def compared(_: Plan) -> tuple[MemoryChoice, ...]:
        if has_changed():
            return ()
        every = {choice: planned(choice) for choice in dict.fromkeys((*MODES[:-1], HALF, MODES[-1], memory))}
        if memory != HALF and any(refusal.fusion == f"memory={HALF}" for refusal in every[HALF].refused):
            del every[HALF]  # it cannot be met: its plan is that of "least"
        if len({(plan.forward, plan.backward, plan.recomputed) for plan in every.values()}) == 1:
            return ()
        found = list[MemoryChoice]()
        for choice, plan in every.items():
            held = held_by(plan, searches)
            if isinstance(held, str):
                return ()
            more = plan.cost - every["fast"].cost
            found.append(MemoryChoice(str(choice), *held, more / 1000, choice == memory))
        return tuple(found)

    main = x if largest is None or largest.x is None else largest.x
    has_choice = any(stretch.wants.live_from < stretch.positions.stop for _, stretch in stretches)
    compare = compared if has_choice else None
    return dataclasses.replace(plan, tokens=tokens_of(main), measure=measured, compare=compare)


def _entering_width(nodes: Sequence[Node]) -> tuple[int, ...] | None:
    """The last dimensions of the input according to the first operation with parameters; `None` if they are unknown."""
    for node in nodes:
        operation: Any = node.operation
        last: Any = getattr(operation, "in_features", None) or getattr(operation, "normalized_shape", None)
        if last is not None:
            return (last,) if isinstance(last, int) else tuple(last)
        if not isinstance(operation, UnfusedOperation) or operation.parameter_slots():
            return None
    return None


def _fusing(region: Region) -> Fusing:
    """The fusions allowed in a region: none if a parameter's class makes calls run the references.

    Sharded parameters do not matter: FSDP gathers them for a call.
    """
    for owner, name in region.slots:
        kind: type[Any] = type(owner._parameters.get(name))  # pyright: ignore[reportPrivateUsage]
        plain = kind in (Tensor, nn.Parameter, type(None)) or issubclass(kind, recorded())
        if not plain and not kind.__module__.startswith("torch.distributed."):
            reason = f"a parameter is of class {kind.__name__}, with which operations run unfused"
            return dataclasses.replace(fusing_now(), enabled=False, off=reason)
    return fusing_now()


def _unmatched(matcher: Matcher, plan: Plan) -> Iterator[str]:
    """Third-party fusions that the plan does not mention; of this library's fusions most match nowhere."""
    others = [cls for cls in matcher.fusions if is_own(cls)]
    if others:
        named = {step.name for step in (*plan.forward, *plan.backward)} | {refusal.fusion for refusal in plan.refused}
        yield from (f"{cls.__name__} ({', '.join(map(str, cls.slots))})" for cls in others if cls.__name__ not in named)


def choice_in(memory: Choice, op_list: OpList, region: Region, x: Tensor | None) -> Choice:
    """The choice of memory for a region with input x, derived from that of the whole sequence.

    An embedding alone has no choices: the other regions share the budget.
    """
    regions = [part for part in op_list.parts if isinstance(part, Region)]
    choosing = [part for part in regions if not _only_embeds(op_list.nodes, part)]
    if not isinstance(memory, Budget) or memory.bytes is None or region not in choosing:
        return memory
    tokens = 0 if x is None else 8 * (tokens_of(x) or 0) * (len(regions) - len(choosing))
    planned = sum(len(part.positions) for part in choosing)
    share = int(max(memory.bytes - tokens, 0) * len(region.positions) / planned)
    return memory if share == memory.bytes else Share(share, whole=memory)


def _only_embeds(nodes: Sequence[Node], region: Region) -> bool:
    """Whether a region consists of one operation that reads integers."""
    operation: Any = nodes[region.start].operation
    return len(region.positions) == 1 and operation.y_dtype is not None


def _check_channels(
    nodes: Sequence[Node],
    positions: range,
    x: Tensor,
    shapes: Sequence[Any],
    channels: Mapping[str, Tensor],
    autocast: bool,
) -> None:
    """Check the shapes of a call's channels against the inputs of the operations that read them.

    Under autocast dtypes are not checked: the input of an operation may have another dtype than x.
    """
    given = {
        name: torch.empty(t.shape, dtype=x.dtype if autocast and t.is_floating_point() else t.dtype, device="meta")
        for name, t in channels.items()
    }
    for position, shape in zip(positions, shapes, strict=False):
        node = nodes[position]
        if node.inputs and all(channel in given for _, channel in node.inputs):
            entering, run = torch.empty(shape, dtype=x.dtype, device="meta"), range(position, position + 1)
            try:
                walk_reference(nodes, run, entering, {**given}, None)
            except InputError as error:
                raise clearer(nodes, run, error, entering) from None
            except Exception:  # data-dependent operations and parameters on other ranks have no known shapes
                continue
