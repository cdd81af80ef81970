"""A plan as plain data, for machines and for pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..casts import dtype_of
from ..env import Env, short
from ..fusion import JointFusion
from ..pictures import summary
from ..pictures.data import FORMAT, CastData, Kind, OperationData, PlanData, StepData
from .step import Step


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """The cast of a tensor at a position, of `"x"`, which enters the operation there, or of a parameter by its name."""

    at: int
    name: str
    dtype: torch.dtype


def casts_of(steps: Sequence[Step], env: Env) -> tuple[Cast, ...]:
    """The casts of a forward schedule under autocast."""
    found: list[Cast] = []
    absorbed: int | None = None
    for step in steps:
        if step.cast is not None and absorbed != step.start:
            found.append(Cast(step.start, "x", step.cast))
        absorbed = step.stop if step.y_dtype is not None else None
        for position, node in enumerate(step.nodes, step.start):
            operation: Any = node.operation
            lowers = node.fusable and getattr(operation, "autocast", None) == "lower"
            parameters = node.slots.items() if lowers else ()
            dtypes = [(name, dtype_of(owner, own)) for name, (owner, own) in parameters]
            found += [Cast(position, name, env.cast(dtype)) for name, dtype in dtypes if env.cast(dtype) is not dtype]
    return tuple(found)


def describe(plan: Any) -> PlanData:
    """Everything that a plan says, as dictionaries, lists, strings and numbers."""
    eager = {e.at for e in plan.eager}
    forward = [_step(s, eager) for s in plan.forward]
    saves = _saves([s for s in plan.forward if s.start not in eager])
    operations = [
        OperationData(at=at, name=name, path=path, saves=[*saves.get(at, ())], needs=sorted(needs))
        for at, (name, path, needs) in enumerate(zip(plan.names, plan.paths, plan.needs, strict=True))
    ]
    env = {f.name: getattr(plan.env, f.name) for f in dataclasses.fields(plan.env) if f.name != "along"}
    env |= {name: short(value) for name, value in env.items() if isinstance(value, torch.dtype)}
    data = PlanData(
        format=FORMAT,
        env={**env, "text": plan.env.said(plan.tokens)},  # pyright: ignore[reportArgumentType],
        operations=operations,
        forward=forward,
        backward=[_step(s, eager, backward=True) for s in plan.backward],
        segments=[(piece.start, piece.stop) for piece in plan.segments],
        refused=[dataclasses.asdict(r) for r in plan.refused],  # pyright: ignore[reportArgumentType]
        eager=[dataclasses.asdict(e) for e in plan.eager],  # pyright: ignore[reportArgumentType]
        casts=[CastData(at=c.at, name=c.name, dtype=short(c.dtype)) for c in plan.casts],
        memory=None if plan.memory is None else dataclasses.asdict(plan.memory),  # pyright: ignore[reportArgumentType]
        memory_unknown=plan.memory_unknown,
        choices=[dataclasses.asdict(c) for c in plan.choices],  # pyright: ignore[reportArgumentType]
        summary=[],
    )
    data["summary"] = summary(data)
    return data


def _saves(steps: Sequence[Step]) -> Mapping[int, tuple[str, ...]]:
    """The fields that are saved at each position; of a joint fusion they are its own."""
    found: dict[int, tuple[str, ...]] = {}
    for step in steps:
        if not (isinstance(step.operation, JointFusion) and any(step.needs)):
            members: Any = zip(step.covers, step.nodes, step.needs, strict=True)
            found.update((at, node.operation.Saved.kept(needs)) for at, node, needs in members)
    return found


def _step(step: Step, eager: set[int], backward: bool = False) -> StepData:
    kind: Kind = "eager" if step.start in eager else "unfused"
    if step.fused:
        kind = "joint" if step.joint else "inference" if step.inference else "backward" if backward else "forward"
    own = step.saves if step.fused and step.joint and not backward else ()
    return StepData(name=step.name, start=step.start, stop=step.stop, kind=kind, saves=[*own[0].kept] if own else [])
