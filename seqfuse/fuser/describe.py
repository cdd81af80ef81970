"""A plan as plain data, for machines and for pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..env import Env
from ..fusion import FusedOperation, InferenceFusion, JointFusion
from ..operation import UnfusedOperation
from ..pictures.data import FORMAT, EnvData, Kind, OperationData, PlanData, StepData
from .show import head, memory_line

if TYPE_CHECKING:
    from .plan import Plan, Step


def describe(plan: Plan) -> PlanData:
    """Everything that a plan says, as dictionaries, lists, strings and numbers."""
    alone = {a.at for a in plan.alone}
    # A joint fusion that stands in both covers keeps a record of its own in place of its operations'.
    joint = {id(s.operation) for s in plan.backward} & {
        id(s.operation) for s in plan.forward if isinstance(s.operation, JointFusion)
    }
    own = {i for s in plan.forward if id(s.operation) in joint for i in s.covers}
    runs = {i: s.operation for s in plan.forward if not s.fused for i in s.covers}
    members = {i: op for s in plan.forward if s.fused for i, (_, op) in zip(s.covers, _members(s), strict=True)}
    operations: list[OperationData] = []
    for at, (name, path) in enumerate(zip(plan.names, plan.paths, strict=True)):
        operation, needs = runs.get(at) or members.get(at), plan.needs[at] if plan.needs else frozenset[str]()
        saves: tuple[str, ...] = ()
        if at not in alone and at not in own and isinstance(operation, UnfusedOperation):
            saves = operation.Saved.kept(needs)
        operations.append(OperationData(at=at, name=name, path=path, saves=[*saves], wants=sorted(needs)))
    memory = plan.memory
    return PlanData(
        format=FORMAT,
        env=_environment(plan.env),
        operations=operations,
        forward=[_step(s, plan, alone, id(s.operation) in joint) for s in plan.forward],
        backward=[_step(s, plan, alone, id(s.operation) in joint, backward=True) for s in plan.backward],
        segments=[(piece.start, piece.stop) for piece in plan.segments],
        refused=[{"fusion": r.fusion, "at": r.at, "reason": r.reason, "outbid": r.outbid} for r in plan.refused],
        alone=[{"at": a.at, "name": a.name, "reason": a.reason} for a in plan.alone],
        memory=None
        if memory is None
        else {"saved": memory.saved, "saved_unfused": memory.saved_unfused, "flops": memory.flops},
        summary=[*head(plan), *([] if memory is None else [memory_line(plan, memory)])],
    )


def _environment(env: Env) -> EnvData:
    return EnvData(
        device=env.device,
        arch=env.arch,
        dtype=_short(env.dtype),
        autocast=None if env.autocast is None else _short(env.autocast),
        grad=env.grad,
        deterministic=env.deterministic,
        recipe=None if env.recipe is None else str(env.recipe),
        triton=env.triton,
        rows=env.rows,
        text=str(env),
    )


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _members(step: Step) -> list[tuple[str, UnfusedOperation]]:
    fusion: FusedOperation = step.operation
    return [*fusion.named_operations()]


def _step(step: Step, plan: Plan, alone: set[int], joint: bool, backward: bool = False) -> StepData:
    saves: tuple[str, ...] = ()
    start, stop = step.covers.start, step.covers.stop
    if joint and not backward:
        wanted = {"x"} & plan.needs[start]
        for at, (place, _) in zip(step.covers, _members(step), strict=True):
            wanted |= {f"{place}.{name}" for name in plan.needs[at] if name != "x"}
        saves = step.operation.Saved.kept(frozenset(wanted))
    kind: Kind = "alone" if start in alone else "unfused"
    if step.fused:
        kind = "backward" if backward else "forward"
        if isinstance(step.operation, JointFusion):
            kind = "joint"
        elif isinstance(step.operation, InferenceFusion):
            kind = "inference"
    return StepData(name=step.name, start=start, stop=stop, kind=kind, saves=[*saves])
