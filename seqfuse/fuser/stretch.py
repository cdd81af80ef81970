"""A stretch of operations with what enters it: everything that a plan of it is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..casts import held
from ..env import Env
from ..fusion import FusedOperation
from ..settings import Fusing, fusing_now
from .flatten import Node
from .inputs import Border, borders_of, validate
from .step import Step


def _requires_grad(owner: nn.Module, attribute: str) -> bool:
    return any(t.requires_grad for t in held(owner, attribute))


@dataclasses.dataclass(frozen=True, slots=True)
class Wants:
    """The gradients that are needed in a region: names at each position, and the first position with any."""

    live_from: int
    needs: Mapping[int, frozenset[str]]

    @classmethod
    def of(
        cls,
        nodes: Sequence[Node],
        start: int,
        stop: int,
        x: bool,
        channels: Mapping[str, bool],
        grad: bool,
        requires: Callable[[nn.Module, str], bool] = _requires_grad,
    ) -> Wants:
        """Follow requires_grad through positions `start..stop`."""
        needs: dict[int, frozenset[str]] = {}
        carries = dict(channels)
        live_from = stop
        for position in range(start, stop):
            node = nodes[position]
            wanted = {"x"} if x else set[str]()
            wanted |= {name for name, channel in node.inputs if carries.get(channel)}
            wanted |= {name for name, slot in node.slots.items() if requires(*slot)}
            wanted = wanted if grad else set[str]()
            needs[position] = frozenset(wanted)
            x = bool(wanted)
            if wanted and live_from == stop:
                live_from = position
            carries.update((channel, x) for _, channel in node.outputs)
        return cls(live_from, needs)


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Operations between barriers, and what is known of the tensors that enter them.

    Attributes:
        nodes: the whole sequence; `positions` are those of the stretch.
        shapes: shape of the tensor that enters each position, and of the last result; `None` where they are not known.
        borders: the dtypes there; empty where all tensors have one.
        x: what enters, or a tensor like it, with `channels` beside it; `None` where it is not known.
        place: the device on which its steps can be tried.
        unknown: why it is not known what enters.
    """

    nodes: Sequence[Node]
    positions: range
    env: Env
    wants: Wants
    shapes: Sequence[tuple[int, ...]] | None
    borders: tuple[Border, ...]
    x: Tensor | None
    channels: Mapping[str, Tensor]
    place: torch.device
    fusing: Fusing = dataclasses.field(default_factory=fusing_now)
    unknown: str | None = None

    @classmethod
    def of(
        cls,
        nodes: Sequence[Node],
        positions: range,
        x: Tensor,
        channels: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
        env: Env,
    ) -> Stretch:
        """The stretch at these positions, for the tensors that enter it."""
        required = {c: t.requires_grad for c, t in channels.items()}
        wants = Wants.of(nodes, positions.start, positions.stop, x.requires_grad, required, env.grad)
        shapes = validate(nodes, positions, x.shape)
        borders = borders_of(nodes, positions, x, channels, parameters, env)
        return cls(nodes, positions, env, wants, shapes, borders, x, channels, x.device)

    @property
    def start(self) -> int:
        """The first position."""
        return self.positions.start

    @property
    def is_entered(self) -> bool:
        """Whether something is known of what enters it."""
        return self.x is not None

    @property
    def inside(self) -> Sequence[Node]:
        """Its own nodes."""
        return self.nodes[self.start : self.positions.stop]

    def around(self, a: int, b: int) -> tuple[Border, ...]:
        """The borders of positions `a..b`."""
        return self.borders[a - self.start : b - self.start + 1]

    def step(self, a: int, b: int, fusion: FusedOperation | None = None) -> Step:
        """The step at positions `a..b` of a schedule: a fusion, or the operation there."""
        node, needs = self.nodes[a], tuple(self.wants.needs[p] for p in range(a, b))
        operation, name = (node.operation, node.name) if fusion is None else (fusion, type(fusion).__name__)
        nodes = tuple(self.nodes[a:b])
        return Step(operation, range(a, b), name, fusion is not None, nodes, needs, self.around(a, b))
