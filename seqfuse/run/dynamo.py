"""Calls traced by torch.compile where Triton kernels run: stretches of operations run as planned.

Dynamo traces Python up to `_planned`, which becomes a node of its graph. AOTAutograd runs that node on proxy tensors:
there the engine plans and runs as usual, and kernels are called as custom ops. Importing this module imports Dynamo, so
only traced calls import it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..env import Env
from ..errors import StateError
from ..operation import FusableOperation, UnfusedOperation
from ..plan.flatten import Node, attributes, has_own_graph, public_channels
from ..plan.reference import check_channels, draw, run_eagerly
from .lower import lent
from .regions import OpList, Region, fusers, stretches

_one_at_a_time = threading.RLock()
_Constants = tuple[tuple[str, Any], ...]
_DATA = bool, int, float, str


@torch.compiler.assume_constant_result  # pyright: ignore[reportUnknownMemberType]
def _kernels_run(device: str) -> bool:
    # Evaluated outside the trace: within a trace, torch 2.11 reports every call as exporting.
    return Env.of(device).triton and not torch.compiler.is_exporting()


@torch.compiler.assume_constant_result  # pyright: ignore[reportUnknownMemberType]
def has_graph_inside(name: str) -> bool:
    """Whether a torch module in an operation has a parameter with a graph, which a trace cannot see."""
    operations = [i.operation for i in fusers[name].op_list().nodes if isinstance(i.operation, UnfusedOperation)]
    inside = [m for operation in operations for m in operation.modules() if not isinstance(m, FusableOperation)]
    return any(map(has_own_graph, inside))


def plannable(nodes: Sequence[Node], x: Tensor) -> bool:
    """Whether a traced call is planned: kernels run, parameters belong to their modules, and there is no collective."""
    if [i for i in nodes if i.sum_over is not None or getattr(i.operation, "redistribution", None) is not None]:
        return False
    if not _kernels_run(x.device.type):
        return False
    slots = [slot for node in nodes for slot in node.slots.values()]
    return not [name for owner, name in slots if name not in owner._parameters]  # pyright: ignore[reportPrivateUsage]


def run_planned(
    name: str,
    nodes: Sequence[Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
    x: Tensor,
    channels: dict[str, Tensor],
) -> Any:
    """Runs a sequence under a trace, one graph node for each stretch between barriers."""
    check_channels(nodes, inputs, channels)
    seeds = draw(nodes, x)
    for start, stop in stretches(nodes):
        inside = nodes[start:stop]
        if not nodes[start].fusable:
            x = run_eagerly(nodes, start, x, channels)
            continue
        given, leaving = public_channels(nodes, start, stop)
        values = [channels[c] for c in given]
        parameters = [getattr(owner, attribute) for node in inside for owner, attribute in node.slots.values()]
        # The configuration of the operations in the trace, which may have changed it.
        held = [attributes(node.operation) for node in inside]
        state = tuple([tuple([(k, v) for k, v in own if v is None or isinstance(v, _DATA)]) for own in held])
        x, *rest = _planned(name, start, state, x, given, values, leaving, seeds, parameters)
        channels.update(zip(leaving, rest, strict=True))
    return (x, *[channels[c] for c in outputs]) if outputs else x


@torch.compiler.allow_in_graph  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
def _planned(
    name: str,
    start: int,
    state: tuple[_Constants, ...],
    x: Tensor,
    given: tuple[str, ...],
    values: Sequence[Tensor],
    leaving: tuple[str, ...],
    seeds: Tensor | None,
    parameters: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Runs the stretch from `start` on with these parameters and this configuration."""
    fuser: Any = fusers[name]
    with _one_at_a_time:
        nodes = fuser.op_list().nodes[start : start + len(state)]
        slots = [slot for node in nodes for slot in node.slots.values()]
        if len(nodes) != len(state) or len(slots) != len(parameters):
            message = "the sequence was changed inside the compiled function"
            raise StateError(message, code="SF503", hint="change it before, and outside")
        with _as_given(nodes, state) as changed, lent(slots, parameters):
            op_list = OpList(fuser.root) if changed else fuser.op_list()
            region = next(p for p in op_list.parts if isinstance(p, Region) and p.start == start)
            channels = dict(zip(given, values, strict=True))
            x = fuser.run_recorded(op_list, region, x, channels, seeds)
    return (x, *[channels[c] for c in leaving])


@contextmanager
def _as_given(nodes: Sequence[Node], state: Sequence[_Constants]) -> Generator[bool]:
    """A block in which operations have this configuration; yields whether it differs from their own."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for node, constants in zip(nodes, state, strict=True):
            held = vars(node.operation)
            for key, value in constants:
                if held.get(key) != value or type(held.get(key)) is not type(value):
                    before.append((held, key, held.get(key)))
                    held[key] = value
        yield bool(before)
    finally:
        for held, key, value in reversed(before):
            held[key] = value
