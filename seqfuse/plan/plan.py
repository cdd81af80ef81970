"""The plan: the schedule of each pass, its segments, and the fusions that are not applied."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from .. import pictures
from ..casts import dtype_of
from ..compiler import compiler
from ..env import Env, short
from ..pictures.data import (
    FORMAT,
    CastData,
    Kind,
    OperationData,
    PlanData,
    QuantizationData,
    RecomputedData,
    RefusalData,
    StepData,
)
from ..pictures.svg import FULL
from ..recipes import Role
from .flatten import Node
from .quantized import Quantization
from .schedule import (
    MemoryChoice,
    Refusal,
)
from .step import Step
from .tally import Memory


@dataclasses.dataclass(frozen=True)
class Eager:
    """An operation or module that runs eagerly, through its own `__call__`: its position, name and the reason."""

    at: int
    name: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """A cast at a position: of `"x"`, the input of the operation there, or of a parameter, by its name."""

    at: int
    name: str
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Plan:
    """The steps of the forward and backward schedules; frozen, hashable, printable.

    Attributes:
        forward: steps of the forward schedule, in order.
        backward: steps of the backward schedule, by position; only steps with a needed gradient.
        segments: ranges of positions, one autograd node each, unless everything runs in torch's own nodes.
        recomputed: segments that the backward pass runs again, each with the positions of steps whose results are
            saved.
        refused: fusions that matched but are not used, with reasons.
        env: the environment of the plan.
        unmatched: third-party fusions that match nowhere, with their patterns.
        tokens: exact number of tokens of the input, if given; plans are shared between similar inputs.
        cost: estimated time relative to the unfused operations, in nanoseconds; negative if faster.
    """

    env: Env
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    segments: tuple[range, ...]
    recomputed: tuple[tuple[range, tuple[int, ...]], ...] = ()
    refused: tuple[Refusal, ...] = ()
    unmatched: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)
    tokens: int | None = dataclasses.field(default=None, compare=False, repr=False)
    measure: Any = dataclasses.field(default=None, compare=False, repr=False)
    cost: int = dataclasses.field(default=0, compare=False, repr=False)
    compare: Any = dataclasses.field(default=None, compare=False, repr=False)

    def count(self, name: str) -> int:
        """Number of different steps of this name; a step in both schedules counts once."""
        return len({(s.covers.start, id(s.operation)) for s in (*self.forward, *self.backward) if s.name == name})

    @cached_property
    def eager(self) -> tuple[Eager, ...]:
        """Operations and modules that run eagerly, through `__call__`, with reasons."""
        return tuple(Eager(s.start, s.name, n.eager) for s in self.forward for n in s.nodes if n.eager is not None)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Class of the operation at each position."""
        return tuple(node.name for step in self.forward for node in step.nodes)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Path of the operation at each position in the container."""
        return tuple(node.path for step in self.forward for node in step.nodes)

    @property
    def needs(self) -> tuple[frozenset[str], ...]:
        """Names of the needed gradients at each position: parameters, extra inputs, and `"x"`."""
        return tuple(needs for step in self.forward for needs in step.needs)

    @cached_property
    def casts(self) -> tuple[Cast, ...]:
        """Casts of the forward pass that no fusion absorbs: of step inputs, and of parameters, once per call."""
        found: list[Cast] = []
        absorbed: int | None = None
        for step in self.forward:
            if step.cast is not None and absorbed != step.start:
                found.append(Cast(step.start, "x", step.cast))
            absorbed = step.stop if step.y_dtype is not None else None
            for position, node in enumerate(step.nodes, step.start):
                lowers = node.fusable and getattr(node.operation, "autocast", None) == "lower"
                for name, (owner, own) in node.slots.items() if lowers else ():
                    given = dtype_of(owner, own)
                    if (dtype := self.env.cast(given)) is not given:
                        found.append(Cast(position, name, dtype))
        return tuple(found)

    @cached_property
    def quantizations(self) -> tuple[Quantization, ...]:
        """Quantized operands by position: x and weight in the forward pass, dy in the backward pass."""
        found: list[Quantization] = []
        inside = {(s.to.at, s.to.role): s.name for s in (*self.forward, *self.backward) if s.to is not None}
        for step in self.forward:
            for position, node, recipe, needs in zip(step.covers, step.nodes, step.recipes, step.needs, strict=False):
                if recipe is None:
                    continue
                one = "group" if getattr(node.operation, "scale_shape", ()) else "tensor"
                roles: list[Role] = ["x", "weight"]
                if any(name == "x" or name.startswith("weight") for name in needs):
                    roles.append("dy")
                for role in roles:
                    dtype = short(recipe.dtype(role)).removeprefix("float8_").removesuffix("fn")
                    by = inside.get((position, role))
                    found.append(Quantization(position, role, dtype, recipe.scaling(role, one), by))
        return tuple(found)

    @cached_property
    def widens(self) -> bool:
        """Whether GEMMs are computed in float32 because this CPU has no instructions for their dtype."""
        return self.env.widens and not {"Linear", "MergedLinear"}.isdisjoint(self.names)

    @property
    def fused(self) -> tuple[int, int]:
        """Number of fused steps in the forward and backward schedules."""
        return sum(s.fused for s in self.forward), sum(s.fused for s in self.backward)

    @cached_property
    def _measured(self) -> Memory | str | None:
        return None if self.measure is None else self.measure(self)

    @property
    def memory(self) -> Memory | None:
        """Bytes saved for backward and FLOPs, fused and unfused; `None` without an input, or see `memory_unknown`."""
        return self._measured if isinstance(self._measured, Memory) else None

    @property
    def memory_unknown(self) -> str | None:
        """Why `memory` is `None` although an input was given; otherwise `None`."""
        return self._measured if isinstance(self._measured, str) else None

    @cached_property
    def choices(self) -> tuple[MemoryChoice, ...]:
        """Bytes and time of each choice of `memory=`; empty if all of them have the same plan."""
        return () if self.compare is None else self.compare(self)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return pictures.render(self.as_dict())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_measured": self._measured, "choices": self.choices, "measure": None, "compare": None}

    def as_dict(self) -> PlanData:
        """The plan as dictionaries, lists, strings and numbers; `format` is the version of the schema."""
        stated = [f.name for f in dataclasses.fields(self.env) if f.name not in ("along", "width", "absorbs")]
        env = {name: getattr(self.env, name) for name in stated}
        env["recipe"] = "off" if self.env.recipe is False else self.env.recipe and str(self.env.recipe)
        env |= {name: short(value) for name, value in env.items() if isinstance(value, torch.dtype)}
        data = PlanData(
            format=FORMAT,
            env={**env, "text": self.env.said(self.tokens)},  # pyright: ignore[reportArgumentType]
            operations=[one for step in self.forward for one in _operations(step)],
            forward=[_step(s) for s in self.forward],
            backward=[_step(s, backward=True) for s in self.backward],
            segments=[(piece.start, piece.stop) for piece in self.segments],
            recomputed=[RecomputedData(start=s.start, stop=s.stop, keeps=[*keeps]) for s, keeps in self.recomputed],
            refused=_reasons(self.refused),
            unmatched=[*self.unmatched],
            eager=[dataclasses.asdict(e) for e in self.eager],  # pyright: ignore[reportArgumentType]
            casts=[CastData(at=c.at, name=c.name, dtype=short(c.dtype)) for c in self.casts],
            quantizations=[QuantizationData(**one._asdict()) for one in self.quantizations],
            gemms="float32" if self.widens else None,
            compiler=self.compiler,
            memory=None if self.memory is None else dataclasses.asdict(self.memory),  # pyright: ignore[reportArgumentType]
            memory_unknown=self.memory_unknown,
            choices=[dataclasses.asdict(c) for c in self.choices],  # pyright: ignore[reportArgumentType]
            summary=[],
        )
        data["summary"] = pictures.summary(data)
        return data

    @property
    def compiler(self) -> str | None:
        """The C compiler of its kernels, such as `"cc 12.2.0"`; `None` without C kernels."""
        launches = any(step.fused and step.operation.kernels for step in (*self.forward, *self.backward))
        found = compiler() if launches and self.env.kernels == "c" else None
        return None if found is None else found.version

    def json(self, indent: int | None = None) -> str:
        """`as_dict()` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def svg(self, width: int = FULL) -> str:
        """The plan as a self-contained SVG, at most `width` pixels wide, with details on hover."""
        return pictures.svg(self.as_dict(), width)

    def _repr_html_(self) -> str:
        return self.svg()


def _reasons(refused: Sequence[Refusal]) -> list[RefusalData]:
    """One entry for each reason, with all its fusions and positions."""
    found: dict[Any, dict[str, list[int]]] = {}
    for r in refused:
        places = found.setdefault((r.reason, r.superseded, r.expected, r.own), {}).setdefault(r.fusion, [])
        places += [r.at] if r.at not in places else []
    return [
        RefusalData(reason=reason, fusions=fusions, superseded=superseded, expected=expected, own=own)
        for (reason, superseded, expected, own), fusions in found.items()
    ]


def _operations(step: Step) -> Iterator[OperationData]:
    """The operations of a forward step with their saved fields; none for a joint fusion, which has its own."""
    for at, node, needs in zip(step.covers, step.nodes, step.needs, strict=True):
        operation: Any = node.operation
        by_itself = node.eager is not None or (step.joint and any(step.needs))
        saves: list[str] = []
        if not by_itself:
            saves += (operation.Saved if step.recipe is None else step.saved_class).kept(needs)
        yield OperationData(at=at, name=node.name, path=node.path, saves=saves, needs=sorted(needs))


def _step(step: Step, backward: bool = False) -> StepData:
    kind: Kind = "unfused" if step.nodes[0].eager is None else "eager"
    if step.fused:
        kind = "joint" if step.joint else "inference" if step.inference else "backward" if backward else "forward"
    own = step.saves if step.fused and step.joint and not backward else ()
    return StepData(name=step.name, start=step.start, stop=step.stop, kind=kind, saves=[*own[0].kept] if own else [])


def merge(plans: Sequence[Plan], eager: Sequence[tuple[int, Node]], env: Env) -> Plan:
    """Joins the plans of regions and their barriers into the plan of the whole sequence."""
    none = (frozenset[str](),)
    beside = [Step(n.operation, range(at, at + 1), n.name, nodes=(n,), needs=none) for at, n in eager]
    names = "forward", "backward", "segments", "recomputed", "refused"
    forward, backward, segments, again, refused = ([one for p in plans for one in getattr(p, n)] for n in names)
    by_start = operator.attrgetter("start")
    ahead, back = sorted([*beside, *forward], key=by_start), sorted([*beside * env.grad, *backward], key=by_start)
    cost = sum(plan.cost for plan in plans)
    return Plan(env, tuple(ahead), tuple(back), tuple(segments), tuple(again), tuple(refused), cost=cost)
